"""`python -m bench model`: what it does with published times, and that it can be wrong."""

from __future__ import annotations

import re
from dataclasses import replace
from statistics import median

import pytest

import bench.__main__ as bench
from bench.cases.calls import Call
from bench.models import cost, model, published, roofline
from bench.models.cost import Demand, Figures
from torch_fattn.inspection.chips import CHIPS

pytestmark = pytest.mark.host_only

CHIP = {chip.name: chip for chip in CHIPS}
FIGURES = Figures(0.5, 0.75, launch_us=10, wait_us=100, rest_7=1, clock_9=1, clock_10=2)
ROW = {"instructions": 300, "loop_bytes": 600, "code_bytes": 900, "threads": 64, "cycles": [0, 800, 0]}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "_STARTS", cost._STARTS[:1])


def test_a_row_is_usable_or_has_a_reason() -> None:
    rows = published.load()
    usable = [row for row in rows if not row.unusable]
    assert len(usable) > 40 and len(rows) - len(usable) > 40
    for row in rows:
        assert bool(row.unusable) != (row.timing in published.TIMINGS)
    for row in usable:
        assert str(row.attention) == re.sub(r" (f16|bf16|f32)$", "", row.call) + (
            "" if row.dtype == "f16" else f" {row.attention.dtype}"
        )
        amount = row.attention.least_bytes / 1e9 if row.kind == "decode" else row.attention.flops / 1e12
        assert amount / row.seconds == pytest.approx(row.rate, rel=0.02)
    with pytest.raises(ValueError, match="is not like 'B1 32/8x128 N=4096'"):
        _ = replace(usable[0], call="12x128").attention


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"library": "torch 2.13 sdpa"},
            "no library 'torch', only MLX, llama.cpp; write one of them, or",
        ),
        ({"chip": "M3 Max"}, "no chip 'M3 Max', only M1, "),
        ({"dtype": "fp16"}, "no dtype 'fp16', only f16, bf16, f32;"),
        ({"timing": "wait"}, "no timing 'wait', only queued, waited, difference;"),
    ],
)
def test_a_row_that_cannot_check_the_model_is_refused(changes: dict[str, str], message: str) -> None:
    row = next(row for row in published.load() if not row.unusable)
    assert model._check(row, model.costs()).seconds == row.seconds
    with pytest.raises(ValueError, match=re.escape(message)):
        model._check(replace(row, **changes), model.costs())


def test_held_out_rows_take_no_part_in_the_fit(quick: None) -> None:
    found = model.checks()

    def scaled(held_out: bool) -> Figures:
        return cost.fit(
            [replace(c, seconds=(1.5 if c.held_out == held_out else 1) * c.seconds) for c in found], 0.9
        )

    assert scaled(True) == cost.fit(found, 0.9) != scaled(False)


def test_the_fit_finds_the_figures() -> None:
    """Times that the model itself made: its figures come back, and a prediction can be wrong."""
    made = replace(FIGURES, overlap=0.9, launch_us=4, wait_us=200, rest_7=0.8, clock_9=1.4, clock_10=2.0)
    checks = [
        replace(check, seconds=cost.seconds(check.demand, check.chip, made, check.timing))
        for check in model.checks()
    ]
    fitted = cost.fit(checks, made.bandwidth)
    assert median(abs(check.error(fitted)) for check in checks) < 0.02
    assert median(abs(check.error(replace(made, clock_10=3, clock_9=2))) for check in checks) > 0.05


def test_the_parts_of_a_time() -> None:
    m1 = CHIP["M1"]
    demand = Demand(cycles=8e6, threadgroups=8, bytes=3.4e6, dispatches=2)
    compute, memory = 8e6 / 8 / 4 / 1.278e9, 3.4e6 / (0.5 * 68e9)
    assert cost.parts(demand, m1, FIGURES) == pytest.approx((compute, memory))
    longer, shorter = max(compute, memory), min(compute, memory)
    assert cost.seconds(demand, m1, FIGURES) == pytest.approx(longer + shorter / 4 + 20e-6)
    assert cost.seconds(demand, m1, FIGURES, "waited") == pytest.approx(longer + shorter / 4 + 100e-6)
    assert cost.seconds(demand, m1, FIGURES, "difference") == pytest.approx(longer + shorter / 4)
    # A ninth threadgroup makes one core work twice as long.
    assert cost.parts(replace(demand, threadgroups=9), m1, FIGURES)[0] == pytest.approx(compute * 16 / 9)
    # The published rate of products holds whatever was simulated and fitted.
    least = 1e6 * 1024 / (m1.products or 0)
    fast = replace(FIGURES, rest_7=0)
    assert cost.parts(replace(demand, products=1_000_000, cycles=18e6), m1, fast)[0] == pytest.approx(least)
    with pytest.raises(LookupError, match="choose another chip"):
        cost.parts(demand, replace(m1, gigahertz=None), FIGURES)


