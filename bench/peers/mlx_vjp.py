"""The fused backward of the open pull request ml-explore/mlx#3241: one kernel for dQ, one for dK and dV.

MLX_VJP_FOLDER names a folder with its two headers. MLX's other headers are those of mlx_metal.py. The request
adds up the rows of dO and O by MLX's own operations; here one kernel does it, which is faster.
"""

from __future__ import annotations

import itertools
import math
import os
import struct
from dataclasses import replace
from pathlib import Path

from ..cases.arguments import WrongArgumentError
from ..cases.calls import METAL_TYPES, Call, UnsupportedCallError
from . import mlx_metal
from .launch import Launch, Pass

IMPL = "mlx-vjp"
_HEADERS = {"dq": "steel_attention_vjp_dq.h", "dkv": "steel_attention_vjp_dkv.h"}
_HOW = f"name a folder with {' and '.join(_HEADERS.values())} of ml-explore/mlx#3241, or unset it"
# Rows, keys and simdgroups of a threadgroup by head size, as the request instantiates them. Which one it
# takes depends on the chip.
_QUERY_TILES = {64: [(32, 32, 4)], 96: [(32, 16, 4), (32, 32, 4)], 128: [(32, 16, 4), (32, 32, 4)]}
_KEY_TILES = {
    64: [(32, 32, 1)],
    96: [(32, 16, 1), (32, 16, 2)],
    128: [(32, 16, 1), (32, 16, 2), (16, 16, 2)],
}
_ROWS_OF_A_GROUP = 8  # of the kernel that adds up dO and O
# The fields that the kernels read. scale and gqa_factor are macros, as where MLX compiles them at run time.
_PARAMS = """
struct AttnVJPParams {
  int H, qL, NQ, NK, NQ_aligned, NK_aligned, qL_rem, kL_rem, qL_off, NK_tiles;
  int64_t Q_strides[3], K_strides[3], V_strides[3], dO_strides[3];
  int64_t dQ_strides[3], dK_strides[3], dV_strides[3];
  int64_t LSE_strides[2], delta_strides[2];
};
"""
_DELTA = """#include <metal_stdlib>
using namespace metal;
kernel void row_delta(
    const device T* out [[buffer(0)]],
    const device T* grad_out [[buffer(1)]],
    device float* delta [[buffer(2)]],
    constant uint& rows [[buffer(3)]],
    uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const uint row = group * ROWS + simdgroup;
  if (row >= rows) {
    return;
  }
  float sum = 0;
  for (uint column = lane; column < COLUMNS; column += 32) {
    const ulong at = ulong(row) * COLUMNS + column;
    sum += float(out[at]) * float(grad_out[at]);
  }
  sum = simd_sum(sum);
  if (lane == 0) {
    delta[row] = sum;
  }
}
"""


def version() -> str:
    folder = _folder()
    return "pull request 3241" if folder and mlx_metal.include_folder() else "not installed"


def launch(call: Call) -> Launch | None:
    """Returns None if the headers are missing."""
    folder = _folder()
    if folder is None or mlx_metal.include_folder() is None:
        return None
    if not call.is_backward:
        raise UnsupportedCallError(f"{IMPL} has a backward only")
    if call.head_dim not in _QUERY_TILES or call.dtype == "float32":
        raise UnsupportedCallError(f"{IMPL} has no kernel for this")
    tiles = itertools.product(_QUERY_TILES[call.head_dim], _KEY_TILES[call.head_dim])
    first, *others = (_launch(call, folder, query, key) for query, key in tiles)
    return replace(first, alternatives=others)


def _folder() -> Path | None:
    """Checks the folder; its kernels must be those that read delta and scale their scores in float32."""
    named = os.environ.get("MLX_VJP_FOLDER")
    if not named:
        return None
    for header in _HEADERS.values():
        path = Path(named) / header
        if not path.is_file():
            raise WrongArgumentError(f"MLX_VJP_FOLDER={named!r} does not contain {header}; {_HOW}")
        if "VJP_SCALE_LOG2" not in path.read_text():
            raise WrongArgumentError(f"{path} is of an older state of the request; {_HOW}")
    return Path(named)


