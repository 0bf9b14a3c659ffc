"""`CacheStats`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheStats:
    """Statistics of a `PagedKVCache`. All are host numbers: reading them does not wait for the GPU."""

    blocks: int  # of the pool
    free_blocks: int  # that new tokens can take
    shared_blocks: int  # that several sequences use
    cached_blocks: int  # that `allocate` finds by their tokens, in use or free
    sequences: int
    swapped: int  # sequences in host memory
    tokens: int  # of all sequences; shared tokens count once per sequence
    prefix_hits: int  # blocks that `allocate` found since the cache was made
    prefix_misses: int  # whole blocks of prompts that it did not find
    evictions: int  # registered blocks that were reused for other tokens
    memory_bytes: int  # keys, values, scales and tables, on the device
