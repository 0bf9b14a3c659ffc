"""The gated delta rule of MLX 0.32.4 and of llama.cpp, from the sources of their attention. Both have
transposed states."""

from __future__ import annotations

import struct
from dataclasses import replace

from ..cases.calls import METAL_TYPES, Call, UnsupportedCallError
from . import llama_metal, llama_source, mlx_metal
from .launch import Launch, Pass, with_rounded_states

_MLX_DIM, _MLX_CHUNK, _MLX_SIMDGROUPS = 128, 8, 4
_MLX_HEADS = {(16, 16), (16, 32), (16, 48), (16, 64), (24, 24), (32, 32)}  # of key and value
# Choices between a bfloat and a float, which CUDA does not convert to one type.
_MLX_CHOICES = {": 0.f)": ": InT(0.f))", "? beta_[fm * Hv + hv_idx]": "? float(beta_[fm * Hv + hv_idx])"}


def mlx(call: Call) -> Launch | None:
    """Launches as GatedDeltaUpdate::eval_gpu on a GPU without matrix units. Returns None without headers."""
    if not mlx_metal.is_known_version():
        return None
    call.refuse_features(mlx_metal.IMPL)
    dim, heads = call.head_dim, (call.kv_heads, call.q_heads)
    if dim != _MLX_DIM or heads not in _MLX_HEADS:
        raise UnsupportedCallError(
            f"{mlx_metal.IMPL} has no kernel for {heads[0]} key and {heads[1]} value heads of {dim}"
        )
    name, columns, note = "gated_delta_seq", 1, "token by token"
    if call.q_len > _MLX_CHUNK:
        name, columns, note = "gated_delta_fused_chunk", 8, f"chunks of {_MLX_CHUNK}"
    # The last argument: tokens of a chunk, or between saved states, of which there are none.
    sizes = (dim, dim, *heads, _MLX_CHUNK)
    kernel = f"{name}<{METAL_TYPES[call.dtype]}, {', '.join(map(str, sizes))}>"
    off: dict[str, bool | int | float] = {"save_state": False}
    pipeline = mlx_metal.pipeline_of(call, "gated_delta_update.h", kernel, 32 * _MLX_SIMDGROUPS, off)
    source = pipeline.source
    for choice, same in _MLX_CHOICES.items():
        source = source.replace(choice, same)
    pipeline = replace(pipeline, source=source, widened_from="float")  # states are operands
    arguments: dict[int, str | bytes] = {
        **{0: "scaled_query", 1: "key", 2: "value", 3: "transposed_initial_state", 4: "decay", 5: "beta"},
        **{6: "out", 7: "transposed_state", 8: struct.pack("i", call.q_len)},
    }
    grid = (1, dim // columns // _MLX_SIMDGROUPS, call.batch * call.q_heads)
    one = Pass(pipeline, grid, (32, _MLX_SIMDGROUPS, 1), arguments)
    return with_rounded_states(Launch(mlx_metal.IMPL, [one], note=note), call.dtype)


def llama(call: Call) -> Launch | None:
    """Launches as ggml_metal_op_gated_delta_net if it writes the state into its cache: all in float32, token
    by token. Returns None without a kernel for the head size, or without sources."""
    if not llama_metal.is_known_version():
        return None
    dim, simdgroups = call.head_dim, call.head_dim // 32
    kernel, prefix = f"kernel_gated_delta_net_f32_{simdgroups}", "FC_gated_delta_net_"
    source = llama_source.text("kernels/gated_delta_net.metal")
    if dim % 32 != 0 or llama_source.instantiation(source, kernel) is None:
        return None
    sizes = {"ne20": dim, "ne30": dim if call.channel_decay else 1, "K": 1}  # K: states kept
    constants: dict[str, bool | int | float] = {prefix + name: size for name, size in sizes.items()}
    pipeline = llama_source.pipeline(call, source, kernel, 32 * simdgroups, constants)
    fields: dict[str, int | float] = {"nb_out": call.batch * call.q_heads * dim * dim}
    heads_of = dict.fromkeys(("0", "1"), call.kv_heads) | dict.fromkeys(("2", ""), call.q_heads)
    for tensor, heads in heads_of.items():
        shape, row = (dim, heads, call.q_len, call.batch), dim * heads
        fields |= {f"ne{tensor}{i}": size for i, size in enumerate(shape)}
        fields |= {f"nb{tensor}{i}": 4 * step for i, step in enumerate((1, dim, row, row * call.q_len))}
        fields[f"ns{tensor}2"] = row
    arguments: dict[int, str | bytes] = {
        0: llama_source.kargs("gated_delta_net", fields),
        **{1: "query_float32", 2: "key_float32", 3: "value_float32", 4: "g", 5: "beta_float32"},
        **{6: "transposed_initial_state", 7: "out_float32", 8: "transposed_state"},
    }
    grid = (dim // simdgroups, call.q_heads, call.batch)
    note = "token by token"
    return Launch(llama_source.IMPL, [Pass(pipeline, grid, (32, simdgroups, 1), arguments)], note=note)
