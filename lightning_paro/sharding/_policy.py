"""What dtype each piece of model state has, and what travels in which dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["PrecisionPolicy"]

_CAST = (torch.float32, torch.float16, torch.bfloat16)  # float64 is left alone, and so is what is quantised


@dataclass(frozen=True)
class PrecisionPolicy:
    """The precision contract of the engine. None always means "the dtype the parameter came with".

    Attributes:
        param_dtype: Dtype of the parameters while they compute, and of the shards that are gathered.
        master_weights: Whether the optimizer works on a copy in the parameter's own dtype, beside the parameter in
            ``param_dtype``. Without it the optimizer's shard is a view of the parameter's.
        accumulator_dtype: Dtype of the accumulated gradient; None is the dtype the optimizer works in.
        intra_dtype: Wire dtype of gradients inside a group; None is the compute dtype.
        inter_dtype: Wire dtype of gradients between groups; None is the compute dtype.

    All of them are for parameters that autocast would cast; complex and float64 ones keep their own everywhere.
    """

    param_dtype: torch.dtype | None = None
    master_weights: bool = False
    accumulator_dtype: torch.dtype | None = None
    intra_dtype: torch.dtype | None = None
    inter_dtype: torch.dtype | None = None

    def compute_dtype(self, own: torch.dtype) -> torch.dtype:
        """The dtype in which a parameter of dtype ``own`` computes."""
        return self.param_dtype if self.param_dtype is not None and own in _CAST else own

    def master_dtype(self, own: torch.dtype) -> torch.dtype:
        """The dtype in which the optimizer updates a parameter of dtype ``own``."""
        return own if self.master_weights else self.compute_dtype(own)

    def accumulated_in(self, own: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of a parameter of dtype ``own`` are added up."""
        return self.accumulator_dtype if self.accumulator_dtype and own in _CAST else self.master_dtype(own)

    def sent_inside(self, own: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of a parameter of dtype ``own`` travel inside a group."""
        return self.intra_dtype if self.intra_dtype and own in _CAST else self.compute_dtype(own)

    def sent_between(self, own: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of a parameter of dtype ``own`` travel between groups."""
        return self.inter_dtype if self.inter_dtype and own in _CAST else self.compute_dtype(own)
