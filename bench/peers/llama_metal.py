"""llama.cpp's Metal flash attention (ggml-org, MIT licence), from the source archive of llama-cpp-python,
launched as its ggml-metal-ops.cpp does (ggml_metal_op_flash_attn_ext) for fewer than 20 query rows.

The archive is one that LLAMA_CPP_SDIST names:
    pip download llama-cpp-python==0.3.36 --no-deps --no-binary=:all:
"""

from __future__ import annotations

import functools
import os
import re
import struct
import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path

from softmetal.cuda.compile import Pipeline

from ..arguments import WrongArgumentError
from .case import BYTES, METAL_TYPES, Case, Launch, NotTakenError, Pass
from .fattn import FAMILY

IMPL = "llama-metal"
VERSION = "0.3.36"
_HOW = f"name the archive llama_cpp_python-{VERSION}.tar.gz, or unset it"
_PARTS = ("/ggml/src/ggml-metal/", "/ggml/src/ggml-common.h")
_TYPES = {"float16": "f16", "bfloat16": "bf16", "int8": "q8_0"}
# ggml_metal_op_flash_attn_ext_use_vec: the other kernel has tiles of eight rows, for prefill.
_VECTOR_ROWS = 20
_BLOCK = 32  # keys per step of a simdgroup: OP_FLASH_ATTN_EXT_VEC_NCPSG
_WORKGROUPS = 32
_FAMILIES = (FAMILY, *(family for family in (7, 8, 9, 10) if family != FAMILY))
_Q8_0 = (32, 34)  # elements and bytes of a block
_THREADGROUP_BYTES = 32768
# The kernel lets lane 0 write over what other lanes have read just before, without a barrier: right where
# lanes run in step, but Metal promises no such thing, and neither softmetal nor CUDA do it. Two barriers per
# threadgroup are added, and one per halving of its simdgroups.
_LANE_0_WRITES = "if (tiisg == 0) {"
_BARRIER = "simdgroup_barrier(mem_flags::mem_threadgroup);"
# ggml_metal_tuning: from where on another row of its table holds (FA_VEC_NE11_BUCKETS, FA_VEC_NE01_BUCKETS).
_LENGTHS, _ROWS = (1024, 4096, 16384), (2, 3, 4, 5)


def launch(case: Case) -> Launch | None:
    """None: llama.cpp has no vector kernel for this case, or its source is not at hand. It has tiles for each
    family of Apple GPUs, so those of the others stand beside the ones of the family that our plan is for."""
    if folder() is None:
        return None
    if version() != VERSION:
        raise NotImplementedError(
            f"{IMPL}: the kernels of llama-cpp-python {version()} are not launched as those of {VERSION}, "
            f"which this adapter knows; name the archive of llama-cpp-python=={VERSION} in LLAMA_CPP_SDIST"
        )
    if case.block_size:
        raise NotTakenError(f"{IMPL} has no kernel for a paged cache")
    if case.kv_format not in ("", "int8"):
        raise NotTakenError(f"{IMPL} has no kernel for a cache of {case.kv_format}")
    if case.dtype == "float32":
        raise NotTakenError(f"{IMPL} rounds queries to float16, also for a float32 cache")
    if case.q_len >= _VECTOR_ROWS:
        raise NotTakenError(f"{IMPL} is run for fewer than {_VECTOR_ROWS} query rows only")
    element = _TYPES[case.kv_format or case.dtype]
    chosen = [tile(element, case.head_dim, case.q_len, case.kv_len, family) for family in _FAMILIES]
    found = [one for tile in dict.fromkeys(chosen) if (one := _Vector(case, element, tile).launch())]
    return replace(found[0], alternatives=found[1:]) if found else None


# ---- the source -------------------------------------------------------------------------------------------


