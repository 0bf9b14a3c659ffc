"""torch's Metal attention (2.13 to 2.15), from the headers in the installed wheel.

It is launched as Attention.mm does on a GPU without matrix units, or on macOS before 26.2.
"""

from __future__ import annotations

import functools
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..cases.calls import METAL_TYPES, Call
from .launch import Launch, Pass, partials

if TYPE_CHECKING:
    from softmetal.testing.cuda import Pipeline

IMPL = "torch-metal"
VERSIONS = ("2.13", "2.14", "2.15")
INCLUDE = Path(torch.__file__).parent / "include"
PREFILL_HEADER = "ATen/native/mps/kernels/PrefillAttention.h"
SOURCE = """#include <metal_stdlib>
using namespace metal;
#include <c10/metal/common.h>
#include <c10/metal/utils.h>
#include <ATen/native/mps/kernels/{header}>
"""
_VECTOR_DIMS = (64, 96, 128, 256)
_SPLITS = 32
# PrefillAttnParams, in order; torch 2.13 has int strides, 2.14 and later int64_t ones.
_PARAMS = (
    "int B; int H; int D; int qL; int kL; int gqa_factor; float scale; float softcapping; "
    "{0} Q_strides[3]; {0} K_strides[3]; {0} V_strides[3]; {0} O_strides[3];"
)
_STRIDES = {"int": "i", "int64_t": "q"}  # as struct packs them
SEEN = "seen"  # the mask
# Head dim -> rows and keys per tile, simdgroups.
_PREFILL_TILES = {**dict.fromkeys((32, 64, 72, 80, 96), (32, 32, 4)), 128: (32, 16, 4), 256: (16, 8, 2)}


def version() -> str:
    return str(torch.__version__)


def launch(call: Call) -> Launch | None:
    """Returns None if torch runs this call with MPSGraph."""
    if not version().startswith(tuple(f"{known}." for known in VERSIONS)):
        raise NotImplementedError(
            f"{IMPL}: the kernels of torch {version()} may take other parameters than those of "
            f"{', '.join(VERSIONS)}, which this adapter knows; install torch=={VERSIONS[-1]}.0"
        )
    call.refuse_features(IMPL)
    if call.q_len <= 8:
        return _decode(call) if call.head_dim in _VECTOR_DIMS else None
    return _prefill(call) if call.head_dim in _PREFILL_TILES else None


def needs_mask(call: Call) -> bool:
    """Whether torch's caller must pass a mask, because torch's causal row i sees the first i + 1 keys."""
    return call.hides_keys and call.q_len != call.kv_len


@functools.cache
def params_format(header: Path = INCLUDE / PREFILL_HEADER) -> str:
    """Returns the `struct` format of PrefillAttnParams in the wheel's header."""
    text = re.sub(r"//.*", "", header.read_text())
    declared = re.search(r"struct PrefillAttnParams \{(.*?)\};", text, re.DOTALL)
    fields = " ".join(declared[1].split()) if declared else ""
    for kind, letter in _STRIDES.items():
        if fields == _PARAMS.format(kind):
            return f"6i2f12{letter}"
    raise NotImplementedError(
        f"{IMPL}: PrefillAttnParams of torch {version()} is {fields or 'missing'!r}, which this adapter does "
        f"not know; install torch=={VERSIONS[-1]}.0"
    )


def _pipeline(call: Call, header: str, kernel: str, threads: int) -> Pipeline:
    from softmetal.testing.cuda import Pipeline

    return Pipeline(
        source=SOURCE.format(header=header),
        name=header,
        kernel=kernel,
        max_threads=threads,
        include=(str(INCLUDE),),
        widened_from=METAL_TYPES[call.dtype],
        aligned_runs=call.has_aligned_rows,
    )


def _decode(call: Call) -> Launch:
    two_passes = call.kv_len >= 1024 or (call.group_size > 1 and call.kv_len >= 4096)
    return _decode_in_two_passes(call) if two_passes else _decode_in_one_pass(call)


def _decode_shape(call: Call) -> list[bytes]:
    """Packs gqa_factor, N, head strides, sequence strides, scale, mask strides, batch strides and heads."""
    d, kv = call.head_dim, call.kv_len * call.head_dim
    query = call.q_len * d
    return [
        struct.pack("I", call.group_size),
        struct.pack("I", call.kv_len),
        struct.pack("4I", query, kv, kv, 0),  # a uint3 has the size of four
        struct.pack("4I", d, d, d, 0),
        struct.pack("f", call.scale),
        struct.pack("4I", *((1, call.mask_pitch, 0, 0) if needs_mask(call) else (0, 0, 0, 0))),
        struct.pack("4I", call.q_heads * query, call.kv_heads * kv, call.kv_heads * kv, call.q_heads),
    ]


