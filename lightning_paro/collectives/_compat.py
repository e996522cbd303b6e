"""The names of the flat collectives: torch 2.13 renamed ``*_tensor`` to ``*_single`` and warns about the old ones."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
