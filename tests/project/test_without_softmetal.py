"""A process without softmetal, which a Mac lacks, and without a program on PATH collects the tests and
imports the modules of a Mac's commands."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import bench.__main__ as bench
from tests.helpers.documents import ROOT
from tests.helpers.processes import run_python

pytestmark = pytest.mark.host_only

FOR_NVIDIA = {"bench.backends.cuda.build", "bench.backends.cuda.run"}
# Arguments: modules, a comma, and arguments of pytest.
SCRIPT = """
import importlib, os, sys, torch
from importlib.machinery import ModuleSpec

class Absent:
    # As on a Mac, its spec has no origin: the folder of this name in a checkout is not a package.
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name.partition(".")[0] == "softmetal" else None

    def create_module(self, spec):
        raise ModuleNotFoundError(f"No module named {spec.name!r}", name=spec.name)

    exec_module = create_module

sys.meta_path.insert(0, Absent())
for name in [name for name in sys.modules if name.partition(".")[0] == "softmetal"]:
    del sys.modules[name]
os.environ["PATH"] = ""
comma = sys.argv.index(",")
sys.path.append("tools")
for name in sys.argv[1:comma]:
    importlib.import_module(name)

import pytest

options = ["--collect-only", "-q", "--assert=plain", "-p", "no:cacheprovider"]
sys.exit(pytest.main([*options, *sys.argv[comma + 1 :]]))
"""


def collect(*arguments: str, modules: Iterable[str] = ()) -> subprocess.CompletedProcess[str]:
    return run_python(["-c", SCRIPT, *sorted(modules), ",", *arguments], cwd=ROOT)


def modules_of_bench_and_tools() -> set[str]:
    files = (path.relative_to(ROOT).with_suffix("") for path in (ROOT / "bench").rglob("*.py"))
    names = {".".join(path.parts).removesuffix(".__init__") for path in files}
    return names | {path.stem for path in (ROOT / "tools").glob("*.py")}


def test_every_module_is_imported() -> None:
    modules = modules_of_bench_and_tools() - FOR_NVIDIA
    assert {"bench.report.run", "bench.backends.agx", "bench.peers.fattn", "first_mac"} <= modules
    done = collect("tests", modules=modules)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert done.stdout.count("\ntests/") > 5000


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        ("import softmetal", 2, "No module named 'softmetal'"),
        ("import subprocess; subprocess.run(['git', '--version'])", 2, "No such file or directory: 'git'"),
        ("import pytest; pytest.importorskip('softmetal.testing', reason='it is about it')", 5, "no tests"),
    ],
)
def test_a_twin_at_whose_top_it_is_used(line: str, status: int, message: str, tmp_path: Path) -> None:
    """The last one is right: a test about softmetal is left out."""
    (tmp_path / "test_twin.py").write_text(f"{line}\n\ndef test() -> None:\n    pass\n")
    done = collect("--rootdir", str(tmp_path), str(tmp_path))
    assert done.returncode == status and message in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("command", ["agx", "bounds"])
def test_commands_that_need_softmetal_name_it(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("softmetal", "softmetal.testing"):
        monkeypatch.setitem(sys.modules, name, None)
    assert bench.main([command]) == 2
    said = f"python -m bench {command}: it needs softmetal, which is for Linux; run it there\n"
    assert capsys.readouterr().err == said
    monkeypatch.setitem(bench.COMMANDS, command, "bench.nothing")
    with pytest.raises(ModuleNotFoundError, match="nothing"):
        bench.main([command])
