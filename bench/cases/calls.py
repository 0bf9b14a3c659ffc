"""An attention call as plain data: its operands and its minimum work."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import delta, masks

ATTENTION = ("prefill", "decode", "paged_decode")
OPS = (*ATTENTION, "prefill_backward", "rotary_write", "gated_delta_rule", "gated_delta_step")
PREFILLS = ("prefill", "prefill_backward")
MASK_BLOCK = 128  # rows and keys of a block: the default of block_size
METAL_TYPES = {"float32": "float", "float16": "half", "bfloat16": "bfloat"}
REMAINDER_SCALE = 1024.0  # kRemainderScale of the kernels


class UnsupportedCallError(NotImplementedError):
    """The message names the feature that a peer's kernels lack. Only this row is refused."""


@dataclass(frozen=True)
class Call:
    op: str
    q_heads: int
    kv_heads: int  # gated_delta_*: the key heads; q_heads are the value heads
    head_dim: int  # of query and key; also of value, unless latent_dim is set
    q_len: int
    kv_len: int
    batch: int = 1
    dtype: str = "float16"
    causal: bool = False  # of a prefill; a decode is always causal
    block_size: int = 0  # paged_decode: keys per block
    window_left: int = -1
    sinks: bool = False  # a learned sink logit per head
    mask: str = ""  # prefill: the name, in masks.py, of a mask that all heads share
    kv_format: str = ""  # the format of a quantised cache
    latent_dim: int = 0  # the value is the first columns of the key (multi-head latent attention)
    lengths: tuple[int, ...] = ()  # decode: keys of each sequence, if not all have kv_len
    model: str = ""
    norms: bool = False  # rotary_write: of the query and key heads
    channel_decay: bool = False  # gated_delta_*: Kimi delta attention
    density: float = 0.0  # prefill: of a block mask with random blocks of 128; 0: no mask
    whole_rows: int = 0  # rows of the prompt of which this call is a sample; launch rules depend on them

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def element_bytes(self) -> int:
        return self.torch_dtype.itemsize

    @property
    def cache_bits(self) -> int:
        """Bits of an element of K or V, without its share of a scale."""
        return {"": 8 * self.element_bytes, "int4": 4}.get(self.kv_format, 8)

    @property
    def value_dim(self) -> int:
        return self.latent_dim or self.head_dim

    @property
    def mask_pitch(self) -> int:
        """Elements from row to row of a mask in buffers.py. llama.cpp reads rows in pairs of float16, which
        an NVIDIA GPU refuses at odd elements."""
        return -(-self.kv_len // 16) * 16

    @property
    def has_aligned_rows(self) -> bool:
        """Whether rows of unquantised operands, like those of masks, begin on 16-byte boundaries."""
        return not self.kv_format and self.head_dim * self.element_bytes % 16 == 0

    @property
    def group_size(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def is_decode(self) -> bool:
        return self.op not in PREFILLS

    @property
    def is_backward(self) -> bool:
        return self.op == "prefill_backward"

    @property
    def is_rotary(self) -> bool:
        return self.op == "rotary_write"

    @property
    def is_delta(self) -> bool:
        return self.op.startswith("gated_delta_")

    @property
    def is_causal(self) -> bool:
        """Whether row i sees only kv_len - q_len + 1 + i keys, as the rows of every decode do."""
        return self.causal or self.is_decode

    @property
    def hides_keys(self) -> bool:
        """Whether some row of a call without window and mask does not see every key."""
        return self.is_causal and self.q_len > 1

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def options(self) -> dict[str, Any]:
        """The options that differ from their defaults, by their names in tables and JSON."""
        chosen: dict[str, Any] = {"window_left": self.window_left} if self.window_left >= 0 else {}
        given = {
            **{"sinks": self.sinks, "mask": self.mask, "latent_dim": self.latent_dim},
            **{"block_size": self.block_size, "kv_format": self.kv_format, "seq_lens": [*self.lengths]},
            **{"norms": self.norms, "channel_decay": self.channel_decay},
        }
        return chosen | {name: value for name, value in given.items() if value}

    @property
    def _score_options(self) -> list[str]:
        words = [f"a window of {self.window_left + 1} keys"] if self.window_left >= 0 else []
        words += ["attention sinks"] if self.sinks else []
        return words + ([f"a mask of {masks.DESCRIPTIONS[self.mask.partition(':')[0]]}"] if self.mask else [])

    @property
    def features(self) -> list[str]:
        """Words for each feature of the call that plain attention lacks."""
        words = self._score_options
        words += ["values that are columns of the keys"] if self.latent_dim else []
        words += ["a paged cache"] if self.block_size else []
        words += [f"a cache of {self.kv_format}"] if self.kv_format else []
        words += ["a decay per channel"] if self.channel_decay else []
        return words + (["sequences of different lengths"] if self.lengths else [])

    def refuse_features(self, impl: str) -> None:
        if self.features:
            raise UnsupportedCallError(f"{impl} has no kernel for {' and '.join(self.features)}")

    def refuse_score_options(self) -> None:
        """The adapters in bench/peers, and the operands in buffers.py, have no windows, sinks and masks."""
        if self._score_options:
            raise UnsupportedCallError(f"the adapters do not take {' and '.join(self._score_options)}")

    def keywords(self, operands: dict[str, Tensor]) -> dict[str, Any]:
        """The keyword arguments of torch_fattn's operator."""
        keywords: dict[str, Any] = {}
        if self.op in PREFILLS:
            keywords["is_causal"] = self.causal
        if self.window_left >= 0:
            keywords["window_left"] = self.window_left
        if self.sinks:
            keywords["sinks"] = operands["sinks"]
        if self.norms:
            keywords |= {name: operands[name] for name in ("query_norm", "key_norm")}
        if self.mask:
            keywords["attn_mask"] = operands["attn_mask"]
        if self.density:
            keywords["block_mask"] = operands["mask_map"]
        if self.op == "gated_delta_step":
            keywords[delta.NEW] = operands[delta.NEW]
        if self.kv_format:
            keywords["kv_format"] = self.kv_format
            keywords |= {name: operands[name] for name in ("key_scales", "value_scales")}
        return keywords

    def arguments(self, operands: dict[str, Tensor]) -> tuple[list[Tensor | None], dict[str, Any]]:
        """The positional and the keyword arguments of torch_fattn's operator. A backward has no gradient of
        lse; a step has no bias of the convolution."""
        keywords = self.keywords(operands)
        if "out_remainder" in operands:
            keywords["out_remainder"] = operands["out_remainder"]
        positional: list[Tensor | None] = [
            one for name, one in operands.items() if name not in {*keywords, "mask_map"}
        ]
        if self.is_backward:
            positional.insert(1, None)
        if self.op == "gated_delta_step":
            positional.insert(list(operands).index("norm_weight"), None)
        return positional, keywords

    def __str__(self) -> str:
        parts = [f"B{self.batch}", f"{self.q_heads}/{self.kv_heads}x{self.head_dim}"]
        rows = f"q={self.q_len} " if self.q_len > 1 else ""
        keys = f"T={self.q_len}" if self.is_delta else f"{rows}N={self.kv_len}"
        parts.append(keys if self.is_decode else f"{self.q_len}x{self.kv_len}")
        parts += ["causal"] if self.causal else []
        parts += [f"window {self.window_left + 1}"] if self.window_left >= 0 else []
        parts += ["sinks"] if self.sinks else []
        parts += ["norms"] if self.norms else []
        parts += ["decay per channel"] if self.channel_decay else []
        parts += [self.mask] if self.mask else []
        parts += [f"{self.density:.0%} of blocks"] if self.density else []
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
        end = min(self.kv_len, self.kv_len - self.q_len + row + 1) if self.is_causal else self.kv_len
        position = self.kv_len - self.q_len + row
        first = max(0, position - self.window_left) if self.window_left >= 0 else 0
        return first, max(first, end)

    @property
    def visible_pairs(self) -> int:
        """Visible (query row, key) pairs of one head."""
        if self.mask:
            return int(self.visible.sum())
        if self.density:
            return round(int(self.blocks.sum()) / self.blocks.numel() * self.q_len * self.kv_len)
        return sum(end - first for first, end in map(self.visible_keys, range(self.q_len)))

    @property
    def visible(self) -> Tensor:
        """The visible pairs of a masked prefill: bool `[q_len, kv_len]`."""
        seen = masks.named(self.mask, self.q_len, self.kv_len).clone()
        for row, (first, end) in enumerate(map(self.visible_keys, range(self.q_len))):
            seen[row, :first] = seen[row, end:] = False
        return seen

    @property
    def blocks(self) -> Tensor:
        """The block mask: bool `[1, 1, rows, keys]`, with as many keys for each row."""
        size = [-(-length // MASK_BLOCK) for length in (self.q_len, self.kv_len)]
        order = torch.rand(size, generator=torch.Generator().manual_seed(0)).argsort(-1)
        return (order < round(self.density * size[1]))[None, None]

    @property
    def flops(self) -> int:
        """Floating-point operations of the matrix products on visible pairs: two, or five in a backward."""
        dims = self.head_dim + self.value_dim
        if self.is_backward:
            dims = 3 * self.head_dim + 2 * self.value_dim
        return 2 * self.batch * self.q_heads * self.visible_pairs * dims

    @property
    def least_bytes(self) -> int:
        """Bytes that must move: each visible K and V row once per key-value head, the query, the output; of a
        backward their gradients as well, in place of the output; of rotary_write all rows and results."""
        if self.is_delta:
            return delta.least_bytes(self.operands("meta"))
        if self.is_rotary:
            rows = self.q_heads + 2 * self.kv_heads + 1  # and a row of each table
            return 2 * self.q_len * rows * self.head_dim * self.element_bytes
        first = self.visible_keys(0)[0]
        end = self.visible_keys(self.q_len - 1)[1]
        keys = sum(self.lengths) if self.lengths else self.batch * (end - first)
        key_and_value = self.head_dim if self.latent_dim else 2 * self.head_dim
        if self.is_backward:
            key_and_value *= 2
        return keys * self.kv_heads * key_and_value * self.cache_bits // 8 + self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of the query and the output, or of the query and the two gradients."""
        rows = self.batch * self.q_heads * self.q_len
        gradient = self.head_dim if self.is_backward else 0
        return rows * (self.head_dim + self.value_dim + gradient) * self.element_bytes

    @property
    def least_products(self) -> int:
        """8x8x8 products that touch at least one visible (row, key) pair.

        Eight rows of a decode are taken from all query heads that share a key-value head; so are those of a
        prefill where that gives fewer products.
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
        """Random contiguous operands, by argument name; the blocks of a pool are shuffled."""
        if self.is_delta:
            tokens, heads = (self.batch, self.q_len), (self.kv_heads, self.q_heads)
            options = {"is_step": self.op == "gated_delta_step", "channel_decay": self.channel_decay}
            return delta.operands(tokens, *heads, self.head_dim, self.torch_dtype, device, seed, **options)
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

            if torch.device(device).type == "meta":  # quantise one row for the layout
                row, scales = quantise(torch.zeros(1, shape[-1]), self.kv_format)
                assert scales is not None
                extra[f"{name}_scales"] = scales.new_empty(shape[:-1] + scales.shape[1:], device=device)
                return row.new_empty(*shape[:-1], row.shape[-1], device=device)
            elements, scales = quantise(normal(*shape), self.kv_format)
            assert scales is not None
            extra[f"{name}_scales"] = scales.to(device)
            return elements.to(device)

        def latent(key: Tensor) -> Tensor:
            """Takes the first columns of the key, and their scales."""
            columns = self.latent_dim
            if self.kv_format:
                scales = extra["key_scales"]
                extra["value_scales"] = (
                    scales[..., : columns // 32, :] if self.kv_format == "int4" else scales
                )
            return key[..., : columns // 2 if self.kv_format == "int4" else columns]

        query = normal(self.batch, self.q_heads, self.q_len, self.head_dim)
        if self.is_rotary:
            rows = {name: normal(1, self.kv_heads, self.q_len, self.head_dim) for name in ("key", "value")}
            tables = {name: normal(1, self.q_len, self.head_dim) for name in ("cos", "sin")}
            norms = {f"{name}_norm": normal(self.head_dim) for name in ("query", "key") if self.norms}
            block = self.block_size or self.q_len
            order = torch.randperm(-(-self.q_len // block), generator=generator)
            caches = {
                f"{name}_cache": normal(len(order), block, self.kv_heads, self.head_dim) for name in rows
            }
            if self.block_size:
                slots = order[:, None] * block + torch.arange(block)
                caches["slot_mapping"] = slots.view(1, -1)[:, : self.q_len].to(device)
            return {"query": query, **rows, **tables, **caches, **norms}
        if self.sinks:
            extra["sinks"] = normal(self.q_heads)
        if self.mask:
            extra["attn_mask"] = masks.named(self.mask, self.q_len, self.kv_len).to(device)
        if self.density:
            extra["mask_map"] = self.blocks.to(device)
        if self.op != "paged_decode":
            cache = (self.batch, self.kv_heads, self.kv_len, self.head_dim)
            key = stored("key", *cache)
            value = latent(key) if self.latent_dim else stored("value", *cache)
            operands = {"query": query, "key": key, "value": value}
            if self.is_backward:
                grad_out = normal(self.batch, self.q_heads, self.q_len, self.value_dim)
                operands = {"grad_out": grad_out, **operands, **self._results({**operands, **extra})}
            if self.lengths:
                operands["seq_lens"] = torch.tensor(self.lengths, dtype=torch.int32, device=device)
            return {**operands, **extra}
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

    def _results(self, operands: dict[str, Tensor]) -> dict[str, Tensor]:
        """The results of the forward, as a graph keeps them."""
        query = operands["query"]
        if query.device.type == "meta":
            out, lse = query.new_empty(*query.shape[:-1], self.value_dim), query.new_empty(query.shape[:-1])
        else:
            from torch_fattn import reference

            host = {name: tensor.cpu() for name, tensor in operands.items()}
            tensors = (host.pop(name) for name in ("query", "key", "value"))
            out, lse = (each.to(query.device) for each in reference.prefill(*tensors, **self.keywords(host)))
        return {"out": out.to(self.torch_dtype), "lse": lse.float(), **self.remainder_of(out)}

    def remainder_of(self, out: Tensor) -> dict[str, Tensor]:
        """What rounding takes off a 16-bit result."""
        if self.torch_dtype == torch.float32:
            return {}
        remainder = (out - out.to(self.torch_dtype)) * REMAINDER_SCALE
        return {"out_remainder": remainder.to(self.torch_dtype)}


def _blocks(first: int, end: int) -> int:
    """The number of aligned blocks of eight keys that [first, end) touches."""
    return math.ceil(end / 8) - first // 8 if end > first else 0
