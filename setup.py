"""Builds torch_fattn._C: the ops everywhere, and with them the Metal path where torch has its MPS backend."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import setup

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError as error:
    BECAUSE = "torch_fattn is built against the torch that will run it, and"
    if error.name == "torch" and (Path(sysconfig.get_path("platlib")) / "torch").is_dir():
        sys.exit(
            f"{BECAUSE} pip's build isolation hides the torch that is installed: "
            "run `pip install --no-build-isolation .`"
        )
    sys.exit(
        f"{BECAUSE} none can be imported ({error}): "
        "run `pip install torch==2.13.0`, then `pip install --no-build-isolation .`"
    )

ROOT = Path(__file__).resolve().parent


def compiler_finds_metal() -> bool:
    """Elsewhere than on a Mac, Metal's headers are where the compiler was told to look."""
    flags = shlex.split(os.environ.get("CPPFLAGS", ""))
    folders = [flag.removeprefix("-I") for flag in flags if flag.startswith("-I")]
    return sys.platform == "darwin" or any(
        (Path(folder) / "Metal" / "Metal.h").is_file() for folder in folders
    )


def extension() -> CppExtension:
    sources = sorted(ROOT.glob("csrc/*.cpp")) + sorted(ROOT.glob("csrc/plan/*.cpp"))
    macros: list[tuple[str, str | None]] = []
    link_args: list[str] = []
    if torch.backends.mps.is_built():
        if not compiler_finds_metal():
            sys.exit(
                "torch_fattn: this torch has an mps device from softmetal, and the compiler misses its "
                'headers: run `eval "$(python -m softmetal config --env)"` and this again, or set '
                "SOFTMETAL=0 for a build without Metal"
            )
        sources += sorted(ROOT.glob("csrc/metal/*.mm"))
        macros.append(("FATTN_WITH_METAL", None))
        embed = [sys.executable, str(ROOT / "tools" / "embed_kernels.py")]
        subprocess.run([*embed, "--output", str(ROOT / "csrc/generated/kernel_sources.inc")], check=True)
        if sys.platform == "darwin":
            os.environ.setdefault("MACOSX_DEPLOYMENT_TARGET", "14.0")  # the first with Metal 3.1
            # A universal2 Python would compile every file twice; torch has no x86_64 wheel for macOS.
            os.environ.setdefault("ARCHFLAGS", "-arch arm64")
            link_args += ["-framework", "Metal", "-framework", "Foundation"]
    else:
        sources.remove(ROOT / "csrc" / "launch.cpp")
    return CppExtension(
        "torch_fattn._C",
        [str(source.relative_to(ROOT)) for source in sources],
        define_macros=macros,
        extra_compile_args={"cxx": ["-std=c++20", "-O2", "-g0", "-Wall", "-fvisibility=hidden"]},
        extra_link_args=link_args,
        depends=[str(header.relative_to(ROOT)) for header in ROOT.glob("csrc/**/*.h")]
        + ["csrc/generated/kernel_sources.inc"],
        py_limited_api=True,
    )


setup(
    ext_modules=[extension()],
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
