"""Operands of bench/cases/buffers.py in every layout are the same attention; its reference finds errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.cases import buffers, delta
from bench.cases.calls import REMAINDER_SCALE, Call

pytestmark = pytest.mark.host_only

OPERANDS = {"grad_out": "grad_out", "query": "query", "key": "key", "value": "value", "out": "saved_out"}
OPERANDS |= {"lse": "lse", "out_remainder": "out_remainder"}
CALLS = [
    Call("decode", 4, 2, 64, 3, 50),
    Call("prefill", 4, 2, 64, 20, 33, causal=True),
    Call("prefill", 4, 2, 64, 20, 33),
    Call("paged_decode", 4, 2, 64, 1, 50, batch=2, block_size=16, lengths=(50, 9)),
    Call("decode", 4, 2, 64, 1, 50, batch=2, kv_format="int8", lengths=(1, 50)),
    Call("paged_decode", 4, 2, 64, 2, 33, block_size=16, kv_format="int8"),
    Call("decode", 4, 1, 96, 2, 50, latent_dim=64),
    Call("prefill", 4, 1, 96, 20, 33, causal=True, latent_dim=64),
    Call("paged_decode", 4, 1, 96, 1, 33, block_size=16, kv_format="int8", latent_dim=64),
]


def reference(call: Call, made: dict[str, torch.Tensor]) -> torch.Tensor:
    from torch_fattn import reference

    keywords: dict[str, Any] = {"is_causal": call.causal} if call.op == "prefill" else {}
    if call.kv_format:
        keywords |= {name: made[name] for name in ("key_scales", "value_scales")}
        keywords["kv_format"] = call.kv_format
    names = ["query", "key", "value"]
    names += ["block_tables"] if call.block_size else []
    names += ["seq_lens"] if call.op != "prefill" else []
    found = getattr(reference, call.op)(*(made[name] for name in names), **keywords)
    return found[0] if isinstance(found, tuple) else found


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_the_reference_matches_the_product(call: Call) -> None:
    made = buffers.make(call, (), {}, "cpu", seed=3)
    expected = reference(call, made)
    for batch in range(call.batch):
        for head in range(call.q_heads):
            torch.testing.assert_close(
                buffers.reference(call, made, batch, head, "cpu"), expected[batch, head], rtol=0, atol=1e-12
            )
    made["out"] = expected.to(torch.float16)
    assert buffers.errors(call, made, False, "cpu")[1] < 1e-3
    made["out"][-1, -1, -1, 0] += 0.5
    assert buffers.errors(call, made, False, "cpu")[0] > 0.4
    made["out"][0, 0, 0, 0] = torch.nan
    assert buffers.errors(call, made, False, "cpu")[0] == float("inf")


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_match_the_product(causal: bool) -> None:
    from torch_fattn import reference

    call = Call("prefill_backward", 4, 2, 64, 20, 33, batch=2, causal=causal)
    made = buffers.make(call, {*OPERANDS.values()}, {"row_states": 16}, "cpu", seed=3)
    assert "out" not in made and made["grad_key"].isnan().all()
    operands = (made[name] for name in ("query", "key", "value"))
    out, lse = reference.prefill(*operands, is_causal=causal)
    torch.testing.assert_close(made["lse"].double(), lse, rtol=0, atol=1e-5)
    saved = made["saved_out"].double() + made["out_remainder"].double() / REMAINDER_SCALE
    torch.testing.assert_close(saved, out, rtol=0, atol=1e-5)
    positional, keywords = call.arguments({name: made[buffer] for name, buffer in OPERANDS.items()})
    expected = reference.prefill_backward(*positional, **keywords)[:3]
    for name, gradient in zip(("grad_query", "grad_key", "grad_value"), expected, strict=True):
        made[name] = gradient.to(torch.float16)
    assert buffers.errors(call, made, False, "cpu")[1] < 1e-3
    for name in ("grad_query", "grad_key", "grad_value"):  # the controls
        wrong = made[name].clone()
        wrong[-1, -1, -1, 0] += 5
        assert buffers.errors(call, {**made, name: wrong}, False, "cpu")[1] > 1e-2
        wrong[-1, -1, -1, 0] = torch.nan
        assert buffers.errors(call, {**made, name: wrong}, False, "cpu")[1] == float("inf")


@pytest.mark.parametrize("op", ["gated_delta_rule", "gated_delta_step"])
@pytest.mark.parametrize("channel_decay", [False, True])
def test_linear_attention_matches_the_product(op: str, channel_decay: bool) -> None:
    from torch_fattn import reference

    call = Call(op, 2 if channel_decay else 6, 2, 64, 5, 5, batch=2, channel_decay=channel_decay)
    made = buffers.make(call, (), {}, "cpu", seed=3)
    made["state"] = made["state"].double()
    positional, keywords = call.arguments({name: made[name] for name in call.operands("meta")})
    made["out"] = getattr(reference, call.op)(*positional, **keywords)
    assert buffers.errors(call, made, False, "cpu")[1] < 1e-6
    for name in {"out", delta.STATE, delta.NEW} & made.keys():  # the controls
        wrong = made[name].clone()
        wrong[-1, -1, -1] += 5
        assert buffers.errors(call, {**made, name: wrong}, False, "cpu")[1] > 1e-2
        wrong[-1, -1, -1] = torch.nan
        assert buffers.errors(call, {**made, name: wrong}, False, "cpu")[1] == float("inf")
    buffers.reset(made)
    assert torch.equal(made["state"], made["initial_state"].double()) and made["out"].isnan().all()


def test_blocks_of_q8_0_hold_the_same_values() -> None:
    made = buffers.make(CALLS[4], {"key_q8_0"}, {}, "cpu", seed=1)
    blocks = made["key_q8_0"]
    assert blocks.shape == (2, 2, 50, 2, 34) and blocks.is_contiguous()
    scale = blocks[..., :2].contiguous().view(torch.float16).float()
    values = (scale * blocks[..., 2:].contiguous().view(torch.int8)).flatten(-2)
    assert torch.equal(values, made["key_scales"][..., None] * made["key"])


def test_the_mask_equals_lengths_and_causal_rows() -> None:
    call = Call("decode", 2, 1, 64, 2, 6, batch=2, lengths=(6, 3))
    made = buffers.make(call, {"mask", "query_float32"}, {"partials": 8}, "cpu", seed=1)
    seen = made["mask"] == 0
    assert seen.shape == (2, 2, call.mask_pitch) and call.mask_pitch == 16
    assert seen[..., :6].tolist() == [
        [[True] * 5 + [False], [True] * 6],
        [[True] * 2 + [False] * 4, [True] * 3 + [False] * 3],
    ]
    assert torch.equal(made["query_float32"], made["query"].float())
    assert made["partials"].view(torch.float32).isnan().all() and made["out"].isnan().all()
