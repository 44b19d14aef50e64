"""`scf`: branches and loops under per-lane masks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from yolomlir.simulator.decode import BlockCode, Control, Execution, Scope, execute, operation
from yolomlir.simulator.elements import Array, Value, element_of, is_uniform, select

if TYPE_CHECKING:
    from yolomlir.simulator.lanes import Lanes


def _assign(lanes: Lanes, slots: list[int], values: list[Value]) -> None:
    for slot, value in zip(slots, values, strict=True):
        lanes.registers[slot] = value


def _values(lanes: Lanes, slots: list[int]) -> list[Value]:
    return [lanes.registers[slot] for slot in slots]


@operation("scf.if")
def _if(op: Any, scope: Scope) -> Control:
    condition = scope.use(op.operands[0])
    branches = [scope.block(r.blocks[0]) if len(r.blocks) else BlockCode() for r in op.regions]
    results = scope.defines(list(op.results))

    def run(lanes: Lanes) -> Execution:
        outer = lanes.mask
        chosen = lanes.registers[condition]
        if is_uniform(chosen):
            code = branches[0 if chosen else 1]
            yield from execute(code, lanes)
            _assign(lanes, results, _values(lanes, code.results) if results else [])
            return
        yield from _both(lanes, chosen, outer, branches, results)

    return Control(run)


def _both(
    lanes: Lanes, chosen: Array, outer: Array | None, branches: list[BlockCode], results: list[int]
) -> Execution:
    then = chosen if outer is None else chosen & outer
    other = ~chosen if outer is None else ~chosen & outer
    produced: list[list[Value]] = []
    for mask, code in ((then, branches[0]), (other, branches[1])):
        if not mask.any():
            continue
        lanes.set_mask(mask)
        yield from execute(code, lanes)
        produced.append(_values(lanes, code.results))
    lanes.set_mask(outer)
    if not results:
        return
    if len(produced) == 1:
        _assign(lanes, results, produced[0])
        return
    merged = [select(then, a, b) for a, b in zip(*produced, strict=True)]
    _assign(lanes, results, merged)


@operation("scf.for")
def _for(op: Any, scope: Scope) -> Control:
    bounds = scope.uses(list(op.operands)[:3])
    initial = scope.uses(list(op.operands)[3:])
    element = element_of(op.operands[0].type)
    body = scope.block(op.regions[0].blocks[0])
    results = scope.defines(list(op.results))
    index, carried = body.arguments[0], body.arguments[1:]
    unsigned = element.unsigned if "unsignedCmp" in op.attributes else None
    site = scope.site

    def run(lanes: Lanes) -> Execution:
        lower, upper, step = (_collapse(lanes, v) for v in _values(lanes, bounds))
        if unsigned is not None:
            lower, upper = lower.view(unsigned), upper.view(unsigned)
        _assign(lanes, carried, _values(lanes, initial))
        if np.any(lanes.active(step) <= 0):
            raise site.fault("endless-loop", f"a loop's step is {np.min(step)}")
        if is_uniform(lower) and is_uniform(upper) and is_uniform(step):
            for i in range(int(lower), int(upper), int(step)):
                lanes.registers[index] = element.register.type(i)
                yield from execute(body, lanes)
                _assign(lanes, carried, _values(lanes, body.results))
        else:
            yield from _divergent_for(lanes, body, lower, upper, step)
        _assign(lanes, results, _values(lanes, carried))

    return Control(run)


def _divergent_for(
    lanes: Lanes, body: BlockCode, lower: Value, upper: Value, step: Value
) -> Execution:
    """A loop whose trip count differs between lanes: lanes drop out one by one."""
    outer = lanes.mask
    index, carried = body.arguments[0], body.arguments[1:]
    position = np.array(lanes.broadcast(lower))
    signed = position.dtype.str.replace("u", "i")
    while True:
        active = position < upper if outer is None else (position < upper) & outer
        if not active.any():
            break
        lanes.set_mask(active)
        lanes.registers[index] = position.view(signed)
        before = _values(lanes, carried)
        yield from execute(body, lanes)
        after = _values(lanes, body.results)
        _assign(lanes, carried, [select(active, a, b) for a, b in zip(after, before, strict=True)])
        position = position + step
    lanes.set_mask(outer)


def _collapse(lanes: Lanes, value: Value) -> Value:
    """A register as a scalar where the active lanes agree."""
    active = lanes.active(value)
    if is_uniform(active) or not active.size:
        return value if is_uniform(value) else value[0]
    return active[0] if (active == active[0]).all() else value


@operation("scf.while")
def _while(op: Any, scope: Scope) -> Control:
    initial = scope.uses(list(op.operands))
    before = scope.block(op.regions[0].blocks[0])
    after = scope.block(op.regions[1].blocks[0])
    results = scope.defines(list(op.results))
    site = scope.site

    def run(lanes: Lanes) -> Execution:
        outer = lanes.mask
        _assign(lanes, before.arguments, _values(lanes, initial))
        final: list[Value] | None = None
        for _ in range(lanes.machine.checks.loop_limit):
            yield from execute(before, lanes)
            condition = lanes.broadcast(lanes.registers[before.results[0]])
            passed = _values(lanes, before.results[1:])
            was = lanes.mask
            active = condition if was is None else condition & was
            reached = np.ones(lanes.count, np.bool_) if was is None else was
            final = passed if final is None else _merge(reached, passed, final)
            if not active.any():
                break
            lanes.set_mask(active)
            _assign(lanes, after.arguments, passed)
            kept = _values(lanes, before.arguments)
            yield from execute(after, lanes)
            _assign(lanes, before.arguments, _merge(active, _values(lanes, after.results), kept))
        else:
            raise site.fault(
                "endless-loop",
                f"still looping after {lanes.machine.checks.loop_limit} iterations; blocks run one "
                "after another here, so a loop that waits for another block never ends",
            )
        lanes.set_mask(outer)
        _assign(lanes, results, final or [])

    return Control(run)


def _merge(mask: Array, new: list[Value], old: list[Value]) -> list[Value]:
    if mask.all():
        return new
    return [select(mask, a, b) for a, b in zip(new, old, strict=True)]


@operation("scf.execute_region")
def _execute_region(op: Any, scope: Scope) -> Control:
    body = scope.block(op.regions[0].blocks[0])
    results = scope.defines(list(op.results))

    def run(lanes: Lanes) -> Execution:
        yield from execute(body, lanes)
        _assign(lanes, results, _values(lanes, body.results) if results else [])

    return Control(run)
