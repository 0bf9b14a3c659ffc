"""bench/cases/calls.py: the operands of a call as tensors and as shapes alone, and its least bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.cases.calls import Call
from tests.helpers.kv_formats import QUANTISED

pytestmark = pytest.mark.host_only

DECODE = Call("decode", 4, 2, 64, 1, 40)


@pytest.mark.parametrize(
    "call",
    [
        DECODE,
        replace(DECODE, op="paged_decode", block_size=16),
        *(replace(DECODE, kv_format=kv_format) for kv_format in QUANTISED),
        replace(DECODE, op="paged_decode", block_size=16, kv_format="int4"),
        replace(DECODE, batch=2, lengths=(40, 3)),
        Call("prefill_backward", 4, 2, 64, 20, 40, causal=True),
        Call("gated_delta_rule", 4, 2, 64, 20, 20),
        Call("gated_delta_step", 2, 2, 64, 3, 3, channel_decay=True),
    ],
    ids=str,
)
def test_shapes_match_the_tensors(call: Call) -> None:
    tensors, shapes = call.operands("cpu"), call.operands("meta")
    assert tensors.keys() == shapes.keys()
    for name, tensor in tensors.items():
        assert (tensor.shape, tensor.dtype) == (shapes[name].shape, shapes[name].dtype), name


def test_an_uneven_batch_moves_the_keys_of_its_lengths() -> None:
    even = replace(DECODE, batch=3, lengths=(40, 40, 40))
    assert even.least_bytes == replace(DECODE, batch=3).least_bytes
    uneven = replace(even, lengths=(40, 0, 7))
    assert even.least_bytes - uneven.least_bytes == 2 * 2 * (40 + 33) * 64 * 2
    assert torch.equal(uneven.operands("cpu")["seq_lens"], torch.tensor([40, 0, 7], dtype=torch.int32))


def test_values_that_are_columns_of_the_keys_are_counted_as_such() -> None:
    call = Call("prefill", 4, 1, 96, 20, 20, latent_dim=64)
    assert call.value_dim == 64
    assert call.flops == 2 * 4 * 20 * 20 * (96 + 64)
    assert call.least_bytes == 2 * (20 * 96 + 4 * 20 * (96 + 64))


@pytest.mark.parametrize("options", [{"window_left": 9}, {"sinks": True}])
def test_windows_and_sinks_are_excluded(options: dict[str, int]) -> None:
    with pytest.raises(NotImplementedError, match="the adapters do not take a"):
        replace(DECODE, **options).refuse_score_options()
