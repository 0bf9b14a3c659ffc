"""setup.py: its messages where it cannot build, and its options for Apple's compiler."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path
from typing import Any

import pytest
import setuptools
import torch
from torch.utils.cpp_extension import include_paths

import torch_fattn
from tests.conftest import EMULATED, needs_emulator

SETUP = Path(__file__).resolve().parents[2] / "setup.py"
pytestmark = pytest.mark.host_only


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs setup.py up to the call of setup() and returns that call's arguments."""
    arguments: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", arguments.update)
    monkeypatch.chdir(SETUP.parent)
    monkeypatch.setenv("PATH", os.environ["PATH"])  # setup.py adds to it

    def run() -> dict[str, Any]:
        runpy.run_path(str(SETUP))
        return arguments

    return run


def message(run: Any) -> str:
    with pytest.raises(SystemExit) as caught:
        run()
    assert isinstance(caught.value.code, str) and "\n" not in caught.value.code
    return caught.value.code


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)


@pytest.mark.usefixtures("no_torch")
def test_build_isolation(configured: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torch is among the installed packages of this Python and yet cannot be imported."""
    (tmp_path / "torch").mkdir()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    text = message(configured)
    assert "pip's build isolation hides the torch that is installed" in text
    assert "run `pip install --no-build-isolation .`" in text and "torch==" not in text


@pytest.mark.usefixtures("no_torch")
def test_no_torch_at_all(configured: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    text = message(configured)
    assert "isolation hides" not in text and "'setuptools>=77'" in text
    assert "pip install 'torch>=2.13,<2.16'" in text and "--no-build-isolation" in text


@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize("command", ["sdist", "egg_info"])
def test_the_source_archive_needs_no_torch(
    command: str, configured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FATTN_LOCAL_VERSION", "1")
    monkeypatch.setattr(sys, "argv", ["setup.py", command])
    arguments = configured()
    assert "ext_modules" not in arguments
    assert arguments["version"] == torch_fattn.__version__
    assert arguments["install_requires"] == ["torch>=2.13,<2.16"]
    monkeypatch.setattr(sys, "argv", ["setup.py", "bdist_wheel"])
    assert "is built against the torch that will run it" in message(configured)


@pytest.mark.skipif(
    not (SETUP.parent / ".git").exists(), reason="not a git checkout, which lists the sources"
)
def test_the_source_archive_is_whole(tmp_path: Path) -> None:
    """All that a build reads, and no test."""
    build = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path)]
    subprocess.run([*build, str(SETUP.parent)], check=True, capture_output=True)
    (archive,) = tmp_path.iterdir()
    folder = f"torch_fattn-{torch_fattn.__version__}"
    assert archive.name == f"{folder}.tar.gz"
    with tarfile.open(archive) as opened:
        inside = {name.removeprefix(f"{folder}/") for name in opened.getnames()}
    command = ["git", "ls-files", "csrc", "torch_fattn"]
    sources = subprocess.run(command, cwd=SETUP.parent, capture_output=True, text=True, check=True).stdout
    wanted = {*sources.split(), "setup.py", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"}
    assert len(wanted) > 100 and {*wanted, "tools/embed_kernels.py"} <= inside
    assert not [
        name for name in inside if name.startswith("tests") or "generated" in name or name.endswith(".so")
    ]


@pytest.mark.parametrize(
    ("version", "label"), [("2.13.0+cpu", "2.13"), ("2.14.1", "2.14"), ("2.15.2a0+git12", "2.15")]
)
def test_a_wheel_names_its_torch(
    version: str, label: str, configured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: False)
    monkeypatch.setattr(torch, "__version__", version)
    arguments = configured()
    assert arguments["version"] == torch_fattn.__version__
    assert arguments["options"]["bdist_wheel"]["build_number"] == label.replace(".", "")
    after = f"2.{int(label[2:]) + 1}"
    assert arguments["install_requires"] == [f"torch>={label},<{after}"]
    monkeypatch.setenv("FATTN_LOCAL_VERSION", "1")
    arguments = configured()
    assert arguments["version"] == f"{torch_fattn.__version__}+torch{label}"
    assert "build_number" not in arguments["options"]["bdist_wheel"]


@pytest.mark.parametrize("version", ["2.12.1", "2.16.0"])
def test_a_torch_outside_the_range(version: str, configured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert f"made for torch 2.13 to 2.15, and this is torch {version}: run `pip install" in message(
        configured
    )


def test_links_of_the_readme_are_absolute(configured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every one leads into the repository, to a file that is there."""
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: False)
    text = configured()["long_description"]
    links = re.findall(r"\]\(([^)\s]+)\)|<img\b[^>]*\bsrc=\"([^\"]+)", text)
    targets = [inline or html for inline, html in links]
    assert len(targets) > 5
    ours = re.compile(
        r"https://(github|raw\.githubusercontent)\.com/torch-fattn/torch-fattn/(blob/)?main/([^#]+)"
    )
    for target in targets:
        assert target.startswith(("https://", "#")), target
        if (found := ours.match(target)) is not None:
            assert (SETUP.parent / found[3]).exists(), target
            assert target.endswith(".png") == found[1].startswith("raw"), target
    assert sum(ours.match(target) is not None for target in targets) > 5


def emulator_flags() -> dict[str, str]:
    if not EMULATED:
        return {}
    from softmetal.testing import build_environment

    return dict(build_environment())


PIPELINES = SETUP.parent / "csrc" / "metal" / "pipelines.mm"
PRECISE = "options.mathFloatingPointFunctions = MTLMathFloatingPointFunctionsPrecise;"


@needs_emulator
@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("sdk", [[], ["-D__MAC_15_0=150000"]], ids=["macOS 14", "macOS 15"])
def test_compile_options_of_both_sdks(sdk: list[str], wrong: bool, tmp_path: Path) -> None:
    """The branch of an SDK that we do not have, by the compiler; the control has a misspelt name in it."""
    environment = emulator_flags()
    text = PIPELINES.read_text()
    assert text.count(PRECISE) == 1
    source = tmp_path / "pipelines.mm"
    source.write_text(text.replace("FunctionsPrecise;", "FunctionsExact;") if wrong else text)
    folders = [f"-isystem{path}" for path in include_paths()]
    command = [environment["CXX"], *shlex.split(environment["CPPFLAGS"]), "-std=c++20", "-fsyntax-only"]
    command += [*sdk, *folders, f"-I{PIPELINES.parent}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PIPELINES.parent)
    assert (done.returncode == 0) == (not wrong or not sdk), done.stderr


@pytest.mark.parametrize("given", [None, "-arch x86_64"])
def test_one_architecture_on_macos(
    configured: Any, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    """A universal2 Python requests two architectures. The caller's choice has priority."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: True)
    monkeypatch.setenv("ARCHFLAGS", given or "")
    if given is None:
        monkeypatch.delenv("ARCHFLAGS")
    monkeypatch.setenv("MACOSX_DEPLOYMENT_TARGET", "14.0")
    monkeypatch.setenv("_PYTHON_HOST_PLATFORM", "")
    monkeypatch.delenv("_PYTHON_HOST_PLATFORM")
    configured()
    assert os.environ["ARCHFLAGS"] == (given or "-arch arm64")
    assert os.environ.get("_PYTHON_HOST_PLATFORM") == (None if given else "macosx-14.0-arm64")