def _decode_suffix(call: Call) -> str:
    if needs_mask(call):
        return "_maskbool"
    return "_masknone_causal" if call.hides_keys else "_masknone"


def _decode_in_one_pass(call: Call) -> Launch:
    suffix = _decode_suffix(call)
    name = f"sdpa_vector_{METAL_TYPES[call.dtype]}_{call.head_dim}_{call.head_dim}{suffix}"
    gqa, n, heads, rows, scale, mask, batches = _decode_shape(call)
    arguments: dict[int, str | bytes] = {0: "query", 1: "key", 2: "value", 3: "out"}
    arguments |= {4: gqa, 5: n, 6: heads, 7: rows, 8: scale, 10: mask, 11: batches}
    if needs_mask(call):
        arguments[9] = SEEN
    pipeline = _pipeline(call, "DecodeAttention.h", name, 1024)
    grid = (call.batch * call.q_heads, call.q_len, 1)
    return Launch(IMPL, [Pass(pipeline, grid, (1024, 1, 1), arguments)], note="1 pass")


def _decode_in_two_passes(call: Call) -> Launch:
    suffix = _decode_suffix(call)
    element = METAL_TYPES[call.dtype]
    d = call.head_dim
    gqa, n, heads, row_strides, scale, mask, batches = _decode_shape(call)
    first: dict[int, str | bytes] = {0: "query", 1: "key", 2: "value", 3: "partials", 4: "sums", 5: "maxs"}
    first |= {6: gqa, 7: n, 8: heads, 9: row_strides, 10: scale, 12: mask, 13: batches}
    if needs_mask(call):
        first[11] = SEEN
    second: dict[int, str | bytes] = {0: "partials", 1: "sums", 2: "maxs", 3: "out"}
    one = _pipeline(call, "DecodeAttention.h", f"sdpa_vector_2pass_1_{element}_{d}_{d}{suffix}", 256)
    two = _pipeline(call, "DecodeAttention.h", f"sdpa_vector_2pass_2_{element}_{d}", 1024)
    grid = (call.batch * call.q_heads, call.q_len)
    return Launch(
        IMPL,
        [Pass(one, (*grid, _SPLITS), (256, 1, 1), first), Pass(two, (*grid, 1), (1024, 1, 1), second)],
        scratch=partials(call, _SPLITS),
        note=f"2 passes, {_SPLITS} splits",
    )


def _prefill(call: Call) -> Launch:
    tile_rows, tile_keys, simdgroups = _PREFILL_TILES[call.head_dim]
    masked = needs_mask(call)
    kind = "hm1_dc0_maskbool_" if masked else f"hm0_dc{int(call.hides_keys)}_mask{call.dtype}"
    name = (
        f"prefill_attention_{call.dtype}_bq{tile_rows}_bk{tile_keys}_bd{call.head_dim}_wm{simdgroups}_wn1"
        f"_{kind}"
    )
    params = prefill_params(call, params_format())
    arguments: dict[int, str | bytes] = {0: "query", 1: "key", 2: "value", 3: "out", 4: params, 5: bytes(16)}
    if masked:
        arguments |= {5: struct.pack(f"4{params_format()[-1]}", 0, 0, call.mask_pitch, 1), 6: SEEN}
    threads = 32 * simdgroups
    pipeline = _pipeline(call, "PrefillAttention.h", name, threads)
    grid = (-(-call.q_len // tile_rows), call.q_heads, call.batch)
    note = f"{tile_rows} rows, {tile_keys} keys, {simdgroups} simdgroups"
    return Launch(IMPL, [Pass(pipeline, grid, (threads, 1, 1), arguments)], note=note)


def prefill_params(call: Call, layout: str) -> bytes:
    """Packs PrefillAttnParams of this format."""
    d, q, kv = call.head_dim, call.q_len * call.head_dim, call.kv_len * call.head_dim
    strides = [call.q_heads * q, q, d, *[call.kv_heads * kv, kv, d] * 2, call.q_heads * q, q, d]
    shape = [call.batch, call.q_heads, d, call.q_len, call.kv_len, call.group_size]
    return struct.pack(layout, *shape, call.scale, 1.0, *strides)
