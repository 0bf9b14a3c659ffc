"""setup.py: what it says where it cannot build, and what it asks of Apple's compiler."""

from __future__ import annotations

import os
import runpy
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import setuptools
import torch
from torch.utils.cpp_extension import include_paths

from tests.conftest import needs_emulator

SETUP = Path(__file__).resolve().parent.parent / "setup.py"
pytestmark = pytest.mark.host_only


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs setup.py up to the call of setup() and returns that call's arguments."""
    arguments: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", arguments.update)
    monkeypatch.chdir(SETUP.parent)

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
    assert "isolation hides" not in text
    assert "pip install torch==2.13.0" in text and "--no-build-isolation" in text


@needs_emulator
def test_metal_in_software_needs_its_flags(configured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CPPFLAGS", raising=False)
    text = message(configured)
    assert 'eval "$(python -m softmetal config --env)"' in text and "SOFTMETAL=0" in text


@needs_emulator
def test_with_its_flags_it_builds(configured: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The control of the test above."""
    (tmp_path / "Metal").mkdir()
    (tmp_path / "Metal" / "Metal.h").touch()
    monkeypatch.setenv("CPPFLAGS", f"-DX -I{tmp_path}")
    monkeypatch.delenv("ARCHFLAGS", raising=False)
    (extension,) = configured()["ext_modules"]
    assert any(source.endswith(".mm") for source in extension.sources)
    assert "ARCHFLAGS" not in os.environ


def test_without_an_mps_device(configured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: False)
    (extension,) = configured()["ext_modules"]
    assert not any(source.endswith(".mm") or "launch" in source for source in extension.sources)


PIPELINES = SETUP.parent / "csrc" / "metal" / "pipelines.mm"
PRECISE = "options.mathFloatingPointFunctions = MTLMathFloatingPointFunctionsPrecise;"


@needs_emulator
@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("sdk", [[], ["-D__MAC_15_0=150000"]], ids=["macOS 14", "macOS 15"])
def test_compile_options_of_both_sdks(sdk: list[str], wrong: bool, tmp_path: Path) -> None:
    """The branch of an SDK that we do not have, by the compiler; the control has a misspelt name in it."""
    config = [sys.executable, "-m", "softmetal", "config"]
    environment = dict(
        line.split("=", 1)
        for line in subprocess.run(
            ["sh", "-c", f'eval "$({shlex.join([*config, "--env"])})"; env'],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        if "=" in line
    )
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
    """A universal2 Python asks for two. What the caller asks for stands."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: True)
    monkeypatch.setenv("ARCHFLAGS", given or "")
    if given is None:
        monkeypatch.delenv("ARCHFLAGS")
    monkeypatch.setenv("MACOSX_DEPLOYMENT_TARGET", "14.0")
    configured()
    assert os.environ["ARCHFLAGS"] == (given or "-arch arm64")
