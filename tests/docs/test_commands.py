"""Commands of the documents: those in RUN run as they stand and print what the document says; the others name
targets, modules and scripts that exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import needs_emulator
from tests.helpers.documents import DOCUMENTS, PYTHONPATH, ROOT, blocks_of, commands_of, inline_commands_of
from tests.helpers.processes import run_python
from tests.helpers.run_page import output_of, same_output

RUN = [
    "python -m softmetal doctor",
    'eval "$(python -m softmetal config --env)"',
    "python -m torch_fattn explain paged_decode --batch 8 --heads 32 --kv-heads 8 --kv-len 4096 "
    '--chip "M3 Max" --verbose',
    "python -m torch_fattn explain prefill --heads 32 --kv-heads 8 --kv-len 1024 --causal --macos 15.6 "
    "--torch 2.15",
    "python -m torch_fattn explain prefill --heads 6 --kv-heads 4",
    "python -m torch_fattn explain decode --heads 32 --kv-heads 8 --kv-len 4096",
    "python -m torch_fattn tune --show",
    "python -m torch_fattn bench --shapes qwen3-0.6b --op decode --peers --backend counts",
]


def run(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`python` is this interpreter. Other commands need a shell."""
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "COLUMNS": "100"}
    if command.startswith("python "):
        return run_python(shlex.split(command)[1:], cwd=cwd, env=environment, timeout=300)
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=[needs_emulator] if "softmetal" in command or "counts" in command else [])
        for command in RUN
    ],
)
def test_commands_that_run_as_they_stand(command: str, tmp_path: Path) -> None:
    """Commands run, and print the documented output, on every page."""
    message = run(command, tmp_path)
    places = 0
    for path in DOCUMENTS:
        markdown = path.read_text(encoding="utf-8")
        blocks = blocks_of(markdown)
        for written, block in commands_of(markdown):
            if written != command:
                continue
            places += 1
            assert message.returncode == block.exit_status, message.stderr
            wanted = output_of(blocks, blocks.index(block))
            if wanted is not None:
                assert same_output(wanted.text, message.stdout + message.stderr), (
                    message.stdout + message.stderr
                )
    assert places or command in set().union(*(inline_commands_of(path.read_text()) for path in DOCUMENTS))


def unknown(markdown: str) -> list[str]:
    """Commands whose target, module or script does not exist."""
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony
    found = []
    for command in sorted({command for command, _ in commands_of(markdown)} | inline_commands_of(markdown)):
        program, *words = command.split()
        known = True
        if program == "make" and words[0] != "-C":
            known = words[0] in phony[1].split()
        elif program == "python" and words[0] == "-m":
            file = ROOT / words[1].replace(".", "/")
            ours = words[1].startswith(("torch_fat", "bench", "tests"))
            known = not ours or file.is_dir() or file.with_suffix(".py").is_file()
        elif program == "python":
            known = (ROOT / words[0]).is_file()
        found += [] if known else [command]
    return found


@pytest.mark.host_only
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_exist(path: Path) -> None:
    assert not unknown(path.read_text(encoding="utf-8"))


@pytest.mark.host_only
@pytest.mark.parametrize("command", ["make coffee", "python -m torch_fatn", "python examples/none.py"])
def test_an_unknown_command_would_be_noticed(command: str) -> None:
    markdown = f"Say `make tea` or `make build`.\n\n```sh\n{command}  # a comment\n```\n"
    assert unknown(markdown) == sorted(("make tea", command))


@pytest.mark.host_only
def test_another_output_would_be_noticed() -> None:
    assert same_output("in ... s\n", "in 3 s\n") and not same_output("grid 15\n", "grid 16\n")
    blocks = blocks_of("```sh\nls\n```\n\n<!-- output -->\n```text\nREADME.md\n```\n")
    wanted = output_of(blocks, 0)
    assert wanted is not None and wanted.text == "README.md\n"
    assert output_of(blocks_of("```sh\nls\n```\n\n```text\nREADME.md\n```\n"), 0) is None
