"""The options of the attention operators, each stated once: its name, its type, and what it means.

Defaults and order are those of the operators' schemas. `runtime/options.py` expands `**options: Unpack[...]`
into signatures and documentation.
"""

from __future__ import annotations

from typing import TypedDict

from torch import Tensor


class PointwiseOptions(TypedDict, total=False):
    """Options that change scores independently of positions."""

    softcap: float
    """c > 0, up to 1e30, turns a score s into `c * tanh(s / c)` before anything is added. 0: none."""
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
    """`[Hq]`, a logit per query head that takes part in the softmax without a value. It is the lse of a row
    that sees no key. Any finite float32; -inf is none, +inf and NaN make the head NaN."""
    alibi_slopes: Tensor | None
    """`[Hq]` or `[B, Hq]`: slope * (key position - p) is added to the score. The result is undefined if that
    overflows float32."""


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
    """int32 `[B]` on the device of query: the number of filled keys of each sequence, as in `decode`; the
    last row is aligned with the last of them. Default: all. Not with q_offset."""


class StorageOptions(TypedDict, total=False):
    """Options that describe how keys and values are stored."""

    key_scales: Tensor | None
    """scales of a quantised cache, `[B, Hkv, capacity]`; int4: `[.., capacity, D / 32, 2]`.
    For int8 and fp8_e4m3, any strides."""
    value_scales: Tensor | None
    """the same for the values."""
    kv_format: str
    """how key and value are stored. "auto" derives it from their dtype: torch.int8 is "int8". A
    torch.uint8 cache needs an explicit format:

    "int8": int8, and a float32 scale for each row of D: an element is `q * scale`.
    "fp8_e4m3": uint8, the bits of a torch.float8_e4m3fn; scales as for int8, or none.
    "int4": uint8, `[.., D / 2]`, even columns in the low four bits; float16 scale and minimum per 32 columns:
    `minimum + q * scale`. D and Dv are multiples of 32.

    `torch_fattn.reference.quantise` makes such caches and documents their errors. An error e of a key changes
    a score by at most `scale * sum(abs(query)) * e`; an error e of a value changes the result by at most e.
    Reading is almost exact: codes are multiplied in float32, or are exact in the dtype; the minimum of an
    int4 group is rounded by at most 2^-18 of its scale."""


class LayoutOptions(TypedDict, total=False):
    """Options of operators whose result has a batch dimension."""

    token_major_out: bool
    """out is a transposed view of `[B, Lq, Hq, Dv]` in memory, so that `out.transpose(1, 2).flatten(2)`, the
    input of an output projection, does not copy."""


class CacheRotaryOptions(TypedDict, total=False):
    """The options of `append_rotated` of the cache classes."""

    rotary_dim: int | None
    """R, the number of columns that are rotated; the others are kept. Default: the columns of cos."""
    rotary_offset: int
    """the first of them."""
    style: str
    """"halves" pairs column p with p + R / 2 (Llama). "pairs" pairs 2p with 2p + 1 and rotates in place
    (GLM). "pairs_to_halves" does the same, and puts the results in columns p and p + R / 2 (DeepSeek)."""
    query_norm: Tensor | None
    """weight `[D]` of an RMS norm of each query head before the rotation, in the dtype of query or
    float32."""
    key_norm: Tensor | None
    """the same for key, in the dtype of query_norm."""
    eps: float
    """of the norms, `x * rsqrt(mean(x ** 2) + eps) * weight`."""
    norm: str
    """what the norms round to the dtype of query. "rounded": the normalised x, and its product with the
    weight (Llama, Qwen3). "float": the product alone (OLMo-2). "plus_one": the product with 1 + weight
    (Gemma)."""


class RotaryOptions(CacheRotaryOptions, LayoutOptions, total=False):
    """The options of `torch_fattn.rotary`."""


class RotaryWriteOptions(RotaryOptions, StorageOptions, total=False):
    """The options of `torch_fattn.rotary_write`."""

    start: int
    """without slot_mapping: the slot of each sequence's first token, in the block of its number."""
    starts: Tensor | None
    """the same on the device, int32 or int64 `[B]`, or `[]` for all sequences; start is added. Tokens beyond
    the block, and a sequence with a negative start, are dropped, or raise ValueError with FATTN_CHECK=1."""


