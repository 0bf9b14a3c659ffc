"""llama.cpp's Metal sources (ggml-org, MIT licence), from the source archive of llama-cpp-python.

LLAMA_CPP_SDIST names the archive:
    pip download llama-cpp-python==0.3.36 --no-deps --no-binary=:all:
"""

from __future__ import annotations

import functools
import os
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from ..cases.calls import METAL_TYPES, Call
from .archives import unpack

if TYPE_CHECKING:
    from softmetal.testing.cuda import Pipeline

IMPL = "llama-metal"
VERSION = "0.3.36"
_PARTS = ("/ggml/src/ggml-metal/", "/ggml/src/ggml-common.h")
_KARGS_TYPES = {"int32_t": "i", "uint64_t": "Q", "float": "f"}

Constants = dict[str, bool | int | float]


@functools.cache
def folder() -> Path | None:
    """Extracts ggml's sources, and returns their folder."""
    archive = os.environ.get("LLAMA_CPP_SDIST")
    if not archive:
        return None
    how = f"name the archive llama_cpp_python-{VERSION}.tar.gz, or unset it"
    place = "llama_cpp_python-*/vendor/llama.cpp/ggml/src"
    return unpack("LLAMA_CPP_SDIST", archive, _PARTS, place, how)


def version() -> str:
    sources = folder()
    return sources.parents[3].name.removeprefix("llama_cpp_python-") if sources else "not installed"


def _metal() -> Path:
    sources = folder()
    assert sources is not None
    return sources / "ggml-metal"


def text(name: str) -> str:
    """Returns the text of a file of ggml-metal."""
    return (_metal() / name).read_text()


def cut(source: str, pattern: str) -> str:
    match = re.search(pattern, source, re.S | re.M)
    assert match, f"{IMPL}: the sources do not contain {pattern!r}"
    return match.group(0)


def q8_0_block() -> str:
    return cut((_metal().parent / "ggml-common.h").read_text(), r"^#define QK8_0 .*?^} block_q8_0;")


def instantiation(file: str, kernel: str) -> str | None:
    """Returns the line that instantiates the kernel's template, or None."""
    match = re.search(rf'^template \[\[host_name\("{kernel}" *\)\]\].*$', file, re.M)
    return match.group(0) if match else None


def auxiliary_source(kernel: str, constant: str) -> str:
    """Returns the source of a kernel without templates, from its first function constant on."""
    return '#include "common.h"\n' + cut(
        text("kernels/fa_aux.metal"), rf"^constant \w+ {constant}.*?^kernel void {kernel}\(.*?^}}\n"
    )


@functools.cache
def _fields(struct_name: str) -> dict[str, str]:
    """Returns the fields of a struct of kernel arguments, in order, and their types."""
    body = cut(text("ggml-metal-impl.h"), rf"typedef struct {{[^}}]*}} ggml_metal_kargs_{struct_name};")
    return {name: _KARGS_TYPES[kind] for kind, name in re.findall(r"^\s*(\w+)\s+(\w+);", body, re.M)}


def kargs(struct_name: str, values: dict[str, int | float]) -> bytes:
    """Packs the arguments of a kernel as the struct in ggml-metal-impl.h."""
    fields = _fields(struct_name)
    assert fields.keys() <= values.keys(), f"{struct_name} also has {set(fields) - set(values)}"
    return struct.pack(f"{''.join(fields.values())}0Q", *(values[name] for name in fields))


def pipeline(
    call: Call, source: str, kernel: str, threads: int, constants: Constants, threadgroup_bytes: int = 0
) -> Pipeline:
    from softmetal.testing.cuda import Pipeline

    return Pipeline(
        source=source,
        name=f"{kernel}.metal",
        kernel=kernel,
        max_threads=threads,
        constants=constants,
        threadgroup_memory={0: threadgroup_bytes} if threadgroup_bytes else {},
        include=(str(_metal() / "kernels"), str(_metal())),
        widened_from=METAL_TYPES[call.dtype],
        aligned_runs=call.has_aligned_rows,
    )
