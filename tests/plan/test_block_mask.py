"""What a block mask leaves of a call, as `explain` counts it: of long calls little but visible pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torch_fattn import explain

pytestmark = pytest.mark.host_only

MACHINES: dict[str, dict[str, Any]] = {
    "M1": {"chip": "M1"},
    "M3 Max": {"chip": "M3 Max"},
    "M5": {"chip": "M5", "tensor": "registers"},
}


def call_of(length: int, heads: int, block: int, density: float) -> dict[str, Any]:
    """Rows of blocks see the neighbouring blocks of keys, in groups of three, and blocks apart."""
    count = -(-length // block)
    generator = torch.Generator().manual_seed(length)
    coarse = torch.rand(-(-count // 3), -(-count // 3), generator=generator) < density
    pattern = coarse.repeat_interleave(3, 0).repeat_interleave(3, 1)[:count, :count]
    rows = torch.empty(1, 1, length, 128, dtype=torch.bfloat16).expand(-1, heads, -1, -1)
    blocks = {"block_mask": pattern[None, None], "block_size": (block, block)}
    return dict.fromkeys(("query", "key", "value"), rows) | blocks


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize(("length", "heads", "block"), [(75600, 12, 64), (150568, 40, 128), (300000, 1, 128)])
def test_long_calls(length: int, heads: int, block: int, machine: dict[str, Any]) -> None:
    call = call_of(length, heads, block, 0.1)
    plan = explain("prefill", **call, **machine)
    assert plan.blocks is not None and 0.05 < plan.blocks.density < 0.15
    assert plan.blocks.pairs <= plan.blocks.tile_pairs <= plan.blocks.pairs * (1.1 if block == 128 else 1.3)
    assert plan.cost.flops == 4 * 128 * plan.blocks.pairs and not plan.cost.is_most
    assert plan.data["scratch_bytes"] == 0
    dense = explain("prefill", *(call[name] for name in ("query", "key", "value")), **machine)
    assert (
        plan.blocks.pairs < 0.2 * heads * length**2
        and plan.cost.bytes == dense.cost.bytes + plan.blocks.bytes
    )
    lse = torch.empty(1, 1, 1).expand(1, heads, length)
    backward = explain("prefill_backward", call["query"], None, *[call["query"]] * 3, None, lse,
                       block_mask=call["block_mask"], block_size=call["block_size"], **machine)  # fmt: skip
    assert backward.data["scratch_bytes"] == 16 * heads * length, "a state of each row"


def test_tiles_of_several_rows_of_blocks_visit_more() -> None:
    """The control: tensor operations have tiles of 64 rows, and the blocks 32."""
    blocks = explain("prefill", **call_of(9600, 1, 32, 0.1), **MACHINES["M5"]).blocks
    assert blocks is not None and blocks.tile_pairs > 1.2 * blocks.pairs


@pytest.mark.parametrize(
    ("options", "lengths", "masks"),
    [
        ({}, None, 1),
        ({"is_causal": True}, None, 2),
        ({"q_offset": -30}, None, 1),
        ({"window_left": 90, "sink_tokens": 50, "is_causal": True}, None, 1),
        ({}, [130, 131], 2),
        ({"window_left": 90, "sink_tokens": 50, "is_causal": True}, [130, 501], 2),
        ({"is_causal": True}, [-1, 400], 1),
    ],
)
def test_pairs_by_counting(options: dict[str, Any], lengths: list[int] | None, masks: int) -> None:
    from torch_fattn.operators.visibility import Visibility, expanded_blocks

    query, key = (torch.empty(2, 4, n, 64) for n in (300, 500))
    blocks = torch.rand(masks, 1, 5, 4, generator=torch.Generator().manual_seed(0)) < 0.5
    call = {"query": query, "key": key, "value": key, "block_mask": blocks, "block_size": (64, 128)} | options
    if lengths is not None:
        call["seq_lens"] = torch.tensor(lengths, dtype=torch.int32)
    plan = explain("prefill", **call)
    filled = torch.tensor(lengths or [500, 500]).clamp(0, 500)[:, None, None, None]
    rows, keys = torch.arange(300)[:, None] + options.get("q_offset", filled - 300), torch.arange(500)
    seen = Visibility.of(options, is_causal=options.get("is_causal", False)).mask(rows, keys)
    seen = seen & (keys < filled)
    visible: Tensor = seen & expanded_blocks(blocks, (64, 128), 300, 500)
    assert plan.blocks is not None and plan.blocks.pairs == 4 * int(visible.sum()) <= plan.blocks.tile_pairs
    assert plan.cost.flops == 4 * 64 * plan.blocks.pairs
    assert plan.blocks.density == pytest.approx(blocks.double().mean().item())
    assert f"64 x 128, {blocks.numel()} bytes" in str(plan)
    on_meta = {name: each.to("meta") if isinstance(each, Tensor) else each for name, each in call.items()}
    unknown = explain("prefill", **on_meta)
    assert unknown.blocks is None and unknown.cost.is_most and unknown.cost.flops >= plan.cost.flops
