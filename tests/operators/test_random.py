"""600 random problems in which any two features meet, on "mps" and on "cpu": right by the accuracy rule, NaN
all around, the checks for races, bounds and uninitialised reads silent, inputs untouched, kernels launched.

The sweep runs 500 more for each seed: `pytest -m slow tests/operators/test_random.py --seeds 1-40`.
"""

from __future__ import annotations

import contextlib

import pytest
import torch

import torch_fattn
from tests.conftest import Checked, counted_launches
from tests.golden.calls import plan_of
from tests.helpers import drawing, features, problems
from tests.helpers.accuracy import assert_close, expected, packed
from tests.helpers.kv_formats import KV_FORMATS
from tests.helpers.problems import OPS, PACKED
from tests.helpers.tensors import same_bits
from tests.helpers.tuned import tiles_of_large_calls

PROBLEMS = drawing.draw(600)
ORDERS = ("forward", "reverse", "random")  # of the threads


def kernel_of(problem: problems.Problem, tensors: bool = False) -> str:
    """`tensors`: whether the plan is on tensor operations, as FATTN_TENSOR may request."""
    if tensors:
        return "fattn_prefill_tensor"
    if not problem.is_decode or problem.q_len > 16:
        wide = max(problem.head_dim, problem.value_dim) > 128
        return "fattn_prefill_wide" if wide else "fattn_prefill"
    copied = problem.layouts[1] == "every_other" and not problem.block_size
    return drawing.decode_kernel(problem, value_in_key=problem.value_in_key and not copied)


def run_and_check(problem: problems.Problem, seed: int, checked: Checked, device: str) -> None:
    case = problems.build(problem, seed)
    arguments, bases = case.arguments(device)
    order = ORDERS[problem.index % len(ORDERS)]
    # Most problems would not fill the GPU, and get smaller tiles than calls that do.
    enlarged = device == "mps" and problem.index % 2
    tiles = tiles_of_large_calls(problem) if enlarged else contextlib.nullcontext()
    with tiles, checked(order=order, seed=problem.index):
        with counted_launches() as launches:
            out, lse = getattr(torch.ops.fattn, problem.op)(**arguments)
        if problem.mask_map:
            without = torch.ops.fattn.prefill(**arguments | {"mask_map": None})
            assert all(map(torch.equal, (out, lse), without)), "a map changes the result"
    tensors = "used" in torch_fattn.explain(problem.op, **arguments).data.get("tensor", "")
    assert launches.pop(kernel_of(problem, tensors), 0) == (device == "mps")
    assert launches == {} or (problem.op not in PACKED and launches == {"fattn_merge": 1})
    assert_close(case, out.cpu(), lse.cpu())
    for name, base in bases.items():
        assert same_bits(base.cpu(), case.operands[name].base), f"{name} was written"


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_problem(problem: problems.Problem, device: str, checked: Checked) -> None:
    run_and_check(problem, 0, checked, device)


@pytest.mark.host_only
@pytest.mark.parametrize("problem", drawing.draw(60, seed=2), ids=str)
def test_all_sequences_at_once(problem: problems.Problem) -> None:
    """On CPU tensors, with the kernel registered for CUDA."""
    case = problems.build(problem, seed=2)
    arguments, bases = case.arguments("cpu")
    before = {name: base.clone() for name, base in bases.items()}
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    out, lse = getattr(torch.ops.fattn, problem.op).default.redispatch(cuda, **arguments)
    assert_close(case, out, lse)
    assert same_bits(bases, before), "an operand was written"


def test_sweep(sweep_seed: int, device: str, checked: Checked, pytestconfig: pytest.Config) -> None:
    failed = []
    for problem in drawing.draw(pytestconfig.getoption("--problems"), sweep_seed):
        try:
            run_and_check(problem, sweep_seed, checked, device)
        except (AssertionError, RuntimeError) as error:
            failed.append(f"seed {sweep_seed}, {problem}: {error}")
    assert not failed, "\n".join(failed)


