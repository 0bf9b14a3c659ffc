"""Caches of int8, fp8_e4m3 and int4: every code, values in the columns of their keys, bad scales. Random
problems with them are in test_random.py, and the error bounds in test_kv_formats.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_fattn
from tests.conftest import Checked, needs_emulator
from tests.helpers import problems, small_problems
from tests.helpers.accuracy import assert_close
from tests.helpers.kv_formats import FORMS, GROUPED, QUANTISED, name_of
from tests.helpers.problems import Problem
from tests.helpers.small_problems import check, row_of, run
from torch_fattn.reference import dequantise, quantise

fattn = torch.ops.fattn
f16, f32 = torch.float16, torch.float32
NAN, INF = torch.nan, torch.inf


def storage(codes: Tensor, kv_format: str) -> Tensor:
    """Codes of one element each as a cache holds them."""
    if kv_format == "int4":
        return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return codes.to(torch.uint8).view(torch.int8 if kv_format == "int8" else torch.uint8)


def scales_of(shape: tuple[int, ...], dim: int, kv_format: str, scale: float, minimum: float = 0.0) -> Tensor:
    if kv_format == "int4":
        return torch.tensor([scale, minimum], dtype=f16).expand(*shape, dim // 32, 2).contiguous()
    return torch.full(shape, scale)


def on(device: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: a.to(device) if isinstance(a, Tensor) else a for name, a in arguments.items()}


def small(op: str, kv_format: str, dtype: torch.dtype = f16, **fields: Any) -> Problem:
    rows: dict[str, Any] = {"q_lens": (2, 1)} if op == "paged_prefill" else {"q_len": 2}
    return small_problems.problem(op, dtype, 1, kv_format=kv_format, **(rows | fields))


def dtype_of(kv_format: str) -> torch.dtype:
    """Each format has another dtype: kernels over a format are compiled for few dtypes."""
    return problems.DTYPES[QUANTISED.index(name_of(kv_format)) % 3]


def decode(arguments: dict[str, Any], device: str = "mps") -> tuple[Tensor, Tensor]:
    out, lse = fattn.decode(**on(device, arguments))
    return out.cpu(), lse.cpu()


@pytest.mark.parametrize("kv_format", QUANTISED)
def test_every_code_of_a_value(kv_format: str, device: str) -> None:
    """One key, so its weight is 1: the result is the value, exactly, in the right column."""
    dtype = dtype_of(kv_format)
    count = 16 if kv_format == "int4" else 256
    codes = torch.randperm(256, generator=torch.Generator().manual_seed(1)).view(1, 2, 1, 128) % count
    stored = storage(codes, kv_format)
    scales = scales_of((1, 2, 1), 128, kv_format, 0.5, -3.0)
    arguments = {
        "query": torch.zeros(1, 2, 1, 128, dtype=dtype),
        "key": torch.zeros_like(stored),
        "value": stored,
        "key_scales": scales,
        "value_scales": scales,
        "kv_format": kv_format,
    }
    out, _ = decode(arguments, device)
    exact = dequantise(stored, scales, kv_format)
    assert exact.isnan().any() == kv_format.startswith("fp8")
    assert torch.equal(out.double().nan_to_num(777), exact.nan_to_num(777))


@pytest.mark.parametrize("dtype", problems.DTYPES, ids=problems.SHORT.get)
@pytest.mark.parametrize(
    ("kv_format", "scale", "minimum"),
    [
        *((kv_format, 0.25, -1.0) for kv_format in QUANTISED),
        ("int4", 0.2346, -1003.0),  # which float16 would round
        ("int4", 8744.0, -65504.0),  # up to 65656, beyond float16
    ],
)
def test_every_code_of_a_key(
    kv_format: str, scale: float, minimum: float, dtype: torch.dtype, device: str
) -> None:
    """Head h of 16 times 8 has a one in column h alone, and lse is the only score."""
    count = 16 if kv_format == "int4" else 256
    codes = torch.randperm(256, generator=torch.Generator().manual_seed(2)).view(2, 1, 1, 128) % count
    scales = scales_of((2, 1, 1), 128, kv_format, scale, minimum)
    special = ~dequantise(storage(codes, kv_format), scales, kv_format).isfinite()
    stored = storage(codes.masked_fill(special, 0), kv_format)  # a NaN would be in every sum
    of_each = {"key": stored, "value": torch.zeros_like(stored), "key_scales": scales, "value_scales": scales}
    arguments = {name: tensor.repeat_interleave(16, dim=0) for name, tensor in of_each.items()} | {
        "query": torch.eye(128, dtype=dtype).view(16, 8, 1, 128).repeat(2, 1, 1, 1),
        "kv_format": kv_format,
        "scale": 1.0,
    }
    _, lse = decode(arguments, device)
    exact = dequantise(stored, scales, kv_format).view(2, 128, 1)
    assert (lse.view(2, 128, 1).double() - exact).abs().max() <= 1e-6 * exact.abs().max()


@pytest.mark.parametrize("q_heads", [2, 4])
@pytest.mark.parametrize("op", problems.DECODES)
@pytest.mark.parametrize("kv_format", FORMS)
def test_keys_by_lanes(kv_format: str, op: str, q_heads: int, checked: Checked) -> None:
    """decode_vector, whose one or two rows few random problems have: lanes with a chunk past the end of a
    key, and of a value."""
    head_dim, value_dim = (96, 32) if kv_format in GROUPED else (80, 72)
    sizes = {"q_len": 1, "q_heads": q_heads, "head_dim": head_dim, "value_dim": value_dim}
    problem = small(
        op, kv_format, dtype_of(kv_format), **sizes, seq_lens=(70, 33), window_left=50, sinks=True
    )
    with checked():
        check(problem, kernels=("fattn_decode_vector",))


@needs_emulator
@pytest.mark.parametrize("kv_format", ["int8", "int4"])
def test_columns_with_other_scales(kv_format: str) -> None:
    """Elements of int8 are read once whatever their scales. The groups of int4 must be the key's own, or the
    columns are read again."""
    import softmetal

    case = problems.build(
        Problem(6, "decode", f32, 1, 4, 1, 1, 40, 160, 128, value_in_key=True, kv_format=kv_format)
    )
    arguments, _ = case.arguments("mps")
    loaded = []
    for scales in (arguments["value_scales"], arguments["value_scales"] * 2):
        changed = arguments | {"value_scales": scales}
        with softmetal.checks(count_bytes=True), softmetal.record() as launches:
            out, lse = fattn.decode(**changed)
        # Both slots hold one buffer, whose bytes are counted for the first of them.
        loaded.append(launches[-1]["buffers_read"]["1"])
        exact, exact_lse = torch_fattn.reference.decode(**on("cpu", changed))
        assert torch.allclose(out.cpu().double(), exact, atol=1e-5)
        assert torch.allclose(lse.cpu().double(), exact_lse, atol=1e-5)
    assert (loaded[1] > loaded[0]) == (kv_format == "int4")


@pytest.mark.parametrize("op", ["paged_decode", "paged_prefill"])
@pytest.mark.parametrize("kv_format", QUANTISED)
def test_the_reference_reads_pools(kv_format: str, op: str) -> None:
    case = problems.build(small(op, kv_format, f32, seq_lens=(48, 20), head_dim=32))
    arguments, _ = case.arguments("cpu")
    out, lse = getattr(torch_fattn.reference, op)(**arguments)
    assert_close(case, out.float().contiguous(), lse.float().contiguous())


# ---- scales that are no ordinary numbers


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("name", ["key_scales", "value_scales"])
@pytest.mark.parametrize("kv_format", QUANTISED)
@pytest.mark.parametrize(("op", "dim"), [("decode", 64), ("decode", 160), ("paged_prefill", 64)])
def test_a_bad_scale_reaches_the_rows_that_see_it(
    op: str, dim: int, kv_format: str, name: str, bad: float, device: str
) -> None:
    """The scale of the newest token but one: of four rows, the last two see it."""
    rows: dict[str, Any] = {"q_lens": (4,)} if op == "paged_prefill" else {"q_len": 4}
    case = problems.build(small(op, kv_format, seq_lens=(40,), head_dim=dim, **rows))
    clean, _ = run(case, device)
    row_of(case, name, 38)[...] = bad
    out, _ = run(case, device)
    if op == "paged_prefill":
        clean, out = (result.transpose(0, 1)[None] for result in (clean, out))
    assert not out[:, :, 2:].isfinite().any()
    if name == "key_scales":
        assert torch.equal(out[:, :, :2], clean[:, :, :2])


# ---- the example


def test_the_example_runs() -> None:
    """Caches have the sizes of their formats, and none a large error."""
    script = Path(__file__).resolve().parents[2] / "examples" / "quantised.py"
    command = [sys.executable, str(script), "--keys", "300"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in text.splitlines()[1:]]
    sizes, errors = ({row[0]: float(row[i].replace(",", "")) for row in rows} for i in (1, 2))
    assert [*sizes] == ["float16", *QUANTISED], "examples/quantised.py has every format, in their order"
    for name in QUANTISED:
        quantised = quantise(torch.zeros(2, 2, 300, 64), name)  # key and value
        assert sizes[name] == sum(part.nbytes for part in quantised if part is not None) < sizes["float16"]
        assert errors["float16"] < errors[name] < 1.0
    assert errors["int8"] < errors["int4"]
