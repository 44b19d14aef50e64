"""A simulator of the `gpu` level: runs a `gpu.func` in numpy as a GPU may, and reports its faults.

See docs/simulator.md.
"""

from yolomlir.simulator.banks import BankStatistics
from yolomlir.simulator.faults import FAULT_KINDS, SimulationError
from yolomlir.simulator.machine import Checks
from yolomlir.simulator.report import SimulationReport
from yolomlir.simulator.simulate import simulate

__all__ = [
    "FAULT_KINDS",
    "BankStatistics",
    "Checks",
    "SimulationError",
    "SimulationReport",
    "simulate",
]
