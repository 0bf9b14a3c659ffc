"""The demo on a few tokens, and that it fails when it should."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command_line import save_checkpoint
from torch_fattn.commands import demo, demo_picture, demo_speed
from torch_fattn.integrations.transformers import attention, masks

NEW_TOKENS = 4
LAYERS = 4


def run_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.chdir(folder)
    return demo.main(None, "float32", NEW_TOKENS)


def test_tokens_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_in(tmp_path, monkeypatch) == 0
    printed = capsys.readouterr().out
    places = [printed.index(each) for each in ("OK: 8 tokens agree", "sequence 0", "launches ", "plans ")]
    assert places == sorted(places) and "pass 1" not in printed, printed
    report = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert report["agree"] and report["tokens"]["fattn"] == report["tokens"]["eager"]
    assert report["launches"]["fattn_prefill"] == LAYERS
    assert report["launches"]["fattn_decode"] == LAYERS * (NEW_TOKENS - 1)
    assert report["largest_logit_difference"] < 1e-4 < min(report["margin_per_step"])
    assert (tmp_path / "out" / "demo.png").stat().st_size > 10_000


def test_one_token_is_a_prefill_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert demo.main(None, "float32", 1, verbose=True) == 0
    assert "  pass 1       fattn_prefill from prefill.metal" in capsys.readouterr().out
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
    monkeypatch.setattr(attention, "restarts_of", lambda *_: None)  # by positions it would be refused
    assert run_in(tmp_path, monkeypatch) == 1
    assert "FAILED: tokens differ" in capsys.readouterr().out


def test_the_cpu_is_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generate = demo.generate

    def other_on_cpu(model: Any, *rest: Any) -> demo.Run:
        run = generate(model, *rest)
        if model.device.type == "cpu":
            run.tokens[0][0] += 1
        return run

    monkeypatch.setattr(demo, "generate", other_on_cpu)
    monkeypatch.chdir(tmp_path)
    assert demo.main(None, "float32", 1) == 0
    assert "eager on CPU chooses other tokens; logits differ by at most" in capsys.readouterr().out
    assert not json.loads((tmp_path / "out" / "demo.json").read_text())["eager_on_cpu"]["agree"]


def test_kernels_that_did_not_run_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "launch_counts", dict)
    assert run_in(tmp_path, monkeypatch) == 1
    message = capsys.readouterr().out
    assert "FAILED: fattn_decode was planned" in message and "FAILED: fattn_decode did not run" in message


# ---- tokens per second, from invented times


def test_software_is_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The test below is the control: the same run as on a Mac."""
    monkeypatch.setattr(demo_speed.sys, "platform", "linux")
    assert run_in(tmp_path, monkeypatch) == 0
    message = capsys.readouterr().out
    assert "time means nothing" in message and "timing  " not in message
    assert list(json.loads((tmp_path / "out" / "demo.json").read_text())["speed"]) == ["not_timed"]


def test_a_mac_prints_tokens_per_second_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both implementations generate tokens; the times are invented."""
    monkeypatch.setattr(demo_speed.sys, "platform", "darwin")
    took = {"fattn": 0.02, "sdpa": 0.05}
    counted: dict[str, list[int]] = {name: [] for name in took}
    generate = demo.generate

    def timed(model: Any, inputs: Any, new_tokens: int, progress: Any) -> demo.Run:
        run = generate(model, inputs, new_tokens, progress)
        if progress is None:
            name = model.config._attn_implementation
            counted[name].append(sum(demo.total_launches(run).values()))
            run.seconds = [10 * took[name]] + [took[name]] * (new_tokens - 1)
        return run

    monkeypatch.setattr(demo, "generate", timed)
    assert run_in(tmp_path, monkeypatch) == 0
    rounds = 1 + demo_speed.ROUNDS
    assert counted == {"fattn": [LAYERS * NEW_TOKENS] * rounds, "sdpa": [0] * rounds}
    message = capsys.readouterr().out
    assert "speed        fattn  100.0 tokens per second; prompt 200.0 ms" in message, message
    assert "             sdpa   40.0 tokens per second; prompt 500.0 ms" in message
    assert "fattn generates 2.50 times the tokens per second of sdpa" in message
    speed = json.loads((tmp_path / "out" / "demo.json").read_text())["speed"]
    assert speed["ratio"] == pytest.approx(2.5) and speed["sdpa"]["tokens_per_second"] == pytest.approx(40)
    assert demo_picture._speed(speed) == "Tokens per second: fattn 100.0, sdpa 40.0."


def made_up(seconds: dict[str, list[list[float]]]) -> Any:
    turns: dict[str, Iterator[list[float]]] = {name: iter(each) for name, each in seconds.items()}
    return lambda name: next(turns[name])


def test_the_first_round_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_speed.sys, "platform", "darwin")
    steady = [[9.0, 0.5, 0.5]] * demo_speed.ROUNDS
    slow_start = made_up({"fattn": [[99.0, 7.0, 7.0], *steady], "sdpa": [[9.0, 0.5, 0.5], *steady]})
    speeds = demo_speed.compare(slow_start, batch=2).speeds
    assert speeds["fattn"] == speeds["sdpa"] == demo_speed.Speed(9.0, 4.0)


def test_a_prompt_alone_has_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_speed.sys, "platform", "darwin")
    found = demo_speed.compare(lambda _: [0.25], batch=2)
    assert found.ratio is None and found.lines[0] == "speed        fattn  prompt 250.0 ms"
    assert demo_picture._speed(found.data) == "No tokens per second."


def test_an_implementation_that_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_speed.sys, "platform", "darwin")

    def generate(name: str) -> list[float]:
        if name == "sdpa":
            raise ValueError("T5 does not support sdpa\nand more")
        return [0.5, 0.25]

    found = demo_speed.compare(generate, batch=1)
    assert found.lines == [
        "speed        fattn  4.0 tokens per second; prompt 500.0 ms",
        "             sdpa   does not run here: T5 does not support sdpa",
    ]
    assert demo_picture._speed(found.data) == "Tokens per second: fattn 4.0."
