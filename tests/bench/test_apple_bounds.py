"""bench/APPLE.md calls itself a bound: no published measurement is faster."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from bench.models import published, roofline
from bench.models.published import KINDS, OF_MEMORY
from torch_fattn.inspection.chips import CHIPS

pytestmark = pytest.mark.host_only

MEASUREMENTS = published.load()
_BOUND = re.compile(r"([\d.]+) (memory|products|tensor units|L2|on-core data|exp2)")


def rates_of_page(text: str) -> dict[tuple[str, str], float]:
    """(chip, op) -> the lowest rate that the first table allows, in TFLOP/s or GB/s."""
    table = text[text.index("| call |") :].split("\n\n")[0].splitlines()
    chips = [cell.strip() for cell in table[0].strip("|").split("|")][1:]
    calls = {roofline.describe(call): call for call in roofline.CALLS}
    lowest: dict[tuple[str, str], float] = {}
    for line in table[2:]:
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        call = calls.pop(name)
        for chip, cell in zip(chips, cells, strict=True):
            if bound := _BOUND.fullmatch(cell):
                amount = call.least_bytes / 1e6 if call.is_decode else call.flops / 1e9
                rate = amount / float(bound.group(1))
                lowest[chip, call.op] = min(rate, lowest.get((chip, call.op), rate))
    assert not calls, f"not on the page: {', '.join(calls)}"
    return lowest


def beaten_cells(text: str) -> list[str]:
    allowed = rates_of_page(text)
    return [
        f"{measured.chip} {measured.kind}: {measured.rate} {measured.unit}"
        for measured in MEASUREMENTS
        if measured.rate > allowed.get((measured.chip, measured.kind), float("inf"))
    ]


def test_table_of_measurements() -> None:
    assert len({(m.chip, m.kind) for m in MEASUREMENTS}) == len(MEASUREMENTS) > 15
    for measured in MEASUREMENTS:
        assert measured.kind in KINDS and measured.rate > 0 and measured.source
        assert measured.unit == ("GB/s" if measured.kind in OF_MEMORY else "TFLOP/s")
    assert {m.chip for m in MEASUREMENTS} & {chip.name for chip in CHIPS} >= {"M1 Max", "M4", "M5 Pro"}


def test_no_figure_is_passed_by_a_measurement() -> None:
    assert not list(published.beaten(CHIPS, MEASUREMENTS))


@pytest.mark.parametrize(
    ("chip", "too_low"),
    [
        ("M4", {"alu_gigahertz": 0.8 * 1.398}),  # 80 % of the M3's ALUs
        ("M3 Ultra", {"alu_gigahertz": 0.85}),  # 17.4 TFLOP/s, reached by the matrix products of a program
        ("M5 Pro", {"ram_gb_s": 269}),  # as a copy measured it
        ("M1 Max", {"gigahertz": 1.2}),
        ("M5 Max", {"tensor_gigahertz": 1.2}),  # 49 TFLOP/s, below MLX's attention
        ("M5 Pro", {"tensor_gigahertz": 1.5}),  # 30.7, below a matrix product
    ],
)
def test_a_figure_that_is_too_low_is_noticed(chip: str, too_low: dict[str, float]) -> None:
    chips = [replace(known, **too_low) if known.name == chip else known for known in CHIPS]
    assert all(sentence.startswith(f"{chip}: ") for sentence in published.beaten(chips, MEASUREMENTS))
    assert list(published.beaten(chips, MEASUREMENTS))


def test_no_bound_of_the_page_is_beaten() -> None:
    assert not beaten_cells(roofline.PAGE.read_text())


def test_a_bound_that_is_beaten_is_noticed() -> None:
    page = roofline.PAGE.read_text()
    cell = re.search(r"\| prefill B1 32/32x64 8192x8192 causal .*", page)
    assert cell is not None
    column = 1 + [chip.name for chip in CHIPS].index("M4")
    cells = cell.group().split("|")
    cells[column + 1] = " 96.1 products "  # as it was with 2.9 TFLOP/s
    assert beaten_cells(page.replace(cell.group(), "|".join(cells))) == ["M4 prefill: 3.1 TFLOP/s"]


def test_the_page_has_these_figures() -> None:
    assert roofline.figures() in roofline.PAGE.read_text()
