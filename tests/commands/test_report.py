"""`python -m torch_fattn doctor --report`: what the compiler gives each row of the tuning table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.conftest import needs_emulator
from tests.helpers.tuning_rows import TUNING, Row, rows, used
from torch_fattn.commands import doctor, report
from torch_fattn.inspection.compiled import compiled_kernels

ONE: list[tuple[str, dict[str, Any]]] = [
    ("prefill", {"dtype": torch.float16, "heads": 8, "kv_len": 1024, "head_dim": 64})
]


def missing(text: str, family: int) -> set[Row]:
    """The rows of the tables for this family that no reported call uses."""
    plans = [*report.plans({"family": max(family, 7), "cores": 8})]
    kernels = [(launch["kernel"], plan.data["tuning"]) for plan in plans for launch in plan.passes]
    assert len(rows(text, family)) > 5
    return rows(text, family) - {used(*each) for each in kernels}


@pytest.mark.host_only
@pytest.mark.parametrize("family", [0, 9])
def test_every_row_of_the_tuning_table_is_reported(family: int) -> None:
    text = TUNING.read_text()
    assert not missing(text, family)
    changed = text.replace(".max_dim = 64", ".max_dim = 65")  # the control
    assert missing(changed, family)


@pytest.mark.host_only
@pytest.mark.parametrize("cores", [8, 80])
def test_one_launch_is_reported(cores: int) -> None:
    planned = report.plans({"family": 7, "cores": cores})
    found = [launch for plan in planned for launch in report.attention_of(plan)]
    short = [launch for launch in found if launch["macros"].get("FATTN_CHUNKS") == "4"]
    assert {launch["kernel"] for launch in short} == {"fattn_decode", "fattn_decode_vector"}
    assert {launch["threads"][0] for launch in short} == {512} != {launch["threads"][0] for launch in found}


@needs_emulator
def test_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "calls", lambda: iter(ONE))
    gpu = doctor.this_gpu()
    (plan,) = report.plans({"family": gpu["family"], "cores": gpu["cores"]})
    (launch,) = report.attention_of(plan)
    first, warning, _, row, *_ = report.lines(gpu)
    assert gpu["name"] in first and "no Apple GPU" in warning
    kernel, element, dim, *tile, threads, most, width, static_bytes, by_hand = row.split()
    assert (kernel, element, dim) == (launch["kernel"], "half", "64") and tile[0][0] == "r"
    assert [int(threads)] == launch["threads"][:1] and int(by_hand) == launch["registers"]["total"]
    # The kernel declares its threads as the limit, and without that the device's limit holds.
    assert int(most) == 1024 > int(threads)
    assert (int(width), int(static_bytes)) == (32, launch["threadgroup_bytes"])
    compiled = len(compiled_kernels())
    assert "no Apple GPU" not in "\n".join(report.lines(gpu | {"name": "Apple GPU"}))
    assert len(compiled_kernels()) == compiled  # what the report compiles is not kept


def test_doctor_reports_when_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("report_versions", "report_device", "advice_about_device", "advice_about_environment"):
        monkeypatch.setattr(doctor, name, list)
    monkeypatch.setattr(doctor, "self_test", lambda _: [])
    monkeypatch.setattr(doctor, "this_gpu", lambda: {"name": "Apple M9"})
    monkeypatch.setattr(report, "lines", lambda gpu: iter([f"the report of {gpu['name']}"]))
    assert doctor.main() == 0
    assert "the report" not in capsys.readouterr().out
    assert doctor.main(True) == 0
    assert "the report of Apple M9" in capsys.readouterr().out

    def fails(gpu: object) -> Iterator[str]:
        yield "a line"
        raise RuntimeError("the Metal compiler rejected prefill.metal:\nhere")

    monkeypatch.setattr(report, "lines", fails)
    assert doctor.main(True) == 1
    text = capsys.readouterr().out
    assert (
        "a line\n" in text
        and "-> no report of the kernels: the Metal compiler rejected prefill.metal:" in text
    )
