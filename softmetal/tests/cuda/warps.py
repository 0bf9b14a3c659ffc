"""Runs the translation of a kernel on the CPU: checks the layouts of tensor cores' fragments without a GPU.

The headers are those that nvcc gets. Only the functions that are PTX instructions are replaced by those of
warps.h, which computes what PTX's manual says of them.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from softmetal.cuda.compile import INCLUDE, Pipeline, translated
from softmetal.cuda.launch import SLOT_BYTES, SLOTS

_SUMS = "{&c.elements0, &c.elements1, &c.elements2, &c.elements3}"
# The head of a function whose body is PTX -> its body here.
_INSTRUCTIONS = {
    "ushort half_from_float(float x)": "return warps::to_half(x);",
    "float float_from_half(ushort bits)": "return warps::of_half(bits);",
    "ushort bfloat_from_float(float x)": "return constant_bfloat(x);",
    "uint own_cuda_lane()": "return warps::lane();",
    "uint shuffle_word(uint word, uint lane)": "return warps::shuffle(word, lane);",
    "uint to_tf32(float x)": "return warps::to_tf32(x);",
    "uint rounded_pair(float first, float second)": (
        "return uint(constant_bfloat(first)) | uint(constant_bfloat(second)) << 16;"
    ),
    "uint2 load_words(const uint2* address)": "return warps::load_aligned(address);",
    "uint4 load_words(const uint4* address)": "return warps::load_aligned(address);",
    "uint transposed_word(uint word)": "return warps::movmatrix(word);",
    "void multiply_16(Sums c, const uint (&a)[4], const uint (&b)[2], half)": (
        f"warps::multiply_half({_SUMS}, a, b);"
    ),
    "void multiply_16(Sums c, const uint (&a)[4], const uint (&b)[2], bfloat)": (
        f"warps::multiply_bfloat({_SUMS}, a, b);"
    ),
    "void multiply_8(Sums c, const uint* a, const uint* b)": f"warps::multiply_tf32({_SUMS}, a, b);",
    "explicit Chunk(const void* address)": "__builtin_memcpy(words, address, sizeof words);",
    "T exp2(T x)": "return T(::exp2f(float(x)));",
    "T log2(T x)": "return T(::log2f(float(x)));",
}
_ENTRY = """
extern "C" void run(const softmetal::Arguments* arguments, const unsigned* grid, const unsigned* threads) {
  warps::run({grid[0], grid[1], grid[2]}, {threads[0], threads[1], threads[2]},
             [&] { softmetal_kernel(*arguments); });
}
"""


def _headers(folder: Path) -> None:
    replaced = set()
    for header in INCLUDE.glob("*.h"):
        text = header.read_text().replace('"../..', f'"{INCLUDE.parents[1]}')
        for head, body in _INSTRUCTIONS.items():
            pattern = re.compile(
                rf"^( *)SOFTMETAL_INLINE {re.escape(head)} \{{\n(?:\1  .*\n)*?\1\}}", re.MULTILINE
            )
            text, count = pattern.subn(f"SOFTMETAL_INLINE {head} {{ {body} }}", text)
            replaced |= {head} if count else set()
        (folder / header.name).write_text(text)
    assert replaced == set(_INSTRUCTIONS), set(_INSTRUCTIONS) - replaced


class CpuKernel:
    """A translated kernel in a shared library."""

    def __init__(self, pipeline: Pipeline, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        _headers(folder)
        shutil.copy(Path(__file__).with_name("warps.h"), folder)
        (folder / "kernel.cpp").write_text('#include "warps.h"\n' + translated(pipeline) + _ENTRY)
        flags = "-std=c++20 -O0 -shared -fPIC -w -fno-gnu-unique -ffp-contract=off".split()
        flags.append(f"-I{folder}")
        flags += ["-DSOFTMETAL_ALIGNED_RUNS"] if pipeline.aligned_runs else []
        command = ["g++", *flags, "-o", str(folder / "kernel.so"), str(folder / "kernel.cpp")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        self._library = ctypes.CDLL(str(folder / "kernel.so"))

    def run(
        self,
        arguments: Mapping[int, np.ndarray | bytes],
        grid: tuple[int, int, int],
        threads: tuple[int, int, int],
    ) -> None:
        storage = ctypes.create_string_buffer(SLOTS * SLOT_BYTES + 16)
        base = -ctypes.addressof(storage) % 16 + ctypes.addressof(storage)
        for slot, value in arguments.items():
            data = value if isinstance(value, bytes) else value.ctypes.data.to_bytes(8, "little")
            ctypes.memmove(base + slot * SLOT_BYTES, data, len(data))
        triple = ctypes.c_uint * 3
        self._library.run(ctypes.c_void_p(base), triple(*grid), triple(*threads))
