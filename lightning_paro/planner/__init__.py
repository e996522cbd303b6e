"""The guideline: memory and time of every partition, which one to take, and the bandwidths it depends on."""

from lightning_paro.planner._cost import Cost, Network, StateBytes, Workload, cost, hpz
from lightning_paro.planner._plan import Peer, Plan, Row, make_plan, scale
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
    "Cost",
    "Network",
    "Peer",
    "Plan",
    "Probe",
    "Row",
    "Sample",
    "StateBytes",
    "Workload",
    "cost",
    "draw",
    "draw_scaling",
    "hpz",
    "make_plan",
    "probe",
    "probe_table",
    "scale",
    "scaling_table",
    "table",
    "write_csv",
    "write_json",
]