def _launch(
    call: Call, folder: Path, query_tile: tuple[int, int, int], key_tile: tuple[int, int, int]
) -> Launch:
    rows = call.batch * call.q_heads * call.q_len
    inputs = dict(enumerate(("query", "key", "value", "delta", "grad_out", "lse_log2")))
    query: dict[int, str | bytes] = {**inputs, 6: "grad_query", 7: _params(call, query_tile)}
    key: dict[int, str | bytes] = {**inputs, 6: "grad_key", 7: "grad_value", 8: _params(call, key_tile)}
    passes = [
        _delta(call, rows),
        _pass(call, folder, "dq", query_tile, (-(-call.q_len // query_tile[0]), call.q_heads), query),
        _pass(call, folder, "dkv", key_tile, (-(-call.kv_len // key_tile[1]), call.kv_heads), key),
    ]
    note = ", ".join(f"{q} rows, {k} keys, {s} simdgroups" for q, k, s in (query_tile, key_tile))
    return Launch(IMPL, passes, scratch={"delta": rows * 4}, note=note)


def _delta(call: Call, rows: int) -> Pass:
    from softmetal.testing.cuda import Pipeline

    macros = {"T": METAL_TYPES[call.dtype], "ROWS": str(_ROWS_OF_A_GROUP), "COLUMNS": str(call.head_dim)}
    threads = 32 * _ROWS_OF_A_GROUP
    pipeline = Pipeline(_DELTA, "row_delta", threads, macros, name="row_delta")
    count = struct.pack("I", rows)
    arguments: dict[int, str | bytes] = {0: "forward_out", 1: "grad_out", 2: "delta", 3: count}
    return Pass(pipeline, (-(-rows // _ROWS_OF_A_GROUP), 1, 1), (threads, 1, 1), arguments)


def _pass(
    call: Call,
    folder: Path,
    suffix: str,
    tile: tuple[int, int, int],
    grid: tuple[int, int],
    arguments: dict[int, str | bytes],
) -> Pass:
    from softmetal.testing.cuda import Pipeline

    tile_rows, tile_keys, simdgroups = tile
    name = f"attention_vjp_{suffix}"
    kernel = f"{name}<{METAL_TYPES[call.dtype]}, {tile_rows}, {tile_keys}, {call.head_dim}, {simdgroups}, 1>"
    include = mlx_metal.include_folder()
    assert include is not None
    attention = f"{mlx_metal.KERNELS}/steel/attn/attn.h"
    declarations = f'#include "{attention}"\n{_PARAMS}#include "{_HEADERS[suffix]}"'
    constants = {
        f"align_Q_vjp_{suffix}": call.q_len % tile_rows == 0,
        f"align_K_vjp_{suffix}": call.kv_len % tile_keys == 0,
        f"do_causal_vjp_{suffix}": call.causal,
        f"has_block_mask_vjp_{suffix}": False,
    }
    macros = {
        "VJP_GQA_FACTOR": str(call.group_size),
        "VJP_SCALE": f"{call.scale!r}f",
        "VJP_SCALE_LOG2": f"{call.scale * math.log2(math.e)!r}f",
    }
    threads = 32 * simdgroups
    pipeline = Pipeline(
        source=mlx_metal.instantiation(declarations, name, kernel),
        name=_HEADERS[suffix],
        kernel=name,
        max_threads=threads,
        macros=macros,
        constants=constants,
        include=(str(include), str(folder)),
        widened_from=METAL_TYPES[call.dtype],
        aligned_runs=True,
    )
    return Pass(pipeline, (*grid, call.batch), (threads, 1, 1), arguments)


def _params(call: Call, tile: tuple[int, int, int]) -> bytes:
    tile_rows, tile_keys, _ = tile
    keys = -(-call.kv_len // tile_keys)
    query = (call.q_heads * call.q_len * call.head_dim, call.q_len * call.head_dim, call.head_dim)
    key = (call.kv_heads * call.kv_len * call.head_dim, call.kv_len * call.head_dim, call.head_dim)
    return struct.pack(
        "10i25q",
        *(call.q_heads, call.q_len, -(-call.q_len // tile_rows), keys),
        *(call.q_len // tile_rows, call.kv_len // tile_keys, call.q_len % tile_rows, call.kv_len % tile_keys),
        *(call.kv_len - call.q_len, keys),
        *(*query, *key, *key, *query, *query, *key, *key),
        *(call.q_len, 1, call.q_len, 1),
    )
