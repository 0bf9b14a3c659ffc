"""What a `PagedCache` returns to a model for keys and values: tensors of their shape, without memory.

The attention function finds the cache behind them and reads its blocks in place. Any other use raises, since
it would need a copy of all keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .support import FLASH_NAME, NAME

if TYPE_CHECKING:
    from .paged_cache import PagedLayer


class Stored(Tensor):
    """Keys or values `[B, Hkv, L, D]` of a layer, those that `arrived` `[B, Hkv, n, D]` not stored yet."""

    layer: PagedLayer
    arrived: Tensor

    @staticmethod
    def of(layer: PagedLayer, arrived: Tensor, length: int) -> Stored:
        shape = (*arrived.shape[:2], length, arrived.shape[3])
        made = Stored._make_wrapper_subclass(Stored, shape, dtype=arrived.dtype, device=arrived.device)
        made.layer, made.arrived = layer, arrived
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        what = f"PagedCache: {func.__name__.partition('.')[0]} cannot read keys that are stored in blocks"
        stored = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, Stored))
        if stored.layer.group.config._attn_implementation in (NAME, FLASH_NAME):
            what += ", which this model does outside of its attention function (as in latent attention)"
            raise NotImplementedError(f"{what}; use DynamicCache for it")
        raise NotImplementedError(
            f'{what}; load the model with attn_implementation="fattn", or use DynamicCache for it'
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Stored(shape={list(self.shape)}, dtype={self.dtype}, device={self.device})"
