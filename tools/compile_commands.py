"""Writes compile_commands.json, the compile commands of the extension for editors and clang-tidy.

python tools/compile_commands.py compile_commands.json
"""

from __future__ import annotations

import json
import os
import runpy
import shlex
import sys
import sysconfig
from pathlib import Path
from typing import Any

import setuptools

ROOT = Path(__file__).resolve().parent.parent


def extension() -> setuptools.Extension:
    """The extension as setup.py configures it."""
    configured: dict[str, Any] = {}
    setuptools.setup, sys.argv = configured.update, ["setup.py", "build_ext"]  # type: ignore[assignment]
    os.chdir(ROOT)
    runpy.run_path("setup.py")
    (only,) = configured["ext_modules"]
    assert isinstance(only, setuptools.Extension)
    return only


def commands(of: setuptools.Extension) -> list[dict[str, object]]:
    includes = [*of.include_dirs, sysconfig.get_path("include")]
    macros = [name if value is None else f"{name}={value}" for name, value in of.define_macros]
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    compiler += shlex.split(os.environ.get("CPPFLAGS", ""))
    flags = [f"-I{folder}" for folder in includes] + [f"-D{macro}" for macro in macros]
    flags += dict(of.extra_compile_args)["cxx"]
    return [
        {"directory": str(ROOT), "file": source, "arguments": [*compiler, *flags, "-c", source]}
        for source in of.sources
    ]


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve()
    target.write_text(json.dumps(commands(extension()), indent=1) + "\n")
