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

from ..cases.calls import METAL_TYPES, Call
from . import mlx_metal
from .launch import Launch, Pass

IMPL = "mlx-vjp"
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
_DECLARATIONS = f"""#include <metal_stdlib>
#include "{mlx_metal.KERNELS}/steel/attn/attn.h"
struct AttnVJPParams {{
  int H, qL, NQ, NK, NQ_aligned, NK_aligned, qL_rem, kL_rem, qL_off, NK_tiles;
  int64_t Q_strides[3], K_strides[3], V_strides[3], dO_strides[3];
  int64_t dQ_strides[3], dK_strides[3], dV_strides[3];
  int64_t LSE_strides[2], delta_strides[2];
}};
"""
_DELTA = """#include <metal_stdlib>
using namespace metal;
kernel void row_delta(
    const device T* out [[buffer(0)]],
    const device T* grad_out [[buffer(1)]],
    device float* delta [[buffer(2)]],
    constant uint& rows [[buffer(3)]],
    uint row [[simdgroup_index_in_threadgroup]],
    uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  row += group * ROWS;
  if (row >= rows) {
    return;
  }
  float sum = 0;
  for (ulong i = ulong(row) * COLUMNS + lane; i < (ulong(row) + 1) * COLUMNS; i += 32) {
    sum += float(out[i]) * float(grad_out[i]);
  }
  sum = simd_sum(sum);
  if (lane == 0) {
    delta[row] = sum;
  }
}
"""


def version() -> str:
    installed = os.environ.get("MLX_VJP_FOLDER") and mlx_metal.include_folder()
    return "pull request 3241" if installed else "not installed"


def launch(call: Call) -> Launch | None:
    """Returns None if the request has no kernel for this, or if the headers are missing."""
    if version() == "not installed" or call.head_dim not in _QUERY_TILES or call.dtype == "float32":
        return None
    tiles = itertools.product(_QUERY_TILES[call.head_dim], _KEY_TILES[call.head_dim])
    first, *others = (_launch(call, query, key) for query, key in tiles)
    return replace(first, alternatives=others)


def _launch(call: Call, query_tile: tuple[int, int, int], key_tile: tuple[int, int, int]) -> Launch:
    inputs = dict(enumerate(("query", "key", "value", "delta", "grad_out", "lse_log2")))
    query: dict[int, str | bytes] = {**inputs, 6: "grad_query", 7: _params(call, query_tile)}
    key: dict[int, str | bytes] = {**inputs, 6: "grad_key", 7: "grad_value", 8: _params(call, key_tile)}
    passes = [
        _delta(call),
        _pass(call, "dq", query_tile, (-(-call.q_len // query_tile[0]), call.q_heads), query),
        _pass(call, "dkv", key_tile, (-(-call.kv_len // key_tile[1]), call.kv_heads), key),
    ]
    note = ", ".join(f"{q} rows, {k} keys, {s} simdgroups" for q, k, s in (query_tile, key_tile))
    return Launch(IMPL, passes, scratch={"delta": call.batch * call.q_heads * call.q_len * 4}, note=note)


def _delta(call: Call) -> Pass:
    from softmetal.testing.cuda import Pipeline

    macros = {"T": METAL_TYPES[call.dtype], "ROWS": str(_ROWS_OF_A_GROUP), "COLUMNS": str(call.head_dim)}
    rows, threads = call.batch * call.q_heads * call.q_len, 32 * _ROWS_OF_A_GROUP
    pipeline = Pipeline(_DELTA, "row_delta", threads, macros, min_groups=1, name="row_delta")
    arguments: dict[int, str | bytes] = {0: "saved_out", 1: "grad_out", 2: "delta", 3: struct.pack("I", rows)}
    return Pass(pipeline, (-(-rows // _ROWS_OF_A_GROUP), 1, 1), (threads, 1, 1), arguments)


def _pass(
    call: Call,
    suffix: str,
    tile: tuple[int, int, int],
    grid: tuple[int, int],
    arguments: dict[int, str | bytes],
) -> Pass:
    rows, keys, simdgroups = tile
    name = f"attention_vjp_{suffix}"
    constants: dict[str, bool | int | float] = {
        f"align_Q_vjp_{suffix}": call.q_len % rows == 0,
        f"align_K_vjp_{suffix}": call.kv_len % keys == 0,
        f"do_causal_vjp_{suffix}": call.causal,
        f"has_block_mask_vjp_{suffix}": False,
    }
    macros = {
        "VJP_GQA_FACTOR": str(call.group_size),
        "VJP_SCALE": f"{call.scale!r}f",
        "VJP_SCALE_LOG2": f"{call.scale * math.log2(math.e)!r}f",
    }
    header = Path(os.environ["MLX_VJP_FOLDER"]).resolve() / f"steel_{name}.h"
    kernel = f"{name}<{METAL_TYPES[call.dtype]}, {rows}, {keys}, {call.head_dim}, {simdgroups}, 1>"
    pipeline = mlx_metal.pipeline_of(call, str(header), kernel, 32 * simdgroups, constants)
    pipeline = replace(pipeline, source=_DECLARATIONS + pipeline.source, macros=macros)
    return Pass(pipeline, (*grid, call.batch), (32 * simdgroups, 1, 1), arguments)


def _params(call: Call, tile: tuple[int, int, int]) -> bytes:
    rows, keys, _ = tile
    tiles = -(-call.kv_len // keys)
    query = (call.q_heads * call.q_len * call.head_dim, call.q_len * call.head_dim, call.head_dim)
    key = (call.kv_heads * call.kv_len * call.head_dim, call.kv_len * call.head_dim, call.head_dim)
    return struct.pack(
        "10i25q",
        *(call.q_heads, call.q_len, -(-call.q_len // rows), tiles, call.q_len // rows, call.kv_len // keys),
        *(call.q_len % rows, call.kv_len % keys, call.kv_len - call.q_len, tiles),
        *(*query, *key, *key, *query, *query, *key, *key),
        *(call.q_len, 1, call.q_len, 1),
    )
