"""One row of the bench, and how an implementation runs it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from softmetal.cuda.compile import Pipeline

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
METAL_TYPES = {"float32": "float", "float16": "half", "bfloat16": "bfloat"}


@dataclass(frozen=True)
class Case:
    """Attention over contiguous query [B, H, Lq, D], key and value [B, Hk, N, D]."""

    op: str  # "prefill" or "decode"
    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    q_len: int
    kv_len: int
    causal: bool = False
    dtype: str = "float16"

    @property
    def group_size(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def query_bytes(self) -> int:
        return self.batch * self.q_heads * self.q_len * self.head_dim * BYTES[self.dtype]

    @property
    def key_bytes(self) -> int:
        return self.batch * self.kv_heads * self.kv_len * self.head_dim * BYTES[self.dtype]

    @property
    def flops(self) -> float:
        """Two products per visible query-key pair; a causal square counts as half of it."""
        pairs = self.q_len * self.kv_len * (0.5 if self.causal else 1.0)
        return 4.0 * self.batch * self.q_heads * pairs * self.head_dim

    @property
    def least_bytes(self) -> int:
        """Every key and value once per key-value head, query and output once."""
        return 2 * self.key_bytes + 2 * self.query_bytes


@dataclass(frozen=True)
class Pass:
    """One dispatch. An argument is the name of a buffer ("query", "key", "value", "out" or scratch), or
    bytes."""

    pipeline: Pipeline
    grid: tuple[int, int, int]
    threads: tuple[int, int, int]
    arguments: Mapping[int, str | bytes]


@dataclass(frozen=True)
class Launch:
    """How an implementation runs a case."""

    impl: str
    passes: list[Pass]
    scratch: Mapping[str, int] = field(default_factory=dict)  # buffer name -> bytes
    out_rows_first: bool = False  # the output is [B, Lq, H, D]
    note: str = ""  # what its launch rule chose
