"""flash-attn's `bert_padding`: converts between padded and packed tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    return x[indices]


def index_first_axis_residual(x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    return x[indices], x


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Scatters values to their indices among `first_axis_dim` rows; other rows are 0."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_put((indices,), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs the tokens `[B, L, ..]` of both masks `[B, L]` as `[T, ..]`. Also returns their indices in `[B *
    L]`, cu_seqlens, the longest length (which waits for the device) and the lengths by the first mask."""
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lens = kept.sum(dim=-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, cu_seqlens, int(lens.max()), attention_mask.sum(dim=-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """`unpad_input` of rows that hold several sequences. A row of `attention_mask_in_length` `[B, L]` lists
    their lengths, then zeros."""
    lengths = attention_mask_in_length
    kept = torch.arange(lengths.shape[1], device=lengths.device) < lengths.sum(-1, keepdim=True)
    tokens, indices, *_ = unpad_input(hidden_states, kept)
    lens = lengths[lengths != 0]
    return tokens, indices, pad(lens.cumsum(0, dtype=torch.int32), (1, 0)), int(lens.max())


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Pads the packed tokens `[T, ..]` with zeros to `[batch, seqlen, ..]`."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
