"""The Python package: the effects of importing it, and building an extension with setuptools as on a Mac."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import softmetal.control

pytest.importorskip("torch")
if not softmetal.control.LIBRARY.exists():
    pytest.skip("libsoftmetal.so is not built (python -m softmetal build)", allow_module_level=True)

SETUP = """
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension
import torch
assert torch.backends.mps.is_built()
setup(name="kit_product", ext_modules=[CppExtension("kit_product", ["scale.mm", "plain.cpp"])],
      cmdclass={"build_ext": BuildExtension})
"""
SCALE = """
#include <ATen/mps/MPSStream.h>
#include <torch/library.h>
#import <Metal/Metal.h>
static std::string name() { return [[at::mps::getCurrentMPSStream()->device() name] UTF8String]; }
TORCH_LIBRARY(kit_product, m) { m.def("device_name() -> str", name); }
"""
PLAIN = """
#include <Python.h>
extern "C" PyObject* PyInit_kit_product() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "kit_product", nullptr, -1};
  return PyModule_Create(&module);
}
"""
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


def test_torch_alone_has_mps() -> None:
    assert python("import torch; print((torch.ones(2, device='mps') + 1).tolist())") == "[2.0, 2.0]\n"


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


def test_build_with_setuptools(tmp_path: Path) -> None:
    for name, text in {"setup.py": SETUP, "scale.mm": SCALE, "plain.cpp": PLAIN}.items():
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "softmetal", "config", "--env"]
    exports = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = re.findall(r"^export (\w+)=", exports, flags=re.M)
    assert names == ["CXX", "CC", "CPPFLAGS", "LDFLAGS"]
    build = f"{exports}\n{shlex.quote(sys.executable)} setup.py -q build_ext --inplace"
    done = subprocess.run(["bash", "-ec", build], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    code = f"import torch, sys; sys.path.insert(0, {str(tmp_path)!r}); import kit_product; "
    assert python(code + "print(torch.ops.kit_product.device_name())").startswith("Software Metal on ")
