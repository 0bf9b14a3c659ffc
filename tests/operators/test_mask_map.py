"""prefill with a map of its mask. test_random.py compares results with one and without."""

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
from tests.helpers.layouts import flat
from tests.helpers.problems import Problem
from tests.helpers.wrong_calls import refusal
from torch_fattn import reference

fattn = torch.ops.fattn
f32, f16, bf16 = problems.DTYPES


# ---- prefill with one

SHAPES: dict[str, Problem] = {
    "rows16": Problem(0, "prefill", f16, 2, 4, 2, 150, 210, 64, 64, mask=torch.bool),
    "rows8": Problem(1, "prefill", f16, 1, 2, 1, 150, 210, 96, 128, mask=torch.bool),
    "rows8-keys16": Problem(2, "prefill", f32, 1, 2, 2, 90, 210, 80, 72, mask=f32),
    "keys32-f32": Problem(3, "prefill", f32, 1, 2, 2, 90, 210, 64, 40, mask=f32),
    "wide": Problem(4, "prefill", bf16, 1, 2, 1, 70, 140, 192, 136, mask=bf16),
    "wide-f32": Problem(5, "prefill", f32, 1, 1, 1, 70, 140, 136, 200, mask=torch.bool),
    "wide-8-rows": Problem(6, "prefill", f32, 1, 1, 1, 60, 140, 264, 16, mask=f16),
}


def documents(lengths: list[int]) -> Tensor:
    """bool `[L, L]`: packed documents see themselves."""
    of = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return of[:, None] == of


def with_mask(problem: Problem, mask: Tensor) -> problems.Case:
    """A case with that bool mask, as the problem's dtype of mask has it."""
    case = problems.build(replace(problem, mask=None))
    case.visible &= mask
    if problem.mask != torch.bool:
        assert problem.mask is not None
        mask = torch.zeros(mask.shape, dtype=problem.mask).masked_fill(~mask, -torch.inf)
    case.operands["attn_mask"] = flat(mask)
    case.clean["attn_mask"] = mask
    return case


def results(case: problems.Case, *, mapped: bool, cells: Tensor | None = None) -> tuple[Tensor, Tensor]:
    arguments = case.arguments("mps")[0]
    if mapped and "mask_map" not in arguments:
        arguments["mask_map"] = torch_fattn.mask_map(arguments["attn_mask"]) if cells is None else cells
    if not mapped:
        arguments.pop("mask_map", None)
    out, lse = fattn.prefill(**arguments)
    return out.cpu(), lse.cpu()


@pytest.mark.parametrize(
    "option", [{}, {"window_left": 1000, "sink_tokens": 40}, {"causality": "bottom_right"}], ids=str
)
@pytest.mark.parametrize("shape", ["rows16", "rows8", "keys32-f32", "wide-8-rows"])
def test_more_columns_of_cells_than_are_looked_up_at_once(
    shape: str, option: dict[str, Any], checked: Checked
) -> None:
    """32 columns have 1,024 keys. The rows see keys of the first, the third and the fourth 32."""
    sizes = {"batch": 1, "q_heads": 1, "kv_heads": 1, "q_len": 70, "kv_len": 3210}
    problem = replace(SHAPES[shape], **sizes, **option)
    mask = torch.zeros(problem.q_len, problem.kv_len, dtype=torch.bool)
    mask[:, 3] = mask[:, 5:40] = mask[20:, 2250:2300] = mask[:50, 3000:] = True
    case = with_mask(problem, mask)
    with checked(order="reverse"):
        out, lse = results(case, mapped=True)
    assert_close(case, out, lse)


@pytest.mark.parametrize("strides", ["expanded", "every_other", "of_all_heads"])
def test_strides_of_the_map(strides: str) -> None:
    case = problems.build(replace(SHAPES["rows16"], mask_pattern="patches", mask_broadcast=(False, True) * 2))
    cells = torch_fattn.mask_map(case.arguments("mps")[0]["attn_mask"])
    given = cells
    if strides == "expanded":
        given = cells.expand(2, 4, 10, 1)
    elif strides == "every_other":
        given = torch.stack([cells, cells * 0], -1).flatten(-2)[..., ::2]
    else:
        given = cells.expand(2, 4, 10, 7).contiguous()
    expected = results(case, mapped=True, cells=cells)
    assert all(map(torch.equal, results(case, mapped=True, cells=given), expected))


