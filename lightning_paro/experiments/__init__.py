"""Many short trainings of a model of one's own, to see whether hyperparameters carry over."""

from lightning_paro.experiments._settings import Setting
from lightning_paro.experiments.coord_check import CoordReport, coord_check
from lightning_paro.experiments.lr_transfer import Optimum, TransferReport, final_loss, lr_transfer_sweep

__all__ = ["CoordReport", "Optimum", "Setting", "TransferReport", "coord_check", "final_loss", "lr_transfer_sweep"]
