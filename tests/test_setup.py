"""setup.py: what it says where it cannot build, and what it asks of Apple's compiler."""

from __future__ import annotations

import os
import runpy
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import setuptools
import torch

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
