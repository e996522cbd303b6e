"""PaRO-CC: the process groups of a topology, collectives in two levels, and the two moves of the ladder."""

from lightning_paro.collectives._checks import ranks_by_value
from lightning_paro.collectives._chunks import DEFAULT_CHUNK_BYTES, ChunkPlan
from lightning_paro.collectives._groups import ProcessGroups
from lightning_paro.collectives._ladder import BUCKET_BYTES, Ladder
from lightning_paro.collectives._lanes import Task, after
from lightning_paro.collectives._progress import Place, Progress
from lightning_paro.collectives._traffic import Traffic
from lightning_paro.collectives._tune import slowest, tune
from lightning_paro.collectives._two_level import all_gather, all_reduce, broadcast, reduce_scatter

__all__ = [
    "BUCKET_BYTES",
    "DEFAULT_CHUNK_BYTES",
    "ChunkPlan",
    "Ladder",
    "Place",
    "ProcessGroups",
    "Progress",
    "Task",
    "Traffic",
    "after",
    "all_gather",
    "all_reduce",
    "broadcast",
    "ranks_by_value",
    "reduce_scatter",
    "slowest",
    "tune",
]
