"""llama.cpp's gated delta rule, token by token, launched as ggml_metal_op_gated_delta_net does if it writes
the state into its cache.

All operands are float32, the state is transposed, and value head h has key head h % ne01.
"""

from __future__ import annotations

from ..cases.calls import Call
from . import llama_metal, llama_source
from .launch import Launch, Pass
from .llama_source import IMPL, Constants


def launch(call: Call) -> Launch | None:
    """Returns None if llama.cpp has no kernel for this head size, or if its source is missing."""
    if not llama_metal.is_known_version():
        return None
    dim, simdgroups = call.head_dim, call.head_dim // 32
    kernel = f"kernel_gated_delta_net_f32_{simdgroups}"
    source = llama_source.text("kernels/gated_delta_net.metal")
    if dim % 32 != 0 or llama_source.instantiation(source, kernel) is None:
        return None
    prefix = "FC_gated_delta_net_"
    constants: Constants = {
        **{f"{prefix}ne20": dim, f"{prefix}ne30": dim if call.channel_decay else 1},
        f"{prefix}K": 1,  # states kept: the last
    }
    pipeline = llama_source.pipeline(call, source, kernel, 32 * simdgroups, constants)
    arguments: dict[int, str | bytes] = {
        0: llama_source.kargs("gated_delta_net", _fields(call)),
        **{1: "query_float32", 2: "key_float32", 3: "tiled_value", 4: "tiled_g", 5: "tiled_beta"},
        **{6: "tiled_initial_state", 7: "tiled_out", 8: "tiled_state"},
    }
    grid = (dim // simdgroups, call.q_heads, call.batch)
    return Launch(IMPL, [Pass(pipeline, grid, (32, simdgroups, 1), arguments)], note="token by token")


def _fields(call: Call) -> dict[str, int | float]:
    """Shapes and strides of query, key, value and result."""
    fields: dict[str, int | float] = {}
    dim, tokens = call.head_dim, call.q_len
    for tensor, heads in {
        "0": call.kv_heads,
        "1": call.kv_heads,
        "2": call.q_heads,
        "": call.q_heads,
    }.items():
        row = dim * heads
        shape, strides = (dim, heads, tokens, call.batch), (1, dim, row, row * tokens)
        fields |= {f"ne{tensor}{i}": size for i, size in enumerate(shape)}
        fields |= {f"nb{tensor}{i}": 4 * stride for i, stride in enumerate(strides)}
        fields[f"ns{tensor}2"] = row
    return {**fields, "nb_out": call.batch * call.q_heads * dim * dim}
