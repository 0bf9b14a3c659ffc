"""The worked additions of CONTRIBUTING.md: tests/project/additions has a diff for each."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import EMULATED, needs_emulator

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
HEADINGS = {
    "score_modifier": "A score modifier",
    "tensor_operand": "A tensor operand",
    "decode_flag": "A decode flag",
    "operator": "An operator",
}
# Tests of what the diffs add, in a copy that has all of them; and of all plans that were there before.
TESTS = {
    "tests/plan/test_golden.py": "",
    "tests/plan/test_plan.py": "float32_out",
    "tests/operators/test_random.py": "test_problem and limit0.5 and score_factors and sinks",
    "tests/operators/test_decode_options.py": "in_float32",
    "tests/operators/test_attention.py": "option and (score_limit or score_factors)",
    "tests/operators/test_logits.py": "log_softmax and (padded or permuted or opcheck or bounded)",
    "tests/refusals/test_bad_input.py": "score_limit",
}


def diff_of(name: str) -> Path:
    return ROOT / "tests/project/additions" / f"{name}.diff"


def listed(name: str) -> list[str]:
    """The files in the table of a section of CONTRIBUTING.md."""
    section = GUIDE.split(f"\n## {HEADINGS[name]}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `([\w./]+)` \|", section, re.MULTILINE)


def applied(diff: Path, folder: Path) -> list[str]:
    """Applies a diff to the files in the folder, which it copies, and returns their names."""
    names = re.findall(r"^\+\+\+ b/(.*)", diff.read_text(), re.MULTILINE)
    for name in names:
        if not (folder / name).exists() and (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    before = {name: (folder / name).read_text() for name in names if (folder / name).exists()}
    # Without a repository around the folder, git takes it for the root.
    environment = {**os.environ, "GIT_DIR": str(folder / "none")}
    done = subprocess.run(
        ["git", "apply", str(diff)], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stderr}Write {diff.name} again: CONTRIBUTING.md has the commands."
    return [name for name in names if (folder / name).read_text() != before.get(name)]


@pytest.mark.host_only
def test_the_tables_have_the_files_of_the_diffs(tmp_path: Path) -> None:
    for name in HEADINGS:
        files = applied(diff_of(name), tmp_path / name)
        assert sorted(files) == sorted(listed(name)), name
        assert not [file for file in files if file.startswith("tests/golden/")], name


@pytest.mark.host_only
def test_one_more_file_is_noticed(tmp_path: Path) -> None:
    """The control."""
    first = (ROOT / "SECURITY.md").read_text().splitlines()[0]
    more = f"--- a/SECURITY.md\n+++ b/SECURITY.md\n@@ -1 +1,2 @@\n+more\n {first}\n"
    diff = tmp_path / "more.diff"
    diff.write_text(diff_of("decode_flag").read_text() + more)
    assert set(applied(diff, tmp_path)) - set(listed("decode_flag")) == {"SECURITY.md"}


@pytest.mark.host_only
def test_every_diff_has_a_section() -> None:
    assert {path.stem for path in diff_of("").parent.glob("*.diff")} == HEADINGS.keys()


def run(copy: Path, *arguments: str) -> str:
    """The output of a command in a copy of the repository."""
    environment = {**os.environ, "FATTN_PCH": "1", "PYTHONPATH": os.pathsep.join((str(copy), *sys.path))}
    if EMULATED:
        from softmetal.testing import build_environment

        environment |= build_environment()
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def run_tests(copy: Path) -> None:
    names = (f"({Path(file).name} and {selected or 'test'})" for file, selected in TESTS.items())
    command = ["-m", "pytest", "-q", "-rp", "-p", "no:cacheprovider", "-n", "0", "-k", " or ".join(names)]
    said = run(copy, *command, *TESTS)
    assert {*re.findall(r"^PASSED ([\w/]+\.py)::", said, re.MULTILINE)} == TESTS.keys()
    assert "skipped" not in said


@needs_emulator
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout, which lists the sources")
def test_a_build_with_all_of_them(tmp_path: Path) -> None:
    """Their own tests pass, and the golden plans are those of a build without them."""
    subprocess.run([ROOT / "tools/copy_tree.sh", tmp_path], check=True)
    for name in HEADINGS:
        applied(diff_of(name), tmp_path)
    run(tmp_path, "setup.py", "-q", "build_ext", "--inplace")
    run_tests(tmp_path)
