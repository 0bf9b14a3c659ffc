"""A pipeline of each kernel and dtype through the system's compiler, up to the function with its constants.

It takes a device, but not a GPU that runs the kernels: the runners of CI try it too, with other pipelines for
each commit. The emulator, for which every other test compiles, tries one kernel.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import EMULATED
from tests.helpers import problems
from tests.helpers.direct_launch import CONSTANTS, kernel_text
from tests.kernels.test_offline_compiler import KERNELS, LANGUAGE, TENSOR_LANGUAGE, commit, plans

pytestmark = pytest.mark.host_only

PROGRAM = Path(__file__).with_name("specialise.mm")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not EMULATED and sys.platform != "darwin":
        pytest.skip("there is no Metal on this machine")
    command, libraries = ["clang++"], ["-framework", "Foundation", "-framework", "Metal"]
    if EMULATED:
        from softmetal.testing import build_environment

        flags = build_environment()
        command, libraries = [flags["CXX"], *shlex.split(flags["CPPFLAGS"])], shlex.split(flags["LDFLAGS"])
    program = tmp_path_factory.mktemp("specialise") / "specialise"
    command += ["-std=c++20", "-Wno-deprecated-declarations", str(PROGRAM), "-o", str(program), *libraries]
    subprocess.run(command, check=True)
    return program


def refusal(program: Path, source: Path, standard: str, kernel: str, *rest: str) -> str:
    major, minor = re.findall(r"\d+", standard)
    version = str(int(major) << 16 | int(minor))
    done = subprocess.run([program, source, version, kernel, *rest], capture_output=True, text=True)
    if done.returncode == 3:
        pytest.skip("this machine has no Metal device")
    assert (done.returncode == 0) == (not done.stderr), done
    return done.stderr


def arguments(launch: dict[str, Any]) -> list[str]:
    macros = [f"-D{name}={value}" for name, value in launch["macros"].items()]
    return macros + [f"{CONSTANTS.index(name)}={value}" for name, value in launch["constants"].items()]


@pytest.mark.parametrize("dtype", problems.DTYPES, ids=problems.SHORT.get)
@pytest.mark.parametrize("kernel", KERNELS)
def test_specialises(kernel: str, dtype: torch.dtype, program: Path, tmp_path: Path) -> None:
    if EMULATED and (kernel, dtype) != ("mask_map", torch.float16):
        pytest.skip("other tests compile it for the emulator")
    source = tmp_path / "kernel.metal"
    source.write_text("kernel void empty() {}")
    standard = TENSOR_LANGUAGE if "tensor" in kernel else LANGUAGE
    if standard != LANGUAGE and (why := refusal(program, source, standard, "empty")):
        pytest.skip(f"this system has no {standard}: {why}")
    every = [launch for plan in plans(kernel, dtype) for launch in plan.passes]
    for name in {launch["source"] for launch in every}:
        launches = [launch for launch in every if launch["source"] == name]
        launch = launches[commit() % len(launches)]
        source.write_text(kernel_text(name))
        assert refusal(program, source, standard, launch["kernel"], *arguments(launch)) == "", launch


def test_a_refusal_is_noticed(program: Path, tmp_path: Path) -> None:
    source = tmp_path / "kernel.metal"
    source.write_text(
        "constant uint n [[function_constant(3)]];\nkernel void f(device uint* x) { *x = n + M; }"
    )
    assert refusal(program, source, LANGUAGE, "f", "-DM=2", "3=7") == "", "the control"
    assert refusal(program, source, LANGUAGE, "f", "3=7").startswith("library: ")
    assert refusal(program, source, LANGUAGE, "g", "-DM=2", "3=7").startswith("function: ")
    assert refusal(program, source, LANGUAGE, "f", "-DM=2", "3=True").startswith("function: ")
