"""What is measured: attention calls as plain data, named sets of them from real models, and their tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import masks
from .case import Case

OPS = ("prefill", "decode", "paged_decode")


@dataclass(frozen=True)
class Call:
    op: str
    q_heads: int
    kv_heads: int
    head_dim: int  # of query and key; of value too, but for latent_dim
    q_len: int
    kv_len: int
    batch: int = 1
    dtype: str = "float16"
    causal: bool = False  # prefill; the rows of a decode are causal always
    block_size: int = 0  # paged_decode: keys per block
    window_left: int = -1
    sinks: bool = False  # a learned sink logit per head
    mask: str = ""  # prefill: that all heads share, by its name in masks.py
    kv_format: str = ""  # of a quantised cache
    latent_dim: int = 0  # decode: the value is the first columns of the key (multi-head latent attention)
    lengths: tuple[int, ...] = ()  # of a decode: keys of each sequence, where they are not all kv_len
    model: str = ""

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def element_bytes(self) -> int:
        return self.torch_dtype.itemsize

    @property
    def cache_bits(self) -> int:
        """Of an element of K or V, without its share of a scale."""
        return {"": 8 * self.element_bytes, "int4": 4}.get(self.kv_format, 8)

    @property
    def value_dim(self) -> int:
        return self.latent_dim or self.head_dim

    @property
    def group_size(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def is_decode(self) -> bool:
        return self.op != "prefill"

    @property
    def options(self) -> dict[str, Any]:
        """The options that are set, as a table and JSON name them."""
        chosen: dict[str, Any] = {}
        if self.window_left >= 0:
            chosen["window_left"] = self.window_left
        if self.sinks:
            chosen["sinks"] = True
        if self.mask:
            chosen["mask"] = self.mask
        if self.latent_dim:
            chosen["latent_dim"] = self.latent_dim
        if self.block_size:
            chosen["block_size"] = self.block_size
        if self.kv_format:
            chosen["kv_format"] = self.kv_format
        if self.lengths:
            chosen["seq_lens"] = list(self.lengths)
        return chosen

    @property
    def features(self) -> list[str]:
        """What the call needs beyond plain attention, in words."""
        words = [f"a window of {self.window_left + 1} keys"] if self.window_left >= 0 else []
        words += ["attention sinks"] if self.sinks else []
        words += [f"a mask of {masks.OF[self.mask.partition(':')[0]]}"] if self.mask else []
        words += ["values that are columns of the keys"] if self.latent_dim else []
        return words + self._case.features

    def keywords(self, operands: dict[str, Tensor]) -> dict[str, Any]:
        """Options of the op as torch_fattn takes them."""
        keywords: dict[str, Any] = {}
        if self.op == "prefill":
            keywords["is_causal"] = self.causal
        if self.window_left >= 0:
            keywords["window_left"] = self.window_left
        if self.sinks:
            keywords["sinks"] = operands["sinks"]
        if self.mask:
            keywords["attn_mask"] = operands["attn_mask"]
        if self.kv_format:
            keywords["kv_format"] = self.kv_format
            keywords |= {name: operands[name] for name in ("key_scales", "value_scales")}
        return keywords

    def case(self) -> Case:
        """The same as the adapters of bench/peers take it. They know no windows, no sinks, no
        latent heads and no masks."""
        if self.window_left >= 0 or self.sinks or self.latent_dim or self.mask:
            raise NotImplementedError(f"the adapters do not take {' and '.join(self.features)}")
        return self._case

    @property
    def _case(self) -> Case:
        shape = (self.batch, self.q_heads, self.kv_heads, self.head_dim, self.q_len, self.kv_len)
        options = (self.causal, self.dtype, self.block_size, self.kv_format, self.lengths)
        return Case(self.op, *shape, *options)

    def __str__(self) -> str:
        parts = [f"B{self.batch}", f"{self.q_heads}/{self.kv_heads}x{self.head_dim}"]
        parts.append(f"{self.q_len}x{self.kv_len}" if self.op == "prefill" else f"N={self.kv_len}")
        parts += ["causal"] if self.causal else []
        parts += [f"window {self.window_left + 1}"] if self.window_left >= 0 else []
        parts += ["sinks"] if self.sinks else []
        parts += [self.mask] if self.mask else []
        parts += [self.dtype] if self.dtype != "float16" else []
        parts += [f"MLA {self.latent_dim}"] if self.latent_dim else []
        parts += [f"pages of {self.block_size}"] if self.block_size else []
        parts += [self.kv_format] if self.kv_format else []
        if self.lengths:
            counted = [(length, self.lengths.count(length)) for length in dict.fromkeys(self.lengths)]
            parts.append("of " + ", ".join(f"{count} x {length}" for length, count in counted))
        return " ".join(parts)

    def visible_keys(self, row: int) -> tuple[int, int]:
        """Query row `row` sees keys first <= j < end."""
        is_causal = self.causal or self.is_decode
        end = min(self.kv_len, self.kv_len - self.q_len + row + 1) if is_causal else self.kv_len
        position = self.kv_len - self.q_len + row
        first = max(0, position - self.window_left) if self.window_left >= 0 else 0
        return first, max(first, end)

    @property
    def visible_pairs(self) -> int:
        """(query row, key) pairs of one head that take part."""
        if self.mask:
            return int(self.visible.sum())
        return sum(end - first for first, end in map(self.visible_keys, range(self.q_len)))

    @property
    def visible(self) -> Tensor:
        """bool `[q_len, kv_len]`, of a masked prefill."""
        seen = masks.named(self.mask, self.q_len, self.kv_len).clone()
        for row, (first, end) in enumerate(map(self.visible_keys, range(self.q_len))):
            seen[row, :first] = seen[row, end:] = False
        return seen

    @property
    def flops(self) -> int:
        """Floating-point operations of the two matrix products, of visible pairs only."""
        dims = self.head_dim + self.value_dim
        return 2 * self.batch * self.q_heads * self.visible_pairs * dims

    @property
    def least_bytes(self) -> int:
        """Device memory that must move: each needed K and V row once per key-value head, query, output."""
        first = self.visible_keys(0)[0]
        end = self.visible_keys(self.q_len - 1)[1]
        keys = sum(self.lengths) if self.lengths else self.batch * (end - first)
        key_and_value = self.head_dim if self.latent_dim else 2 * self.head_dim
        return keys * self.kv_heads * key_and_value * self.cache_bits // 8 + self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Of query and output."""
        rows = self.batch * self.q_heads * self.q_len
        return rows * (self.head_dim + self.value_dim) * self.element_bytes

    @property
    def least_products(self) -> int:
        """8x8x8 products that touch at least one visible (row, key) pair, rows taken eight at a time.

        The rows of a decode are those of all query heads that share a key-value head; and those of a prefill
        where eights of them are fewer.
        """
        per_block = -(-self.head_dim // 8) + -(-self.value_dim // 8)
        if self.is_decode:
            first, end = self.visible_keys(0)[0], self.visible_keys(self.q_len - 1)[1]
            row_blocks = -(-self.group_size * self.q_len // 8)
            return self.batch * self.kv_heads * row_blocks * _blocks(first, end) * per_block
        if self.mask:
            return self.batch * self.q_heads * masks.blocks_of_8(self.visible) * per_block
        pairs = self.q_len * self.group_size
        grouped = -(-pairs // 8) < -(-self.q_len // 8) * self.group_size
        heads, group_size = (self.kv_heads, self.group_size) if grouped else (self.q_heads, 1)
        blocks = 0
        for first in range(0, self.q_len * group_size, 8):
            last = min(first + 8, self.q_len * group_size) - 1
            blocks += _blocks(
                self.visible_keys(first // group_size)[0], self.visible_keys(last // group_size)[1]
            )
        return self.batch * heads * blocks * per_block

    def operands(self, device: str | torch.device, seed: int = 0) -> dict[str, Tensor]:
        """Random operands by the names of the op's arguments, contiguous; blocks of a pool are shuffled."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            if torch.device(device).type == "meta":
                return torch.empty(shape, dtype=self.torch_dtype, device=device)
            return torch.randn(shape, generator=generator).to(self.torch_dtype).to(device)

        extra: dict[str, Tensor] = {}

        def stored(name: str, *shape: int) -> Tensor:
            if not self.kv_format:
                return normal(*shape)
            from torch_fattn.reference import quantise

            if torch.device(device).type == "meta":  # as one row is stored
                row, scales = quantise(torch.zeros(1, shape[-1]), self.kv_format)
                assert scales is not None
                extra[f"{name}_scales"] = scales.new_empty(shape[:-1] + scales.shape[1:], device=device)
                return row.new_empty(*shape[:-1], row.shape[-1], device=device)
            elements, scales = quantise(normal(*shape), self.kv_format)
            assert scales is not None
            extra[f"{name}_scales"] = scales.to(device)
            return elements.to(device)

        def latent(key: Tensor) -> Tensor:
            """The first columns of the key, and their scales."""
            columns = self.latent_dim
            if self.kv_format:
                scales = extra["key_scales"]
                extra["value_scales"] = (
                    scales[..., : columns // 32, :] if self.kv_format == "int4" else scales
                )
            return key[..., : columns // 2 if self.kv_format == "int4" else columns]

        query = normal(self.batch, self.q_heads, self.q_len, self.head_dim)
        if self.sinks:
            extra["sinks"] = normal(self.q_heads)
        if self.mask:
            extra["attn_mask"] = masks.named(self.mask, self.q_len, self.kv_len).to(device)
        if self.op != "paged_decode":
            cache = (self.batch, self.kv_heads, self.kv_len, self.head_dim)
            key = stored("key", *cache)
            value = latent(key) if self.latent_dim else stored("value", *cache)
            found = {"query": query, "key": key, "value": value}
            if self.lengths:
                found["seq_lens"] = torch.tensor(self.lengths, dtype=torch.int32, device=device)
            return {**found, **extra}
        blocks = -(-self.kv_len // self.block_size)
        pool = (self.batch * blocks, self.block_size, self.kv_heads, self.head_dim)
        order = torch.randperm(self.batch * blocks, generator=generator)
        key_cache = stored("key", *pool)
        return {
            "query": query,
            "key_cache": key_cache,
            "value_cache": latent(key_cache) if self.latent_dim else stored("value", *pool),
            "block_tables": order.reshape(self.batch, blocks).to(torch.int32).to(device),
            "seq_lens": torch.full((self.batch,), self.kv_len, dtype=torch.int32, device=device),
            **extra,
        }


def _blocks(first: int, end: int) -> int:
    """Aligned blocks of eight keys that [first, end) touches."""
    return math.ceil(end / 8) - first // 8 if end > first else 0


# ---- named sets


def _decodes(base: Call, *lengths: int, batches: tuple[int, ...] = (1,)) -> Iterator[Call]:
    for batch in batches:
        for length in lengths:
            yield replace(base, batch=batch, kv_len=length)


def _prefills(base: Call, *lengths: int) -> Iterator[Call]:
    for length in lengths:
        yield replace(base, q_len=length, kv_len=length)


def _model(
    name: str, q_heads: int, kv_heads: int, head_dim: int, decode: tuple[int, ...], prefill: tuple[int, ...]
) -> list[Call]:
    step = Call("decode", q_heads, kv_heads, head_dim, 1, 0, model=name)
    paged = replace(step, op="paged_decode", block_size=16)
    prompt = replace(step, op="prefill", causal=True)
    return [*_decodes(step, *decode), *_decodes(paged, *decode[:1]), *_prefills(prompt, *prefill)]


def _standard() -> list[Call]:
    """Decode of a 32/8 model and prefill of 32 heads: what the bench is read by first."""
    step = Call("decode", 32, 8, 128, 1, 0, model="Llama-3-8B")
    calls = list(_decodes(step, 4096, 32768, 131072, batches=(1, 16)))
    for head_dim in (64, 128):
        for causal in (True, False):
            prompt = Call("prefill", 32, 32, head_dim, 0, 0, causal=causal, model="H32")
            calls += _prefills(prompt, 2048, 8192)
    return calls


def _decode() -> list[Call]:
    """What a decode has to be fast at: short and long caches, groups, head sizes, pages, a quantised cache,
    and one long sequence among short ones."""
    step = Call("decode", 32, 8, 128, 1, 131072, model="32/8")
    long, short = 65536, 512
    return [
        *_decodes(step, 256, 1024, 4096, 32768, 131072),
        *_decodes(step, 8192, batches=(16,)),
        replace(step, op="paged_decode", block_size=16),
        *(replace(step, kv_heads=32 // group, model=f"group of {group}") for group in (1, 8, 16)),
        *(replace(step, head_dim=head_dim) for head_dim in (64, 96, 256)),
        replace(step, kv_format="int8"),
        replace(step, batch=16, kv_len=long, lengths=(long, *[short] * 15), model="uneven"),
    ]


def _prefill() -> list[Call]:
    """What a prefill has to be fast at: head sizes, lengths, 16-bit dtypes, with and without a diagonal."""
    prompt = Call("prefill", 32, 32, 128, 0, 0, causal=True, model="H32")
    lengths = [
        call
        for dtype in ("float16", "bfloat16")
        for head_dim in (64, 96, 128)
        for causal in (True, False)
        for call in _prefills(replace(prompt, dtype=dtype, head_dim=head_dim, causal=causal), 2048, 8192)
    ]
    short = [call for dim in (64, 128) for call in _prefills(replace(prompt, head_dim=dim), 512)]
    others = (40, 72, 80, 112, 256, 512)
    one = [c for dim in others for c in _prefills(replace(prompt, head_dim=dim), 2048)]
    wide = [
        call
        for dtype in ("float16", "bfloat16")
        for head_dim, heads in ((256, 16), (512, 8))
        for causal in (True, False)
        for call in _prefills(Call("prefill", heads, heads, head_dim, 0, 0, 1, dtype, causal), 2048, 8192)
    ]
    return lengths + short + one + _with(wide, model="wide heads")


def _chunked() -> list[Call]:
    """Between decode and a whole prompt: drafts of a speculative decode, chunks of a prompt, and few heads,
    over many keys."""
    chunk = Call("prefill", 32, 8, 128, 0, 0, causal=True, model="32/8")
    return [
        *(
            replace(chunk, q_len=rows, kv_len=n)
            for n in (8192, 32768)
            for rows in (9, 12, 16, 24, 32, 48, 64)
        ),
        replace(chunk, q_len=256, kv_len=16384),
        replace(chunk, q_heads=4, kv_heads=4, q_len=512, kv_len=32768, model="few heads"),
    ]


def _with(calls: list[Call], **changes: Any) -> list[Call]:
    return [replace(call, **changes) for call in calls]


GEMMA_3 = _model("Gemma-3-4B", 8, 4, 256, (4096,), (2048,))
GPT_OSS = _model("GPT-OSS-20B", 64, 8, 64, (4096, 32768), (2048,))

SHAPES: dict[str, list[Call]] = {
    "standard": _standard(),
    "decode": _decode(),
    "prefill": _prefill(),
    "chunked": _chunked(),
    "llama-3-8b": _model("Llama-3-8B", 32, 8, 128, (4096, 32768, 131072), (2048, 8192)),
    "qwen3-0.6b": _model("Qwen3-0.6B", 16, 8, 128, (4096, 32768), (2048,)),
    # Five of six layers see a window of 1,024 keys.
    "gemma-3": _with(GEMMA_3, window_left=1023, model="Gemma-3-4B local") + GEMMA_3,
    # Every head has a sink; every other layer sees a window of 128 keys.
    "gpt-oss": _with(GPT_OSS, sinks=True)
    + _with(GPT_OSS[:1], sinks=True, window_left=127, model="GPT-OSS-20B local"),
    "gemma-4-like": _model("Gemma-4-like", 16, 2, 512, (4096,), (2048,)),
    # The absorbed form: 128 query heads share one latent vector and a rotary key per token.
    "deepseek": [
        replace(call, latent_dim=512) for call in _model("DeepSeek-V3", 128, 1, 576, (4096, 32768), ())
    ],
    "whisper": list(_prefills(Call("prefill", 20, 20, 64, 0, 0, model="Whisper-large encoder"), 1500)),
    "flux": list(_prefills(Call("prefill", 24, 24, 128, 0, 0, model="FLUX-like"), 4608)),
}