def test_every_other_problem_has_the_tiles_of_large_calls() -> None:
    problem = problems.Problem(0, "prefill", torch.float16, 1, 1, 1, 40, 40, 64, 64)

    def rows() -> int:
        operands = [torch.empty(1, 1, 40, 64, dtype=torch.float16, device="mps")] * 3
        macros = torch_fattn.explain("prefill", *operands).passes[0]["macros"]
        return int(macros["FATTN_ROW_FRAGMENTS"]) * int(macros["FATTN_SIMDGROUPS"])

    of_its_own = rows()
    with tiles_of_large_calls(problem):
        assert rows() > of_its_own
    assert rows() == of_its_own


@pytest.mark.host_only
def test_any_two_features_meet() -> None:
    """All of those with few values; of the others, such as head dims with layouts, nearly all."""
    missing, possible = features.missing(PROBLEMS)
    met = f"{possible - len(missing):,} of {possible:,} pairs of features meet"
    print(met)
    values = {(op, axis): set() for op, a, b in missing for axis in (a[0], b[0])}  # type: ignore[var-annotated]
    for problem in PROBLEMS:
        for axis, value in features.features(problem).items():
            values.setdefault((problem.op, axis), set()).add(value)
    small = {
        pair for pair in missing if all(len(values[pair[0], axis]) <= features.FEW for axis, _ in pair[1:])
    }
    assert not small and len(missing) < 0.04 * possible, f"{met}; not: {sorted(map(str, small or missing))}"


@pytest.mark.host_only
def test_a_pair_that_does_not_meet_is_noticed() -> None:
    """The control: without the problems that have both a tree mask and a softcap."""
    apart = [p for p in PROBLEMS if not (p.tree == "each" and p.softcap == 30.0)]
    missing, _ = features.missing(apart)
    assert ("decode", ("softcap", 30.0), ("tree", "each")) in missing


