"""Wrong arguments of `python -m softmetal`: one error line on standard error, exit status 2, no process
started."""

from __future__ import annotations

import subprocess

import pytest

from softmetal import __main__ as command_line
from softmetal import native


def status_of(words: str) -> int | str | None:
    try:
        command_line.main(words.split())
    except SystemExit as leaving:
        return leaving.code
    return 0


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Records commands instead of starting them."""
    started: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        started.append(command)
        return subprocess.CompletedProcess(command, returncode=0)

    monkeypatch.setattr(native.subprocess, "run", run)
    monkeypatch.setattr(native.shutil, "which", lambda tool: f"/bin/{tool}")
    return started


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        ("", "required: command"),
        ("buld", "invalid choice: 'buld'"),
        ("build -j 0", "-j/--jobs: '0' is not a positive whole number; give one"),
        ("build -j -2", "-j/--jobs: '-2' is not a positive whole number"),
        ("build -j many", "-j/--jobs: 'many' is not a positive whole number"),
        ("build --job 2", "unrecognized arguments: --job"),
        ("build all", "unrecognized arguments: all"),
        ("config", "required: --env"),
        ("config --env x", "unrecognized arguments: x"),
        ("doctor x", "unrecognized arguments: x"),
    ],
)
def test_wrong_arguments(
    refused: str, said: str, commands: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(refused) == 2
    printed = capsys.readouterr()
    assert said in printed.err and printed.err.count("\n") == 1 and not printed.out and not commands


def test_right_arguments(commands: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("build -j 2") == status_of("build") == status_of("config --env") == 0
    assert [command[-1] for command in commands if command[0] == "ninja"][0] == "-j2"
    assert "export CXX=" in capsys.readouterr().out


def test_a_failing_build_is_a_sentence(commands: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, returncode=int(command[0] == "ninja"))

    monkeypatch.setattr(native.subprocess, "run", fail)
    said = status_of("build")
    assert isinstance(said, str) and said.startswith("softmetal: ninja failed")
