"""No dispatch runs for seconds: a pass with more work is cut into slices of its grid (csrc/plan/slices.h).

Plans of huge calls are only inspected. The calls that run have a huge capacity and few keys: slices are
planned from the capacity, and only the GPU knows the lengths.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_fattn
from tests.conftest import Checked, counted_launches, needs_emulator
from tests.helpers import direct_launch
from tests.helpers.accuracy import assert_lse_close
from tests.helpers.tensors import same_bits

f16 = torch.float16
# Limit per core: half a second at half the rate of an M1 core, which makes 128 products per cycle at 1.28
# GHz.
MOST_PRODUCTS_PER_CORE = 0.5 * 0.5 * 128 * 1.28e9
LONGEST = 2**20  # keys

Sizes = tuple[int, ...]  # batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim
DECODES: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "one_long_sequence": ((1, 32, 8, 1, 2**30, 128, 128), {}),
    "many_long_sequences": ((64, 32, 8, 1, LONGEST, 128, 128), {}),
    "many_rows": ((4, 128, 1, 16, LONGEST, 128, 128), {}),
    "many_heads": ((4, 1024, 1024, 4, LONGEST, 64, 64), {}),
    "latent": ((16, 128, 1, 16, LONGEST, 576, 512), {}),
    "float32": ((64, 32, 8, 1, LONGEST, 128, 128), {"dtype": torch.float32}),
    "wide_window": ((1024, 32, 8, 1, LONGEST, 128, 128), {"window_left": LONGEST // 2, "sink_tokens": 9}),
}
PREFILLS: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "long_prompt": ((1, 32, 8, LONGEST, LONGEST, 128, 128), {"is_causal": True}),
    "many_prompts": ((512, 32, 32, 8192, 8192, 64, 64), {}),
    "chunk": ((1, 32, 8, 2048, LONGEST, 128, 128), {"is_causal": True, "q_offset": LONGEST - 2048}),
    "window": ((64, 32, 8, LONGEST, LONGEST, 64, 64), {"is_causal": True, "window_left": 4095}),
    "video": ((1, 12, 12, 150_568, 150_568, 128, 128), {}),  # M1: at most 129, four waves and one
}
CORES = (8, 10, 40, 0)


def meta(*shape: int, dtype: torch.dtype = f16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def plan_of(op: str, sizes: Sizes, cores: int, dtype: torch.dtype = f16, **options: Any) -> dict[str, Any]:
    batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim = sizes
    operands = (
        meta(batch, q_heads, q_len, head_dim, dtype=dtype),
        meta(batch, kv_heads, kv_len, head_dim, dtype=dtype),
        meta(batch, kv_heads, kv_len, value_dim, dtype=dtype),
    )
    return torch_fattn.explain(op, *operands, **options, family=7, cores=cores).data


def visible_keys(rows: int, kv_len: int, options: dict[str, Any]) -> int:
    """Only neighbouring rows share memory."""
    window = options.get("window_left", kv_len) + 1
    return min(kv_len, window + rows * (window < kv_len) + options.get("sink_tokens", 0))


def check_cover(step: dict[str, Any]) -> None:
    """Every threadgroup of the grid is in one dispatch."""
    dispatches = list(direct_launch.dispatches(step))
    assert sum(math.prod(groups) for _, groups in dispatches) == math.prod(step["grid"])
    assert [first for first, _ in dispatches] == list(range(0, math.prod(step["grid"]), step["slice"]))
    assert len(dispatches) > 1


@pytest.mark.host_only
@pytest.mark.parametrize("cores", CORES)
@pytest.mark.parametrize("name", DECODES)
def test_the_work_of_a_dispatch_of_decode_is_bounded(name: str, cores: int) -> None:
    sizes, options = DECODES[name]
    batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim = sizes
    step = plan_of("decode", sizes, cores, **options)["passes"][0]
    check_cover(step)
    assert step["constants"]["sliced"]
    shares, columns, _ = step["grid"]
    span = step["params"]["span"]
    rows = 8 * int(step["macros"]["FATTN_ROW_GROUPS"])
    assert rows * columns >= q_heads * q_len
    # Every threadgroup has the same share of the keys, give or take a chunk.
    chunk = min(span["largest_chunk"], kv_len)
    keys = batch * visible_keys(q_len, kv_len, options) / shares + chunk
    products = keys * rows * (head_dim + value_dim)
    most = max(math.prod(groups) for _, groups in direct_launch.dispatches(step))
    assert most * products <= MOST_PRODUCTS_PER_CORE * (cores or 8)


@pytest.mark.host_only
@pytest.mark.parametrize("cores", CORES)
@pytest.mark.parametrize("name", PREFILLS)
def test_the_work_of_a_dispatch_of_prefill_is_bounded(name: str, cores: int) -> None:
    sizes, options = PREFILLS[name]
    q_len, kv_len, head_dim, value_dim = sizes[3:]
    (step,) = plan_of("prefill", sizes, cores, **options)["passes"]
    check_cover(step)
    rows = 8 * int(step["macros"]["FATTN_ROW_FRAGMENTS"]) * int(step["macros"]["FATTN_SIMDGROUPS"])
    products = rows * visible_keys(rows, kv_len, options) * (head_dim + value_dim)
    most = max(math.prod(groups) for _, groups in direct_launch.dispatches(step))
    assert most * products <= MOST_PRODUCTS_PER_CORE * (cores or 8)
    wave = (cores or 8) * (16 // int(step["macros"]["FATTN_SIMDGROUPS"]))  # resident at once
    assert most % (wave if most >= wave else cores or 8) == 0, "no core is without work"


def backward_passes(heads: int, kv_heads: int, length: int, **machine: Any) -> list[dict[str, Any]]:
    query, key = (meta(1, n, length, 128) for n in (heads, kv_heads))
    lse = meta(1, heads, length, dtype=torch.float32)
    operands = (query, None, query, key, key, query, lse)
    return torch_fattn.explain("prefill_backward", *operands, out_remainder=query, **machine).passes


def rows_of(step: dict[str, Any]) -> int:
    """Rows of a threadgroup of a backward, or keys of one that walks rows."""
    of_keys, macros = step["kernel"] == "fattn_backward_key", step["macros"]
    owned = int(macros["FATTN_TILE_KEYS"]) if of_keys else 8 * int(macros["FATTN_ROW_FRAGMENTS"])
    return owned * int(macros["FATTN_ROW_GROUPS"])


@pytest.mark.host_only
def test_usual_calls_take_one_dispatch() -> None:
    """The control: where the bound is far, and with more cores, nothing is cut."""
    usual = [
        ("decode", (16, 32, 8, 1, 32768, 128, 128), {}),
        ("decode", (1, 32, 8, 1, 2**17, 128, 128), {}),
        ("prefill", (1, 32, 8, 4096, 4096, 128, 128), {"is_causal": True}),
    ]
    for op, sizes, options in usual:
        for step in plan_of(op, sizes, 8, **options)["passes"]:
            assert "slice" not in step and not step["constants"]["sliced"]
    sizes, _ = DECODES["many_long_sequences"]
    slices = [len(list(direct_launch.dispatches(plan_of("decode", sizes, n)["passes"][0]))) for n in (8, 64)]
    assert slices[0] > slices[1]


@pytest.mark.host_only
def test_many_sequences_or_heads_lie_along_x() -> None:
    """In one dispatch: nothing says what a GPU takes in y and z."""
    for op, sizes in (
        ("prefill", (70_000, 2, 2, 1, 2, 64, 64)),
        ("decode", (2, 70_000, 70_000, 1, 2, 64, 64)),
    ):
        step = plan_of(op, sizes, 8)["passes"][0]
        assert max(step["grid"][1:]) == 70_000 and step["constants"]["sliced"]
        assert list(direct_launch.dispatches(step)) == [(0, [math.prod(step["grid"]), 1, 1])]


@pytest.mark.host_only
def test_walks_too_long_for_matrix_units() -> None:
    """Their tiles are of one size, since the self-test covers no other."""
    for heads, units in ((8, True), (16, False)):
        passes = backward_passes(heads, 1, 300_000, family=10, cores=10, tensor="registers")
        assert [step["kernel"].endswith("_tensor") for step in passes] == [units, units]


# ---- run


def test_a_large_batch() -> None:
    query, key = torch.randn(65_537, 1, 1, 16), torch.randn(65_537, 1, 2, 16)
    exact, _ = torch_fattn.reference.prefill(query, key, key)
    out = torch_fattn.decode(*(each.to("mps") for each in (query, key, key)))
    assert torch.allclose(out.cpu().double(), exact, atol=1e-5)


def operands_of(op: str, batch: int, heads: tuple[int, int], q_len: int, capacity: int) -> dict[str, Any]:
    """A cache of `capacity` keys, all in the same memory; `seq_lens` gives the number of filled ones."""
    generator = torch.Generator().manual_seed(capacity)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(f16).to("mps")

    arguments: dict[str, Any] = {"query": randn(batch, heads[0], q_len, 64)}
    if op == "decode":
        for name in ("key", "value"):
            arguments[name] = randn(batch, heads[1], 1, 64).expand(-1, -1, capacity, -1)
        return arguments
    for name in ("key_cache", "value_cache"):
        arguments[name] = randn(3, 16, heads[1], 64)
    arguments["block_tables"] = (
        torch.tensor([[2], [0]], dtype=torch.int32).to("mps").expand(-1, capacity // 16)
    )
    if op == "paged_prefill":
        arguments["query"] = randn(batch * q_len, heads[0], 64)
        arguments["cu_seqlens_q"] = torch.arange(0, batch * q_len + 1, q_len, dtype=torch.int32).to("mps")
        arguments |= {"max_seqlen_q": q_len, "is_causal": True}
    return arguments


def with_capacity(op: str, arguments: dict[str, Any], capacity: int) -> dict[str, Any]:
    smaller = dict(arguments)
    for name in ("key", "value"):
        if name in smaller:
            smaller[name] = smaller[name][:, :, :capacity]
    if "block_tables" in smaller:
        smaller["block_tables"] = smaller["block_tables"][:, : capacity // 16]
    return smaller


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("op", ["decode", "paged_decode", "paged_prefill"])
def test_slices_compute_what_one_dispatch_does(op: str, q_len: int, checked: Checked) -> None:
    capacity = 2**29
    arguments = operands_of(op, 2, (16, 8), q_len, capacity)
    arguments["seq_lens"] = torch.tensor([1400, 37], dtype=torch.int32).to("mps")
    small = with_capacity(op, arguments, 1408)
    plans = [torch_fattn.explain(op, **of).passes[0] for of in (arguments, small)]
    sliced = len(list(direct_launch.dispatches(plans[0])))
    assert sliced > 1 and "slice" not in plans[1]
    kernel = plans[0]["kernel"]
    with checked(), counted_launches() as launches:
        results = getattr(torch.ops.fattn, op)(**arguments)
    assert launches[kernel] == sliced
    with counted_launches() as launches:
        expected = getattr(torch.ops.fattn, op)(**small)
    assert launches[kernel] == 1
    for result, one in zip(results, expected, strict=True):
        assert torch.equal(result.cpu(), one.cpu()), "the same bits"
    exact_out, exact_lse = getattr(torch_fattn.reference, op)(**small)
    assert torch.allclose(results[0].cpu().double(), exact_out, atol=2e-3)
    assert_lse_close(results[1].cpu(), exact_lse, f16)


@needs_emulator
@pytest.mark.parametrize(("heads", "length"), [(8, 300_000), (1, 5_000_000)])
def test_long_walks_of_a_backward(heads: int, length: int) -> None:
    """A walk over keys, or over the rows of all heads that share keys, cannot be cut. Its threadgroup has
    fewer rows or keys instead, here of a call with many rows and few keys, and computes the same bits."""
    long = backward_passes(heads, 1, length, family=9, cores=40)
    for step, walked in zip(long, (length, heads * length), strict=True):
        assert rows_of(step) * walked * 2.5 * (128 + 128) <= 2 * MOST_PRODUCTS_PER_CORE
    rows, keys = torch.randn(1, 8, 100, 128, dtype=f16), torch.randn(1, 1, 40, 128, dtype=f16)
    arguments = {"grad_out": rows, "query": rows, "key": keys, "value": keys, "lse": torch.zeros(1, 8, 100)}
    arguments |= {"out": None, "grad_lse": None}
    plan = direct_launch.plan_of("prefill_backward", arguments, family=9)
    usual, tiles = direct_launch.gradients(arguments, plan), [rows_of(step) for step in plan["passes"]]
    for step, other, count in zip(plan["passes"], long, (100, 40), strict=True):
        step |= {name: other[name] for name in ("macros", "threads", "threadgroup_bytes")}
        step["grid"][0] = -(-count // rows_of(step))
    direct_launch.set_params(plan["passes"][0], {"forward.q_tiles": plan["passes"][0]["grid"][0]})
    assert [rows_of(step) for step in long] != tiles, "the control"
    assert same_bits(direct_launch.gradients(arguments, plan), usual)
