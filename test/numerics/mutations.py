"""Kernels, as text, with one thing wrong that keeps blocks of a cluster in step, and what shows.

A mutation is what a bug in a generator would be.
"""

from __future__ import annotations

import re
from functools import partial

import simulated_faults
from simulated_launch import SimulatedLaunch

WAIT = re.compile(r"\n *llvm\.inline_asm has_side_effects \"\{[^\n]*try_wait[^\n]*")
"""For bytes, or for a slot of the ring."""
_EXPECTED = re.compile(r"nvvm\.mbarrier\.arrive\.expect_tx %\w+, (%\w+)")
_MEETING = re.compile(r"nvvm\.cluster\.(wait|arrive\.relaxed)[^\n]*")


def kinds(launch: SimulatedLaunch, text: str, *, seeds: int = 2) -> set[str]:
    """The kinds of fault of a kernel's text: one in either schedule and every order of warps."""
    return simulated_faults.kinds(partial(launch, text=text), seeds=seeds)


def without(text: str, found: re.Match[str]) -> str:
    """The kernel without what was found."""
    return text[: found.start()] + text[found.end() :]


def with_wrong_count(text: str, change: int) -> str:
    """The kernel that first expects so many bytes more than are sent."""
    expected = _EXPECTED.search(text)
    assert expected is not None
    other = f"%wrong_by = arith.constant {change} : i32\n"
    other += f"%wrong = arith.addi {expected[1]}, %wrong_by : i32\n"
    other += expected[0].replace(f", {expected[1]}", ", %wrong")
    return text.replace(expected[0], other, 1)


def without_meeting(text: str) -> str:
    """The kernel whose blocks do not meet at the start."""
    assert text.count("nvvm.cluster.wait") == 1
    return _MEETING.sub("", text)