@functools.cache
def folder() -> Path | None:
    """Where ggml's sources are."""
    archive = os.environ.get("LLAMA_CPP_SDIST")
    if not archive:
        return None
    target = Path(tempfile.gettempdir()) / f"{Path(archive).name.removesuffix('.tar.gz')}-ggml"
    try:
        with tarfile.open(archive) as source:
            wanted = [one for one in source if any(part in one.name for part in _PARTS)]
            source.extractall(target, wanted, filter="data")
    except (OSError, tarfile.TarError) as error:
        raise WrongArgumentError(f"LLAMA_CPP_SDIST={archive!r} is no readable archive; {_HOW}") from error
    found = list(target.glob("llama_cpp_python-*/vendor/llama.cpp/ggml/src"))
    if len(found) != 1:
        raise WrongArgumentError(f"LLAMA_CPP_SDIST={archive!r} holds no sources of ggml; {_HOW}")
    return found[0]


def version() -> str:
    sources = folder()
    return sources.parents[3].name.removeprefix("llama_cpp_python-") if sources else "not installed"


def _metal() -> Path:
    sources = folder()
    assert sources is not None
    return sources / "ggml-metal"


def _text(name: str) -> str:
    return (_metal() / name).read_text()


def _cut(text: str, pattern: str) -> str:
    found = re.search(pattern, text, re.S | re.M)
    assert found, f"{IMPL}: the sources hold no {pattern!r}"
    return found.group(0)


def _vector_source(element: str, kernel: str) -> str | None:
    """The kernel's template with one instantiation, and of the conversions what it names: the rest is for
    llama.cpp's other operations. None: there is no such instantiation."""
    file = _text(f"kernels/fa_vec_{'q8_0' if element == 'q8_0' else 'f16'}.metal")
    instantiation = re.search(rf'^template \[\[host_name\("{kernel}"\)\]\].*$', file, re.M)
    if instantiation is None:
        return None
    conversions = _text("kernels/dequantize.h")
    return "\n".join(
        [
            '#include "common.h"',
            "typedef half ggml_half;",
            _cut((_metal().parent / "ggml-common.h").read_text(), r"^#define QK8_0 .*?^} block_q8_0;"),
            *(
                _cut(conversions, rf"^template <typename type4>\nvoid dequantize_{one}_t4\(.*?^}}")
                for one in dict.fromkeys(("f16", element))
            ),
            _text("kernels/fa_vec_common.metal").replace(_LANE_0_WRITES, f"{_BARRIER} {_LANE_0_WRITES}"),
            *re.findall(r"^#define FA_TYPES\w* (?:.*\\\n)+.*", file, re.M),
            _cut(file, r"^typedef decltype.*?;"),
            instantiation.group(0),
            "",
        ]
    )


def _auxiliary_source(kernel: str, constant: str) -> str:
    """A kernel without templates, from its first function constant on."""
    text = _text("kernels/fa_aux.metal")
    return '#include "common.h"\n' + _cut(
        text, rf"^constant \w+ {constant}.*?^kernel void {kernel}\(.*?^}}\n"
    )


def _pipeline(
    case: Case,
    source: str,
    kernel: str,
    threads: int,
    constants: dict[str, bool | int | float],
    threadgroup_bytes: int = 0,
) -> Pipeline:
    return Pipeline(
        source=source,
        name=f"{kernel}.metal",
        kernel=kernel,
        max_threads=threads,
        constants=constants,
        threadgroup_memory={0: threadgroup_bytes} if threadgroup_bytes else {},
        include=(str(_metal() / "kernels"), str(_metal())),
        widened_from=METAL_TYPES[case.dtype],
        aligned_runs=True,
    )


# ---- the launch rule --------------------------------------------------------------------------------------


@functools.cache
def _tuning() -> tuple[dict[tuple[str, ...], tuple[int, int]], dict[tuple[int, int], int]]:
    """The table of ggml-metal-tuning.cpp, by family, type, dims and buckets; and the keys per load of
    kernels that it does not name, by dims."""
    text = _text("ggml-metal-tuning.cpp")
    rows = re.findall(r"{ { (\d+), GGML_TYPE_(\w+), (\d+), (\d+), (-?\d+), (\d+) }, { (\d+), (\d+) } }", text)
    table = {key: (int(q), int(ne)) for *fields, q, ne in rows for key in [tuple(fields)]}
    baseline = re.findall(r"dk == (\d+) && dv == (\d+)\) \{\s*return (\d+);", text)
    return table, {(int(dk), int(dv)): int(ne) for dk, dv, ne in baseline}


