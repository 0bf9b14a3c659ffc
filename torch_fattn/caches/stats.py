"""`CacheStats`."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CacheStats"]


@dataclass(frozen=True)
class CacheStats:
    """What a `PagedKVCache` holds. Only host numbers: reading them does not wait for the GPU."""

    blocks: int  # of the pool
    free_blocks: int  # that new tokens can take
    shared_blocks: int  # that several sequences use
    sequences: int
    tokens: int  # of all sequences; each counts those that it shares
    memory_bytes: int  # keys, values, scales and tables, on the device
