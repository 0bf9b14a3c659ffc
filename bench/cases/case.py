"""A case: a call without the options that no peer has."""

from __future__ import annotations

import math
from dataclasses import dataclass

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
PREFILLS = ("prefill", "prefill_backward")
METAL_TYPES = {"float32": "float", "float16": "half", "bfloat16": "bfloat"}


class UnsupportedCaseError(NotImplementedError):
    """The message names the feature that a peer's kernels lack. Only this row is refused."""


@dataclass(frozen=True)
class Case:
    """Attention of a contiguous query [B, H, Lq, D] over key and value [B, Hk, N, D], or over a pool
    [blocks, block_size, Hk, D] if the op is "paged_decode"."""

    op: str  # "prefill", "prefill_backward", "decode" or "paged_decode"
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
    lengths: tuple[int, ...] = ()  # keys of each sequence, if not all have kv_len
    latent_dim: int = 0  # the value is the first columns of the key
    whole_rows: int = 0  # rows of the prompt of which this case is a sample; launch rules depend on them

    @property
    def features(self) -> list[str]:
        """Words for each feature of the case that plain attention lacks."""
        words = ["values that are columns of the keys"] if self.latent_dim else []
        words += ["a paged cache"] if self.block_size else []
        words += [f"a cache of {self.kv_format}"] if self.kv_format else []
        return words + (["sequences of different lengths"] if self.lengths else [])

    def refuse_features(self, impl: str) -> None:
        if self.features:
            raise UnsupportedCaseError(f"{impl} has no kernel for {' and '.join(self.features)}")

    @property
    def value_dim(self) -> int:
        return self.latent_dim or self.head_dim

    @property
    def group_size(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def is_backward(self) -> bool:
        return self.op == "prefill_backward"

    @property
    def is_causal(self) -> bool:
        """Whether row i sees only kv_len - q_len + 1 + i keys, as the rows of every decode do."""
        return self.causal or self.op not in PREFILLS

    @property
    def hides_keys(self) -> bool:
        """Whether some row does not see every key."""
        return self.is_causal and self.q_len > 1

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def flops(self) -> float:
        """Two products per visible query-key pair, five in a backward; a causal square counts as half."""
        pairs = self.q_len * self.kv_len * (0.5 if self.causal else 1.0)
        columns = self.head_dim + self.value_dim
        if self.is_backward:
            columns = 3 * self.head_dim + 2 * self.value_dim
        return 2.0 * self.batch * self.q_heads * pairs * columns
