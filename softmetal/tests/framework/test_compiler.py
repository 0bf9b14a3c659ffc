"""How the framework gets a compiled module: from the index of the cache, from a server, or from a process."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from softmetal.paths import PACKAGE
from softmetal.testing import compile_server

SOURCE = "kernel void f(device float* x [[buffer(0)]]) { *x = %s; }"
NO_COMPILER = "softmetal cannot run /nowhere/python"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and no server."""
    monkeypatch.setenv("SOFTMETAL_CACHE", str(tmp_path))
    monkeypatch.delenv("SOFTMETAL_COMPILER", raising=False)
    yield tmp_path


@pytest.fixture
def value_of(kit: ModuleType) -> Callable[[str], float]:
    def run(text: str) -> float:
        x = torch.zeros(1, device="mps")
        kit.run(SOURCE % text, "f", [x], {}, [], [1, 1, 1], [1, 1, 1], 0)
        return x.item()

    return run


def test_a_known_source_starts_no_process(
    value_of: Callable[[str], float], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert value_of("3") == 3
    monkeypatch.setenv("SOFTMETAL_PYTHON", "/nowhere/python")
    assert value_of("3") == 3
    with pytest.raises(RuntimeError, match=NO_COMPILER):
        value_of("4")
    monkeypatch.setenv("SOFTMETAL_CONTRACT", "0")
    with pytest.raises(RuntimeError, match=NO_COMPILER):
        value_of("3")
    monkeypatch.delenv("SOFTMETAL_CONTRACT")
    (module,) = folder.glob("*.so")
    module.write_bytes(module.read_bytes()[:-1] + b"?")
    with pytest.raises(RuntimeError, match=NO_COMPILER):
        value_of("3")


UPGRADE = f"""
import os, sys, torch
torch.ops.load_library(sys.argv[1])
for value in sys.argv[3:]:
    x = torch.zeros(1, device="mps")
    torch.ops.softmetal_kit.run({SOURCE!r} % value, "f", [x], {{}}, [], [1, 1, 1], [1, 1, 1], 0)
    os.utime(sys.argv[2])
"""


def test_an_index_entry_is_of_one_clang(
    kit: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upgrade of clang, also in the middle of a process, makes all earlier entries misses."""
    clang = folder / "clang++-19"
    clang.write_text(f'#!/bin/sh\nexec {shutil.which(clang.name)} "$@"\n')
    clang.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    library = next(path for path in torch.ops.loaded_libraries if "softmetal_kit" in path)
    command = [sys.executable, "-c", UPGRADE, library, str(clang)]
    subprocess.run([*command, "1", "2"], check=True)
    assert len([*folder.glob("source-*")]) == 1 and len([*folder.glob("*.so")]) == 2
    monkeypatch.setenv("SOFTMETAL_PYTHON", "/nowhere/python")
    assert NO_COMPILER in subprocess.run([*command, "1"], capture_output=True, text=True).stderr


def test_a_source_that_cannot_be_written_is_not_compiled(value_of: Callable[[str], float]) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with compile_server():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            with pytest.raises(RuntimeError, match="cannot write .*program_source: File too large"):
                value_of(f"1; }} // {'.' * 4096}\n {{")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_server_compiles_like_a_process(
    value_of: Callable[[str], float], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match="undeclared identifier") as alone:
        value_of("unknown")
    with monkeypatch.context() as patch, compile_server():
        patch.setenv("SOFTMETAL_PYTHON", "/nowhere/python")
        patch.setenv("SOFTMETAL_REQUESTS", str(folder / "requests"))
        assert value_of("5") == 5
        with pytest.raises(RuntimeError) as served:
            value_of("unknown")
        assert str(served.value) == str(alone.value)
        patch.setenv("SOFTMETAL_REFUSE", "nonsense")  # the server reads the client's environment
        with pytest.raises(RuntimeError, match="SOFTMETAL_REFUSE"):
            value_of("6")
        patch.delenv("SOFTMETAL_REFUSE")
        patch.setenv("SOFTMETAL_CACHE", "/dev/null")
        with pytest.raises(RuntimeError, match="Not a directory: '/dev/null"):
            value_of("6")
    assert value_of("7") == 7
    requests = (folder / "requests").read_text()
    assert re.fullmatch(r"\w{40}\.so\n", requests), requests


def test_a_server_compiles_for_the_translator_that_it_imported(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(PACKAGE, folder / "softmetal", ignore=shutil.ignore_patterns("_build"))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    with compile_server():

        def answers(package: Path) -> bool:
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(os.environ["SOFTMETAL_COMPILER"])
                client.sendall(f"{package}\0compile\0\0\0".encode())
                client.shutdown(socket.SHUT_WR)
                return client.recv(4096) != b""

        assert answers(folder) and not answers(PACKAGE.parent)
        (folder / "softmetal/msl/lexer.py").touch()
        assert not answers(folder)


def test_requests_are_logged(kit: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each file, and in a process that has the pipeline already, too: a launch is a request."""
    x = torch.ones(64, device="mps")
    kit.scale(x)
    for log in (folder / "one", folder / "two"):
        monkeypatch.setenv("SOFTMETAL_REQUESTS", str(log))
        kit.scale(x), kit.scale(x)
        torch.mps.synchronize()
        assert re.fullmatch(r"\w{40}\.so\n", log.read_text())