@pytest.mark.parametrize("special", [torch.nan, torch.inf])
@pytest.mark.parametrize("shape", ["rows16", "rows8-keys16", "wide"])
def test_special_values_reach_the_rows_that_see_them(shape: str, special: float) -> None:
    """Rows in cells that are whole for some simdgroups of a tile and mixed or hidden for others. No row sees
    the value of key 90."""
    problem = replace(SHAPES[shape], q_len=100, kv_len=100)
    mask = documents([40, 37, 23])
    mask[:, 90] = False
    for bad in ([("key", 60), ("value", 90)], [("value", 5), ("value", 50)]):
        case = with_mask(problem, mask)
        for name, key in bad:
            for values in (case.clean[name], case.operands[name].of(case.operands[name].base)):
                values[:, :, key, 3] = special
        out, _ = results(case, mapped=True)
        clean = (case.clean[name] for name in ("query", "key", "value", "attn_mask"))
        exact, _ = reference.prefill(*clean, **case.options)
        if bad[0][0] == "value":  # the rows of the last document are undefined
            out, exact = out[:, :, :77], exact[:, :, :77]
            assert not out[..., 3].isfinite().any()
        else:
            assert not out[:, :, 40:77].isfinite().all() and out[:, :, 77:].isfinite().all()
            assert torch.equal(out.isnan(), exact.isnan()) and torch.equal(out.isinf(), exact.isinf())


