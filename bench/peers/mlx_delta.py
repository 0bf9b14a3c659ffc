"""MLX 0.32.4's gated delta rule, from the header in the mlx-metal wheel.

It is launched as GatedDeltaUpdate::eval_gpu does on a GPU without matrix units: up to 8 tokens one by one, more
in chunks of 8. The kernels take a scaled query, its decays in its dtype, and a transposed state.
"""

from __future__ import annotations

import struct
from dataclasses import replace

from ..cases.calls import METAL_TYPES, Call, UnsupportedCallError
from . import mlx_metal
from .launch import Launch, Pass

IMPL = mlx_metal.IMPL
_DIM = 128
_HEADS = {(16, 16), (16, 32), (16, 48), (16, 64), (24, 24), (32, 32)}  # of key and value
_CHUNK = 8
_SIMDGROUPS = 4
# A choice between a bfloat and a float, which CUDA cannot convert to one type.
_CHOICES = {": 0.f)": ": InT(0.f))", "? beta_[fm * Hv + hv_idx] :": "? float(beta_[fm * Hv + hv_idx]) :"}


def launch(call: Call) -> Launch | None:
    """Returns None if the headers are missing."""
    if not mlx_metal.is_known_version():
        return None
    call.refuse_features(IMPL)
    if call.head_dim != _DIM or (call.kv_heads, call.q_heads) not in _HEADS:
        raise UnsupportedCallError(
            f"{IMPL} has no kernel for {call.kv_heads} key and {call.q_heads} value heads of {call.head_dim}"
        )
    in_chunks = call.q_len > _CHUNK
    name, columns = ("gated_delta_fused_chunk", 8) if in_chunks else ("gated_delta_seq", 1)
    # The last argument: tokens of a chunk; or those between saved states, of which there are none.
    kernel = f"{name}<{METAL_TYPES[call.dtype]}, {_DIM}, {_DIM}, {call.kv_heads}, {call.q_heads}, {_CHUNK}>"
    pipeline = mlx_metal.pipeline_of(
        call, "gated_delta_update.h", kernel, 32 * _SIMDGROUPS, {"save_state": False}
    )
    source = pipeline.source
    for choice, same in _CHOICES.items():
        source = source.replace(choice, same)
    pipeline = replace(pipeline, source=source, widened_from="float")  # states are operands
    arguments: dict[int, str | bytes] = {
        **{0: "scaled_query", 1: "key", 2: "value", 3: "transposed_initial_state", 4: "decay", 5: "beta"},
        **{6: "out", 7: "transposed_state", 8: struct.pack("i", call.q_len)},
    }
    grid = (1, _DIM // columns // _SIMDGROUPS, call.batch * call.q_heads)
    note = f"chunks of {_CHUNK}" if in_chunks else "token by token"
    return Launch(IMPL, [Pass(pipeline, grid, (32, _SIMDGROUPS, 1), arguments)], note=note)
