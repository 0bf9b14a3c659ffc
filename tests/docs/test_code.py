"""The python blocks of the documents run, and print what the documents say."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import needs_emulator
from tests.helpers.documents import PAGES, PYTHONPATH, ROOT, blocks_of
from tests.helpers.processes import run_python

WITH_CODE = [
    path
    for path in (*PAGES, ROOT / "README.md", ROOT / "softmetal/README.md", ROOT / "softmetal/docs/cuda.md")
    if any(block.language in ("python", "py") for block in blocks_of(path.read_text(encoding="utf-8")))
]


def run(page: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "TMPDIR": str(folder)}
    return run_python(["-m", "tests.helpers.run_page", page], cwd=folder, env=environment, timeout=300)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            id=str(page.relative_to(ROOT)),
            marks=[needs_emulator] if page.is_relative_to(ROOT / "softmetal") else [],
        )
        for page in WITH_CODE
    ],
)
def test_a_page_runs(page: Path, tmp_path: Path) -> None:
    done = run(page, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.host_only
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("```python\nx = 1\n```\n\n```python\nassert x == 1\n```\n", None),
        ("```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n", "page.md:6: the block fails"),
        ("```python\nimport torch_fatn\n```\n", "No module named 'torch_fatn'"),
        ("```python\nprint(3)\n```\n\n<!-- output -->\n```text\n3\n```\n", None),
        ("```python\nprint(3)\n```\n\n<!-- output -->\n```text\n4\n```\n", "the block prints\n3\nand not\n4"),
        ("<!-- not run: no such thing -->\n```python\nimport torch_fatn\n```\n", None),
        ("```text\nimport torch_fatn\n```\n", None),
    ],
)
def test_a_failure_is_noticed(text: str, problem: str | None, tmp_path: Path) -> None:
    from tests.helpers.run_page import run as run_here

    found = run_here("page.md", text)
    assert (found is None) if problem is None else (problem in str(found)), found


@pytest.mark.host_only
def test_a_failing_page_is_a_failing_process(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("```python\n1 / 0\n```\n")
    done = run(tmp_path / "page.md", tmp_path)
    assert done.returncode == 1 and "page.md:2: the block fails" in done.stderr
