"""Lays out the sources as a kernel of the Hugging Face Hub, and builds it for the installed torch.

    python tools/hub_kernel.py layout DIR   build.toml, flake.nix, torch-ext and csrc, for `kernel-builder`
    python tools/hub_kernel.py build DIR    the layout, and in DIR/build what `kernel-builder` would build

The layout is generated from the sources. The operators move to the builder's namespace, so several versions
of a kernel can coexist in one process. `kernels` imports a module with the functions that transformers looks
up; the Python package is below it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NAME = "torch-fattn"
MODULE = "torch_fattn"
REPOSITORY = "torch-fattn/torch-fattn"
VERSION = 1  # of the kernel: increase it for incompatible changes
LICENSE = "Apache-2.0"
NAMESPACE = re.compile(r"\b(TORCH_LIBRARY(?:_FRAGMENT|_IMPL)?)\(fattn\b")
# The extension's module, which the builder generates, and command-line entry points.
LEFT_OUT = {"module.cpp", "__main__.py"}

FLAKE = """{
  description = "Flash attention for PyTorch on Apple GPUs";

  inputs = {
    kernel-builder.url = "github:huggingface/kernels";
  };

  outputs =
    { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;
    };
}
"""
HUB_HEADER = """// The operators are registered in the namespace of this build of the kernel.
#pragma once
#include <torch/library.h>

#define HUB_TEXT_OF(name) #name
#define HUB_TEXT(name) HUB_TEXT_OF(name)
#define HUB_TORCH_LIBRARY(name, library) TORCH_LIBRARY(name, library)
#define HUB_TORCH_LIBRARY_FRAGMENT(name, library) TORCH_LIBRARY_FRAGMENT(name, library)
#define HUB_TORCH_LIBRARY_IMPL(name, key, library) TORCH_LIBRARY_IMPL(name, key, library)
"""
BINDING = """#include "registration.h"

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
"""
# Replaces the builder's own header in a variant that is built here.
REGISTRATION = """#pragma once
#include <Python.h>
#define JOINED_(a, b) a##b
#define JOINED(a, b) JOINED_(a, b)
#define TEXT_(name) #name
#define TEXT(name) TEXT_(name)
#define REGISTER_EXTENSION(name)                                                                          \\
  PyMODINIT_FUNC JOINED(PyInit_, name)() {                                                                \\
    static PyModuleDef module = {PyModuleDef_HEAD_INIT, TEXT(name), nullptr, 0, nullptr, nullptr, nullptr, \\
                                 nullptr, nullptr};                                                       \\
    return PyModule_Create(&module);                                                                      \\
  }
"""
ENTRY = '''"""torch_fattn as a kernel of the Hub: `attn_implementation="{repository}"`, or its operators."""

from .fattn import *  # noqa: F403
from .fattn import __version__
from .fattn.integrations.transformers.kernel import flash_attn_forward, supports_flash_attn  # noqa: F401
'''
EXTENSION = '''"""The builder's _ops.py loads the extension; `kernels` chose the variant for this torch."""

from __future__ import annotations

import torch

from ... import _ops  # noqa: F401


def load() -> str:
    return torch.__version__
