"""The specification of the operators: a readable float64 implementation in PyTorch on the CPU.

Every function takes the arguments of the operator of the same name, on any device and in any dtype, and
returns the same results, `(out, lse)` or one tensor, in float64 on the CPU. `quantise` and `dequantise`
define the contents of the caches that `cache_write` writes. The whole score matrix is materialised: use it on
small problems.

How a row of scores becomes a row of the result:

    s[j]  = softcap(scale * q.k[j]) + alibi * (j - p) + attn_mask[j]     for the keys j that the row may see
    lse   = log(sum_j exp(s[j]) + exp(sink))
    out   = sum_j exp(s[j] - lse) * v[j]

A hidden key is removed by selection, never multiplied by 0, so NaN in a key reaches only the rows that see
it. Masked memory never affects the output. If a row sees a NaN or an infinity in a value, its result is not
finite, and the results of other rows of the same sequence and key-value head are undefined. A row that sees
no key has out = 0 and lse = -inf (the sink logit, if there is one). A sink of +inf or NaN makes all rows of
its head NaN; a sink of -inf has no effect.
"""

from .attention import (
    cache_write,
    decode,
    merge,
    paged_decode,
    paged_prefill,
    prefill,
    varlen_prefill,
)
from .backward import prefill_backward, varlen_prefill_backward
from .delta import causal_conv1d, gated_delta_rule, gated_delta_step
from .kv_formats import dequantise, quantise
from .rotary import rms_norm, rotary, rotary_write
from .scores import mask_map, softcap, softmax

__all__ = [
    "cache_write",
    "causal_conv1d",
    "decode",
    "dequantise",
    "gated_delta_rule",
    "gated_delta_step",
    "mask_map",
    "merge",
    "paged_decode",
    "paged_prefill",
    "prefill",
    "prefill_backward",
    "quantise",
    "rms_norm",
    "rotary",
    "rotary_write",
    "softcap",
    "softmax",
    "varlen_prefill",
    "varlen_prefill_backward",
]
