"""Attention over keys that are sharded across processes, on torch.distributed, for sequences that do not fit
one machine.

    out = torch_fattn.distributed.decode(query, own_key, own_value, seq_lens, group=group, shards=shards)

Every rank holds some positions (`Shards`) and attends to them; the ranks then exchange partial results or
keys. All transfers use torch.distributed: gloo between Macs, NCCL between NVIDIA GPUs.
"""

from __future__ import annotations

from .context import context_parallel, unshard
from .decode import decode, paged_decode
from .planner import Explanation, explain
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
