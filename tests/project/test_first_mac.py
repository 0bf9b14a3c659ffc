"""tools/first_mac.py continues when a step fails, hangs or is missing, hides names, and runs on softmetal."""

from __future__ import annotations

import getpass
import json
import re
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import needs_emulator
from tests.helpers.processes import run_python
from tools import first_mac
from tools.first_mac import Step
from torch_fattn.commands.doctor import FIND_FAULTS

ROOT = Path(__file__).resolve().parents[2]


def python(name: str, text: str, seconds: int = 60) -> Step:
    return Step(name, (sys.executable, "-c", text), seconds)


def contents(archive: Path) -> dict[str, str]:
    with zipfile.ZipFile(archive) as opened:
        return {Path(name).name: opened.read(name).decode() for name in opened.namelist()}


@needs_emulator
def test_rehearsal(tmp_path: Path) -> None:
    command = [sys.executable, "tools/first_mac.py", "--rehearse", "--out", str(tmp_path / "mac")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    files = contents(tmp_path / "mac.zip")
    names = ["bench.json", "bench.txt", "compile.txt", "doctor.txt", "facts.txt", "tests.txt", "tune.txt"]
    assert list(files) == ["summary.md", *names]
    assert done.stdout.startswith("compile ")
    for op, kernel in (("decode", "decode_vector"), ("merge", "merge"), ("prefill_backward", "backward_key")):
        assert re.search(
            rf"^{op} float16: compiled .*(\n  .*)*\n  fattn_{kernel} in [\d.]+ s", files["compile.txt"], re.M
        )
    said = {"doctor": "No problems found.", "tests": "1 passed", "tune": "written"}
    for name, message in (said | {"compile": "refused: none"}).items():
        assert message in files[f"{name}.txt"]
        assert f"| {name} | ok |" in files["summary.md"] and message in files["summary.md"]
    assert "torch 2." in files["summary.md"] and "name a fault of the GPU: 0" in files["summary.md"]
    assert json.loads(files["bench.json"])
    assert files["summary.md"] in done.stdout and "attach" in done.stdout.splitlines()[-1]


@pytest.mark.host_only
def test_it_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [
        python("fails", "import sys; print('half | done'); sys.exit(3)"),
        python("hangs", "import time; print('waiting', flush=True); time.sleep(60)", seconds=1),
        Step("missing", ("/nonexistent/program",), 60),
        python("faults", "print('error: (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)')"),
        python("works", f"print({str(tmp_path)!r}, 'is well')"),
    ]
    assert first_mac.run_all(tmp_path / "mac", steps) == 1
    files = contents(tmp_path / "mac.zip")
    summary = files["summary.md"]
    assert set(files) == {"summary.md", *(f"{step.name}.txt" for step in steps)}
    for row in (
        "| fails | exit status 3 |",
        "half / done",
        "| hangs | stopped after 1 s |",
        "| missing | not started: No such file",
        "| faults | ok |",
        "name a fault of the GPU: 1",
        "| works | ok |",
    ):
        assert row in summary, row
    assert files["hangs.txt"].startswith("waiting\n")
    assert str(tmp_path) not in summary + files["works.txt"]
    assert summary in capsys.readouterr().out
    assert first_mac.run_all(tmp_path / "mac", steps[-1:]) == 0, "the control"
    assert set(contents(tmp_path / "mac.zip")) == {"summary.md", "works.txt"}


@pytest.mark.host_only
def test_it_removes_nothing_but_an_earlier_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(first_mac, "steps", lambda *_: [python("facts", "print('is well')")])
    folder = tmp_path / "mac"
    rehearse = ["--rehearse", "--out", str(folder)]
    assert first_mac.main(rehearse) == first_mac.main(rehearse) == 0, "the control"
    (folder / "thesis.tex").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for out, message in ((folder, "contains thesis.tex"), (tmp_path / "file", "Not a directory")):
        with pytest.raises(SystemExit, match="2"):
            first_mac.main(["--rehearse", "--out", str(out)])
        words = capsys.readouterr().err
        assert message in words and words.count("\n") == 1 and "give a new folder" in words
    assert (folder / "thesis.tex").read_text() == (tmp_path / "file").read_text() == "mine"


@pytest.mark.host_only
def test_it_is_for_a_mac(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(first_mac, "steps", lambda *_: [python("facts", "print('is well')")])
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(SystemExit, match="2"):
        first_mac.main(["--out", str(tmp_path / "mac")])
    assert "not a Mac; give --rehearse" in capsys.readouterr().err and not (tmp_path / "mac").exists()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert first_mac.main(["--out", str(tmp_path / "mac")]) == 0, "the control"


def test_the_refused_kernel_is_named() -> None:
    """A head size that no kernel has."""
    done = run_python(["-c", first_mac.COMPILE, "7", "float16"])
    assert done.returncode == 1 and "\ndecode float16: REFUSED: fattn.decode: " in done.stdout
    assert "refused: prefill float16, decode float16, " in done.stdout.splitlines()[-1]


@pytest.mark.host_only
def test_it_hides_names(monkeypatch: pytest.MonkeyPatch) -> None:
    users = "/Users"
    monkeypatch.setattr(getpass, "getuser", lambda: "anna")
    monkeypatch.setattr(socket, "gethostname", lambda: "Annas-Mac.local")
    monkeypatch.setattr(Path, "home", lambda: Path(users, "anna"))
    message = f"{ROOT}/tests {users}/anna/x {users}/ben/y anna@Annas-Mac.local Annas-Mac: annals of Hanna"
    assert first_mac.anonymous(message) == f"./tests ~/x {users}/USER/y USER@HOST HOST: annals of Hanna"


@pytest.mark.host_only
@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("Error: command buffer exited with error status.", True),
        ("Caused GPU Hang Error (00000003:kIOGPUCommandBufferCallbackErrorHang)", True),
        ("2026-01-31 12:00:00 kernel (AGXG14X) GPU restart due to timeout", True),
        ('Filtering the log data using "composedMessage CONTAINS[c] "GPU restart""', False),
        (f"-> {FIND_FAULTS}", False),
        ("prefill float16   1.0e-03   1.2 ms", False),
    ],
)
def test_lines_that_name_a_fault(line: str, fault: bool) -> None:
    assert (first_mac.FAULT.search(line) is not None) == fault
