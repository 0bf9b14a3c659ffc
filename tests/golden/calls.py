"""The calls of the golden plans (__main__.py), and calls without memory, for planning."""

from __future__ import annotations

from typing import Any

import torch

import torch_fattn
from tests.helpers import problems
from tests.helpers.kv_formats import GROUPED, UNSCALED, columns, name_of
from tests.helpers.problems import Problem
from torch_fattn.inspection.sizes import call_of_sizes
from torch_fattn.operators.kv_formats import KV_FORMATS

M1: dict[str, Any] = {"device_name": "Apple M1", "family": 7, "cores": 8}
M2_MAX: dict[str, Any] = {"device_name": "Apple M2 Max", "family": 8, "cores": 38}
M5: dict[str, Any] = {"device_name": "Apple M5", "family": 10, "cores": 10}
TENSORS = M5 | {"tensor": "registers"}

f32, f16, bf16 = problems.DTYPES


def on_meta(problem: Problem) -> dict[str, Any]:
    """Arguments on "meta" with the strides of the problem."""
    p = problem

    def tensor(shape: tuple[int, ...], dtype: torch.dtype = p.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    arguments: dict[str, Any] = {"query": tensor((p.batch, p.q_heads, p.q_len, p.head_dim))}
    if p.q_lens is not None:
        arguments["query"] = tensor((sum(p.q_lens) + p.spare_rows, p.q_heads, p.head_dim))
        arguments["cu_seqlens_q"] = tensor((p.batch + 1,), torch.int32)
        arguments |= {"max_seqlen_q": p.q_len, "is_causal": p.is_causal}
    rows: tuple[int, ...] = (p.batch, p.kv_heads, p.kv_len)
    suffix = ""
    if p.has_packed_keys:
        rows = (sum(p.lengths) + p.spare_rows, p.kv_heads)
        arguments["cu_seqlens_k"] = tensor((p.batch + 1,), torch.int32)
        arguments["max_seqlen_k"] = p.kv_len
    if p.block_size:
        blocks = p.kv_len // p.block_size
        rows, suffix = (p.batch * blocks, p.block_size, p.kv_heads), "_cache"
        arguments["block_tables"] = tensor((p.batch, blocks), torch.int32)
    kind = KV_FORMATS.get(name_of(p.kv_format))
    for name, dim in (("key", p.head_dim), ("value", p.value_dim)):
        stored = p.dtype if kind is None else kind.dtype
        arguments[f"{name}{suffix}"] = tensor((*rows, columns(p.kv_format, dim)), stored)
        if kind is not None and p.kv_format not in UNSCALED:
            arguments[f"{name}_scales"] = tensor(*kind.scales(rows, dim))
    if kind is not None:
        arguments["kv_format"] = name_of(p.kv_format)
    if p.value_in_key:
        arguments[f"value{suffix}"] = arguments[f"key{suffix}"][..., : columns(p.kv_format, p.value_dim)]
        if p.kv_format in GROUPED:
            arguments["value_scales"] = arguments["key_scales"][..., : p.value_dim // 32, :]
    if p.seq_lens is not None and not p.has_packed_keys:
        arguments["seq_lens"] = tensor((p.batch,), torch.int32)
    if p.mask is not None:
        full = (p.batch, p.q_heads, p.q_len, p.kv_len)
        size = tuple(1 if one else n for n, one in zip(full, p.mask_broadcast, strict=True))
        arguments["attn_mask"] = tensor(size, p.mask)
        if p.mask_map:
            cells = (*size[:2], -(-size[2] // 16), -(-size[3] // 32))
            arguments["mask_map"] = tensor(cells, torch.uint8)
    if p.op == "prefill" and p.causality != "none":
        arguments["is_causal"] = True
    if p.q_offset is not None:
        arguments["q_offset"] = p.q_offset
    arguments |= {name: each.to("meta") for name, each in p.tensors(torch.Generator()).items()}
    return arguments | p.numbers


def plan_of(problem: Problem, **device: Any) -> dict[str, Any]:
    return torch_fattn.explain(problem.op, **on_meta(problem), **(device or M1)).data


def _call(
    op: str, dtype: torch.dtype, sizes: tuple[int, ...], device: dict[str, Any] = M1, **options: Any
) -> tuple[Problem, dict[str, Any]]:
    """`sizes` are those of Problem: batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim."""
    return Problem(0, op, dtype, *sizes, **options), device  # type: ignore[arg-type]


CAUSAL = {"causality": "bottom_right"}
CHUNK_AND_TOKEN: dict[str, Any] = {"seq_lens": (4000, 900), "q_lens": (1, 900), "block_size": 16, **CAUSAL}

# Each row of the tuning tables once, and each kind of pass.
# fmt: off
GOLDEN_CALLS: dict[str, tuple[Problem, dict[str, Any]]] = {
    "prefill_f16_causal": _call("prefill", f16, (2, 16, 4, 512, 512, 64, 64), **CAUSAL),
    "prefill_f32_d128": _call("prefill", f32, (1, 8, 8, 300, 300, 128, 128)),
    "prefill_bf16_mask": _call("prefill", bf16, (2, 8, 2, 77, 93, 80, 40), mask=torch.bool,
        mask_broadcast=(False, True, True, False)),
    # A map that the plan makes of a mask for all heads, and a given map.
    "prefill_documents": _call("prefill", f16, (2, 32, 8, 2000, 2000, 128, 128), mask=torch.bool,
        mask_broadcast=(False, True, False, False), **CAUSAL),
    # Tiles of 128 rows become tiles of one row of blocks; the query heads of a group do not share a tile.
    "prefill_block_mask": _call("prefill", bf16, (2, 16, 4, 3000, 4000, 128, 128),
        {"device_name": "Apple M3 Max", "family": 9, "cores": 40}, block_mask=(64, 256), **CAUSAL),
    "prefill_wide_mask_map": _call("prefill", bf16, (2, 4, 4, 100, 100, 256, 256), mask=bf16,
        mask_broadcast=(True, False, False, False), mask_map=True),
    "decode_one_split": _call("decode", f16, (1, 8, 8, 1, 100, 64, 64), seq_lens=(100,)),
    "decode_long": _call("decode", bf16, (1, 32, 8, 1, 32768, 128, 128), seq_lens=(30000,)),
    "decode_long_m2_max": _call("decode", bf16, (1, 32, 8, 1, 32768, 128, 128), M2_MAX, seq_lens=(30000,)),
    "decode_f32_rows": _call("decode", f32, (4, 8, 1, 8, 4096, 96, 96), mask=f32),
    "decode_options": _call("decode", f16, (2, 64, 8, 2, 8192, 64, 64), seq_lens=(5000, 70), window_left=127,
        sink_tokens=4, sinks=True, alibi_slopes=True, softcap=30.0, tree="shared"),
    "decode_int8": _call("decode", f16, (1, 32, 8, 1, 8192, 128, 128), seq_lens=(8192,), kv_format="int8"),
    "paged_int4": _call("paged_decode", bf16, (2, 8, 2, 1, 96, 64, 32), seq_lens=(9, 96), block_size=16,
        kv_format="int4"),
    "decode_unshared": _call("decode", bf16, (4, 16, 16, 1, 8192, 128, 128), M2_MAX, seq_lens=(9,) * 4),
    "paged_two_rows": _call("paged_decode", f16, (2, 8, 4, 1, 4096, 256, 256), seq_lens=(9, 4096),
        block_size=16, sinks=True, window_left=1023),
    "decode_wide_rows": _call("decode", f16, (2, 32, 8, 4, 4096, 256, 256), seq_lens=(9, 4096)),
    "paged_mla": _call("paged_decode", bf16, (4, 128, 1, 1, 8192, 576, 512), value_in_key=True,
        seq_lens=(9,) * 4, block_size=64),
    "paged_mla_int8": _call("paged_decode", f16, (4, 128, 1, 1, 8192, 576, 512), value_in_key=True,
        seq_lens=(9,) * 4, block_size=64, kv_format="int8"),
    "decode_wide_int4": _call("decode", f16, (2, 32, 8, 1, 4096, 256, 256), seq_lens=(9, 4096),
        kv_format="int4"),
    "prefill_options": _call("prefill", f16, (1, 8, 2, 600, 600, 64, 64), window_left=127, window_right=16,
        sink_tokens=4, sinks=True, alibi_slopes=True, softcap=30.0),
    "paged_prefill_mixed": _call("paged_prefill", f16, (4, 32, 8, 900, 4096, 128, 128),
        seq_lens=(4000, 900, 0, 17), q_lens=(1, 900, 0, 17), block_size=16, window_left=1023, window_right=5,
        **CAUSAL),
    "paged_prefill_int8": _call("paged_prefill", f16, (2, 32, 8, 900, 4096, 128, 128), kv_format="int8",
        **CHUNK_AND_TOKEN),
    "paged_prefill_int4": _call("paged_prefill", f16, (2, 32, 8, 900, 4096, 128, 128), kv_format="int4",
        **CHUNK_AND_TOKEN),
    # Few rows over many keys, cut into parts and merged: all heads that share keys, a few heads, and a
    # cache beyond the most keys of a threadgroup.
    "prefill_chunk": _call("prefill", f16, (2, 32, 8, 12, 8192, 128, 128), M2_MAX, sinks=True, **CAUSAL),
    "prefill_few_heads": _call("prefill", bf16, (1, 4, 4, 512, 32768, 128, 128), M2_MAX, **CAUSAL),
    "paged_prefill_huge": _call("paged_prefill", f16, (2, 32, 8, 900, 2**24, 128, 128), **CHUNK_AND_TOKEN),
    "prefill_wide_d256": _call("prefill", f16, (1, 16, 8, 900, 900, 256, 256), softcap=50.0, **CAUSAL),
    "prefill_wide_f32": _call("prefill", f32, (2, 8, 1, 60, 70, 576, 512)),
    "varlen_prefill": _call("varlen_prefill", bf16, (4, 32, 8, 900, 1000, 128, 64),
        seq_lens=(1000, 900, 0, 17), q_lens=(1, 900, 3, 0), window_left=1023, sinks=True, **CAUSAL),
    # On tensor operations, and a call that they do not take.
    "prefill_tensor": _call("prefill", f16, (1, 32, 8, 2000, 2000, 128, 128), TENSORS, **CAUSAL),
    "prefill_tensor_threadgroup": _call("prefill", bf16, (1, 32, 8, 2000, 2000, 128, 128),
        M5 | {"tensor": "threadgroup"}, **CAUSAL),
    "prefill_tensor_wide": _call("prefill", bf16, (1, 4, 4, 100, 9000, 256, 256), TENSORS, mask=torch.bool),
    "prefill_tensor_f32": _call("prefill", f32, (1, 32, 8, 2000, 2000, 128, 128), TENSORS, **CAUSAL),
    "prefill_tensor_latent": _call("prefill", f16, (1, 128, 1, 9, 4096, 576, 512), TENSORS,
        value_in_key=True, **CAUSAL),
    "decode_tensor": _call("decode", f16, (2, 32, 8, 8, 5000, 128, 128), TENSORS, seq_lens=(4000, 9),
        tree="shared"),
}
# fmt: on


def _empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _backward(
    op: str, dtype: torch.dtype, sizes: tuple[int, ...], **options: Any
) -> tuple[str, dict[str, Any]]:
    """The backward of a call, as its graph has it, with a gradient of lse."""
    problem, _device = _call(op, dtype, sizes, **options)
    arguments = on_meta(problem)
    query = arguments["query"]
    rows = (*query.shape[:-1], problem.value_dim)
    lse = _empty(f32, *(query.shape[:-1] if query.dim() == 4 else query.shape[1::-1]))
    out = _empty(dtype, *rows)
    return f"{op}_backward", {
        **arguments,
        "grad_out": _empty(dtype, *rows),
        "grad_lse": lse,
        "out": out,
        "out_remainder": None if dtype == f32 else out,
        "lse": lse,
    }


# Operators that no Problem describes.
OTHER_GOLDEN_CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "merge_f16": ("merge", {"outs": _empty(f16, 4, 2, 8, 3, 64), "lses": _empty(f32, 4, 2, 8, 3)}),
    "cache_write_int4": (
        "cache_write",
        {
            "key": _empty(bf16, 9, 2, 192),
            "value": _empty(bf16, 9, 2, 128),
            "key_cache": _empty(torch.uint8, 64, 2, 16, 96).transpose(1, 2),
            "value_cache": _empty(torch.uint8, 64, 2, 16, 64).transpose(1, 2),
            "slot_mapping": _empty(torch.int64, 9),
            "key_scales": _empty(f16, 64, 2, 16, 6, 2).transpose(1, 2),
            "value_scales": _empty(f16, 64, 2, 16, 4, 2).transpose(1, 2),
            "kv_format": "int4",
        },
    ),
    "rotary_bf16": (
        "rotary",
        {
            "query": _empty(bf16, 2, 9, 4, 64).transpose(1, 2),
            "key": _empty(bf16, 2, 9, 2, 64).transpose(1, 2),
            **dict.fromkeys(("cos", "sin"), _empty(f32, 1, 16, 9).mT),
            "rotary_dim": 32,
            "style": "pairs",
            "token_major_out": True,
        },
    ),
    "rotary_write_int8": (
        "rotary_write",
        {
            "query": _empty(f16, 4, 8, 1, 128),
            "key": _empty(f16, 4, 2, 1, 128),
            "value": _empty(f16, 4, 2, 1, 64),
            **dict.fromkeys(("cos", "sin"), _empty(f16, 4, 1, 128)),
            **{
                f"{n}_cache": _empty(torch.int8, 4, 2, 300, d).transpose(1, 2)
                for n, d in (("key", 128), ("value", 64))
            },
            **{f"{n}_scales": _empty(f32, 4, 2, 300).transpose(1, 2) for n in ("key", "value")},
            **{f"{n}_norm": _empty(f16, 128) for n in ("query", "key")},
            "starts": _empty(torch.int32, 4),
        },
    ),
    "gated_delta_step_qwen3_next": (
        "gated_delta_step",
        call_of_sizes("gated_delta_step", dtype=bf16, kv_heads=16) | {"slots": _empty(torch.int32, 1)},
    ),
    "gated_delta_step_drafts": (
        "gated_delta_step",
        call_of_sizes("gated_delta_step", batch=2, q_len=4, heads=48, kv_heads=16, head_dim=64)
        | {"writes_state": False},
    ),
    "gated_delta_step_kimi": (  # a decay per channel, and rounds over columns
        "gated_delta_step",
        call_of_sizes("gated_delta_step", dtype=f32, batch=4, q_len=3, head_dim=256)
        | {"a": _empty(f32, 4, 3, 32, 256), "dt_bias": _empty(f32, 32, 256)}
        | {"counts": _empty(torch.int32, 4), "gate": "sigmoid"},
    ),
    "rms_norm_gemma": (
        "rms_norm",
        {"x": _empty(bf16, 1, 1, 2304), "weight": _empty(bf16, 2304), "norm": "plus_one"},
    ),
    "rms_norm_gated": (
        "rms_norm",
        {
            "x": _empty(f16, 2, 9, 4, 128),
            "weight": _empty(f32, 128),
            "gate": _empty(f16, 2, 9, 4, 256)[..., 128:],
        },
    ),
    "gated_delta_rule_f16": (  # Qwen3-Next's interleaved projections, gates and slots
        "gated_delta_rule",
        {
            "query": _empty(f16, 2, 100, 16, 768)[..., :128],
            "key": _empty(f16, 2, 100, 16, 768)[..., 128:256],
            "value": _empty(f16, 2, 100, 16, 768)[..., 256:512].unflatten(3, (2, 128)),
            "g": _empty(f16, 2, 100, 16, 4)[..., 2:],
            "beta": _empty(f16, 2, 100, 16, 4)[..., :2],
            "state": _empty(f32, 9, 32, 128, 128),
            **dict.fromkeys(("A_log", "dt_bias"), _empty(f32, 32)),
            "slots": _empty(torch.int32, 2),
            "has_initial_state": _empty(torch.bool, 2),
            "use_qk_l2norm_in_kernel": True,
        },
    ),
    "gated_delta_rule_kda_bf16": (
        "gated_delta_rule",
        {
            **dict.fromkeys(("query", "key", "value"), _empty(bf16, 1, 77, 3, 72)),
            "g": _empty(f32, 1, 77, 3, 72),
            "beta": _empty(bf16, 1, 77, 3),
            "state": _empty(f32, 4, 3, 72, 72),
            "cu_seqlens": _empty(torch.int32, 5),
            "writes_state": False,
        },
    ),
    "causal_conv1d_bf16": (
        "causal_conv1d",
        {
            "x": _empty(bf16, 2, 300, 100).mT,
            "weight": _empty(bf16, 300, 4),
            "bias": _empty(bf16, 300),
            "state": _empty(bf16, 2, 300, 4),
            "activation": "silu",
        },
    ),
    "softmax_f16": ("softmax", {"scores": _empty(f16, 2, 8, 77, 1500).transpose(1, 2)}),
    "softmax_short_f32": ("softmax", {"scores": _empty(f32, 4000, 60, 2)[..., 0], "softcap": 30.0}),
    "softcap_bf16": ("softcap", {"x": _empty(bf16, 6, 40, 100)[:, :, :60], "cap": 30.0}),
    "prefill_backward_f16": _backward("prefill", f16, (2, 16, 4, 512, 512, 64, 64), **CAUSAL),
    "prefill_backward_f32": _backward("prefill", f32, (1, 8, 8, 300, 300, 128, 128)),
    # Columns over several simdgroups, shares of different sizes, and a map that the plan makes.
    "prefill_backward_bf16_mask": _backward(
        "prefill",
        bf16,
        (2, 32, 8, 2000, 2000, 136, 256),
        mask=torch.bool,
        mask_broadcast=(False, True, False, False),
        sinks=True,
        softcap=30.0,
    ),
    "varlen_prefill_backward": _backward(
        "varlen_prefill",
        bf16,
        (4, 32, 8, 900, 1000, 128, 64),
        seq_lens=(1000, 900, 0, 17),
        q_lens=(1, 900, 3, 0),
        window_left=1023,
        sinks=True,
        alibi_slopes=True,
        **CAUSAL,
    ),
    "mask_map_f32": ("mask_map", {"attn_mask": _empty(f32, 2, 1, 3000, 5000)}),
}


def golden_plan(name: str) -> tuple[str, dict[str, Any]]:
    """The operator of a golden plan, and its current plan."""
    if name in GOLDEN_CALLS:
        problem, device = GOLDEN_CALLS[name]
        return problem.op, plan_of(problem, **device)
    op, arguments = OTHER_GOLDEN_CALLS[name]
    return op, torch_fattn.explain(op, **arguments, **M1).data
