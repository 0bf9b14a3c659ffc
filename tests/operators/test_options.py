"""Prefill and decode with their options at the edges: positions, numbers of heads, masks, trees of booleans,
chunks of keys. Random problems have all of them together."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import Checked, needs_emulator
from tests.helpers import direct_launch, problems, small_problems
from tests.helpers.accuracy import assert_close
from tests.helpers.small_problems import check
from tests.helpers.tensors import same_bits
from torch_fattn import reference

fattn = torch.ops.fattn
f16, f32 = torch.float16, torch.float32
DECODES = problems.DECODES
CHUNK = 256  # keys, for each eight packed rows
small = partial(small_problems.problem, dtype=f16, head_dim=16, value_dim=24)
prefill = partial(small, "prefill", batch=1, q_heads=2, kv_heads=1, q_len=70, kv_len=150)


# ---- windows and positions


@pytest.mark.parametrize("offset", [-100, -70, -1, 149, 200])
@pytest.mark.parametrize("options", [{"window_left": 40}, {"window_right": 20}, {"alibi_slopes": True}])
@pytest.mark.parametrize("causality", ["offset", "none"])
def test_rows_far_from_the_keys(causality: str, options: dict[str, Any], offset: int, device: str) -> None:
    """Positions below 0 and beyond the keys: only keys in the window are seen, at their true distance."""
    check(prefill(dtype=f32, causality=causality, q_offset=offset, sink_tokens=3, **options), device)


@pytest.mark.parametrize(("offset", "like"), [(2**63 - 1, 9), (2**63 - 3, 9), (-(2**63), -5)])
def test_an_offset_at_the_end_of_int64(offset: int, like: int, device: str) -> None:
    """All keys are seen, or none, as from the last position that matters."""
    query, key = torch.randn(1, 2, 5, 16).to(device), torch.randn(1, 2, 9, 16).to(device)
    rows, keys, starts = query[0].transpose(0, 1), key[0].transpose(0, 1), [[0, 5], [0, 9]]
    packed = [rows, keys, keys, *(torch.tensor(s, dtype=torch.int32, device=device) for s in starts), 5, 9]
    for op, operands in (("prefill", [query, key, key]), ("varlen_prefill", packed)):
        for of in (fattn, reference):
            far, near = (getattr(of, op)(*operands, is_causal=True, q_offset=at) for at in (offset, like))
            assert torch.equal(far[0], near[0])


@needs_emulator
def test_the_last_position_of_an_int() -> None:
    """As row 2^30 - 1 from a q_offset of 2^30 has it: it sees every key."""
    case = problems.build(prefill(dtype=f32, causality="offset", q_offset=149))
    plan = direct_launch.plan_of("prefill", case.arguments("cpu")[0])
    direct_launch.set_params(plan["passes"][0], {"q_offset": 2**31 - 70})
    assert_close(case, *direct_launch.run(case, plan=plan))


@pytest.mark.parametrize("far", [2**30, 2**31 - 1, 2**31, 10**15])
def test_limits_beyond_every_key_are_ignored(far: int, device: str) -> None:
    """No bit changes, also with sink tokens, which then have no effect."""
    query, key, value = (torch.randn(1, 2, n, 16).to(device) for n in (40, 50, 50))
    for offset in (-30, 10, 2**30 - 1):
        plain = fattn.prefill(query, key, value, q_offset=offset)
        for limits in (
            {"window_left": far},
            {"window_right": far},
            {"window_left": far, "window_right": far, "sink_tokens": far},
        ):
            limited = fattn.prefill(query, key, value, q_offset=offset, **limits)
            assert offset + 40 >= far or same_bits(plain, limited)


# ---- numbers of heads


def operators_within(op: str, arguments: dict[str, Tensor]) -> set[str]:
    """The operators of torch that a call runs."""
    with torch.profiler.profile() as profile:
        getattr(fattn, op)(**arguments)
    return {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("op", ["prefill", "decode"])
@pytest.mark.parametrize("head_dim", [64, 192])
@pytest.mark.parametrize("dtype", [f16, torch.bfloat16])
def test_numbers_of_heads_are_read_in_their_own_dtype(
    op: str, head_dim: int, dtype: torch.dtype, device: str
) -> None:
    """Bit for bit as their float32 copies, and on the GPU without making one."""
    generator = torch.Generator().manual_seed(5)
    operands = {name: torch.randn(2, 4, 9, head_dim, generator=generator) for name in ("key", "value")}
    operands["query"] = torch.randn(2, 4, 2, head_dim, generator=generator)
    operands = {name: tensor.to(f16).to(device) for name, tensor in operands.items()}
    sinks, slopes = torch.randn(8, generator=generator), torch.rand(2, 4, generator=generator)
    numbers = {"sinks": sinks.to(dtype).to(device)[1::2], "alibi_slopes": slopes.to(dtype).to(device)}
    copies = {name: tensor.float() for name, tensor in numbers.items()}
    assert same_bits(*(getattr(fattn, op)(**operands, **given) for given in (numbers, copies)))
    if device == "mps":
        assert "aten::_to_copy" not in operators_within(op, operands | numbers)
        strided = operands | {"query": torch.cat([operands["query"]] * 2, -1)[..., ::2]}
        assert "aten::contiguous" in operators_within(op, strided), "the control"


# ---- trees


@pytest.mark.parametrize("op", DECODES)
@pytest.mark.parametrize(("kv_format", "dim"), [("int4", 64), ("int8", 192)])
def test_large_trees_over_quantised_caches(op: str, kv_format: str, dim: int, device: str) -> None:
    """More rows than a decode has: on the kernels of prefill, as few random problems are."""
    sizes = {"q_len": 33, "seq_lens": (150, 77), "tree": "each", "head_dim": dim, "value_dim": dim}
    kernel = "fattn_prefill_wide" if dim > 128 else "fattn_prefill"
    check(small(op, kv_format=kv_format, **sizes), device, kernels=(kernel,))


@pytest.mark.parametrize("rows", [3, 64])
def test_trees_of_booleans(rows: int, device: str) -> None:
    shown = torch.rand(2, rows, rows, generator=torch.Generator().manual_seed(0)) < 0.5
    numbers = [[sum(int(on) << t for t, on in enumerate(row)) for row in tree] for tree in shown.tolist()]
    bits = torch.tensor(numbers, dtype=torch.uint64).view(torch.int64)
    query, key = torch.randn(2, 4, rows, 16), torch.randn(2, 2, 90, 24)
    operands = [each.to(device) for each in (query, key[..., :16], key)]
    for tree, of_bits in ((shown, bits), (shown[1], bits[1])):
        masks = (tree.to(device), of_bits.to(device))
        out, wanted = (fattn.decode(*operands, tree_mask=mask)[0].cpu() for mask in masks)
        exact, _ = reference.decode(query, key[..., :16], key, tree_mask=tree)
        assert torch.equal(out, wanted) and torch.allclose(out.double(), exact, atol=1e-5)


# ---- chunks and columns of decode


@pytest.mark.parametrize("op", DECODES)
@pytest.mark.parametrize("kv_format", ["float", "int8", "int4"])
def test_a_value_that_is_the_whole_key(op: str, kv_format: str, checked: Checked, device: str) -> None:
    """The key then has no other columns."""
    sizes = {"head_dim": 64, "value_dim": 64, "value_in_key": True, "kv_format": kv_format}
    with checked():
        check(small(op, q_len=1, seq_lens=(77, 32), **sizes), device, kernels=("fattn_decode_wide",))


@pytest.mark.parametrize("op", DECODES)
@pytest.mark.parametrize(("group", "row_groups"), [(1, 1), (16, 2), (32, 4)])
def test_lengths_around_a_chunk(op: str, group: int, row_groups: int, device: str) -> None:
    chunk = CHUNK * row_groups
    lengths = (0, 1, chunk - 1, chunk, chunk + 1, 2 * chunk + 1)
    check(small(op, q_heads=group, kv_heads=1, q_len=1, seq_lens=lengths), device)


def test_many_uneven_sequences(device: str) -> None:
    """More than a simdgroup has lanes, which look for a threadgroup's sequence together."""
    lengths = (600, *[n % 3 for n in range(38)], 513, 0)
    sizes = {"q_heads": 1, "kv_heads": 1, "head_dim": 8, "value_dim": 8}
    check(small("decode", q_len=1, seq_lens=lengths, **sizes), device)
