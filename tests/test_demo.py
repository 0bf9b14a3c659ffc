"""The demo on a few tokens, and that it fails when it should."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.test_command_line import save_checkpoint
from torch_fattn import demo
from torch_fattn.integrations.transformers import masks

NEW_TOKENS = 4
LAYERS = 4


def run_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.chdir(folder)
    return demo.main(None, "float32", NEW_TOKENS)


def test_tokens_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_in(tmp_path, monkeypatch) == 0
    report = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert report["agree"] and report["tokens"]["fattn"] == report["tokens"]["eager"]
    assert report["launches"]["fattn_prefill"] == LAYERS
    assert report["launches"]["fattn_decode"] == LAYERS * (NEW_TOKENS - 1)
    assert report["largest_logit_difference"] < 1e-4 < min(report["margin_per_step"])
    assert (tmp_path / "out" / "demo.png").stat().st_size > 10_000


def test_one_token_is_a_prefill_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert demo.main(None, "float32", 1) == 0
    report = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert report["agree"] and report["launches"] == {"fattn_prefill": LAYERS}


def test_a_checkpoint_to_its_last_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_checkpoint(tmp_path / "model", positions=104)
    assert demo.main("model", "float32", 4) == 0


def test_lost_padding_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(masks, "_padding_or_none", lambda *_: None)
    assert run_in(tmp_path, monkeypatch) == 1
    assert "FAILED: tokens differ" in capsys.readouterr().out


def test_kernels_that_did_not_run_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "launch_counts", dict)
    assert run_in(tmp_path, monkeypatch) == 1
    said = capsys.readouterr().out
    assert "FAILED: fattn_decode was planned" in said and "FAILED: fattn_decode did not run" in said
