"""Attention over keys that several processes share, on torch.distributed: sequences that do not fit one
machine.

    out = torch_fattn.distributed.decode(query, own_key, own_value, seq_lens, group=group, shards=shards)

Every rank keeps a part of the positions (`Shards`) and attends to it; the ranks then exchange partial results
or keys. All transfers are torch.distributed's: gloo between Macs, NCCL between NVIDIA GPUs.
"""

from __future__ import annotations

from .context import context_parallel, unshard
from .decode import decode, paged_decode
from .explain import Explanation, explain
from .prefill import prefill, varlen_prefill
from .shards import Shards

__all__ = [
    "Explanation",
    "Shards",
    "context_parallel",
    "decode",
    "explain",
    "paged_decode",
    "prefill",
    "unshard",
    "varlen_prefill",
]
