"""flash-attn's functions for dense tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..integrations.pytorch.routing import is_plain, torchs
from ..operators.differentiable import needs_gradient
from ..operators.head_padding import pad_heads, without_padding
from ..operators.parts import result_dtype
from ..runtime.signatures import public
from ..runtime.tensor_checks import check_shape
from .alibi import attend_by_distance, sees_no_later_key
from .arguments import (
    ROWS,
    Window,
    check_heads,
    check_operands,
    check_sizes,
    check_slopes,
    refuse_dropout,
    refuse_gradient_by_distance,
    scale_of,
    softcap_of,
    window,
)
from .newer import DEFAULTS, DenseArguments, check_newer, check_out, into, sinks_of
from .results import Result, result, with_lse

_PACKED_QKV = ("batch", "length", 3, "heads", "head_dim")
_PACKED_KV = ("batch", "length", 2, "kv_heads", "head_dim")


@with_lse
@public("torch_fattn.flash_attn.flash_attn_func", options=DEFAULTS)
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False, *,
    num_splits: int = 0, **newer: Unpack[DenseArguments],
) -> Result:  # fmt: skip
    """Attention of q `[B, Lq, Hq, D]` over k and v `[B, Lk, Hkv, D]`. Returns out, shaped like q; with
    return_attn_probs also the log-sum-exp `[B, Hq, Lq]` and an empty tensor, as flash-attn does without
    dropout. Differentiable for head dims up to 256, also in alibi_slopes if causal. `deterministic` has no
    effect. learnable_sink (s_aux) `[Hq]` are softmax logits without a value. `out`, if given, gets a copy of
    the result."""
    op = "torch_fattn.flash_attn.flash_attn_func"
    check_newer(op, newer, q=q, k=k, v=v)
    check_shape(op, "q", q, ROWS)
    check_operands(op, q, k=(k, ROWS), v=(v, ROWS))
    check_sizes(op, "batch size", q=q.shape[0], k=k.shape[0], v=v.shape[0])
    check_sizes(op, "length", k=k.shape[1], v=v.shape[1])
    check_heads(op, q, k, v)
    check_slopes(op, alibi_slopes, q, q.shape[0])
    refuse_dropout(op, dropout_p)
    scale = scale_of(op, softmax_scale)
    q_len, kv_len, value_dim = q.shape[1], k.shape[1], v.shape[-1]
    limits: dict[str, Any] = {**window(window_size), "softcap": softcap_of(op, softcap, scale)}
    limits |= sinks_of(op, newer, q)
    target = newer.get("out")
    check_out(op, target, q, value_dim)
    trains = needs_gradient(q, k, v, alibi_slopes, limits.get("sinks"))
    if alibi_slopes is None and not return_attn_probs and not trains and is_plain(limits):
        routed = torchs(*(tensor.transpose(1, 2) for tensor in (q, k, v)), is_causal=causal, scale=scale)
        if routed is not None:
            return into(target, routed.transpose(1, 2).contiguous())
    options: dict[str, Any] = {**limits, "token_major_out": True}
    q, k, v, options["scale"] = pad_heads(q, k, v, scale)
    operands = [tensor.transpose(1, 2) for tensor in (q, k, v)]

    def attend(before: int, part: bool = False, **options: Any) -> tuple[Tensor, Tensor]:
        ops = torch.ops.fattn
        prefill = ops.prefill.part if part else ops.attention if trains else ops.prefill
        out, lse = prefill(*operands, q_offset=kv_len - q_len - before, **options)
        return out.transpose(1, 2), lse

    if not trains and (q_len == 1 or causal):
        out, lse = torch.ops.fattn.decode(*operands, alibi_slopes=alibi_slopes, **options)
        out = out.transpose(1, 2)
    elif alibi_slopes is None or sees_no_later_key(causal, options):
        out, lse = attend(0, is_causal=causal, alibi_slopes=alibi_slopes, **options)
    else:
        refuse_gradient_by_distance(op, trains and limits["window_left"] != 0)
        out, lse = attend_by_distance(attend, alibi_slopes, alibi_slopes[..., None], result_dtype(q), options)
    return result(into(target, without_padding(out, value_dim)), lse, return_attn_probs)


@with_lse
@public("torch_fattn.flash_attn.flash_attn_qkvpacked_func", names=dict.fromkeys("qkv", "qkv"))
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """`flash_attn_func` of qkv `[B, L, 3, H, D]`, without a copy."""
    check_shape("torch_fattn.flash_attn.flash_attn_qkvpacked_func", "qkv", qkv, _PACKED_QKV)
    q, k, v = qkv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


@with_lse
@public("torch_fattn.flash_attn.flash_attn_kvpacked_func", names=dict.fromkeys("kv", "kv"))
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """`flash_attn_func` of kv `[B, Lk, 2, Hkv, D]`, without a copy."""
    check_shape("torch_fattn.flash_attn.flash_attn_kvpacked_func", "kv", kv, _PACKED_KV)
    k, v = kv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip
