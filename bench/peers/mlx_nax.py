"""MLX 0.32.4's attention on tensor operations (NAX), from the headers in the mlx-metal wheel.

It is launched as MLX does from M5 on with macOS 26.2. The kernel names lanes: it is right only under the
layout of an M5.
"""

from __future__ import annotations

from ..cases.calls import METAL_TYPES, Call
from . import mlx_metal
from .launch import Launch, Pass

IMPL = "mlx-nax"
_DIMS = (64, 96, 128)
_TILE_ROWS, _TILE_KEYS = 64, 32

version = mlx_metal.version


def launch(call: Call) -> Launch | None:
    """Returns None if MLX runs this call otherwise, or if its headers are missing."""
    from softmetal.testing.cuda import Pipeline

    if not mlx_metal.is_known_version():
        return None
    call.refuse_features(IMPL)
    is_taken = call.q_len > 8 and call.head_dim in _DIMS and call.dtype != "float32"
    if not is_taken or (call.is_causal and call.q_len > call.kv_len):
        return None
    element, d = METAL_TYPES[call.dtype], call.head_dim
    kernel = f"attention_nax<{element}, {_TILE_ROWS}, {_TILE_KEYS}, {d}, {d}, 4, 1, {element}, float>"
    header = f'#include "{mlx_metal.KERNELS}/steel/attn/kernels/steel_attention_nax.h"'
    pipeline = Pipeline(
        source=mlx_metal.instantiation(header, "attention_nax", kernel),
        name="steel_attention_nax.h",
        kernel="attention_nax",
        max_threads=128,
        constants={
            **dict.fromkeys(("has_mask", "has_sinks", "save_lse"), False),
            "align_Q": call.q_len % _TILE_ROWS == 0,
            "align_K": call.kv_len % _TILE_KEYS == 0,
            "do_causal": call.is_causal,
        },
        include=(str(mlx_metal.include_folder()),),
        aligned_runs=True,
        std="metal4.0",
    )
    params = mlx_metal.full_params(call, _TILE_ROWS, _TILE_KEYS)
    arguments: dict[int, str | bytes] = {0: "query", 1: "key", 2: "value", 3: "out", 4: params}
    grid = (-(-call.q_len // _TILE_ROWS), call.q_heads, call.batch)
    note = f"{_TILE_ROWS} rows, {_TILE_KEYS} keys, 4 simdgroups"
    return Launch(IMPL, [Pass(pipeline, grid, (32, 4, 1), arguments)], out_rows_first=True, note=note)
