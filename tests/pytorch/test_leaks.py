"""A thousand calls leave nothing behind."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.conftest import EMULATED


def resources() -> dict[str, int]:
    """The live objects on the device: Metal objects by class if they can be counted, else allocated bytes."""
    gc.collect()
    torch.mps.synchronize()
    if not EMULATED:
        return {"bytes": torch.mps.current_allocated_memory()}
    import softmetal

    return {name: count for name, count in softmetal.live_objects().items() if count}


def test_a_thousand_calls_leave_nothing_behind() -> None:
    query = torch.randn(1, 2, 1, 8).to("mps")
    key, pool = torch.randn(1, 1, 16, 8).to("mps"), torch.randn(2, 8, 1, 8).to("mps")
    table = torch.tensor([[1, 0]], dtype=torch.int32).to("mps")
    lengths = torch.tensor([11], dtype=torch.int32).to("mps")
    mask = torch.ones(16, dtype=torch.bool).to("mps")
    rows, values = torch.randn(2, 1, 8).to("mps"), torch.randn(2, 8, 1, 8).to("mps")
    slots = torch.tensor([3, -1]).to("mps")

    def calls() -> None:
        torch.ops.fattn.prefill(query, key, key, is_causal=True)
        torch.ops.fattn.decode(query, key, key, lengths, attn_mask=mask)
        torch.ops.fattn.paged_decode(query, pool, pool, table, lengths)
        torch.ops.fattn.merge(query[None], query[None, ..., 0].float())
        torch.ops.fattn.cache_write(rows, rows, pool, values, slots)
        with pytest.raises(ValueError):
            torch.ops.fattn.prefill(query[..., :4], key, key)

    calls()
    before = resources()
    for _ in range(250):
        calls()
    assert resources() == before
    kept = query.clone()
    assert resources() != before, "the control: a tensor that is kept is counted"
    del kept
