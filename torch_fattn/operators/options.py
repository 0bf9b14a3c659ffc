"""The options of the attention operators, each stated once: its name, its type, and what it means.

Defaults and order are those of the operators' schemas. A function that takes `**options: Unpack[...]` of one
of these shows them in its signature, and the text below each in its documentation (`runtime/options.py`).
"""

from __future__ import annotations

from typing import TypedDict

from torch import Tensor


class PointwiseOptions(TypedDict, total=False):
    """Options that change a score wherever its row and key are."""

    softcap: float
    """c > 0, up to 1e30, turns a score s into `c * tanh(s / c)`, before all that is added to it.
    0: none."""
    scale: float | None
    """factor of the score, finite. Default `D ** -0.5`."""


class ScoreOptions(PointwiseOptions, total=False):
    """Options that change scores or hide keys by position."""

    window_left: int
    """a row at position p sees keys from `p - window_left` on; -1: all. Keys outside the windows
    of all rows of a tile are never loaded."""
    window_right: int
    """and up to `p + window_right`; -1: all. Ignored for causal rows, such as those of
    `decode`."""
    sink_tokens: int
    """this many keys at the beginning stay visible outside the window."""
    sinks: Tensor | None
    """`[Hq]`, a logit per query head that takes part in the softmax and has no value. A row that
    sees no key has it as its lse. Any finite float32; -inf is none, +inf and NaN make the head
    NaN."""
    alibi_slopes: Tensor | None
    """`[Hq]` or `[B, Hq]`: slope * (key position - p) is added to the score. The result is
    undefined where that is beyond float32."""


class CausalOptions(TypedDict, total=False):
    """Options of the prefills; rows of the decodes are always causal."""

    is_causal: bool
    """a row at position p sees the keys up to p."""


class OffsetOptions(TypedDict, total=False):
    """Options of the prefills whose rows need not be the newest."""

    q_offset: int | None
    """absolute position of row 0. Default `Lk - Lq`, which aligns the last row with the last key;
    0 is the alignment of `F.scaled_dot_product_attention`."""


class LengthOptions(TypedDict, total=False):
    """Options of the prefills of dense keys."""

    seq_lens: Tensor | None
    """int32 `[B]` on the device of query: how many keys of each sequence are filled, as in `decode`;
    the last row is then at the last of them. Default: all. Not with q_offset."""


class StorageOptions(TypedDict, total=False):
    """Options that describe how keys and values are stored."""

    key_scales: Tensor | None
    """the scales of a quantised cache, `[B, Hkv, capacity]`, and for int4 `[.., D / 32, 2]`
    behind that. For int8 and fp8_e4m3, any strides."""
    value_scales: Tensor | None
    """the same for the values."""
    kv_format: str
    """how key and value are stored. "auto" derives it from their dtype: torch.int8 is "int8". A
    torch.uint8 cache needs an explicit format:

    "int8": int8, and a float32 scale for each row of D: an element is `q * scale`.
    "fp8_e4m3": uint8, the bits of a torch.float8_e4m3fn; scales as for int8, or none.
    "int4": uint8, `[.., D / 2]`, the even column of two in the low four bits; float16 scales, scale and
    minimum of 32 columns: `minimum + q * scale`. D and Dv are multiples of 32.

    `torch_fattn.reference.quantise` makes such caches and documents the error of their elements.
    An error e of a key changes a score by at most `scale * sum(abs(query)) * e`; an error e of a
    value changes the result by at most e. Reading adds next to none: codes are multiplied in
    float32, or are exact in the dtype; the minimum of an int4 group is rounded, by at most 2^-18
    of its scale."""


class LayoutOptions(TypedDict, total=False):
    """Options of operators whose result has a batch dimension."""

    token_major_out: bool
    """out is the transposed view of `[B, Lq, Hq, Dv]` in memory, with the same numbers, so that
    `out.transpose(1, 2).flatten(2)`, the input of an output projection, is not a copy."""


class PrefillOptions(CausalOptions, OffsetOptions, LengthOptions, ScoreOptions, LayoutOptions, total=False):
    """The options of `torch_fattn.prefill`."""

    mask_map: Tensor | None
    """the result of `torch_fattn.mask_map(attn_mask)` for this mask; with the map of another mask
    the result is undefined (with FATTN_CHECK=1 in the environment it is a ValueError). The kernel
    skips cells of the mask that hide everything and groups of 8 keys that a cell hides, and does
    not read cells that hide nothing. Larger calls make a map themselves; pass one to make it once
    for all layers. Defined results are bit-identical, unless the keys are cut into parts."""


class CacheDecodeOptions(ScoreOptions, LayoutOptions, total=False):
    """The options of `decode` of the cache classes, which know how they store keys and values."""

    attn_mask: Tensor | None
    """broadcastable to `[B, Hq, Lq, capacity]`, as in `prefill`."""
    tree_mask: Tensor | None
    """for drafts that branch: which of the newest Lq tokens each row sees, itself included. bool
    `[Lq, Lq]` or `[B, Lq, Lq]`; or int64 `[Lq]` or `[B, Lq]`, where bit t of a row is token t. It
    only hides keys, and never shows a key that another rule hides. Positions, which windows and
    ALiBi count, are those of memory, not depths in the tree. At most 64 rows."""


class DecodeOptions(CacheDecodeOptions, StorageOptions, total=False):
    """The options of `torch_fattn.decode` and `torch_fattn.paged_decode`."""


class CachePrefillOptions(ScoreOptions, total=False):
    """The options of `prefill` of the cache classes, whose is_causal is in their signature."""


class PagedPrefillOptions(CachePrefillOptions, StorageOptions, total=False):
    """The options of `torch_fattn.paged_prefill`, whose is_causal has no default."""


class VarlenPrefillOptions(CausalOptions, OffsetOptions, ScoreOptions, total=False):
    """The options of `torch_fattn.varlen_prefill`."""
