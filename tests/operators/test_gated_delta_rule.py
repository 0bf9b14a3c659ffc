"""gated_delta_rule: transformers' functions, splits and batches, and its cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torch_fattn
from tests.conftest import Checked, needs_emulator
from tests.helpers.problems import DTYPES
from tests.helpers.tensors import same_bits
from torch_fattn import reference

TOKENS = ("query", "key", "value", "g", "beta")
GATES = pytest.mark.parametrize("channel_decay", [False, True], ids=["gdn", "kda"])


def call_of(
    channel_decay: bool, batch: int, length: int, dims: tuple[int, int] = (32, 16), kind: str = ""
) -> dict[str, Any]:
    """Arguments with two key heads, of two value heads each unless channels decay, and their states."""
    heads, columns = (2, (dims[0],)) if channel_decay else (4, ())
    query, key = torch.randn(2, batch, length, 2, dims[0])
    g, beta = -torch.rand(batch, length, heads, *columns), torch.rand(batch, length, heads)
    if kind:
        key = torch.randn(batch, 1, 2, dims[0]) + 1e-3 * key
        beta, g = (1 if kind == "repeated" else 2) - 1e-3 * beta, 1e-3 * g
    numbers = (query, key, torch.randn(batch, length, heads, dims[1]), g, beta)
    state = torch.randn(batch, heads, *dims)
    return dict(zip(TOKENS, numbers, strict=True)) | {"state": state, "use_qk_l2norm_in_kernel": True}


def run(
    call: dict[str, Any], device: str, tokens: slice = slice(None), **changes: Any
) -> tuple[Tensor, Tensor]:
    """The result of these tokens, and the states after them."""
    call = {n: x[:, tokens] if n in TOKENS else x for n, x in (call | changes).items()}
    on_device = {n: x.to(device, copy=True) if isinstance(x, Tensor) else x for n, x in call.items()}
    return torch_fattn.gated_delta_rule(**on_device).cpu(), on_device["state"].cpu()


@GATES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_splits_batches_and_packing(channel_decay: bool, dtype: torch.dtype, device: str) -> None:
    """Sequences alone, cut at any multiple of 8, and packed have the bits of one batch."""
    call = call_of(channel_decay, 3, 45)
    call |= {name: call[name].to(dtype) for name in ("query", "key", "value")}
    out, state = run(call, device)
    for cut in (8, 24, 40):
        first, between = run(call, device, slice(cut))
        second, after = run(call, device, slice(cut, None), state=between)
        assert same_bits([torch.cat((first, second), 1), after], [out, state])
    alone = {n: x[1:2] if isinstance(x, Tensor) else x for n, x in call.items()}
    assert same_bits(list(run(alone, device)), [out[1:2], state[1:2]])
    if device == "mps":
        ends = torch.tensor([0, 45, 90, 90, 135]).int()
        packed = {n: x.flatten(0, 1)[None] for n, x in call.items() if n in TOKENS}
        four = call["state"][[0, 1, 1, 2]]
        result, states = run(call | packed, device, state=four, cu_seqlens=ends)
        assert same_bits(result[0].unflatten(0, (3, 45)), out)
        assert same_bits(list(states), [state[0], state[1], four[2], state[2]])


def test_operands_in_the_memory_of_the_state(device: str, checked: Checked) -> None:
    """They are copied before the state is written."""
    call = call_of(True, 1, 12)
    state = call["state"].to(device)
    numbers = state.flatten()
    inside = {
        "A_log": numbers[:2],
        "dt_bias": numbers[40:104].view(2, 32),
        "beta": numbers[9:33].view(1, 12, 2),
    }
    apart, after = run(call | {name: each.cpu() for name, each in inside.items()}, device)
    call = {n: x.to(device) for n, x in call.items() if n in TOKENS} | inside
    with checked():
        out = torch_fattn.gated_delta_rule(**call, state=state, use_qk_l2norm_in_kernel=True)
    assert same_bits([out.cpu(), state.cpu()], [apart, after])


@GATES
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_sequence(channel_decay: bool, number: float, device: str) -> None:
    call = call_of(channel_decay, 3, 21)
    out, state = run(call, device)
    for name in TOKENS:
        bad = call[name].clone()
        bad[1, 13] = -number if name == "g" else number
        result, after = run(call | {name: bad}, device)
        assert same_bits([result[::2], after[::2]], [out[::2], state[::2]])
        assert same_bits(result[1, :8], out[1, :8]), "nor does it reach an earlier chunk"
        assert name != "g" or number == torch.inf or after[1].isnan().any()


@GATES
@pytest.mark.parametrize("length", [1, 100, 300])
@pytest.mark.parametrize("kind", ["random", "repeated", "reflecting"])
def test_functions_of_transformers(kind: str, length: int, channel_decay: bool) -> None:
    """At most twice as far from float64 as the worse of the two that serve a generation there."""
    name, functions = "qwen3_next", ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
    if channel_decay:
        name, functions = "kimi_linear", ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention")
    module = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    call = call_of(channel_decay, 1, length, (64, 32), "" if kind == "random" else kind)
    exact = call | {"state": call["state"].double()}
    exact = [reference.gated_delta_rule(**exact), exact["state"]]

    def errors(results: Any) -> list[float]:
        return [float((x - y).abs().max() / y.abs().max()) for x, y in zip(results, exact, strict=True)]

    options = {"initial_state": call["state"], "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    heads = {n: call[n].repeat_interleave(call["g"].shape[2] // 2, 2) for n in ("query", "key")}
    theirs = [
        errors(getattr(module, each)(**{n: (call | heads)[n] for n in TOKENS}, **options))
        for each in functions
    ]
    mine = errors(run(call, "mps"))
    for error, *others in zip(mine, *theirs, strict=True):
        assert error <= 2 * max(others) + 3e-7


@needs_emulator
@GATES
def test_products_and_bytes(channel_decay: bool) -> None:
    """At D = 128: 50 products for 8 tokens and 8 columns, one read and one write of a state, and 160 floats
    of scratch per chunk and head."""
    import softmetal

    call = call_of(channel_decay, 1, 24, (128, 128))
    with softmetal.checks(count_bytes=True), softmetal.record() as launches:
        run(call, "mps")
    prepare, scan = launches
    heads, chunks, bytes_of_state = call["g"].shape[2], 3, call["state"].numel() * 4
    assert prepare["counters"]["products"] == 0
    assert scan["counters"]["products"] == 50 * chunks * heads * 128 // 8
    plan = torch_fattn.explain("gated_delta_rule", **call).data
    bound = plan["passes"][1]["bindings"]
    for way in ("read", "written"):
        assert scan[f"buffers_{way}"][str(bound["state"])] == bytes_of_state
    assert plan["scratch_bytes"] == 4 * 160 * chunks * heads
