"""The demo on a few tokens, and that it fails when it should."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command_line import save_checkpoint
from torch_fattn.commands import demo
from torch_fattn.integrations.transformers import attention, masks

NEW_TOKENS = 4
LAYERS = 4


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(new_tokens: int = NEW_TOKENS) -> tuple[int, dict[str, Any]]:
    status = demo.main(None, "float32", new_tokens)
    return status, json.loads(Path("out/demo.json").read_text())


def test_tokens_agree(capsys: pytest.CaptureFixture[str]) -> None:
    status, report = run()
    printed = capsys.readouterr().out
    places = [
        printed.index(each) for each in ("OK: 8 tokens agree", "sequence 0", "launches ", "not timed: ")
    ]
    assert places == sorted(places), printed
    assert status == 0 and report["tokens"]["fattn"] == report["tokens"]["eager"]
    assert report["tokens_per_second"] == {}
    assert report["launches"]["fattn_prefill"] == LAYERS
    assert report["launches"]["fattn_decode"] == LAYERS * (NEW_TOKENS - 1)
    assert max(report["logit_difference_per_step"]) < 1e-4 < min(report["margin_per_step"])
    assert Path("out/demo.png").stat().st_size > 10_000


def test_one_token_is_a_prefill_alone() -> None:
    status, report = run(1)
    assert status == 0 and report["launches"] == dict.fromkeys(("fattn_prefill", "fattn_rotary"), LAYERS)


def test_a_checkpoint() -> None:
    save_checkpoint(Path("model"), positions=104)
    assert demo.main("model", "float32", 4) == 0


def test_lost_padding_is_noticed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(masks, "_padding_or_none", lambda *_, **_options: None)
    monkeypatch.setattr(attention, "restarts_of", lambda *_: None)  # by positions it would be refused
    assert run()[0] == 1
    assert "FAILED: tokens differ" in capsys.readouterr().out


def test_kernels_that_did_not_run_are_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "launch_counts", dict)
    assert run()[0] == 1
    message = capsys.readouterr().out
    assert "FAILED: fattn_prefill did not run" in message and "FAILED: fattn_decode did not run" in message


def test_a_mac_prints_tokens_per_second_of_both(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both implementations generate tokens; the times are invented."""
    monkeypatch.setattr(demo.sys, "platform", "darwin")
    took = {"fattn": 0.02, "sdpa": 0.05}
    counted: dict[str, list[int]] = {name: [] for name in took}
    generate = demo.generate

    def timed(model: Any, inputs: Any, new_tokens: int) -> demo.Run:
        run = generate(model, inputs, new_tokens)
        if (label := model.config._attn_implementation) in took:
            is_first = len(counted[label]) < 2  # the compared run, and the round that compiles
            counted[label].append(sum(run.all_launches.values()))
            run.seconds = [9.0] + [9.0 if is_first else took[label]] * (new_tokens - 1)
        return run

    monkeypatch.setattr(demo, "generate", timed)
    status, report = run()
    rounds = 1 + demo.ROUNDS
    assert counted == {"fattn": [2 * LAYERS * NEW_TOKENS] * (1 + rounds), "sdpa": [0] * rounds}
    assert status == 0 and report["tokens_per_second"] == pytest.approx({"fattn": 100.0, "sdpa": 40.0})
    assert "tokens/s     fattn 100.0, sdpa 40.0" in capsys.readouterr().out


def test_a_model_without_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.sys, "platform", "darwin")

    def generate(name: str) -> list[float]:
        if name == "sdpa":
            raise ValueError("T5 does not support sdpa")
        return [9.0, 0.5, 0.5]

    assert demo.tokens_per_second(generate, batch=2) == {"fattn": 4.0}