def test_the_problems_cover_every_axis() -> None:
    seen = {(p.op, p.dtype) for p in PROBLEMS}
    assert len(seen) == 15
    dims = {(p.head_dim, p.value_dim, p.value_in_key) for p in PROBLEMS}
    assert dims == {(*pair, False) for pair in problems.HEAD_DIMS} | set(problems.WIDE_HEAD_DIMS)
    assert {p.q_heads // p.kv_heads == 1 for p in PROBLEMS} == {True, False}
    assert any(p.kv_heads == 1 and p.q_heads > 1 for p in PROBLEMS)
    for op in ("prefill", "varlen_prefill"):
        assert {p.causality for p in PROBLEMS if p.op == op} == set(problems.CAUSALITIES)
        assert {features.features(p)["q_offset"] for p in PROBLEMS if p.op == op} == {False, True, "moved"}
    for operand in range(3):
        assert {p.layouts[operand] for p in PROBLEMS if not p.block_size} == set(problems.LAYOUTS)
    for op in OPS:
        of_op = [p for p in PROBLEMS if p.op == op]
        if op == "prefill":
            forms = {(p.mask_pattern, p.mask_map) for p in of_op if p.mask is not None}
            assert forms == {
                (pattern, given) for pattern in problems.MASK_PATTERNS for given in (False, True)
            }
        assert {p.mask for p in of_op} == ({None} if op in PACKED else set(problems.MASKS))
        for name, option in problems.OPTIONS.items():
            values = {*option.values} if op in option.ops else {option.values[0]}
            assert {getattr(p, name) for p in of_op} == values, name
        assert {(p.sinks, p.alibi_slopes) for p in of_op} == {(a, b) for a in (0, 1) for b in (0, 1)}
    assert len({p.mask_broadcast for p in PROBLEMS if p.mask is not None}) == 16
    for op in ("paged_decode", "paged_prefill"):
        assert {p.block_size for p in PROBLEMS if p.op == op} == set(problems.BLOCK_SIZES)
    for op in PACKED:
        packed = [p for p in PROBLEMS if p.op == op]
        assert {p.is_causal for p in packed} == {True, False} == {p.spare_rows > 0 for p in packed}
        rows = {n for p in packed for n in p.rows}
        assert {0, 1} < rows and any(1 < n <= 16 for n in rows) and max(rows) > 100
    for op in ("decode", "paged_decode"):
        assert {p.kv_format for p in PROBLEMS if p.op == op} == set(KV_FORMATS)
    for op in ("decode", "paged_decode", *PACKED):
        lengths = [(n, p.kv_len) for p in PROBLEMS if p.op == op and p.seq_lens for n in p.seq_lens]
        assert any(n == 0 for n, _ in lengths) and any(n == capacity for n, capacity in lengths)


@pytest.mark.host_only
def test_every_kernel_of_decode_has_problems() -> None:
    """decode_vector: each dtype and number of rows, dense and paged."""
    kernels = [kernel_of(p) for p in PROBLEMS if p.is_decode]
    assert min(map(kernels.count, ("fattn_decode", "fattn_decode_wide", "fattn_decode_vector"))) >= 15
    vector = [p for p in PROBLEMS if p.is_decode and kernel_of(p) == "fattn_decode_vector"]
    assert {(p.dtype, p.q_heads // p.kv_heads * p.q_len) for p in vector} == {
        (dtype, rows) for dtype in problems.DTYPES for rows in (1, 2)
    }
    assert {p.op for p in vector} == {"decode", "paged_decode"} and any(p.head_dim > 128 for p in vector)


@pytest.mark.host_only
def test_some_prefills_are_cut_into_parts() -> None:
    """The planner cuts calls for the smallest GPU, with every option and head size."""
    cut = [p for p in PROBLEMS if p.op == "prefill" and plan_of(p)["passes"][-1]["kernel"] == "fattn_merge"]
    assert len(cut) >= 30
    assert {p.dtype for p in cut} == set(problems.DTYPES) and {p.sinks for p in cut} == {False, True}
    assert {max(p.head_dim, p.value_dim) > 128 for p in cut} == {False, True}
    assert {p.causality for p in cut} >= {"none", "bottom_right", "offset"}
    assert any(p.window_left >= 0 and p.sink_tokens for p in cut) and any(p.mask_map for p in cut)
    grouped = [plan_of(p)["passes"][0]["constants"]["grouped"] for p in cut]
    assert {True, False} == set(grouped)


def test_the_rule_can_fail() -> None:
    """The control: results that are wrong by less than a per cent are refused."""
    plain = (p for p in PROBLEMS if p.op == "prefill" and p.mask is p.block_mask is None and p.q_len > 8)
    problem = next(p for p in plain if p.causality == "bottom_right")
    case = problems.build(problem)
    out, lse = expected(case)
    out, lse = out.to(problem.dtype), lse.float()
    assert_close(case, out, lse)
    with pytest.raises(AssertionError, match="error"):
        assert_close(case, out * 1.03, lse)
    with pytest.raises(AssertionError, match="lse"):
        assert_close(case, out, lse + 0.01)


def test_the_rule_of_packed_calls_can_fail() -> None:
    """The faults: rows of two sequences exchanged, and a value in a row of no sequence."""
    problem = next(
        p for p in PROBLEMS if p.spare_rows and sum(n > 0 for n in p.rows) > 1 and p.window_left < 0
    )
    case = problems.build(problem)
    out, lse = packed(case, *expected(case))
    out, lse = out.to(problem.dtype), lse.float()
    assert_close(case, out, lse)
    owned = sum(problem.rows)
    with pytest.raises(AssertionError, match="error"):
        assert_close(case, torch.cat([out[:owned].roll(1, dims=0), out[owned:]]), lse)
    out[-1] = 1e-3
    with pytest.raises(AssertionError, match="no sequence"):
        assert_close(case, out, lse)
