"""PaRO-CC: the process groups of a topology and the two moves over them."""

from lightning_paro.collectives._groups import ProcessGroups
from lightning_paro.collectives._ladder import BUCKET_BYTES, Ladder, Traffic
from lightning_paro.collectives._lanes import Task, after
from lightning_paro.collectives._progress import Place, Progress

__all__ = ["BUCKET_BYTES", "Ladder", "Place", "ProcessGroups", "Progress", "Task", "Traffic", "after"]
