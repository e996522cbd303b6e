"""The guideline: memory and time of every partition, and which one to take. Pure functions of a few numbers."""

from lightning_paro.planner._cost import Cost, Network, StateBytes, Workload, cost, hpz
from lightning_paro.planner._plan import Peer, Plan, Row, make_plan, scale
from lightning_paro.planner._report import draw, draw_scaling, scaling_table, table, write_csv, write_json

__all__ = [
    "Cost",
    "Network",
    "Peer",
    "Plan",
    "Row",
    "StateBytes",
    "Workload",
    "cost",
    "draw",
    "draw_scaling",
    "hpz",
    "make_plan",
    "scale",
    "scaling_table",
    "table",
    "write_csv",
    "write_json",
]
