"""DTensors as operands of `prefill`: their placements say which positions each rank holds."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from .shards import Shards

__all__ = ["Placed", "is_dtensor", "placed"]

SEQUENCE = 2  # the dimension of the positions


@dataclass(frozen=True)
class Placed:
    """The local operands, and what the placements say."""

    operands: tuple[Tensor, Tensor, Tensor]
    mesh: Any
    shards: Shards
    query_shards: Shards | Literal["replicated"]
    query: Any

    def whole(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Results as DTensors that are placed as query is."""
        from torch.distributed.tensor import DTensor

        rows = self.query.shape[SEQUENCE]

        def as_dtensor(local: Tensor) -> Tensor:
            sizes = [*local.shape[:SEQUENCE], rows, *local.shape[SEQUENCE + 1 :]]
            whole = local.new_empty(sizes, device="meta")
            known: dict[str, Any] = {"shape": whole.shape, "stride": whole.stride()}
            return DTensor.from_local(local, self.mesh, self.query.placements, run_check=False, **known)

        return as_dtensor(out), as_dtensor(lse)


def is_dtensor(operand: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(operand, module.DTensor)


def placed(name: str, query: Any, key: Any, value: Any, mask: Tensor | None) -> Placed:
    """Raises for anything but query, key and value on one mesh of one dimension, key and value sharded over
    their positions, query likewise or replicated."""
    from torch.distributed.tensor import Replicate, Shard

    operands = {"query": query, "key": key, "value": value}
    for what, operand in operands.items():
        if not is_dtensor(operand):
            raise TypeError(f"{name}: {what} is a plain tensor beside DTensors; pass all three as DTensors")
    if is_dtensor(mask):
        raise TypeError(f"{name}: attn_mask is a DTensor; pass this rank's part of it, attn_mask.to_local()")
    mesh = query.device_mesh
    for what, operand in operands.items():
        if operand.device_mesh != mesh or mesh.ndim != 1:
            raise ValueError(
                f"{name}: {what} is on {operand.device_mesh}; pass query, key and value on one mesh of one "
                "dimension"
            )
        allowed = (Shard(SEQUENCE), Replicate()) if what == "query" else (Shard(SEQUENCE),)
        if operand.placements[0] not in allowed:
            raise NotImplementedError(
                f"{name}: {what} is placed as {operand.placements[0]}; redistribute it to "
                f"{' or '.join(map(str, allowed))}"
            )
    shards = _chunks(key.shape[SEQUENCE], mesh.size())
    is_sharded = query.placements[0] == Shard(SEQUENCE)
    rows: Any = _chunks(query.shape[SEQUENCE], mesh.size()) if is_sharded else "replicated"
    local = (query.to_local(), key.to_local(), value.to_local())
    return Placed(local, mesh, shards, rows, query)


def _chunks(length: int, ranks: int) -> Shards:
    """As `torch.chunk` cuts: every chunk but the last ones is as long as the first."""
    most = -(-length // ranks)
    return Shards.sizes([min(max(length - rank * most, 0), most) for rank in range(ranks)])
