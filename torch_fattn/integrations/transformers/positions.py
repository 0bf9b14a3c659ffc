"""Sequences that are packed into one row, by positions that restart.

Models that pass `position_ids` to their mask have packed sequences in it. For others, such as GPT-OSS, the
attention function reads the positions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.utils.import_utils import is_tracing

from .patterns import lengths_between

_forward = 0
_restarts_of: Any = WeakTensorKeyDictionary()


class Restarts(NamedTuple):
    begins: Tensor  # bool [B, L]: where a sequence begins
    lengths: tuple[Tensor, Tensor, int, int]  # as `compute_packed` takes them


def start_forward() -> None:
    """The mask function calls this, at least once per forward: positions may have changed in place since."""
    global _forward
    if not torch.compiler.is_compiling():
        _forward += 1


def restarts_of(position_ids: Any, query: Tensor, keys: int) -> Restarts | None:
    """None if every row of the batch is one sequence, or if there are other keys than those of the query. The
    check waits for the device once per forward; a graph under tracing cannot check."""
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
    found: Restarts | None = known[1]
    return found


def _find(position_ids: Tensor, batch: int) -> Restarts | None:
    before, after = position_ids[:, :-1], position_ids[:, 1:]
    restarts = (after < before) | (after == 0)
    if not bool(restarts.any()):
        return None
    begins = torch.nn.functional.pad(restarts, (1, 0), value=True).expand(batch, -1)
    ends, longest = lengths_between(begins)
    return Restarts(begins, (ends, ends, longest, longest))


def see_one_another(mask: Tensor, begins: Tensor) -> bool:
    """Whether a whole mask `[B, H, L or 1, L]`, bool or additive, shows the first token of a sequence, unless
    that is padding, the token before it. Other keys than those of the rows cannot be told apart. Waits for
    the device."""
    rows = begins.shape[1]
    later = begins[:, 1:]
    if mask.shape[3] == rows:
        shown = mask[:, 0] if mask.dtype is torch.bool else mask[:, 0] > torch.finfo(mask.dtype).min / 2
        shown = shown.expand(-1, rows, -1)
        later = later & shown.diagonal(0, 1, 2)[:, 1:] & shown.diagonal(-1, 1, 2)
    return bool(later.any())