class PrefillOptions(CausalOptions, OffsetOptions, LengthOptions, ScoreOptions, LayoutOptions, total=False):
    """The options of `torch_fattn.prefill`."""

    mask_map: Tensor | None
    """the result of `torch_fattn.mask_map(attn_mask)` for this mask; with the map of another mask the result
    is undefined (with FATTN_CHECK=1 in the environment it raises ValueError). The kernel skips cells and
    groups of 8 keys that are fully hidden, and does not read cells that hide nothing. Larger calls make a map
    themselves; pass one to make it once for all layers. Results are bit-identical with and without, unless
    the keys are split into parts."""
    block_mask: Tensor | None
    """which blocks of rows and keys see each other: bool, or uint8 where not 0 is visible, `[B or 1, Hq or 1,
    ceil(Lq / block_size[0]), ceil(Lk / block_size[1])]`, any strides. Hidden blocks are neither read nor
    computed, and there is no mask of single keys. The other options hide keys inside visible blocks. Not with
    attn_mask or mask_map."""
    block_size: tuple[int, int]
    """rows and keys of a block of block_mask, powers of two from 32 to 256."""


class CacheDecodeOptions(ScoreOptions, LayoutOptions, total=False):
    """The options of `decode` of the cache classes."""

    attn_mask: Tensor | None
    """broadcastable to `[B, Hq, Lq, capacity]`, as in `prefill`."""
    tree_mask: Tensor | None
    """for draft trees, which of the newest Lq tokens each row sees, itself included. bool `[Lq, Lq]` or
    `[B, Lq, Lq]`; or int64 `[Lq]` or `[B, Lq]`, where bit t of a row is token t. Keys that another option
    hides stay hidden. Windows and ALiBi count positions in memory, not depths in the tree. At most 64
    rows."""


class DecodeOptions(CacheDecodeOptions, StorageOptions, total=False):
    """The options of `torch_fattn.decode` and `torch_fattn.paged_decode`."""


class CachePrefillOptions(ScoreOptions, total=False):
    """The options of `prefill` of the cache classes, whose is_causal is an explicit parameter."""


class PagedPrefillOptions(CachePrefillOptions, StorageOptions, total=False):
    """The options of `torch_fattn.paged_prefill`, whose is_causal has no default."""


class VarlenPrefillOptions(CausalOptions, OffsetOptions, ScoreOptions, total=False):
    """The options of `torch_fattn.varlen_prefill`."""


class SequenceOptions(TypedDict, total=False):
    """Options of linear attention over whole sequences."""

    has_initial_state: Tensor | None
    """bool `[sequences]`. A sequence with False begins with zeros. Default: all begin with their states."""
    slots: Tensor | None
    """int32 `[sequences]`, the state of each sequence; -1, or one that is not there, skips the sequence,
    whose result is 0. Two sequences must not share a state. Default: sequence n has state n."""
    cu_seqlens: Tensor | None
    """int32 `[sequences + 1]`, where the sequences of a packed batch (B = 1) begin and end; they do not
    decrease. The result of tokens outside is 0."""


class GatedDeltaRuleOptions(SequenceOptions, total=False):
    """The options of `torch_fattn.gated_delta_rule`."""

    A_log: Tensor | None
    """`[Hv]`, float32 or the dtype of query. With it, g and beta are the projections a and b, and the kernel
    computes `g = -exp(A_log) softplus(a + dt_bias)` and `beta = sigmoid(b)`."""
    dt_bias: Tensor | None
    """`[Hv]`, or `[Hv, Dk]` for a decay per channel; float32 or the dtype of query. With A_log only."""
    scale: float | None
    """factor of the query. Default `Dk ** -0.5`."""
    use_qk_l2norm_in_kernel: bool
    """normalises each query and key to length 1."""
    writes_state: bool
    """False leaves the state as it is."""


class GatedDeltaStepOptions(TypedDict, total=False):
    """The options of `torch_fattn.gated_delta_step`."""

    slots: Tensor | None
    """int32 `[B]`, both states of each sequence; as in `gated_delta_rule`."""
    counts: Tensor | None
    """int32 `[B]`, tokens of each sequence, from 0 to T; the result of the others is 0. Default: T."""
    conv_state_out: Tensor | None
    """of the shape and strides of conv_state: the new states of sequences with tokens are written here, and
    conv_state stays. Value heads of one key head then run side by side. Default: conv_state."""
    gate: str
    """activation of z, "silu" or "sigmoid"."""
    eps: float
    """of the norm."""
    scale: float | None
    """factor of the query. Default `Dk ** -0.5`."""
    writes_state: bool
    """False leaves both states as they are, as for draft tokens."""


class CausalConv1dOptions(SequenceOptions, total=False):
    """The options of `torch_fattn.causal_conv1d`."""

    activation: str
    """"none" or "silu"."""
