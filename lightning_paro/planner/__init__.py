"""The guideline: memory and time of every partition, which one to take, and the bandwidths it depends on."""

from lightning_paro.planner._cache import cached_probe
from lightning_paro.planner._cost import Cost, Network, StateBytes, Workload, cost, hpz
from lightning_paro.planner._measure import Measured, measure
from lightning_paro.planner._memory import FreeMemory, free_memory, smallest_share
from lightning_paro.planner._plan import MARGIN, Peer, Plan, Row, make_plan, scale
from lightning_paro.planner._probe import Probe, Sample, probe
from lightning_paro.planner._report import (
    draw,
    draw_scaling,
    probe_table,
    scaling_table,
    table,
    write_csv,
    write_json,
)

__all__ = [
    "MARGIN",
    "Cost",
    "FreeMemory",
    "Measured",
    "Network",
    "Peer",
    "Plan",
    "Probe",
    "Row",
    "Sample",
    "StateBytes",
    "Workload",
    "cached_probe",
    "cost",
    "draw",
    "draw_scaling",
    "free_memory",
    "hpz",
    "make_plan",
    "measure",
    "probe",
    "probe_table",
    "scale",
    "scaling_table",
    "smallest_share",
    "table",
    "write_csv",
    "write_json",
]
