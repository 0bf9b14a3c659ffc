"""The wheel contains the inputs of `python -m softmetal build` and the MSL compiler, but no build output."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent
SOURCES = PROJECT / "src" / "softmetal"


@pytest.mark.skipif(not SOURCES.is_dir(), reason="the sources are not beside the tests")
def test_the_wheel_is_complete(tmp_path: Path) -> None:
    project = tmp_path / "project"
    ignored = shutil.ignore_patterns(
        "_build", "build", "dist", "out", ".venv", "*.egg-info", "__pycache__", "tests"
    )
    shutil.copytree(PROJECT, project, ignore=ignored)
    package = project / "src"
    expected = {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file()}
    built = package / "softmetal" / "_build" / "cmake"
    built.mkdir(parents=True)
    (built / "probe.cpp").touch()
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", str(tmp_path), str(project)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if name.startswith("softmetal/")} == expected
    assert {"softmetal/simt/fiber_x86_64.S", "softmetal/msl/stub/metal_stdlib"} <= expected
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert len({name.partition("/")[0] for name in names}) == 2  # the package and its metadata