'''


def lay_out(folder: Path) -> None:
    for name in ("csrc", "torch-ext"):
        shutil.rmtree(folder / name, ignore_errors=True)
    sources = lay_out_extension(folder / "csrc")
    lay_out_package(folder / "torch-ext" / MODULE)
    (folder / "torch-ext" / "torch_binding.cpp").write_text(BINDING)
    (folder / "flake.nix").write_text(FLAKE)
    (folder / "build.toml").write_text(build_toml([f"csrc/{source}" for source in sources]))
    shutil.copy(ROOT / "LICENSE", folder)


def lay_out_extension(folder: Path) -> list[str]:
    """Returns the compiled sources."""
    compiled = []
    for file in sorted((ROOT / "csrc").rglob("*")):
        name = file.relative_to(ROOT / "csrc")
        if file.suffix not in (".cpp", ".h", ".mm") or name.name in LEFT_OUT or name.parts[0] == "generated":
            continue
        text, libraries = NAMESPACE.subn(r"HUB_\1(TORCH_EXTENSION_NAME", file.read_text(encoding="utf-8"))
        text, names = re.subn(r'"fattn::', 'HUB_TEXT(TORCH_EXTENSION_NAME) "::', text)
        if libraries or names:
            text = '#include "hub_library.h"\n' + text
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
        if file.suffix != ".h":
            compiled.append(name.as_posix())
    (folder / "hub_library.h").write_text(HUB_HEADER)
    embed = [sys.executable, str(ROOT / "tools" / "embed_kernels.py")]
    subprocess.run([*embed, "--output", str(folder / "generated" / "kernel_sources.inc")], check=True)
    return compiled


def lay_out_package(folder: Path) -> None:
    for file in sorted((ROOT / MODULE).rglob("*.py")):
        name = file.relative_to(ROOT / MODULE)
        if name.name in LEFT_OUT:
            continue
        target = folder / "fattn" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        up = "." * (len(name.parts) + 1)
        target.write_text(in_the_namespace(file.read_text(encoding="utf-8"), up), encoding="utf-8")
    (folder / "fattn" / "runtime" / "extension.py").write_text(EXTENSION)
    (folder / "__init__.py").write_text(ENTRY.format(repository=REPOSITORY))


def in_the_namespace(text: str, up: str) -> str:
    """Replaces torch.ops.fattn with the `ops` of the builder's _ops.py, which also prefixes operator
    names."""
    text, uses = re.subn(r"(?<!`)torch\.ops\.fattn\b(?!\.\*)", "_hub.ops", text)
    text, names = re.subn(r'(f?)"fattn::([^"]*)"', r'_hub.add_op_namespace_prefix(\1"\2")', text)
    if not uses and not names:
        return text
    marker = "from __future__ import annotations\n"
    if marker not in text:
        raise ValueError(f"hub_kernel: a module that uses the operators has no line {marker!r}")
    return text.replace(marker, f"{marker}\nfrom {up} import _ops as _hub\n", 1)


def build_toml(sources: list[str]) -> str:
    listed = "".join(f'  "{source}",\n' for source in sources)
    return f"""[general]
edition = 5
name = "{NAME}"
version = {VERSION}
license = "{LICENSE}"
backends = ["metal"]

[general.hub]
repo-id = "{REPOSITORY}"

[torch]
src = ["torch-ext/torch_binding.cpp"]

# Metal compiles the kernels at their first use, from the sources in csrc/generated.
[kernel.fattn]
backend = "metal"
depends = ["torch"]
include = ["csrc"]
cxx-flags = ["-DFATTN_WITH_METAL", "-std=c++20", "-fvisibility=hidden"]
src = [
{listed}]
"""


def build(folder: Path) -> Path:
    """Builds the variant for this torch and machine; on Linux the Metal part runs in software."""
    import torch
    from torch.utils import cpp_extension

    lay_out(folder)
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file() and "build" not in path.parts):
        digest.update(file.read_bytes())
    namespace = f"_{MODULE}_metal_{digest.hexdigest()[:7]}"
    variant = folder / "build" / variant_name(torch.__version__)
    shutil.rmtree(variant, ignore_errors=True)
    shutil.copytree(folder / "torch-ext" / MODULE, variant)
    with_objects = folder / "build" / "objects"
    with_objects.mkdir(parents=True, exist_ok=True)
    (with_objects / "registration.h").write_text(REGISTRATION)
    sources = [folder / "torch-ext" / "torch_binding.cpp"]
    # torch names an object after its source file only, and folders have files of the same name.
    for path in sorted(path for path in (folder / "csrc").rglob("*") if path.suffix in (".cpp", ".mm")):
        unit = with_objects / "_".join(path.relative_to(folder / "csrc").parts)
        unit.write_text(f'#include "{path}"\n')
        sources.append(unit)
    flags = shlex.split(os.environ.get("CPPFLAGS", ""))
    frameworks = ["-framework", "Metal", "-framework", "Foundation"] if sys.platform == "darwin" else []
    cpp_extension.load(
        namespace,
        [str(source) for source in sources],
        extra_cflags=[*flags, "-DFATTN_WITH_METAL", "-std=c++20", "-O2", "-fvisibility=hidden"],
        extra_ldflags=[*shlex.split(os.environ.get("LDFLAGS", "")), *frameworks],
        extra_include_paths=[str(with_objects), str(folder / "csrc")],
        build_directory=str(with_objects),
        is_python_module=False,
        is_standalone=False,
        verbose=False,
    )
    shutil.copy(with_objects / f"{namespace}.so", variant / f"{namespace}.abi3.so")
    (variant / "_ops.py").write_text(ops_module(namespace))
    (variant / "metadata.json").write_text(json.dumps(metadata(namespace), indent=2) + "\n")
    return variant


def metadata(namespace: str) -> dict[str, Any]:
    return {
        "id": namespace,
        "name": NAME,
        "version": VERSION,
        "license": LICENSE,
        "python-depends": [],
        "backend": {"type": "metal"},
    }


def variant_name(torch_version: str) -> str:
    versions = runpy.run_path(str(ROOT / MODULE / "runtime" / "versions.py"))
    major, minor = versions["minor"](torch_version)
    machine = {"arm64": "aarch64"}.get(platform.machine(), platform.machine())
    return f"torch{major}{minor}-metal-{machine}-{platform.system().lower()}"


def ops_module(namespace: str) -> str:
    return f'''import torch

from . import {namespace}  # noqa: F401

ops = torch.ops.{namespace}


def add_op_namespace_prefix(op_name: str) -> str:
    return f"{namespace}::{{op_name}}"
'''


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=["layout", "build"])
    parser.add_argument("folder", type=Path, metavar="DIR")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if options.command == "layout":
        lay_out(folder)
        print(folder)
    else:
        print(build(folder))


if __name__ == "__main__":
    main()
