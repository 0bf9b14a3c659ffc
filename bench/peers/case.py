"""One row of the bench, and how an implementation runs it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from softmetal.testing.cuda import Pipeline

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
METAL_TYPES = {"float32": "float", "float16": "half", "bfloat16": "bfloat"}


class NotTakenError(NotImplementedError):
    """One sentence: what of a case a peer's kernels do not take. Its row is a refusal, the others stay."""


@dataclass(frozen=True)
class Case:
    """Attention over contiguous query [B, H, Lq, D], key and value [B, Hk, N, D]; of "paged_decode" over a
    pool [blocks, block_size, Hk, D]."""

    op: str  # "prefill", "decode" or "paged_decode"
    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    q_len: int
    kv_len: int
    causal: bool = False
    dtype: str = "float16"
    block_size: int = 0  # paged_decode: keys per block
    kv_format: str = ""  # "int8": a quantised cache, with a float32 scale per key and head
    lengths: tuple[int, ...] = ()  # keys of each sequence, where they are not all kv_len
    whole_rows: int = 0  # of the prompt that a shorter one is counted for: launch rules go by them

    @property
    def features(self) -> list[str]:
        """What the case asks for beyond plain attention, in words."""
        words = ["a paged cache"] if self.block_size else []
        words += [f"a cache of {self.kv_format}"] if self.kv_format else []
        return words + (["sequences of different lengths"] if self.lengths else [])

    def refuse_features(self, impl: str) -> None:
        if self.features:
            raise NotTakenError(f"{impl} has no kernel for {' and '.join(self.features)}")

    @property
    def group_size(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def is_causal(self) -> bool:
        """Row i sees kv_len - q_len + 1 + i keys; the rows of a decode always do."""
        return self.causal or self.op != "prefill"

    @property
    def hides_keys(self) -> bool:
        """Some row does not see all of them."""
        return self.is_causal and self.q_len > 1

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def query_bytes(self) -> int:
        return self.batch * self.q_heads * self.q_len * self.head_dim * BYTES[self.dtype]

    @property
    def keys(self) -> int:
        """Of all sequences."""
        return sum(self.lengths) if self.lengths else self.batch * self.kv_len

    @property
    def key_bytes(self) -> int:
        return self.keys * self.kv_heads * self.head_dim * BYTES[self.kv_format or self.dtype]

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
    """One dispatch. An argument is bytes, or the name of a buffer: one of bench/buffers.py, or scratch."""

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
    # How it runs the case on other chips, over the same buffers: the bench quotes the fastest.
    alternatives: Sequence[Launch] = ()
