"""How the framework gets a compiled module: from the index of the cache, from a server, or from a process."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

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


def test_a_server_compiles_like_a_process(
    value_of: Callable[[str], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match="undeclared identifier") as alone:
        value_of("unknown")
    with monkeypatch.context() as patch, compile_server():
        patch.setenv("SOFTMETAL_PYTHON", "/nowhere/python")
        assert value_of("5") == 5
        with pytest.raises(RuntimeError) as served:
            value_of("unknown")
        assert str(served.value) == str(alone.value)
        patch.setenv("SOFTMETAL_REFUSE", "nonsense")  # the server reads the client's environment
        with pytest.raises(RuntimeError, match="SOFTMETAL_REFUSE"):
            value_of("6")
    assert value_of("7") == 7


def test_a_server_of_another_checkout_does_not_answer() -> None:
    with compile_server():
        for package, answered in (("/elsewhere", False), (str(Path(__file__).parents[2] / "src"), True)):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(os.environ["SOFTMETAL_COMPILER"])
                client.sendall(f"{package}\0compile\0\0\0".encode())
                client.shutdown(socket.SHUT_WR)
                assert bool(client.recv(4096)) == answered


def test_requests_are_logged(kit: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each file, and in a process that has the pipeline already, too: a launch is a request."""
    x = torch.ones(64, device="mps")
    kit.scale(x)
    for log in (folder / "one", folder / "two"):
        monkeypatch.setenv("SOFTMETAL_REQUESTS", str(log))
        kit.scale(x), kit.scale(x)
        torch.mps.synchronize()
        assert re.fullmatch(r"\w{40}\.so\n", log.read_text())
