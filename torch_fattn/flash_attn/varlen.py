"""flash-attn's functions for packed sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..operators.differentiable import needs_gradient
from ..operators.head_padding import pad_heads, without_padding
from ..operators.parts import result_dtype
from ..runtime.signatures import public
from ..runtime.tensor_checks import check_integers, check_shape
from .alibi import attend_by_distance, sees_no_later_key
from .arguments import (
    POOL,
    Window,
    check_between,
    check_blocks,
    check_heads,
    check_operands,
    check_sizes,
    check_slopes,
    integer,
    refuse_dropout,
    refuse_gradient_by_distance,
    scale_of,
    softcap_of,
    window,
)
from .newer import DEFAULTS, PackedArguments, check_newer, check_out, into, one_of, sinks_of
from .results import Result, result, with_lse

FEW_ROWS = 16  # per sequence; with more, always a prefill, for which packed rows need no copy
_ROWS = ("tokens", "heads", "head_dim")
_QKV = {f"{what}_{of}": what for what in ("cu_seqlens", "max_seqlen") for of in "qk"}
_QKV |= dict.fromkeys("qkv", "qkv")


@with_lse
@public("torch_fattn.flash_attn.flash_attn_varlen_func", options=DEFAULTS)
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None, max_seqlen_k: int | Tensor | None = None,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
    seqused_k: Tensor | None = None, *, return_softmax_lse: bool = False, num_splits: int = 0,
    **newer: Unpack[PackedArguments],
) -> Result:  # fmt: skip
    """Attention of packed sequences: q `[Tq, Hq, D]`; k and v `[Tk, Hkv, D]`, or with a block_table `[B,
    blocks]` pools `[num_blocks, block_size, Hkv, D]`. Returns out, shaped like q, and on request the
    log-sum-exp `[Hq, Tq]`. seqused_k `[B]` is the number of keys in use of each sequence, as in vLLM; with it
    and a block_table, cu_seqlens_k may be None. Differentiable like `flash_attn_func`, without block_table
    and seqused_k.

    With a block_table and max_seqlen_q rows in every sequence (one, or up to 16 if causal), this calls
    `paged_decode`, otherwise `paged_prefill`. Rows of a sequence beyond max_seqlen_q are right or NaN; with
    FATTN_CHECK=1 in the environment they raise ValueError. num_splits=1 always calls `paged_prefill`, whose
    results are batch-invariant, bit for bit."""
    op = "torch_fattn.flash_attn.flash_attn_varlen_func"
    check_newer(op, newer, q=q, k=k, v=v)
    block_table = one_of(op, block_table=block_table, page_table=newer.get("page_table"))
    check_shape(op, "q", q, _ROWS)
    check_integers(op, "cu_seqlens_q", cu_seqlens_q, ("batch + 1",), q, "q")
    batch = cu_seqlens_q.shape[0] - 1
    if batch < 0:
        raise ValueError(f"{op}: cu_seqlens_q is empty; it begins with 0")
    if block_table is not None:
        check_integers(op, "block_table", block_table, (batch, "blocks"), q, "q")
    if seqused_k is not None:
        check_integers(op, "seqused_k", seqused_k, (batch,), q, "q")
    if cu_seqlens_k is not None or block_table is None or seqused_k is None:
        check_integers(op, "cu_seqlens_k", cu_seqlens_k, (batch + 1,), q, "q")
    shape = _ROWS if block_table is None else POOL
    check_operands(op, q, k=(k, shape), v=(v, shape))
    for dim, what in enumerate(("length",) if block_table is None else ("num_blocks", "block_size")):
        check_sizes(op, what, k=k.shape[dim], v=v.shape[dim])
    check_heads(op, q, k, v)
    check_slopes(op, alibi_slopes, q, batch)
    refuse_dropout(op, dropout_p)
    most_q = integer(op, "max_seqlen_q", max_seqlen_q, "the rows of the longest sequence")
    most_k = integer(op, "max_seqlen_k", max_seqlen_k, "the keys of the longest sequence")
    scale = scale_of(op, softmax_scale)
    options: dict[str, Any] = {**window(window_size), "softcap": softcap_of(op, softcap, scale)}
    options |= sinks_of(op, newer, q)
    target, value_dim = newer.get("out"), v.shape[-1]
    check_out(op, target, q, value_dim)
    q, k, v, options["scale"] = pad_heads(q, k, v, scale)
    trains = needs_gradient(q, k, v, alibi_slopes, options.get("sinks"))
    by_distance = alibi_slopes is not None and not sees_no_later_key(causal, options)
    if block_table is None and seqused_k is None and not by_distance:
        prefill = torch.ops.fattn.varlen_attention if trains else torch.ops.fattn.varlen_prefill
        out, lse = prefill(
            q, k, v, cu_seqlens_q, cu_seqlens_k, most_q, most_k,
            is_causal=causal, alibi_slopes=alibi_slopes, **options,
        )  # fmt: skip
        out = into(target, without_padding(out, value_dim))
        return result(out, lse, return_attn_probs, return_softmax_lse)

    most: int | Tensor = k.shape[0] if block_table is None else block_table.shape[1] * k.shape[1]
    if block_table is None or seqused_k is None:
        assert cu_seqlens_k is not None
        lens = cu_seqlens_k.diff()
        check_between(op, "cu_seqlens_k.diff()", lens, most)
        most = lens = lens.clamp(min=0).clamp(max=most)
    if seqused_k is not None:
        check_between(op, "seqused_k", seqused_k, most)
        lens = seqused_k.clamp(min=0).clamp(max=most)
    decodes = False
    if block_table is not None:
        check_blocks(op, "block_table", block_table, lens, 0, k)
        decodes = q.shape[0] == batch * most_q > 0 and (most_q == 1 or (causal and most_q <= FEW_ROWS))

    def attend(before: int, part: bool = False, **options: Any) -> tuple[Tensor, Tensor]:
        keys = (lens - before).clamp(min=0) if before else lens
        results: tuple[Tensor, Tensor]
        if block_table is not None:
            op = torch.ops.fattn.paged_prefill.part if part else torch.ops.fattn.paged_prefill
            results = op(q, k, v, block_table, keys, cu_seqlens_q, most_q, **options)
            return results
        # After each sequence, add one without rows that takes its unused keys.
        assert cu_seqlens_k is not None
        starts = torch.stack((cu_seqlens_k[:-1], cu_seqlens_k[:-1] + keys), 1).flatten()
        of_keys, of_rows = torch.cat((starts, cu_seqlens_k[-1:])), cu_seqlens_q.repeat_interleave(2)[1:]
        if (slopes := options["alibi_slopes"]) is not None and slopes.dim() == 2:
            options["alibi_slopes"] = slopes.repeat_interleave(2, 0)
        op = torch.ops.fattn.varlen_prefill.part if part else torch.ops.fattn.varlen_prefill
        results = op(q, k, v, of_rows, of_keys, most_q, most_k, **options)
        return results

    if decodes and num_splits != 1:
        check_between(op, "cu_seqlens_q.diff()", cu_seqlens_q.diff(), most_q)
        options |= {"alibi_slopes": alibi_slopes, "token_major_out": True}
        out, lse = _decode(q, k, v, block_table, lens, cu_seqlens_q, most_q, options)
    elif by_distance:
        assert alibi_slopes is not None
        refuse_gradient_by_distance(op, trains)
        of_rows = _slopes_of_rows(alibi_slopes, cu_seqlens_q, q.shape[0])
        out, lse = attend_by_distance(attend, alibi_slopes, of_rows, result_dtype(q), options)
    else:
        out, lse = attend(0, is_causal=causal, alibi_slopes=alibi_slopes, **options)
    out = into(target, without_padding(out, value_dim))
    return result(out, lse, return_attn_probs, return_softmax_lse)


def _decode(
    q: Tensor, k: Tensor, v: Tensor, block_table: Tensor | None, lens: Tensor, cu_seqlens_q: Tensor,
    count: int, options: dict[str, Any],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Decodes the newest `count` rows of each sequence, or all if it has fewer. Further rows are NaN."""
    end = cu_seqlens_q[1:]
    newest = end[:, None] + torch.arange(-count, 0, device=q.device)  # a short one starts in other rows
    query = q[newest.clamp(0, q.shape[0] - 1)].transpose(1, 2)
    out, lse = torch.ops.fattn.paged_decode(query, k, v, block_table, lens, **options)

    row, sequence = _sequences_of_rows(cu_seqlens_q, q.shape[0])
    own = sequence.clamp(0, end.shape[0] - 1)
    place = row - end[own] + count
    found = own * count + place.clamp(0, count - 1)
    is_none, is_missing = sequence != own, place < 0
    of_none = options["sinks"].float()[:, None] if "sinks" in options else -torch.inf
    out = out.transpose(1, 2).flatten(0, 1)[found]
    out = out.masked_fill(is_missing[:, None, None], torch.nan).masked_fill(is_none[:, None, None], 0)
    lse = lse.transpose(0, 1).flatten(1)[:, found].masked_fill(is_missing, torch.nan)
    return out, lse.where(~is_none, of_none)


