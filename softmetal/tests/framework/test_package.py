"""The Python package: the effects of importing it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import softmetal.control

pytest.importorskip("torch")
if not softmetal.control.LIBRARY.exists():
    pytest.skip("libsoftmetal.so is not built (python -m softmetal build)", allow_module_level=True)

# The process ends right after a `backward` that raises.
REFUSED = """
import torch
class Refuses(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 2
    @staticmethod
    def backward(context, grad):
        raise RuntimeError("refused")
try:
    Refuses.apply(torch.ones(3, device="mps", requires_grad=True)).sum().backward()
except RuntimeError:
    pass
"""


def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout + done.stderr


def test_import_is_light() -> None:
    assert (
        python("import softmetal, sys; print('torch' in sys.modules, 'numpy' in sys.modules)")
        == "False False\n"
    )


def test_switched_off() -> None:
    assert python("import torch; print(torch.backends.mps.is_available())", SOFTMETAL="0") == "False\n"


def test_not_built_is_one_warning() -> None:
    hide = "import softmetal.control as c, pathlib; c.LIBRARY = pathlib.Path('/nowhere.so'); "
    output = python(hide + "import torch; print(1)")
    assert (
        output.count("UserWarning") == 1 and "python -m softmetal build" in output and output.startswith("1")
    )


def test_process_ends_behind_a_refused_backward() -> None:
    """Repeated five times: the thread that releases the error last is random."""
    for _ in range(5):
        assert python(REFUSED) == ""
