"""The operators on logits: every layout and kind of row, exactness of the cap, bytes read, behaviour in
torch, and limits."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

import torch_fattn
from tests.conftest import Checked, counted_launches, needs_emulator
from tests.helpers import direct_launch, logits_problems
from tests.helpers.logits_problems import DTYPES, ROW_OPS, LogitsProblem, keywords
from tests.helpers.wrong_calls import refusal
from tests.mutation.trial import of_logits
from torch_fattn import reference
from torch_fattn.operators import LOGITS_OPERATORS

fattn = torch.ops.fattn
f32, f16, bf16 = DTYPES
OPS = LOGITS_OPERATORS
LOGITS = str(direct_launch.SLOTS["logits"])
ORDERS = ("forward", "reverse", "random")  # of the threads


def call(op: str, x: Tensor, cap: float = 5.0) -> Tensor:
    result: Tensor = getattr(fattn, op)(**keywords(op, x, cap))
    return result


# ---- results


@pytest.mark.parametrize("problem", logits_problems.draw(200), ids=str)
def test_problem(problem: LogitsProblem, device: str, checked: Checked) -> None:
    case = logits_problems.build(problem)
    with checked(order=ORDERS[problem.index % 3]), counted_launches() as launches:
        result = case.run(device)
    assert launches == ({f"fattn_{problem.op}": 1} if device == "mps" else {})
    case.assert_close(result)


@pytest.mark.parametrize("cap", [1e-30, 0.5, 50.0, 1e30])
def test_the_cap_is_exact_near_0_and_at_the_ends(cap: float, device: str) -> None:
    near = torch.logspace(-7, -2, 200) * cap
    result = torch_fattn.softcap(torch.cat([near, -near]).to(device), cap).cpu().double()
    exact = reference.softcap(torch.cat([near, -near]), cap)
    assert ((result - exact).abs() <= 1e-6 * exact.abs()).all(), "relative to the result"
    far = torch.tensor([20.0, 45.0, 100.0, 1e4, 1e8]) * min(cap, 1e30)
    ends = torch_fattn.softcap(torch.cat([far, -far]).to(device), cap).cpu()
    bound = torch.full_like(far, cap)
    assert torch.allclose(ends, torch.cat([bound, -bound]), rtol=2e-7, atol=0)


def test_a_number(device: str) -> None:
    for entry, weight in ((0.3, 1.0), (-torch.inf, 0.0), (torch.nan, torch.nan)):
        x = torch.tensor(entry, device=device)
        assert torch.equal(torch_fattn.softmax(x).cpu().nan_to_num(7), torch.tensor(weight).nan_to_num(7))
    x = torch_fattn.softcap(torch.tensor(9.0, device=device), 2.0).cpu()
    assert x.shape == () and math.isclose(x.item(), 2 * math.tanh(4.5), rel_tol=1e-6)


def test_past_2_to_the_31_elements() -> None:
    """The memory of the operand, allocated once because the emulator fills it."""
    memory = torch.empty(2**31 + 2**17, dtype=f16, device="mps")
    view = memory.as_strided((3, 2, 40), (2**30, 2**16, 1), 8)
    x = torch.randn(3, 2, 40).to(f16)
    for row, other in itertools.product(range(3), range(2)):
        view[row, other].copy_(x[row, other])
    for op in OPS:
        result = call(op, view).cpu()
        assert torch.allclose(result.double(), call(op, x).double(), atol=4e-3)


def test_a_row_is_the_same_among_others() -> None:
    """Bit by bit, and from run to run."""
    x = torch.randn(9, 700, device="mps")
    whole = torch_fattn.softmax(x).cpu()
    assert torch.equal(whole, torch_fattn.softmax(x).cpu())
    assert torch.equal(whole[5], torch_fattn.softmax(x[5]).cpu())


# ---- bytes read and written


@needs_emulator
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "offset", "every_other"])
@pytest.mark.parametrize("columns", [5, 64, 700, 4096, 16384])
def test_one_read_and_one_write(columns: int, layout: str, dtype: torch.dtype) -> None:
    import softmetal

    for op in OPS:
        case = logits_problems.build(LogitsProblem(0, op, dtype, (3, columns), layout, 5.0))
        with softmetal.checks(count_bytes=True), softmetal.record() as launches:
            case.run("mps")
        (launch,) = [launch for launch in launches if launch["kernel"] == f"fattn_{op}"]
        data = 3 * columns * dtype.itemsize
        assert launch["buffers_read"][LOGITS] == launch["buffers_written"]["3"] == data
        assert launch["counters"]["threadgroup_barriers"] <= 2 * 3
        if op == "softmax":
            assert launch["counters"]["simd_reductions"] <= 4 * math.prod(launch["threads"]) // 32 * 3


@needs_emulator
def test_the_first_block_of_a_long_row_is_read_once() -> None:
    """The control: the columns behind it are read twice."""
    import softmetal

    case = logits_problems.build(LogitsProblem(0, "softmax", f16, (2, 20000)))
    with softmetal.checks(count_bytes=True), softmetal.record() as launches:
        case.run("mps")
    launch = launches[-1]
    assert launch["buffers_read"][LOGITS] == 2 * 2 * (2 * 20000 - 16384)
    assert launch["buffers_written"]["3"] == 2 * 2 * 20000


# ---- slices


@pytest.mark.host_only
@pytest.mark.parametrize("shape", [(2**20, 4096), (2**33,), (2**26, 128), (3, 2**30)], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_the_work_of_a_dispatch_is_bounded(op: str, shape: tuple[int, ...]) -> None:
    options = {} if op in ROW_OPS else {"cap": 5.0}
    x = torch.empty(shape, dtype=f16, device="meta")
    if op in ROW_OPS and shape[-1] > 2**30:
        x = x.view(-1, 8)
    (step,) = torch_fattn.explain(op, x, **options).passes
    groups = math.prod(step["grid"])
    dispatches = list(direct_launch.dispatches(step))
    assert len(dispatches) > 1 and sum(math.prod(n) for _, n in dispatches) == groups
    elements = -(-x.numel() // groups)
    assert max(math.prod(n) for _, n in dispatches) * elements <= max(2**28, elements)
    small = torch_fattn.explain(op, x[:1, :128] if x.dim() > 1 else x[:9], **options)
    assert "slice" not in small.passes[0] and not small.passes[0]["constants"]["sliced"], "the control"


@needs_emulator
@pytest.mark.parametrize("op", OPS)
def test_a_grid_in_slices(op: str) -> None:
    sliced = of_logits(LogitsProblem(0, op, f32, (9, 3000), "padded", 5.0), slice_size=3)
    assert len(list(direct_launch.dispatches(sliced.plan["passes"][0]))) > 1
    sliced.run()


# ---- limits


@pytest.mark.host_only
@pytest.mark.parametrize("cap", [-1.0, math.nan, math.inf, 1e-40, 1e39])
@pytest.mark.parametrize("op", OPS)
def test_caps_that_are_refused(op: str, cap: float) -> None:
    with refusal(f"fattn.{op}", ValueError, f"{cap:g}", "positive normal number of float32"):
        call(op, torch.ones(3, 5), cap)


@pytest.mark.host_only
@pytest.mark.parametrize(
    ("op", "shape", "words"),
    [
        ("softmax", (2, 2**30 + 1), ["row length 1073741825", "1073741824"]),
        ("softmax", (2**30 + 1, 8), ["1073741825 rows of 8", "8589934592"]),
        ("softmax", (2**32, 1), ["4294967296 rows", "4294967295"]),
        ("softcap", (2**33 + 1,), ["8589934593", "8589934592"]),
    ],
)
def test_sizes_above_the_limits(op: str, shape: tuple[int, ...], words: list[str]) -> None:
    with refusal(f"fattn.{op}", ValueError, *words):
        call(op, torch.empty(shape, device="meta"))
    within = (shape[0] - 1, *shape[1:]) if len(shape) == 1 or shape[0] > 2 else (2, 2**30)
    assert call(op, torch.empty(within, device="meta")).shape == within
