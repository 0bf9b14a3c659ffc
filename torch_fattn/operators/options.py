"""The options of the attention operators as types, each stated once."""

from __future__ import annotations

from typing import TypedDict

from torch import Tensor


class ScoreOptions(TypedDict, total=False):
    """Options that change scores or hide keys by position."""

    window_left: int
    window_right: int
    sink_tokens: int
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    softcap: float
    scale: float | None


class StorageOptions(TypedDict, total=False):
    """Options that describe how keys and values are stored."""

    key_scales: Tensor | None
    value_scales: Tensor | None
    kv_format: str


class PrefillOptions(ScoreOptions, total=False):
    """The options of `torch_fattn.prefill`."""

    mask_map: Tensor | None
    is_causal: bool
    q_offset: int | None
    token_major_out: bool


class DecodeOptions(ScoreOptions, StorageOptions, total=False):
    """The options of `torch_fattn.decode` and `torch_fattn.paged_decode`."""

    attn_mask: Tensor | None
    tree_mask: Tensor | None
    token_major_out: bool


class PagedPrefillOptions(ScoreOptions, StorageOptions, total=False):
    """The options of `torch_fattn.paged_prefill`."""

    is_causal: bool


class VarlenPrefillOptions(ScoreOptions, total=False):
    """The options of `torch_fattn.varlen_prefill`."""

    is_causal: bool
    q_offset: int | None