def _slopes_of_rows(slopes: Tensor, cu_seqlens_q: Tensor, rows: int) -> Tensor:
    """The slopes broadcast to `[Hq, Tq]`; arbitrary for rows of no sequence."""
    if slopes.dim() == 1 or slopes.shape[0] == 0:
        return slopes.new_zeros(()) if slopes.dim() == 2 else slopes[:, None]
    _row, sequence = _sequences_of_rows(cu_seqlens_q, rows)
    return slopes[sequence.clamp(0, slopes.shape[0] - 1)].T


def _sequences_of_rows(cu_seqlens_q: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Row indices, and the sequence of each row: -1 or the number of sequences for a row of none."""
    row = torch.arange(rows, device=cu_seqlens_q.device, dtype=torch.int32)
    return row, torch.searchsorted(cu_seqlens_q.contiguous(), row, right=True) - 1


@with_lse
@public("torch_fattn.flash_attn.flash_attn_varlen_qkvpacked_func", names=_QKV)
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | Tensor, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """`flash_attn_varlen_func` of qkv `[T, 3, H, D]`, without a copy."""
    op = "torch_fattn.flash_attn.flash_attn_varlen_qkvpacked_func"
    check_shape(op, "qkv", qkv, ("tokens", 3, "heads", "head_dim"))
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


@with_lse
@public("torch_fattn.flash_attn.flash_attn_varlen_kvpacked_func", names=dict.fromkeys("kv", "kv"))
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """`flash_attn_varlen_func` of kv `[Tk, 2, Hkv, D]`, without a copy."""
    op = "torch_fattn.flash_attn.flash_attn_varlen_kvpacked_func"
    check_shape(op, "kv", kv, ("tokens", 2, "kv_heads", "head_dim"))
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip
