"""Tuned rows in the planner: the GPU they apply to, right results with every legal row, and results that do
not depend on sizes tuned by length."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import torch_fattn
from tests.conftest import Checked, counted_launches
from tests.helpers import drawing, problems
from tests.helpers.accuracy import assert_close
from tests.helpers.problems import Problem
from tests.helpers.tensors import same_bits
from tests.helpers.tuned import PROVENANCE, Install, install, plan_of, row, this_chip
from torch_fattn.tuning import candidates as tuning
from torch_fattn.tuning import tuned_file
from torch_fattn.tuning.tuned_file import TunedRow, fault_of

__all__ = ["install"]

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in problems.DTYPES}
DRAWN = [p for p in drawing.draw(400, seed=31) if p.kv_format == "float" and not p.value_in_key]


def is_tuned(plan: torch_fattn.Explanation) -> bool:
    return bool(plan.data["tuning"] == PROVENANCE)


def test_rows_apply_to_one_gpu(install: Install) -> None:
    short, long = (row("prefill", simdgroups=n, max_length=m) for n, m in ((2, 512), (8, None)))
    wide = replace(row("prefill_wide"), min_dim=200, max_dim=300)
    install(short, long, replace(row("decode", simdgroups=8), max_dim=64), wide)
    for rows, simdgroups in ((40, "2"), (512, "2"), (513, "8")):
        plan = plan_of("prefill", rows, rows, 64)
        assert is_tuned(plan) and plan.passes[0]["macros"]["FATTN_SIMDGROUPS"] == simdgroups
    for dim, tuned in ((8, True), (128, True), (136, False), (200, True), (296, True), (304, False)):
        assert is_tuned(plan_of("prefill", 40, 40, dim)) == tuned
    assert is_tuned(plan_of("decode", 1, 4000, 64)) and not is_tuned(plan_of("decode", 1, 4000, 256))
    assert not is_tuned(plan_of("decode", 1, 4000, 64, torch.bfloat16))
    chip = this_chip()
    named = {"device_name": "another GPU", "family": chip.family, "cores": chip.cores}
    for other in ({"family": 8}, {"cores": 8}, named):
        assert not is_tuned(plan_of("prefill", 40, 40, 64, **other)), "plans for another GPU"
    install()
    assert not is_tuned(plan_of("prefill", 40, 40, 64))


def test_length_of_packed_rows_counts_the_heads_that_share_keys(install: Install) -> None:
    install(row("prefill", simdgroups=2, max_length=512), row("prefill", simdgroups=8))
    query = torch.empty(600, 8, 64, dtype=torch.float16, device="mps")
    key, starts = query[:, :2], torch.empty(3, dtype=torch.int32, device="mps")
    for longest, simdgroups in ((128, "2"), (129, "8"), (2**63 - 1, "8")):
        plan = torch_fattn.explain("varlen_prefill", query, key, key, starts, starts, longest, longest)
        assert is_tuned(plan) and plan.passes[0]["macros"]["FATTN_SIMDGROUPS"] == simdgroups


def test_a_quantised_cache_keeps_the_built_in_table(install: Install) -> None:
    install(row("decode"))
    pool = torch.empty(1, 2, 600, 64, dtype=torch.int8, device="mps")
    scales = torch.empty(1, 2, 600, device="mps")
    query = torch.empty(1, 6, 1, 64, dtype=torch.float16, device="mps")
    quantised = torch_fattn.explain("decode", query, pool, pool, key_scales=scales, value_scales=scales)
    assert not is_tuned(quantised)
    pool = pool.half()
    assert is_tuned(torch_fattn.explain("decode", query, pool, torch.empty_like(pool)))


def test_decode_sizes_reach_the_plan(install: Install) -> None:
    def span(**sizes: int) -> tuple[int, int, int]:
        install(row("decode", **sizes))
        found = plan_of("decode", 1, 65536, 64).passes[0]["params"]["span"]
        return found["chunk_unit"], found["min_chunk"], found["max_chunks"]

    unit, least, most = span()
    assert (unit, least) == (64, 128)
    assert span(min_chunk=256) == (64, 256, most)
    assert span(tile_keys=32) == (128, 128, most)
    assert span(threadgroups_per_core=6) == (64, 128, 2 * most)


def legal_rows(kernel: str, dtype: str) -> list[TunedRow]:
    """The legal rows of every subject of the kernel."""
    chosen = [s for s in tuning.subjects() if s.kernel == kernel and s.dtype == dtype]
    return [subject.row(sizes) for subject in chosen for sizes in tuning.candidates(subject)]


@pytest.mark.host_only
@pytest.mark.parametrize("kernel", tuning.SIZES)
def test_some_candidates_exist(kernel: str) -> None:
    for dtype in DTYPES:
        rows = legal_rows(kernel, dtype)
        assert len(rows) > 8 and not any(fault_of([one]) for one in rows)
        assert len({str(one) for one in rows}) == len(rows)


def problem_for(one: TunedRow, chooser: random.Random) -> Problem:
    """A drawn problem with large heads of the row."""
    op = one.kernel.split("_")[0]

    def fits(p: Problem) -> bool:
        few_rows = p.q_heads // p.kv_heads * p.q_len <= 2
        fitting_rows = op == "prefill" or few_rows == (one.kernel == "decode_vector") or one.max_dim > 256
        is_op = p.op == op if op == "prefill" else p.is_decode and p.q_len <= 16
        return is_op and fitting_rows and p.batch * p.q_heads <= 8

    fitting = list(filter(fits, DRAWN))
    dim = one.max_dim if one.max_dim <= 256 else 264
    drawn = chooser.choice(fitting)
    return replace(drawn, dtype=DTYPES[one.dtype], head_dim=dim, value_dim=dim, q_len=min(drawn.q_len, 70))


def check(one: TunedRow, problem: Problem, install: Install, checked: Checked) -> None:
    case = problems.build(problem)
    arguments, _ = case.arguments("mps")
    install(one)
    assert is_tuned(torch_fattn.explain(problem.op, **arguments))
    with checked(), counted_launches() as launches:
        out, lse = getattr(torch.ops.fattn, problem.op)(**arguments)
        assert_close(case, out.cpu(), lse.cpu())
    assert launches[f"fattn_{one.kernel}"] >= 1


SAMPLE = [*zip(tuning.SIZES, ("float16", "bfloat16", "float32", "float16", "bfloat16"), strict=True)]


@pytest.mark.parametrize(("kernel", "dtype"), SAMPLE)
def test_a_candidate_is_right(kernel: str, dtype: str, install: Install, checked: Checked) -> None:
    chooser = random.Random(f"{kernel} {dtype}")
    one = chooser.choice(legal_rows(kernel, dtype))
    check(one, problem_for(one, chooser), install, checked)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", tuning.SIZES)
def test_every_candidate_is_right(kernel: str, dtype: str, install: Install, checked: Checked) -> None:
    chooser = random.Random(f"all {kernel} {dtype}")
    for one in legal_rows(kernel, dtype):
        check(one, problem_for(one, chooser), install, checked)


PACKED = [p for p in DRAWN if p.op in ("paged_prefill", "varlen_prefill")]


def results(problem: Problem, one: TunedRow, install: Install) -> tuple[torch.Tensor, torch.Tensor]:
    arguments, _ = problems.build(problem).arguments("mps")
    install(one)
    assert is_tuned(torch_fattn.explain(problem.op, **arguments))
    out, lse = getattr(torch.ops.fattn, problem.op)(**arguments)
    return out.cpu(), lse.cpu()


def sizes_of_one_order(kernel: str, dim: int) -> list[dict[str, Any]]:
    rows = [one.sizes for one in legal_rows(kernel, "float16") if one.min_dim <= dim <= one.max_dim]
    orders = [tuning.order_of(kernel, tuple(sizes.items())) for sizes in rows]
    most = max(orders, key=orders.count)
    return [sizes for sizes, order in zip(rows, orders, strict=True) if order == most]


@pytest.mark.parametrize(("kernel", "dim"), [("prefill", 64), ("prefill_wide", 256)])
def test_results_do_not_depend_on_sizes_tuned_by_length(kernel: str, dim: int, install: Install) -> None:
    """Were it not so, a packed sequence's result would depend on the longest of the others."""
    chooser = random.Random(5)
    fitting = [replace(p, head_dim=dim, value_dim=dim, dtype=torch.float16) for p in PACKED]
    for problem in chooser.sample(fitting, 3):
        first, *others = chooser.sample(sizes_of_one_order(kernel, dim), 3)
        expected = results(problem, row(kernel, **first), install)
        for sizes in others:
            assert same_bits(expected, results(problem, row(kernel, **sizes), install)), (first, sizes)


def test_bits_do_go_by_the_keys_of_a_step(install: Install) -> None:
    """The control."""
    problem = Problem(0, "prefill", torch.float16, 1, 4, 2, 90, 200, 64, 64)
    two = [results(problem, row("prefill", tile_keys=keys), install) for keys in (16, 32)]
    assert not same_bits(*two)


@pytest.mark.host_only
@pytest.mark.parametrize("field", ["tile_key", "dim"])
def test_a_field_that_a_row_has_not(field: str) -> None:
    """Fields cross to the planner by name, and a wrong one is not ignored."""
    (named,) = tuned_file.named([row("decode")])
    assert torch.ops.fattn._tuning_fault([named], []) == "", "the control"
    with pytest.raises(ValueError, match=f"a tuned row has no field '{field}'"):
        torch.ops.fattn._tuning_fault([named | {field: "16"}], [])
