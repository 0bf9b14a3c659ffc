"""Every command of the documents is in one table, which names its test. Commands that can run unchanged are
run, and their output is compared with the document."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import needs_emulator
from tests.helpers.document_commands import COMMANDS, ByTest, Run
from tests.helpers.documents import DOCUMENTS, PYTHONPATH, ROOT, blocks_of, commands_of, inline_commands_of
from tests.helpers.processes import run_python
from tests.helpers.run_page import output_of, same_output


def commands_in(markdown: str) -> set[str]:
    return {command for command, _ in commands_of(markdown)} | inline_commands_of(markdown)


def untold(markdown: str) -> set[str]:
    return commands_in(markdown) - COMMANDS.keys()


@pytest.mark.host_only
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_is_in_the_table(path: Path) -> None:
    assert not untold(path.read_text(encoding="utf-8"))


@pytest.mark.host_only
def test_another_command_would_be_noticed() -> None:
    assert untold("```sh\nmake build  # a comment\nmake \\\n  coffee\n```\n") == {"make coffee"}
    assert untold("Say `python -m torch_fattn fly` or `make build`.") == {"python -m torch_fattn fly"}
    assert untold("```text\nmake coffee\n```\n") == set()
    assert untold("<!-- not run: there is no cup -->\n```sh\nmake coffee\n```\n") == set()
    assert untold("<!-- not run: -->\n```sh\nmake coffee\n```\n") == {"make coffee"}


@pytest.mark.host_only
def test_every_command_of_the_table_is_written() -> None:
    written = set().union(*(commands_in(path.read_text(encoding="utf-8")) for path in DOCUMENTS))
    assert not COMMANDS.keys() - written


@pytest.mark.host_only
@pytest.mark.parametrize("by", sorted({kind.by for kind in COMMANDS.values() if isinstance(kind, ByTest)}))
def test_the_tests_that_it_names_are_there(by: str) -> None:
    name, function = by.split("::")
    assert re.search(rf"^def {function}\(", (ROOT / name).read_text(), re.MULTILINE), by


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
        for command, kind in COMMANDS.items()
        if isinstance(kind, Run)
    ],
)
def test_commands_that_run_as_they_stand(command: str, tmp_path: Path) -> None:
    """Commands run, and print the documented output, on every page."""
    message = run(command, tmp_path)
    for path in DOCUMENTS:
        markdown = path.read_text(encoding="utf-8")
        blocks = blocks_of(markdown)
        for written, block in commands_of(markdown):
            if written != command:
                continue
            assert message.returncode == block.exit_status, message.stderr
            wanted = output_of(blocks, blocks.index(block))
            if wanted is not None:
                assert same_output(wanted.text, message.stdout + message.stderr), (
                    message.stdout + message.stderr
                )


@pytest.mark.host_only
def test_another_output_would_be_noticed() -> None:
    assert same_output("in ... s\n", "in 3 s\n") and not same_output("grid 15\n", "grid 16\n")
    blocks = blocks_of("```sh\nls\n```\n\n<!-- output -->\n```text\nREADME.md\n```\n")
    wanted = output_of(blocks, 0)
    assert wanted is not None and wanted.text == "README.md\n"
    assert output_of(blocks_of("```sh\nls\n```\n\n```text\nREADME.md\n```\n"), 0) is None


@pytest.mark.host_only
def test_an_output_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.docs import update_outputs

    message = "# Page\n\n```sh\necho 4\n```\n\n<!-- output -->\n```text\n{}```\n\nAnd more.\n"
    page = tmp_path / "page.md"
    monkeypatch.setitem(COMMANDS, "echo 4", Run())
    for old, written in (("3\nand 2\n", True), ("4\n", False), ("...\n", False)):
        page.write_text(message.format(old))
        assert update_outputs.update(page) == written
        assert page.read_text() == message.format("4\n" if written else old)
