"""`token_major_out`: the same bits, in memory by batch, row and head. Operands that lie so cost the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_fattn
from tests.conftest import Checked, counted_launches, needs_emulator
from tests.helpers import problems
from tests.helpers.accuracy import assert_close
from tests.helpers.problems import Problem
from torch_fattn import reference

f32, f16, bf16 = problems.DTYPES
PREFILL, DECODE = "prefill", "decode"
# With dtypes and head sizes that test_random.py compiles.
PROBLEMS = {
    "prefill": Problem(0, PREFILL, f16, 2, 6, 2, 43, 50, 80, 40, causality="bottom_right", softcap=30.0),
    "prefill_wide": Problem(1, PREFILL, bf16, 2, 4, 4, 21, 37, 192, 128, mask=torch.bool),
    "decode": Problem(2, DECODE, f32, 2, 6, 2, 3, 70, 80, 40, seq_lens=(70, 9), sinks=True),
    "decode_shared_rows": Problem(3, DECODE, f32, 2, 12, 2, 3, 70, 64, 64, seq_lens=(70, 0)),
    "decode_merge": Problem(4, DECODE, bf16, 2, 6, 2, 5, 1100, 128, 64, seq_lens=(900, 44)),
    "decode_vector": Problem(8, DECODE, f16, 2, 2, 2, 2, 1100, 80, 80, seq_lens=(900, 44), sinks=True),
    "decode_one_launch": Problem(9, DECODE, f16, 2, 4, 2, 3, 500, 40, 40, seq_lens=(500, 44), sinks=True),
    "decode_vector_one_launch": Problem(10, DECODE, bf16, 2, 2, 2, 2, 500, 64, 128, seq_lens=(500, 44)),
    "decode_wide": Problem(5, DECODE, bf16, 1, 8, 2, 2, 60, 24, 328, seq_lens=(60,)),
    "decode_wide_merge": Problem(6, DECODE, f16, 2, 3, 1, 4, 700, 24, 328, seq_lens=(700, 1)),
    "paged_decode": Problem(
        *(7, "paged_decode", f32, 2, 6, 2, 3, 96, 80, 40), seq_lens=(96, 30), block_size=16
    ),
}
KERNELS = {
    "decode_vector": {"fattn_decode_vector", "fattn_merge"},
    "decode_vector_one_launch": {"fattn_decode_vector"},
    "prefill": {"fattn_prefill"},
    "prefill_wide": {"fattn_prefill_wide"},
    "decode_wide": {"fattn_decode_wide"},
    "decode_merge": {"fattn_decode", "fattn_merge"},
    "decode_wide_merge": {"fattn_decode_wide", "fattn_merge"},
}
SIZES: dict[str, Any] = {"prefill": {"q_len": 5}, "decode": {"q_len": 3}}


def run(problem: Problem, device: str) -> tuple[Tensor, Tensor]:
    arguments, _ = problems.build(problem).arguments(device)
    out, lse = getattr(torch_fattn, problem.op)(**arguments, return_lse=True)
    return out, lse


def in_both(problem: Problem, device: str) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    return run(problem, device), run(replace(problem, token_major_out=True), device)


@pytest.mark.parametrize("device", ["mps", "cpu"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_same_bits(name: str, device: str, checked: Checked) -> None:
    problem = PROBLEMS[name]
    with checked(order="random", seed=problem.index), counted_launches() as launches:
        (out, lse), (token_major, same_lse) = in_both(problem, device)
    kernels = KERNELS.get(name, {"fattn_decode"}) if device == "mps" else set()
    assert launches == dict.fromkeys(kernels, 2)
    assert out.shape == token_major.shape and out.is_contiguous() and lse.is_contiguous()
    assert token_major.transpose(1, 2).is_contiguous() and not token_major.is_contiguous()
    assert torch.equal(out.cpu(), token_major.cpu()) and torch.equal(lse.cpu(), same_lse.cpu())
    assert_close(problems.build(problem), out.cpu(), lse.cpu())


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_reference_has_it_too(name: str) -> None:
    problem = PROBLEMS[name]
    arguments, _ = problems.build(problem).arguments("cpu")
    of_op = getattr(reference, problem.op)
    (out, lse), (token_major, same_lse) = (of_op(**arguments, token_major_out=yes) for yes in (False, True))
    assert torch.equal(out.nan_to_num(), token_major.nan_to_num()) and torch.equal(lse, same_lse)
    assert token_major.transpose(1, 2).is_contiguous() and out.is_contiguous()


@pytest.mark.parametrize("device", ["mps", "cpu", "meta"])
@pytest.mark.parametrize(
    "sizes",
    [(0, 4, 3, 9), (2, 0, 3, 9), (2, 4, 0, 9), (2, 4, 3, 0), (1, 1, 1, 9), (2, 4, 1, 9), (2, 1, 3, 9)],
    ids=str,
)
@pytest.mark.parametrize("op", [PREFILL, DECODE])
def test_strides(op: str, sizes: tuple[int, int, int, int], device: str) -> None:
    """The strides of the transposed view of a fresh tensor, including sizes of 0 and 1."""
    batch, heads, q_len, kv_len = sizes
    query = torch.randn(batch, heads, q_len, 16, device=device)
    key, value = (torch.randn(batch, heads, kv_len, dim, device=device) for dim in (16, 24))
    as_view = torch.empty(batch, q_len, heads, 24).transpose(1, 2)
    out, lse = getattr(torch.ops.fattn, op)(query, key, value, token_major_out=True)
    assert out.shape == as_view.shape and out.stride() == as_view.stride()
    plain, same_lse = getattr(torch.ops.fattn, op)(query, key, value)
    assert plain.stride() == torch.empty(batch, heads, q_len, 24).stride()
    if device != "meta":
        assert torch.equal(out.cpu(), plain.cpu()) and torch.equal(lse.cpu(), same_lse.cpu())


@pytest.mark.host_only
@pytest.mark.parametrize(("heads", "q_len", "same"), [(8, 1, True), (1, 4, True), (8, 4, False)])
@pytest.mark.parametrize("kv_len", [100, 4096])
def test_one_row_takes_the_same_kernels(heads: int, q_len: int, same: bool, kv_len: int) -> None:
    """One row, or one head, is the same memory in both layouts."""
    query = torch.empty(2, heads, q_len, 64, device="meta")
    key = torch.empty(2, heads, kv_len, 64, device="meta")
    plain, token_major = (
        torch_fattn.explain("decode", query, key, key, token_major_out=yes).passes for yes in (False, True)
    )
    assert (plain == token_major) == same
    if not same:  # the pass that writes the result is another
        assert [launch["constants"]["token_major_out"] for launch in token_major] == (
            [True] if kv_len == 100 else [False, True]
        )


@pytest.mark.host_only
def test_prefill_needs_no_other_kernels_for_it() -> None:
    """The strides are parameters."""
    query = torch.empty(2, 8, 100, 64, device="meta")
    plain, token_major = (
        torch_fattn.explain("prefill", query, query, query, token_major_out=yes).passes[0]
        for yes in (False, True)
    )
    assert plain.pop("params")["out"] == {"batch": 51200, "head": 6400, "row": 64}
    assert token_major.pop("params")["out"] == {"batch": 51200, "head": 64, "row": 512}
    assert plain.pop("params_bytes") != token_major.pop("params_bytes")
    assert plain == token_major


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", ["prefill", "decode_merge"])
def test_compile(name: str, dynamic: bool, checked: Checked) -> None:
    """Later operations may rely on the layout: a view is traced and is one."""
    problem = replace(PROBLEMS[name], token_major_out=True)
    arguments, _ = problems.build(problem).arguments("mps")

    def flat_heads(**arguments: Any) -> Tensor:
        out, _ = getattr(torch.ops.fattn, problem.op)(**arguments)
        return out.transpose(1, 2).view(problem.batch, problem.q_len, -1)

    torch.compiler.reset()
    compiled = torch.compile(flat_heads, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    with checked():
        assert torch.equal(compiled(**arguments).cpu(), flat_heads(**arguments).cpu())
    with pytest.raises(RuntimeError, match="view"):  # the control
        torch.ops.fattn.prefill(*(torch.zeros(2, 4, 5, 16),) * 3)[0].transpose(1, 2).view(2, 5, -1)


def test_requires_grad() -> None:
    query = torch.randn(1, 2, 5, 16, device="mps", requires_grad=True)
    out = torch_fattn.prefill(query, query, query, token_major_out=True)
    assert out.requires_grad and not out._is_view()
    with pytest.raises(RuntimeError, match="no backward"):
        out.transpose(1, 2).flatten(2).sum().backward()


def operands(layout: str, head_dim: int) -> list[Tensor]:
    """Query, key and value `[2, 4, 70, D]`: by batch, head and row in memory; by batch, row and head; or the
    latter with rows that no vector fits."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for values in torch.randn(3, 2, 4, 70, head_dim, generator=generator).half():
        tensor = values.to("mps")
        if layout != "BHLD":
            row = head_dim + (layout == "odd")
            rows = torch.zeros(2, 70, 4, row, dtype=torch.float16, device="mps")[..., :head_dim]
            tensor = rows.copy_(tensor.transpose(1, 2)).transpose(1, 2)
        found.append(tensor)
    return found


@needs_emulator
@pytest.mark.parametrize("head_dim", [64, 136])
def test_operands_in_either_layout_cost_the_same(head_dim: int) -> None:
    """The same kernels with the same loads, counted; only strides differ."""
    import softmetal

    plans, counts, results = [], [], []
    for layout in ("BHLD", "BLHD", "odd"):
        tensors = operands(layout, head_dim)
        (launch,) = torch_fattn.explain("prefill", *tensors, is_causal=True).passes
        plans.append({name: fact for name, fact in launch.items() if not name.startswith("params")})
        with softmetal.checks(count_bytes=True), softmetal.record() as launches:
            results.append(torch_fattn.prefill(*tensors, is_causal=True).cpu())
        ours = launches[-1]
        assert ours["kernel"] == launch["kernel"]
        counts.append((ours["buffers_read"], ours["buffers_written"], ours["counters"]))
    assert plans[0] == plans[1] and plans[0]["constants"]["vector_loads"]
    assert counts[0] == counts[1]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert not plans[2]["constants"]["vector_loads"], "the control: rows of 65 elements"
    assert counts[2][2] != counts[0][2]
