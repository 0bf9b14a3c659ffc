"""MLX 0.32.4's attention on tensor operations (NAX), from the headers in the mlx-metal wheel.

It is launched as MLX does from M5 on with macOS 26.2. The kernel names lanes: it is right only under the
layout of an M5.
"""

from __future__ import annotations

from dataclasses import replace

from ..cases.calls import Call
from . import mlx_metal
from .launch import Launch

IMPL = "mlx-nax"
_DIMS = (64, 96, 128)
_TILE_ROWS, _TILE_KEYS = 64, 32

version = mlx_metal.version


def launch(call: Call) -> Launch | None:
    """Returns None if MLX runs this call otherwise, or if its headers are missing."""
    if not mlx_metal.is_known_version():
        return None
    call.refuse_features(IMPL)
    is_taken = call.q_len > 8 and call.head_dim in _DIMS and call.dtype != "float32"
    if not is_taken or (call.is_causal and call.q_len > call.kv_len):
        return None
    launch = mlx_metal.full(call, _TILE_ROWS, _TILE_KEYS, "attention_nax")
    (step,) = launch.passes
    step = replace(step, pipeline=replace(step.pipeline, std="metal4.0"))
    return replace(launch, impl=IMPL, passes=[step])
