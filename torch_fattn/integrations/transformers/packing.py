"""Sequences packed into one row of the batch, detected from restarting positions or cumulative lengths.

Models that pass `position_ids` to their mask have packed sequences in it. For others, such as GPT-OSS, the
attention function reads the positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.utils.import_utils import is_tracing

from .call import Call
from .unsupported import refuse_meaning
from .visibility import LayerMask, Lengths, lengths_between

_forward = 0
_restarts_of: Any = WeakTensorKeyDictionary()


def start_forward() -> None:
    """The mask function calls this at least once per forward, since positions may have changed in place."""
    global _forward
    if not torch.compiler.is_compiling():
        _forward += 1


def restarts_of(position_ids: Any, query: Tensor, keys: int) -> Lengths | None:
    """Finds packed sequences. None if every row of the batch is one sequence, or if there are keys other than
    the query's. The check waits for the device once per forward; tracing cannot check."""
    batch, _heads, rows, _dim = query.shape
    if not rows == keys > 1 or not isinstance(position_ids, Tensor) or is_tracing(position_ids):
        return None
    if position_ids.ndim != 2 or position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != rows:
        return None
    version = None if position_ids.is_inference() else position_ids._version
    asked = _forward, version, batch, query.device
    known = _restarts_of.get(position_ids)
    if known is None or known[0] != asked:
        known = _restarts_of[position_ids] = asked, _find(position_ids.to(query.device), batch)
    found: Lengths | None = known[1]
    return found


def _find(position_ids: Tensor, batch: int) -> Lengths | None:
    before, after = position_ids[:, :-1], position_ids[:, 1:]
    restarts = (after < before) | (after == 0)
    if not bool(restarts.any()):
        return None
    begins = torch.nn.functional.pad(restarts, (1, 0), value=True).expand(batch, -1)
    ends, longest = lengths_between(begins)
    return Lengths(ends, ends, longest, longest)


def lengths_of(call: Call, restarts: Lengths | None) -> Lengths | None:
    """The lengths of packed sequences, if they can replace the mask: there is no bias, and the mask hides
    nothing or is only causal, with or without a window. Refuses sequences that would see each other."""
    mask = call.mask
    is_open = mask is None or (mask.is_only_order and (not mask.has_pattern or call.rows == call.keys))
    lengths = None
    if call.position_bias is None and is_open:
        lengths = _given_lengths(call)
        if lengths is None and restarts is not None and not call.keywords.get("use_cache"):
            lengths = restarts
    if lengths is None:
        starts = call.keywords.get("cu_seq_lens_q") if restarts is None else restarts.cu_seqlens_q
        if starts is not None and not is_tracing(starts):
            refuse_mixing(call, starts)
    return lengths


def refuse_mixing(call: Call, starts: Tensor) -> None:
    """Refuses packed sequences, with these cumulative lengths, that the mask lets see each other."""
    mask = call.mask
    if mask is None:
        return
    if not mask.is_causal:
        if not _see_one_another(call, mask.whole, starts):
            return
        advice = "pass a 4D attention_mask that separates them"
    elif mask.is_only_order and (mask.window_left is None or _is_of_these_rows(mask)):
        advice = "pass use_cache=False" if call.keywords.get("use_cache") else "pass each in a row of its own"
    else:
        return
    refuse_meaning(call.module, "the sequences that are packed into a row would see one another", advice)


def _is_of_these_rows(mask: LayerMask) -> bool:
    """Whether a pattern may have as many keys as rows, and no window shortens it."""
    return (mask.seq_lens is not None or mask.filled == mask.rows) and (mask.window_left or 0) < mask.rows


def _see_one_another(call: Call, mask: Tensor | None, starts: Tensor) -> bool:
    """Whether a whole mask `[B, H, L or 1, L]`, bool or additive, lets the first token of a sequence, unless
    it is padding, see the token before. Assumed if there are not as many keys as rows. Waits for the
    device."""
    batch, rows = call.query.shape[0], call.rows
    begins = torch.zeros(batch * rows + 1, dtype=torch.bool, device=call.query.device)
    begins = begins.index_fill_(0, starts.to(begins.device).long(), True)[:-1].unflatten(0, (batch, rows))
    later = begins[:, 1:]
    if mask is not None and mask.shape[3] == rows:
        shown = mask[:, 0] if mask.dtype is torch.bool else mask[:, 0] > torch.finfo(mask.dtype).min / 2
        shown = shown.expand(-1, rows, -1)
        later = later & shown.diagonal(0, 1, 2)[:, 1:] & shown.diagonal(-1, 1, 2)
    return bool(later.any())


def _given_lengths(call: Call) -> Lengths | None:
    """The lengths from FlashAttention's keywords; None if they are absent. Without max_length keywords, waits
    for the device once."""
    cu_q, cu_k = call.keywords.get("cu_seq_lens_q"), call.keywords.get("cu_seq_lens_k")
    if cu_q is None or cu_k is None:
        return None
    cu_q, cu_k = (lens.to(device=call.query.device, dtype=torch.int32) for lens in (cu_q, cu_k))
    longest = (call.keywords.get(name) for name in ("max_length_q", "max_length_k"))
    max_q, max_k = (
        int(lens.diff().max() if given is None else given)
        for lens, given in zip((cu_q, cu_k), longest, strict=True)
    )
    return Lengths(cu_q, cu_k, max_q, max_k)