def _bucket(value: int, bounds: tuple[int, ...]) -> int:
    return sum(value >= bound for bound in bounds)


def tile(element: str, head_dim: int, q_len: int, kv_len: int, family: int) -> tuple[int, int]:
    """Query rows per threadgroup, and keys that a simdgroup reads side by side (fa_vec_pick)."""
    table, baseline = _tuning()
    default = (1, baseline.get((head_dim, head_dim), 4))
    length, rows = _bucket(kv_len, _LENGTHS), _bucket(q_len, _ROWS)
    if length == 0:
        return default
    key = (str(family), element.upper(), str(head_dim), str(head_dim))
    exact, domain = (*key, str(length), str(rows)), (*key, "-1", str(min(rows, 1)))
    return table.get(exact) or table.get(domain) or default


class _Vector:
    """kernel_flash_attn_ext_vec over 32 workgroups, and the kernel that puts their results together."""

    def __init__(self, case: Case, element: str, tile: tuple[int, int]) -> None:
        self.case = case
        self.element = element
        self.rows = case.batch * case.q_heads * case.q_len
        self.needs_mask = bool(case.lengths) or case.q_len > 1
        self.pads = case.kv_len % _BLOCK != 0
        if case.kv_format:
            elements, size = _Q8_0
            self.row_bytes, self.row_units = case.head_dim // elements * size, case.head_dim // elements
            self.key, self.value = "key_q8_0", "value_q8_0"
        else:
            self.row_bytes, self.row_units = case.head_dim * BYTES[case.dtype], case.head_dim
            self.key, self.value = "key", "value"
        self.simdgroups = 1
        while 2 * _WORKGROUPS * self.simdgroups * _BLOCK < case.kv_len and self.simdgroups < 4:
            self.simdgroups *= 2
        self.baseline = (1, _tuning()[1].get((case.head_dim, case.head_dim), 4))
        self.tile = tile
        if self.threadgroup_bytes > _THREADGROUP_BYTES:
            self.tile = self.baseline

    @property
    def threadgroup_bytes(self) -> int:
        padded = -(-self.case.head_dim // 128) * 128
        halves = (padded + 4 * _BLOCK + 2 * padded) * self.tile[0] * self.simdgroups
        return -(-2 * halves // 16) * 16

    def launch(self) -> Launch | None:
        case = self.case
        suffix = "" if self.tile == self.baseline else f"_q{self.tile[0]}_ne{self.tile[1]}"
        kernel = f"kernel_flash_attn_ext_vec_{self.element}_dk{case.head_dim}_dv{case.head_dim}{suffix}"
        source = _vector_source(self.element, kernel)
        if source is None:
            return None
        passes = [self._pad()] if self.pads else []
        passes += [self._attend(source, kernel), self._reduce()]
        # The last keys of every head and their part of the mask; outputs of workgroups with sums and maxima.
        padded = _BLOCK * (2 * self.row_bytes * case.kv_heads + 2 * case.q_len) * case.batch
        return Launch(
            IMPL,
            passes,
            scratch={
                "last_keys": padded,
                "partials": 4 * self.rows * _WORKGROUPS * (case.head_dim + 2),
            },
            out_rows_first=True,
            note=f"{_WORKGROUPS} x {self.simdgroups} simdgroups, {self.tile[1]} keys side by side",
        )

    def _mask_shape(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """ne31 to ne33 and nb31 to nb33."""
        if not self.needs_mask:
            return (0, 0, 0), (0, 0, 0)
        row = 2 * self.case.kv_len
        return (self.case.q_len, 1, self.case.batch), (row, row * self.case.q_len, row * self.case.q_len)

    def _cache_strides(self) -> tuple[int, int, int]:
        head = self.row_bytes * self.case.kv_len
        return self.row_bytes, head, head * self.case.kv_heads

    def _pad(self) -> Pass:
        """Copies the last, partial block of keys and fills it up."""
        case, kernel = self.case, "kernel_flash_attn_ext_pad"
        constants: dict[str, bool | int | float] = {
            "FC_flash_attn_ext_pad_has_mask": self.needs_mask,
            "FC_flash_attn_ext_pad_ncpsg": _BLOCK,
        }
        source = _auxiliary_source(kernel, "FC_flash_attn_ext_pad_has_mask")
        shape, strides = self._mask_shape()
        params = struct.pack(
            "3i6Q3i3Q",
            *(case.kv_len, case.kv_heads, case.batch),
            *(self._cache_strides() * 2),
            *(*shape, *strides),
        )
        arguments: dict[int, str | bytes] = {0: params, 1: self.key, 2: self.value}
        arguments |= {3: "mask" if self.needs_mask else "query_float32", 4: "last_keys"}
        pipeline = _pipeline(case, source, kernel, 32, constants)
        return Pass(pipeline, (_BLOCK, max(case.kv_heads, shape[1]), case.batch), (32, 1, 1), arguments)

    def _attend(self, source: str, kernel: str) -> Pass:
        case = self.case
        prefix = "FC_flash_attn_ext_vec_"
        off = dict.fromkeys((f"{prefix}{name}" for name in ("has_sinks", "has_bias", "has_scap")), False)
        constants: dict[str, bool | int | float] = {
            **off,
            f"{prefix}has_sparse": False,
            f"{prefix}has_mask": self.needs_mask,
            f"{prefix}has_kvpad": self.pads,
            f"{prefix}ns10": self.row_units,
            f"{prefix}ns20": self.row_units,
            f"{prefix}nsg": self.simdgroups,
            f"{prefix}nwg": _WORKGROUPS,
        }
        threads = 32 * self.simdgroups
        pipeline = _pipeline(case, source, kernel, threads, constants, self.threadgroup_bytes)
        query = "query_float32"
        arguments: dict[int, str | bytes] = {0: self._params(), 1: query, 2: self.key, 3: self.value}
        arguments |= {4: "mask" if self.needs_mask else query, 5: query}
        arguments |= {6: "last_keys", 7: "partials", 8: query}
        grid = (-(-case.q_len // self.tile[0]), case.q_heads, case.batch * _WORKGROUPS)
        return Pass(pipeline, grid, (32, self.simdgroups, 1), arguments)

    def _params(self) -> bytes:
        case = self.case
        query = 4 * case.head_dim
        shape, strides = self._mask_shape()
        return struct.pack(
            "3i3Q4i3Qi3Q3i3Q3i4fifi0Q",
            *(case.q_len, case.q_heads, case.batch),
            *(query, query * case.q_len, query * case.q_len * case.q_heads),
            *(case.kv_len, case.kv_heads, case.batch, self.row_units, *self._cache_strides()),
            *(self.row_units, *self._cache_strides()),
            *(*shape, *strides),
            *(case.q_heads, case.q_len, case.batch),
            *(case.scale, 0.0, 1.0, 1.0, 1 << (case.q_heads.bit_length() - 1), 0.0, 0),
        )

    def _reduce(self) -> Pass:
        kernel, prefix = "kernel_flash_attn_ext_vec_reduce", "FC_flash_attn_ext_vec_reduce_"
        constants: dict[str, bool | int | float] = {
            f"{prefix}DV": self.case.head_dim,
            f"{prefix}NWG": _WORKGROUPS,
        }
        source = _auxiliary_source(kernel, f"{prefix}DV")
        threads = 32 * _WORKGROUPS
        pipeline = _pipeline(self.case, source, kernel, threads, constants)
        arguments: dict[int, str | bytes] = {
            0: struct.pack("i", self.rows),
            1: "partials",
            2: "out_float32",
        }
        return Pass(pipeline, (self.rows, 1, 1), (threads, 1, 1), arguments)