def test_steps_are_counted_by_products_or_by_loaded_bytes() -> None:
    once = 4 * 2 * 300 / 3  # four threadgroups of two simdgroups, a third of the program outside the loop
    assert cost._cycles({**ROW, "products": 16}, 160, 0, 4) == pytest.approx(10 * 800 + once)
    row = {**ROW, "products": 0, "loaded": 64}
    assert cost._cycles(row, 160, 5 * 32 * 64, 4) == pytest.approx(5 * 800 + once)


@pytest.mark.parametrize(
    "call",
    [
        Call("prefill", 4, 2, 64, 100, 100, causal=True),
        Call("prefill", 4, 2, 64, 100, 230),
        Call("prefill", 4, 2, 72, 100, 100, causal=True, window_left=20),
        Call("prefill", 4, 2, 64, 9, 1000, causal=True),
    ],
    ids=str,
)
def test_products_of_tiles(call: Call) -> None:
    rows, keys, fragments = 32, 16, 0
    for first in range(0, call.q_len, rows):
        for step in range(0, call.kv_len, keys):
            ranges = map(call.visible_keys, range(first, min(first + rows, call.q_len)))
            fragments += any(begin < step + keys and step < end for begin, end in ranges)
    columns = 2 * -(-call.head_dim // 8)
    tiles = fragments * (4 if call.q_len > rows else 2)  # a few rows of two heads share a tile
    assert cost.tile_products(call, rows, keys) == tiles * rows * keys // 64 * columns


def test_no_prediction_of_the_page_beats_its_bound() -> None:
    page = roofline.PAGE.read_text()
    table = page.split("multiple of the bound")[1].split("\n\n")[1]
    multiples = [float(text) for text in re.findall(r"\((\d+\.\d+)\)", table)]
    assert len(multiples) > 100 and min(multiples) >= 1
    assert model.BAND in page


def test_the_page_has_the_errors_of_the_model() -> None:
    """Write it again after `python -m bench agx --update`: python -m bench roofline."""
    page = roofline.PAGE.read_text()
    figures = model.figures()
    for cells in (*model.figure_rows(figures), *model.error_rows(model.checks(), figures)):
        assert f"| {' | '.join(cells)} |" in page


def test_errors_are_of_a_useful_size() -> None:
    """Half of the held-out rows within 20 %: no promise, but a mistake in the model would show."""
    rows = {cells[0]: cells for cells in model.error_rows(model.checks(), model.figures())}
    assert int(rows["held out, all"][2].rstrip("%")) <= 20
    doubled = [replace(check, seconds=2 * check.seconds) for check in model.checks()]
    wrong = {cells[0]: cells for cells in model.error_rows(doubled, model.figures())}
    assert int(wrong["held out, all"][2].rstrip("%")) > 30


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = pytest.importorskip("softmetal.testing.agx", reason="our kernels are known by its version")
    monkeypatch.setattr(compiler, "is_built", lambda: False)
    assert bench.main(["model"]) == 0
    text = capsys.readouterr().out
    assert "why they were left out" in text and "held out, decode" in text and model.BAND in text
    assert bench.main(["model", "--chip", "M5Pro", "--shapes", "llama-3-8b", "decode"]) == 0
    text = capsys.readouterr().out
    assert text.count("\ndecode B1 32/8x128 N=32768 ") == 1  # both sets have it
    assert "decode B1 32/8x128 N=32768" in text and "no published prefill of this family" in text
    with pytest.raises(SystemExit):
        bench.main(["model", "--shapes", "standard"])
    assert "--shapes needs --chip" in capsys.readouterr().err
