"""Builds torch_fattn._C: the ops everywhere, and with them the Metal path where torch has its MPS backend."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from setuptools import setup

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError as error:
    sys.exit(
        "torch_fattn is built against the torch that will run it, and none can be imported "
        f"({error}): run `pip install torch==2.13.0`, then `pip install --no-build-isolation -e .`"
    )

ROOT = Path(__file__).resolve().parent


def extension() -> CppExtension:
    sources = sorted(ROOT.glob("csrc/*.cpp")) + sorted(ROOT.glob("csrc/plan/*.cpp"))
    macros: list[tuple[str, str | None]] = []
    link_args: list[str] = []
    if torch.backends.mps.is_built():
        sources += sorted(ROOT.glob("csrc/metal/*.mm"))
        macros.append(("FATTN_WITH_METAL", None))
        embed = [sys.executable, str(ROOT / "tools" / "embed_kernels.py")]
        subprocess.run([*embed, "--output", str(ROOT / "csrc/generated/kernel_sources.inc")], check=True)
        if sys.platform == "darwin":
            os.environ.setdefault("MACOSX_DEPLOYMENT_TARGET", "14.0")  # the first with Metal 3.1
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