@needs_emulator
@pytest.mark.parametrize("shape", ["rows16", "rows8", "rows8-keys16", "wide"])
def test_hidden_fragments_are_left_out(shape: str) -> None:
    """Two documents of 40 tokens, in five rows of cells: five fragments or, with rows of both, ten, counted;
    and the control, a map without fragment bits. prefill skips pairs of fragments, and values that eight rows
    do not see."""
    import softmetal

    problem = replace(SHAPES[shape], batch=1, q_len=80, kv_len=80, q_heads=1, kv_heads=1)
    arguments = with_mask(problem, documents([40, 40])).arguments("mps")[0]
    cells = torch_fattn.mask_map(arguments["attn_mask"])
    products = []
    for given in (cells, cells & 3):
        with softmetal.record() as launched:
            fattn.prefill(**arguments, mask_map=given)
            torch.mps.synchronize()
        products.append(launched[-1]["counters"]["products"])
    if shape == "wide":
        assert products[0] * (8 + 8 + 10 + 6 + 6) == products[1] * (5 + 5 + 10 + 5 + 5)
        return
    scored = [6 + 6 + 10 + 6 + 6, 8 + 8 + 10 + 6 + 6]  # of the 16 rows of a cell
    values = (5 + 5) * 6 * problem.value_dim // 8
    assert products == [2 * fragments * problem.head_dim // 8 + values for fragments in scored]


@pytest.mark.parametrize("shape", SHAPES)
def test_an_invalid_byte_of_a_map_is_ignored(shape: str, checked: Checked) -> None:
    """Invalid cells: above 63, of kind 3, or hidden or whole but with fragments."""
    p = replace(SHAPES[shape], mask_pattern="patches", causality="bottom_right")
    case = problems.build(p)
    size = (p.batch, 1, -(-p.q_len // 16), -(-p.kv_len // 32))
    known = {0, 2, *range(1, 64, 4)}
    foreign = torch.tensor([byte for byte in range(256) if byte not in known], dtype=torch.uint8)
    chosen = torch.randint(len(foreign), size, generator=torch.Generator().manual_seed(0))
    with checked():
        out, lse = results(case, mapped=True, cells=foreign[chosen].to("mps"))
        expected = results(case, mapped=False)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


@pytest.mark.parametrize("shape", SHAPES)
def test_arbitrary_map_bytes_show_no_hidden_key(shape: str, checked: Checked) -> None:
    """Keys hidden by position: memory after the diagonal is NaN, values too after that of the last row, and
    no access is out of bounds."""
    p = replace(SHAPES[shape], causality="offset", q_offset=SHAPES[shape].kv_len - SHAPES[shape].q_len - 1)
    case = with_mask(p, torch.ones(p.q_len, p.kv_len, dtype=torch.bool))
    for name, first in (("key", p.kv_len - 2), ("value", p.kv_len - 1)):
        operand = case.operands[name]
        operand.of(operand.base)[:, :, first:] = torch.nan
    size = (p.batch, p.q_heads, -(-p.q_len // 16), -(-p.kv_len // 32))
    cells = torch.randint(256, size, generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    with checked():
        out, _ = results(case, mapped=True, cells=cells.to("mps"))
    assert out[:, :, :-1].isfinite().all()


def test_mixed_is_valid_for_every_cell() -> None:
    case = problems.build(replace(SHAPES["rows16"], mask_pattern="patches"))
    cells = torch_fattn.mask_map(case.arguments("mps")[0]["attn_mask"])
    chosen = torch.rand(cells.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    looser = torch.where(chosen, torch.ones_like(cells.cpu()), cells.cpu()).to("mps")
    expected = results(case, mapped=False)
    for given in (looser, torch.ones_like(cells)):
        assert all(map(torch.equal, results(case, mapped=True, cells=given), expected))


# ---- the planner's own

LARGE = Problem(9, "prefill", f16, 1, 4, 2, 400, 420, 64, 64, mask=torch.bool, mask_pattern="patches")


@pytest.mark.parametrize(
    "problem",
    [
        replace(LARGE, mask_broadcast=(True, True, False, False), causality="bottom_right"),
        replace(LARGE, batch=2, mask_broadcast=(False, True, True, False), mask=f32, head_dim=136),
        replace(LARGE, mask_broadcast=(True, True, False, True), mask=bf16, dtype=bf16, window_left=90),
    ],
    ids=str,
)
def test_a_large_call_makes_its_own(problem: Problem, checked: Checked) -> None:
    case = problems.build(problem)
    with checked(), counted_launches() as launches:
        out, lse = results(case, mapped=False)
    kernel = "fattn_prefill_wide" if problem.head_dim > 128 else "fattn_prefill"
    assert launches == {"fattn_mask_map": 1, kernel: 1}
    assert_close(case, out, lse)
    with checked(), counted_launches() as launches:
        given = results(case, mapped=True, cells=torch_fattn.mask_map(case.arguments("mps")[0]["attn_mask"]))
    assert launches == {"fattn_mask_map": 1, kernel: 1}, "that of mask_map"
    assert torch.equal(out, given[0]) and torch.equal(lse, given[1])


def test_a_learned_mask(device: str) -> None:
    """Its map belongs to no graph; the result of prefill does, and refuses."""
    query = torch.randn(1, 2, 20, 16).to(device)
    bias = torch.zeros(20, 20, device=device).requires_grad_()
    with torch.autocast(device, dtype=f16):
        cells = torch_fattn.mask_map(bias)
        out = torch_fattn.prefill(query, query, query, bias, mask_map=cells)
    assert cells.dtype == torch.uint8 and not cells.requires_grad
    assert out.dtype == f16 and out.requires_grad
    with pytest.raises(RuntimeError, match="no backward"):
        out.sum().backward()


def arguments_of(device: str = "mps") -> dict[str, Any]:
    return problems.build(replace(SHAPES["rows16"], mask_pattern="patches", mask_map=True)).arguments(device)[
        0
    ]


@pytest.mark.host_only
@pytest.mark.parametrize("index", [(..., slice(6)), (..., slice(9), slice(None)), (slice(None), slice(3))])
def test_maps_of_another_shape(index: tuple[Any, ...]) -> None:
    arguments = arguments_of("cpu")
    cells = arguments["mask_map"][index]
    with refusal("fattn.prefill", ValueError, f"mask_map has shape {list(cells.shape)}"):
        fattn.prefill(**arguments | {"mask_map": cells})


def test_the_map_of_another_mask_raises_when_asked(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FATTN_CHECK", "1")
    arguments = arguments_of(device)
    fattn.prefill(**arguments)
    fattn.prefill(**arguments | {"mask_map": torch.ones_like(arguments["mask_map"])})
    looser = arguments["mask_map"].clone()
    looser[looser % 4 == 1] &= 3 + 4 * 5
    assert not torch.equal(looser, arguments["mask_map"])
    fattn.prefill(**arguments | {"mask_map": looser})
    fattn.prefill(**arguments | {"mask_map": torch.full_like(looser, 255)})
    words = r"fattn\.prefill: mask_map does not match attn_mask; recreate it"
    for byte in (0, 2, 1 + 4 * 15):
        with pytest.raises(ValueError, match=words):
            fattn.prefill(**arguments | {"mask_map": torch.full_like(looser, byte)})
    stale = arguments["attn_mask"].clone()
    hidden = (arguments["mask_map"] == 0).nonzero()[0].tolist()
    stale[hidden[0], hidden[1], hidden[2] * 16, hidden[3] * 32] = True
    with pytest.raises(ValueError, match=words):
        fattn.prefill(**arguments | {"attn_mask": stale})
    monkeypatch.delenv("FATTN_CHECK")
    fattn.prefill(**arguments | {"attn_mask": stale})
