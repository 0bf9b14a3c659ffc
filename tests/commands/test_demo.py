"""The demo on a few tokens, and that it fails when it should."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command_line import save_checkpoint
from torch_fattn.commands import demo, demo_picture, demo_speed
from torch_fattn.integrations.transformers import attention, masks

NEW_TOKENS = 4
LAYERS = 4


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(new_tokens: int = NEW_TOKENS, verbose: bool = False) -> tuple[int, dict[str, Any]]:
    status = demo.main(None, "float32", new_tokens, verbose)
    return status, json.loads(Path("out/demo.json").read_text())


def test_tokens_agree(capsys: pytest.CaptureFixture[str]) -> None:
    status, report = run()
    printed = capsys.readouterr().out
    places = [printed.index(each) for each in ("OK: 8 tokens agree", "sequence 0", "launches ", "plans ")]
    assert places == sorted(places) and "pass 1" not in printed, printed
    assert status == 0 and report["agree"] and report["tokens"]["fattn"] == report["tokens"]["eager"]
    assert report["launches"]["fattn_prefill"] == LAYERS
    assert report["launches"]["fattn_decode"] == LAYERS * (NEW_TOKENS - 1)
    assert report["largest_logit_difference"] < 1e-4 < min(report["margin_per_step"])
    assert Path("out/demo.png").stat().st_size > 10_000


def test_one_token_is_a_prefill_alone(capsys: pytest.CaptureFixture[str]) -> None:
    status, report = run(1, verbose=True)
    assert "  pass 1       fattn_prefill from prefill.metal" in capsys.readouterr().out
    assert status == 0 and report["agree"] and report["launches"] == {"fattn_prefill": LAYERS}


def test_a_checkpoint_to_its_last_position() -> None:
    save_checkpoint(Path("model"), positions=104)
    assert demo.main("model", "float32", 4) == 0


def test_lost_padding_is_noticed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(masks, "_padding_or_none", lambda *_: None)
    monkeypatch.setattr(attention, "restarts_of", lambda *_: None)  # by positions it would be refused
    assert run()[0] == 1
    assert "FAILED: tokens differ" in capsys.readouterr().out


def test_the_cpu_is_not_judged(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    generate = demo.generate

    def other_on_cpu(model: Any, *rest: Any) -> demo.Run:
        run = generate(model, *rest)
        if model.device.type == "cpu":
            run.tokens[0][0] += 1
        return run

    monkeypatch.setattr(demo, "generate", other_on_cpu)
    status, report = run(1)
    assert status == 0 and not report["eager_on_cpu"]["agree"]
    assert "eager on CPU chooses other tokens; logits differ by at most" in capsys.readouterr().out


def test_kernels_that_did_not_run_are_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "launch_counts", dict)
    assert run()[0] == 1
    message = capsys.readouterr().out
    assert "FAILED: fattn_decode was planned" in message and "FAILED: fattn_decode did not run" in message


# ---- tokens per second, from invented times


def test_software_is_not_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The test below is the control: the same run as on a Mac."""
    monkeypatch.setattr(demo_speed.sys, "platform", "linux")
    status, report = run()
    message = capsys.readouterr().out
    assert status == 0 and "time means nothing" in message and "timing  " not in message
    assert list(report["speed"]) == ["not_timed"]


def test_a_mac_prints_tokens_per_second_of_both(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both implementations generate tokens; the times are invented."""
    monkeypatch.setattr(demo_speed.sys, "platform", "darwin")
    took = {"fattn": 0.02, "sdpa": 0.05}
    counted: dict[str, list[int]] = {name: [] for name in took}
    generate = demo.generate

    def timed(model: Any, inputs: Any, new_tokens: int, label: str) -> demo.Run:
        run = generate(model, inputs, new_tokens, label)
        if label.startswith("timing"):
            name = model.config._attn_implementation
            counted[name].append(sum(run.all_launches.values()))
            run.seconds = [10 * took[name]] + [took[name]] * (new_tokens - 1)
        return run

    monkeypatch.setattr(demo, "generate", timed)
    status, report = run()
    rounds = 1 + demo_speed.ROUNDS
    assert counted == {"fattn": [LAYERS * NEW_TOKENS] * rounds, "sdpa": [0] * rounds}
    message = capsys.readouterr().out
    assert status == 0 and "speed        fattn  100.0 tokens per second; prompt 200.0 ms" in message, message
    assert "             sdpa   40.0 tokens per second; prompt 500.0 ms" in message
    assert "fattn generates 2.50 times the tokens per second of sdpa" in message
    speed = report["speed"]
    assert speed["ratio"] == pytest.approx(2.5) and speed["sdpa"]["tokens_per_second"] == pytest.approx(40)
    assert demo_picture._speed(speed) == "Tokens per second: fattn 100.0, sdpa 40.0."


SLOW_START = [[99.0, 7.0, 7.0], *[[9.0, 0.5, 0.5]] * demo_speed.ROUNDS]


@pytest.mark.parametrize(
    ("rounds", "shown", "picture"),
    [
        (SLOW_START, "fattn  4.0 tokens per second; prompt 9000.0 ms", "Tokens per second: fattn 4.0."),
        ([[0.25]] * (1 + demo_speed.ROUNDS), "fattn  prompt 250.0 ms", "No tokens per second."),
    ],
    ids=["the first round is not counted", "a prompt alone has no rate"],
)
def test_speed(rounds: list[list[float]], shown: str, picture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_speed.sys, "platform", "darwin")
    turns = iter(rounds)

    def generate(name: str) -> list[float]:
        if name == "sdpa":
            raise ValueError("T5 does not support sdpa\nand more")
        return next(turns)

    speed, lines = demo_speed.speed_of(generate, batch=2)
    assert lines == [
        f"speed        {shown}",
        "             sdpa   does not run here: T5 does not support sdpa",
    ]
    assert speed["ratio"] is None and demo_picture._speed(speed) == picture
