"""`python -m bench agx`: its rows are tied to the kernels. Stale rows give a warning, not a failure."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("softmetal.testing", reason="costs are of softmetal's compiler, which is for Linux")

import bench.__main__ as bench
from bench.backends import agx
from bench.backends.record import read
from bench.peers.launch import OURS
from bench.report import agx as report
from softmetal.testing import agx as compiler
from tests.helpers.tuning_rows import TUNING, Row, rows, used
from torch_fattn.commands import report as doctor_report

pytestmark = pytest.mark.host_only

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def entries() -> list[agx.Entry]:
    return list(agx.entries())


def unused(text: str, entries: list[agx.Entry]) -> set[Row]:
    """The rows of the tables for M1 and M2 that no entry compiles."""
    ours = [entry for entry in entries if entry.impl == OURS]
    found = {used(entry.kernel.kernel, str(entry.facts["tuning"])) for entry in ours}
    return rows(text, family=0) - found


def test_every_row_of_the_tuning_table_is_compiled(entries: list[agx.Entry]) -> None:
    text = TUNING.read_text()
    assert len(rows(text, family=0)) > 12
    assert not unused(text, entries)
    changed = text.replace(".dtypes = kBFloat16s, .max_dim = 96", ".dtypes = kBFloat16s, .max_dim = 97")
    assert [row.kernel for row in unused(changed, entries)] == ["prefill"], "the control"
    others = [entry for entry in entries if not entry.op.startswith("backward")]
    assert {row.kernel for row in unused(text, others)} == {"backward_query", "backward_key"}


@pytest.mark.skipif(not compiler.is_built(), reason="needs the AGX compiler")
@pytest.mark.parametrize("shape", ["o1 w32 g4 s4", "o1 w16 g2 s4"])
def test_a_step_of_the_backward(entries: list[agx.Entry], shape: str) -> None:
    """Without column shares a step has one loop over fragments; with them it has two, and both count."""
    entry = next(one for one in entries if (one.op, one.shape) == ("backward_key", shape))
    row = agx._row(entry)
    shares = entry.kernel.threads[0] // 32 // int(entry.kernel.macros["FATTN_ROW_GROUPS"])
    assert row["products"] == 4 * entry.head_dim // 8 // shares
    assert row["issue"][0] == 18 * row["products"]
    hottest = compiler.compile_kernel(entry.kernel).hot_loop
    assert hottest is not None
    assert (hottest.kinds["product"] < row["products"]) == (shares > 1), "the control"


def test_an_implementation_has_one_pipeline_of_a_call(entries: list[agx.Entry]) -> None:
    assert len({entry.key[:2] for entry in entries}) == len(entries)


def test_a_digest_follows_the_text(entries: list[agx.Entry]) -> None:
    entry = entries[0]
    same = replace(entry, part="option", facts={})
    assert same.digest == entry.digest
    for changed in (
        replace(entry.kernel, source=entry.kernel.source + "\n"),
        replace(entry.kernel, macros={**entry.kernel.macros, "FATTN_TILE_KEYS": "8"}),
        replace(entry.kernel, fast_math=True),
    ):
        assert replace(entry, kernel=changed).digest != entry.digest
    assert replace(entry, version="9").digest != entry.digest


def test_a_stale_row_stands_only_without_the_compiler(
    entries: list[agx.Entry], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = entries[0]
    recorded = {"impl": entry.impl, "call": entry.call, "shape": entry.shape, "digest": entry.digest}
    other = {**recorded, "digest": "another"}
    monkeypatch.setattr(compiler, "is_built", lambda: False)
    assert agx.measure([entry], [recorded]) == [recorded | entry.facts]
    assert agx.measure([entry], [other]) == [{**other, "stale": True}]
    assert agx.measure([entry], []) == []
    monkeypatch.setattr(compiler, "is_built", lambda: True)
    monkeypatch.setattr(agx, "_row", lambda entry: {"new": entry.digest})
    assert agx.measure([entry], [recorded]) == [recorded | entry.facts]
    assert agx.measure([entry], [other]) == [{"new": entry.digest}]


def test_the_recorded_rows(entries: list[agx.Entry]) -> None:
    """A change of a kernel needs no compiler: old rows are a warning."""
    digests = {entry.key: entry.digest for entry in entries}
    rows = read(report.RESULTS)["rows"]
    mine = [row for row in rows if row["impl"] == OURS]
    assert len(mine) > 60 and len(rows) > 100
    old = [
        row["call"] for row in mine if digests.get((row["impl"], row["call"], row["shape"])) != row["digest"]
    ]
    if old:
        warnings.warn(
            f"{len(old)} of {len(mine)} rows of {report.RESULTS.name} are stale, such as {old[0]!r}: run "
            "`make agx`, then `python -m bench agx --update`",
            stacklevel=1,
        )


def test_rotary_leaves_room_for_a_core_full_of_threads() -> None:
    rows = [row for row in read(report.RESULTS)["rows"] if row["op"] == "rotary_write"]
    assert len(rows) == 6
    assert all((row["resident"], row["spills"], row["needed"] <= 96) == (1024, 0, True) for row in rows)


def resident(row: dict[str, Any], table: dict[int, int]) -> int:
    by_registers = table[min(most for most in table if row["given"] <= most)]
    return compiler.resident_threads(by_registers, row["threads"], row["threadgroup_bytes"])


def test_the_table_of_residency_is_the_compilers() -> None:
    """The recorded numbers are what Mesa printed; docs and doctor have the table in words."""
    table = compiler.THREADS_BY_REGISTERS
    rows = [row for row in read(report.RESULTS)["rows"] if "given" in row]
    assert all(resident(row, table) == row["resident"] for row in rows)
    for wrong in ({144: 600}, {160: 576}, {208: 448}):  # the controls
        assert any(resident(row, table | wrong) != row["resident"] for row in rows)
    page = (ROOT / "softmetal/docs/agx.md").read_text().partition("Mesa's table: ")[2].partition(")")[0]
    halves = re.findall(r"(\d+)(?: halves)? (\d+)", page)
    assert {int(most): int(threads) for most, threads in halves} == table
    threads = re.findall(r"(\d+)(?: threads)?\swith(?: up to)? (\d+)", doctor_report._MEANING)
    assert {int(most): int(count) for count, most in threads} == table


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(compiler, "is_built", lambda: False)
    assert bench.main(["agx", "--only", "fattn prefill float16 D64$"]) == 0
    text = capsys.readouterr().out
    assert "prefill float16 D64" in text and "bfloat16" not in text
