"""Builds the native libraries, and returns the flags for building an extension."""

from __future__ import annotations

import compileall
import os
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from .paths import BUILD, PACKAGE

CLANG = "clang++-19"
OBJC_FLAGS = [
    "-fobjc-runtime=gcc",
    "-fblocks",
    "-fconstant-string-class=NSConstantString",
    "-D_NATIVE_OBJC_EXCEPTIONS",
    "-DGNUSTEP",
    "-DGNUSTEP_BASE_LIBRARY=1",
    "-DGNU_RUNTIME=1",
]
# Packages of Debian 12.
APT_PACKAGES = " ".join((PACKAGE / "debian-packages.txt").read_text().split())


def missing_tools() -> list[str]:
    return [tool for tool in ("cmake", "ninja", CLANG) if shutil.which(tool) is None]


def build(jobs: int | None) -> None:
    """Compile the package's C++ into its folder `_build`."""
    if missing := missing_tools():
        sys.exit(f"softmetal: {', '.join(missing)} not found; install {APT_PACKAGES}.")
    if not os.access(PACKAGE, os.W_OK):
        sys.exit(
            f"softmetal: {PACKAGE} is read-only; install softmetal in a virtual environment of your own."
        )
    folder = BUILD / "cmake"
    configure = ["cmake", "-S", str(PACKAGE), "-B", str(folder), "-G", "Ninja"]
    configure += [f"-DCMAKE_CXX_COMPILER={shutil.which(CLANG)}", f"-DTORCH_DIR={_torch_folder()}"]
    for command in (configure, ["ninja", "-C", str(folder), *([f"-j{jobs}"] if jobs else [])]):
        done = subprocess.run(command, stdout=subprocess.DEVNULL if command is configure else None)
        if done.returncode != 0:
            sys.exit(
                f"softmetal: {command[0]} failed (its message is above); if the package was moved or copied, "
                f"delete {folder} and build again."
            )
    # Each compilation of a program starts an interpreter, which may lack permission to write byte code.
    compileall.compile_dir(PACKAGE, maxlevels=1, quiet=1)


def environment() -> dict[str, str]:
    """The variables that make setuptools and torch.utils.cpp_extension compile Objective-C++ for Metal."""
    includes = [f"-I{PACKAGE / 'framework' / 'include'}", "-isystem/usr/include/GNUstep"]
    includes += [f"-isystem{_gcc_objc_include()}"]
    libraries = [str(BUILD / "objcxx_personality.o"), f"-L{BUILD}", f"-Wl,-rpath,{BUILD}"]
    libraries += ["-lsoftmetal", "-lgnustep-base", "-lobjc", "-lBlocksRuntime"]
    return {
        "CXX": CLANG,
        "CC": CLANG.replace("++", ""),
        "CPPFLAGS": shlex.join(OBJC_FLAGS + includes),
        "LDFLAGS": shlex.join(libraries),
    }


def _torch_folder() -> Path:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit("softmetal: torch is not installed in this environment; install torch first.")
    return Path(spec.origin).parent


def _gcc_objc_include() -> Path:
    found = sorted(Path("/usr/lib/gcc").glob("*/*/include/objc/objc.h"))
    if not found:
        sys.exit(f"softmetal: <objc/objc.h> is missing; install {APT_PACKAGES}.")
    return found[-1].parent.parent
