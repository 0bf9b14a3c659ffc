"""llama.cpp's Metal flash attention (ggml-org, MIT licence): the vector kernel, for fewer than 20 query rows.

It is launched as ggml_metal_op_flash_attn_ext does. llama_prefill.py has the kernel for more rows.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace

from ..cases.calls import Call, UnsupportedCallError
from . import llama_prefill, llama_source
from .fattn import FAMILY
from .launch import Launch, Pass
from .llama_operands import OUT, QUERY, Operands
from .llama_source import IMPL, VERSION, Constants, folder, version

_TYPES = {"float16": "f16", "bfloat16": "bf16", "int8": "q8_0"}
# ggml_metal_op_flash_attn_ext_use_vec
_VECTOR_ROWS, _VECTOR_DIMS = 20, 32
_KEYS = 32  # keys of a step of a simdgroup: OP_FLASH_ATTN_EXT_VEC_NCPSG
_WORKGROUPS = 32
_FAMILIES = (FAMILY, *(family for family in (7, 8, 9, 10) if family != FAMILY))
_THREADGROUP_BYTES = 32768
_BARRIER = "simdgroup_barrier(mem_flags::mem_threadgroup);"
# Lanes of the kernel overwrite and read each other's data without a barrier. That works if lanes run in
# lockstep, which neither Metal nor softmetal nor CUDA promises. The adapter adds barriers before lane 0
# writes (two per threadgroup, and one per halving of its simdgroups), and one per step of keys.
_BEFORE = ("if (tiisg == 0) {", "// Q*K^T\n")
# ggml_metal_tuning: the lengths and rows at which another row of its table begins (FA_VEC_NE11_BUCKETS,
# FA_VEC_NE01_BUCKETS).
_LENGTHS, _ROWS = (1024, 4096, 16384), (2, 3, 4, 5)


def launch(call: Call) -> Launch | None:
    """Returns None if llama.cpp has no kernel for this call, or if its source is missing.

    llama.cpp has tiles for each family of Apple GPUs. Those of our plan's family come first, the others are
    alternatives.
    """
    if not is_known_version():
        return None
    if call.block_size:
        raise UnsupportedCallError(f"{IMPL} has no kernel for a paged cache")
    if call.latent_dim:
        raise UnsupportedCallError(f"{IMPL} is not run over values that are columns of the keys")
    if call.kv_format not in ("", "int8"):
        raise UnsupportedCallError(f"{IMPL} has no kernel for a cache of {call.kv_format}")
    if call.dtype == "float32":
        raise UnsupportedCallError(f"{IMPL} rounds queries to float16, also for a float32 cache")
    if call.q_len >= _VECTOR_ROWS or call.head_dim % _VECTOR_DIMS != 0:
        if call.kv_format:
            raise UnsupportedCallError(
                f"{IMPL} is run over a cache of {call.kv_format} by its vector kernel only"
            )
        return llama_prefill.launch(call, _TYPES[call.dtype])
    element = _TYPES[call.kv_format or call.dtype]
    chosen = [tile(element, call.head_dim, call.q_len, call.kv_len, family) for family in _FAMILIES]
    launches = [one for tile in dict.fromkeys(chosen) if (one := _Vector(call, element, tile).launch())]
    return replace(launches[0], alternatives=launches[1:]) if launches else None


def is_known_version() -> bool:
    """Whether there are sources; raises if they are of another version."""
    if folder() is None:
        return False
    if version() != VERSION:
        raise NotImplementedError(
            f"{IMPL}: the kernels of llama-cpp-python {version()} are not launched as those of {VERSION}, "
            f"which this adapter knows; name the archive of llama-cpp-python=={VERSION} in LLAMA_CPP_SDIST"
        )
    return True


def _vector_source(element: str, kernel: str) -> str | None:
    """Returns the kernel's template with one instantiation and the conversions that it uses, or None if it
    does not exist."""
    file = llama_source.text(f"kernels/fa_vec_{'q8_0' if element == 'q8_0' else 'f16'}.metal")
    instantiation = llama_source.instantiation(file, kernel)
    if instantiation is None:
        return None
    conversions = llama_source.text("kernels/dequantize.h")
    template = llama_source.text("kernels/fa_vec_common.metal")
    for place in _BEFORE:
        template = template.replace(place, f"{_BARRIER} {place}")
    return "\n".join(
        [
            '#include "common.h"',
            "typedef half ggml_half;",
            llama_source.q8_0_block(),
            *(
                llama_source.cut(
                    conversions, rf"^template <typename type4>\nvoid dequantize_{one}_t4\(.*?^}}"
                )
                for one in dict.fromkeys(("f16", element))
            ),
            template,
            *re.findall(r"^#define FA_TYPES\w* (?:.*\\\n)+.*", file, re.M),
            llama_source.cut(file, r"^typedef decltype.*?;"),
            instantiation,
            "",
        ]
    )


# ---- the launch rule --------------------------------------------------------------------------------------


@functools.cache
def _tuning() -> tuple[dict[tuple[str, ...], tuple[int, int]], dict[tuple[int, int], int]]:
    """Returns the table of ggml-metal-tuning.cpp, by family, type, dims and buckets; and the keys per load of
    other kernels, by dims."""
    text = llama_source.text("ggml-metal-tuning.cpp")
    rows = re.findall(r"{ { (\d+), GGML_TYPE_(\w+), (\d+), (\d+), (-?\d+), (\d+) }, { (\d+), (\d+) } }", text)
    table = {key: (int(q), int(ne)) for *fields, q, ne in rows for key in [tuple(fields)]}
    baseline = re.findall(r"dk == (\d+) && dv == (\d+)\) \{\s*return (\d+);", text)
    return table, {(int(dk), int(dv)): int(ne) for dk, dv, ne in baseline}


def _bucket(value: int, bounds: tuple[int, ...]) -> int:
    return sum(value >= bound for bound in bounds)


def tile(element: str, head_dim: int, q_len: int, kv_len: int, family: int) -> tuple[int, int]:
    """Returns query rows per threadgroup, and keys that a simdgroup reads side by side (fa_vec_pick)."""
    table, baseline = _tuning()
    default = (1, baseline.get((head_dim, head_dim), 4))
    length, rows = _bucket(kv_len, _LENGTHS), _bucket(q_len, _ROWS)
    if length == 0:
        return default
    key = (str(family), element.upper(), str(head_dim), str(head_dim))
    exact, domain = (*key, str(length), str(rows)), (*key, "-1", str(min(rows, 1)))
    return table.get(exact) or table.get(domain) or default


class _Vector:
    """kernel_flash_attn_ext_vec over 32 workgroups, and the kernel that merges their results."""

    def __init__(self, call: Call, element: str, tile: tuple[int, int]) -> None:
        self.call = call
        self.element = element
        self.rows = call.batch * call.q_heads * call.q_len
        self.operands = Operands(call, _KEYS)
        self.simdgroups = 1
        while 2 * _WORKGROUPS * self.simdgroups * _KEYS < call.kv_len and self.simdgroups < 4:
            self.simdgroups *= 2
        self.baseline = (1, _tuning()[1].get((call.head_dim, call.head_dim), 4))
        self.tile = tile
        if self._shared_bytes > _THREADGROUP_BYTES:
            self.tile = self.baseline

    @property
    def _shared_bytes(self) -> int:
        padded = -(-self.call.head_dim // 128) * 128
        halves = (padded + 4 * _KEYS + 2 * padded) * self.tile[0] * self.simdgroups
        return -(-2 * halves // 16) * 16

    @property
    def _overrun_bytes(self) -> int:
        """Bytes that the kernel writes past its threadgroup memory.

        Every lane writes zeros from its own float4 on (fa_vec_common.metal, "zero out so"). If a simdgroup
        reads several keys side by side, only the lanes of one key have a part of the output, and the other
        lanes of the last simdgroup write past the end.
        """
        rows, keys = self.tile
        columns, padded = self.call.head_dim // 4, -(-self.call.head_dim // 128) * 32
        end = rows * columns + 32 - 32 // keys
        return 16 * max(0, end - rows * padded)

    def launch(self) -> Launch | None:
        call = self.call
        suffix = "" if self.tile == self.baseline else f"_q{self.tile[0]}_ne{self.tile[1]}"
        kernel = f"kernel_flash_attn_ext_vec_{self.element}_dk{call.head_dim}_dv{call.head_dim}{suffix}"
        source = _vector_source(self.element, kernel)
        if source is None:
            return None
        passes = [self.operands.pad()] if self.operands.pads else []
        passes += [self._attend(source, kernel), self._reduce()]
        # "partials" are outputs of workgroups, with their sums and maxima.
        return Launch(
            IMPL,
            passes,
            scratch={
                "last_keys": self.operands.last_keys_bytes,
                "partials": 4 * self.rows * _WORKGROUPS * (call.head_dim + 2),
            },
            out_rows_first=True,
            note=f"{_WORKGROUPS} x {self.simdgroups} simdgroups, {self.tile[1]} keys side by side",
        )

    def _attend(self, source: str, kernel: str) -> Pass:
        call, operands, prefix = self.call, self.operands, "FC_flash_attn_ext_vec_"
        off = dict.fromkeys((f"{prefix}{name}" for name in ("has_sinks", "has_bias", "has_scap")), False)
        constants: Constants = {
            **off,
            f"{prefix}has_sparse": False,
            f"{prefix}has_mask": operands.needs_mask,
            f"{prefix}has_kvpad": operands.pads,
            f"{prefix}ns10": operands.row_units,
            f"{prefix}ns20": operands.row_units,
            f"{prefix}nsg": self.simdgroups,
            f"{prefix}nwg": _WORKGROUPS,
        }
        threads = 32 * self.simdgroups
        threadgroup_bytes = self._shared_bytes + self._overrun_bytes
        pipeline = llama_source.pipeline(call, source, kernel, threads, constants, threadgroup_bytes)
        arguments: dict[int, str | bytes] = {
            0: llama_source.kargs("flash_attn_ext_vec", operands.fields()),
            **{1: QUERY, 2: operands.key, 3: operands.value, 4: operands.mask, 5: QUERY},
            **{6: "last_keys", 7: "partials", 8: QUERY},
        }
        grid = (-(-call.q_len // self.tile[0]), call.q_heads, call.batch * _WORKGROUPS)
        return Pass(pipeline, grid, (32, self.simdgroups, 1), arguments)

    def _reduce(self) -> Pass:
        kernel, prefix = "kernel_flash_attn_ext_vec_reduce", "FC_flash_attn_ext_vec_reduce_"
        constants: Constants = {f"{prefix}DV": self.call.head_dim, f"{prefix}NWG": _WORKGROUPS}
        source = llama_source.auxiliary_source(kernel, f"{prefix}DV")
        threads = 32 * _WORKGROUPS
        pipeline = llama_source.pipeline(self.call, source, kernel, threads, constants)
        arguments: dict[int, str | bytes] = {
            0: llama_source.kargs("flash_attn_ext_vec_reduce", {"nrows": self.rows}),
            **{1: "partials", 2: OUT},
        }
        return Pass(pipeline, (self.rows, 1, 1), (threads, 1, 1), arguments)
