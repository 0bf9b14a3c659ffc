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

from ..cases.case import METAL_TYPES, Case
from .launch import Launch, Pass

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


def launch(case: Case) -> Launch | None:
    """Returns None if torch runs this case with MPSGraph."""
    if not version().startswith(tuple(f"{known}." for known in VERSIONS)):
        raise NotImplementedError(
            f"{IMPL}: the kernels of torch {version()} may take other parameters than those of "
            f"{', '.join(VERSIONS)}, which this adapter knows; install torch=={VERSIONS[-1]}.0"
        )
    case.refuse_features(IMPL)
    if case.q_len <= 8:
        return _decode(case) if case.head_dim in _VECTOR_DIMS else None
    return _prefill(case) if case.head_dim in _PREFILL_TILES else None


def needs_mask(case: Case) -> bool:
    """Whether torch's caller must pass a mask, because torch's causal row i sees the first i + 1 keys."""
    return case.hides_keys and case.q_len != case.kv_len


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


def _pipeline(case: Case, header: str, kernel: str, threads: int) -> Pipeline:
    from softmetal.testing.cuda import Pipeline

    return Pipeline(
        source=SOURCE.format(header=header),
        name=header,
        kernel=kernel,
        max_threads=threads,
        include=(str(INCLUDE),),
        widened_from=METAL_TYPES[case.dtype],
        aligned_runs=True,
    )


def _decode(case: Case) -> Launch:
    two_passes = case.kv_len >= 1024 or (case.group_size > 1 and case.kv_len >= 4096)
    return _decode_in_two_passes(case) if two_passes else _decode_in_one_pass(case)


def _decode_shape(case: Case) -> list[bytes]:
    """Packs gqa_factor, N, head strides, sequence strides, scale, mask strides, batch strides and heads."""
    d, kv = case.head_dim, case.kv_len * case.head_dim
    query = case.q_len * d
    return [
        struct.pack("I", case.group_size),
        struct.pack("I", case.kv_len),
        struct.pack("4I", query, kv, kv, 0),  # a uint3 has the size of four
        struct.pack("4I", d, d, d, 0),
        struct.pack("f", case.scale),
        struct.pack("4I", *((1, case.kv_len, 0, 0) if needs_mask(case) else (0, 0, 0, 0))),
        struct.pack("4I", case.q_heads * query, case.kv_heads * kv, case.kv_heads * kv, case.q_heads),
    ]


def _decode_suffix(case: Case) -> str:
    if needs_mask(case):
        return "_maskbool"
    return "_masknone_causal" if case.hides_keys else "_masknone"


def _decode_in_one_pass(case: Case) -> Launch:
    suffix = _decode_suffix(case)
    name = f"sdpa_vector_{METAL_TYPES[case.dtype]}_{case.head_dim}_{case.head_dim}{suffix}"
    gqa, n, heads, rows, scale, mask, batches = _decode_shape(case)
    arguments: dict[int, str | bytes] = {0: "query", 1: "key", 2: "value", 3: "out"}
    arguments |= {4: gqa, 5: n, 6: heads, 7: rows, 8: scale, 10: mask, 11: batches}
    if needs_mask(case):
        arguments[9] = SEEN
    pipeline = _pipeline(case, "DecodeAttention.h", name, 1024)
    grid = (case.batch * case.q_heads, case.q_len, 1)
    return Launch(IMPL, [Pass(pipeline, grid, (1024, 1, 1), arguments)], note="1 pass")


def _decode_in_two_passes(case: Case) -> Launch:
    suffix = _decode_suffix(case)
    element = METAL_TYPES[case.dtype]
    d, rows = case.head_dim, case.batch * case.q_heads * case.q_len
    gqa, n, heads, row_strides, scale, mask, batches = _decode_shape(case)
    first: dict[int, str | bytes] = {0: "query", 1: "key", 2: "value", 3: "partials", 4: "sums", 5: "maxs"}
    first |= {6: gqa, 7: n, 8: heads, 9: row_strides, 10: scale, 12: mask, 13: batches}
    if needs_mask(case):
        first[11] = SEEN
    second: dict[int, str | bytes] = {0: "partials", 1: "sums", 2: "maxs", 3: "out"}
    one = _pipeline(case, "DecodeAttention.h", f"sdpa_vector_2pass_1_{element}_{d}_{d}{suffix}", 256)
    two = _pipeline(case, "DecodeAttention.h", f"sdpa_vector_2pass_2_{element}_{d}", 1024)
    grid = (case.batch * case.q_heads, case.q_len)
    size = 4 if case.dtype == "float32" else 2
    return Launch(
        IMPL,
        [Pass(one, (*grid, _SPLITS), (256, 1, 1), first), Pass(two, (*grid, 1), (1024, 1, 1), second)],
        scratch={
            "partials": rows * _SPLITS * d * size,
            "sums": rows * _SPLITS * 4,
            "maxs": rows * _SPLITS * 4,
        },
        note=f"2 passes, {_SPLITS} splits",
    )


def _prefill(case: Case) -> Launch:
    tile_rows, tile_keys, simdgroups = _PREFILL_TILES[case.head_dim]
    masked = needs_mask(case)
    kind = "hm1_dc0_maskbool_" if masked else f"hm0_dc{int(case.hides_keys)}_mask{case.dtype}"
    name = (
        f"prefill_attention_{case.dtype}_bq{tile_rows}_bk{tile_keys}_bd{case.head_dim}_wm{simdgroups}_wn1"
        f"_{kind}"
    )
    params = prefill_params(case, params_format())
    arguments: dict[int, str | bytes] = {0: "query", 1: "key", 2: "value", 3: "out", 4: params, 5: bytes(16)}
    if masked:
        arguments |= {5: struct.pack(f"4{params_format()[-1]}", 0, 0, case.kv_len, 1), 6: SEEN}
    threads = 32 * simdgroups
    pipeline = _pipeline(case, "PrefillAttention.h", name, threads)
    grid = (-(-case.q_len // tile_rows), case.q_heads, case.batch)
    note = f"{tile_rows} rows, {tile_keys} keys, {simdgroups} simdgroups"
    return Launch(IMPL, [Pass(pipeline, grid, (threads, 1, 1), arguments)], note=note)


def prefill_params(case: Case, layout: str) -> bytes:
    """Packs PrefillAttnParams of this format."""
    d, q, kv = case.head_dim, case.q_len * case.head_dim, case.kv_len * case.head_dim
    strides = [case.q_heads * q, q, d, *[case.kv_heads * kv, kv, d] * 2, case.q_heads * q, q, d]
    shape = [case.batch, case.q_heads, d, case.q_len, case.kv_len, case.group_size]
    return struct.pack(layout, *shape, case.scale, 1.0, *strides)
