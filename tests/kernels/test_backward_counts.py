"""Exact counts of the backward kernels: products beside the least possible, bytes, and memory that grows with
the rows only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_fattn
from bench.backends.samples import polynomial
from tests.conftest import needs_emulator
from tests.helpers.direct_launch import SLOTS

QUERY, KEY = "fattn_backward_query", "fattn_backward_key"
QUERY_SLOT, KEY_SLOT, VALUE_SLOT, GRAD_OUT_SLOT = (
    str(SLOTS[name]) for name in ("query", "key", "value", "grad_out")
)


def arguments(
    length: int,
    dim: int,
    dtype: torch.dtype,
    device: str,
    *,
    heads: int = 1,
    kv_heads: int = 1,
    out: bool = False,
) -> dict[str, Any]:
    def operand(count: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.ones(1, count, length, dim, dtype=of, device=device)

    return {
        "grad_out": operand(heads),
        "grad_lse": None,
        "query": operand(heads),
        "key": operand(kv_heads),
        "value": operand(kv_heads),
        "out": operand(heads, torch.float32) if out else None,
        "lse": torch.zeros(1, heads, length, device=device),
    }


def launches_of(
    operands: dict[str, Any], count_bytes: bool = True, **options: Any
) -> dict[str, dict[str, Any]]:
    import softmetal

    with softmetal.checks(count_bytes=count_bytes), softmetal.record() as launches:
        torch_fattn.prefill_backward(**operands, **options)
        torch.mps.synchronize()
    return {launch["kernel"]: launch for launch in launches}


def products_of(launch: dict[str, Any]) -> int:
    return int(launch["counters"]["products"])


@needs_emulator
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("out", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_products(dtype: torch.dtype, out: bool, causal: bool) -> None:
    """Eight rows and eight keys that see each other take D / 8 each: three for the gradient of the query, two
    more without a float32 result, and four for those of key and value. At L = 4096 the blocks on the
    diagonal, half of which is hidden, add 0.2 % to the least."""
    blocks = 256 // 8
    seen = blocks * (blocks + 1) // 2 if causal else blocks**2
    launches = launches_of(arguments(256, 64, dtype, "mps", out=out), is_causal=causal)
    assert products_of(launches[QUERY]) == seen * (3 if out else 5) * 8
    assert products_of(launches[KEY]) == seen * 4 * 8
    least = 4096 * 4097 / 2
    assert 64 * (512 * 513 / 2) / least < 1.08


@needs_emulator
@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_causal_products_of_a_long_sequence(dtype: torch.dtype, dim: int) -> None:
    """Of 4,096 rows, by those of shorter ones: a quadratic polynomial of the length. Needed are nine products
    of D / 8 for 64 visible pairs."""
    lengths = (128, 192, 256, 320)

    def done(length: int, causal: bool) -> int:
        operands = arguments(length, dim, dtype, "mps")
        launches = launches_of(operands, count_bytes=False, is_causal=causal)
        return sum(map(products_of, launches.values()))

    counted = [done(length, True) for length in lengths]
    assert polynomial(lengths[:3], counted[:3], lengths[3]) == counted[3]
    needed = 9 * dim / 8 * (4096 * 4097 / 2) / 64
    assert 1.0 <= polynomial(lengths[:3], counted[:3], 4096) / needed <= 1.08
    everything = done(128, False) * (4096 / 128) ** 2
    assert everything / needed > 1.9, "the control: to multiply all pairs would be too many"


@needs_emulator
def test_products_of_a_window() -> None:
    launches = launches_of(arguments(256, 64, torch.float16, "mps"), window_left=31, is_causal=True)
    seen = sum(min(block + 1, 5) for block in range(32))
    assert products_of(launches[QUERY]) == seen * 5 * 8
    assert products_of(launches[KEY]) == seen * 4 * 8


@needs_emulator
def test_operands_are_read_once_for_each_tile() -> None:
    """Eight heads over two: 32 rows share the keys of a step, 32 keys the rows of one."""
    launches = launches_of(arguments(128, 64, torch.float16, "mps", heads=8, kv_heads=2))
    head = 128 * 64 * 2  # bytes
    read = launches[QUERY]["buffers_read"]
    assert read[QUERY_SLOT] == read[GRAD_OUT_SLOT] == 8 * head
    assert read[KEY_SLOT] == read[VALUE_SLOT] == 2 * 4 * 8 * head  # in both walks, by four tiles of each head
    read = launches[KEY]["buffers_read"]
    assert read[KEY_SLOT] == read[VALUE_SLOT] == 2 * head
    assert read[QUERY_SLOT] == read[GRAD_OUT_SLOT] == 4 * 8 * head


@pytest.mark.parametrize("dim", [64, 256])
def test_scratch_and_kept_bytes_grow_with_the_length(dim: int) -> None:
    for length in (1024, 8192):
        operands = arguments(length, dim, torch.float16, "meta", heads=8, kv_heads=2)
        plan = torch_fattn.explain("prefill_backward", **operands, family=7, cores=8).data
        assert plan["scratch_bytes"] == 16 * 8 * length
        assert plan["kept_bytes"] == (8 + 2 + 2) * length * dim * 2 + 8 * length * 4
        assert [step["scratch_bytes"] for step in plan["passes"]] == [plan["scratch_bytes"]] * 2
