"""A seeded generator of attention problems, and their operands laid out in every way that the ops accept.

Everything that no query may see is NaN: slots past `seq_lens`, future and masked keys, unused cache blocks,
the gaps between strided rows and the memory around a view. References get the clean copy, without NaN.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tests import features

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHORT = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.bool: "bool",
}
HEAD_DIMS = (
    *((d, d) for d in (8, 40, 64, 72, 80, 96, 112, 128)),
    (64, 128),
    (128, 64),
    (80, 40),
)
GROUPS = ((1, 1), (2, 2), (4, 2), (6, 2), (4, 1), (8, 1), (16, 1))  # query heads, key-value heads
LAYOUTS = (
    "contiguous",
    "offset",
    "token_major",
    "padded_rows",
    "expanded_batch",
    "expanded_heads",
    "every_other",
)
CAUSALITIES = ("none", "bottom_right", "top_left", "offset")
MASKS = (None, None, None, torch.bool, torch.bool, torch.float32, torch.float16, torch.bfloat16)
BLOCK_SIZES = (1, 8, 16, 32, 256)
WINDOWS_LEFT = (-1, -1, -1, 0, 1, 5, 40, 200, 10**9)
WINDOWS_RIGHT = (-1, -1, 0, 3)
SINK_TOKENS = (0, 0, 1, 4, 40, 300)
SOFTCAPS = (0.0, 0.0, 2.0, 30.0)
TREES = (None, None, None, "shared", "each")  # a tree mask for all sequences, or one for each
MAX_LENGTH = 300
MAX_CACHE = 1100
# Multiply-adds of one problem: a software GPU does about 1e8 a second.
MAX_WORK = 2e7


@dataclass(frozen=True)
class Problem:
    index: int
    op: str
    dtype: torch.dtype
    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int  # decode: the capacity
    head_dim: int
    value_dim: int
    layouts: tuple[str, str, str] = ("contiguous",) * 3
    causality: str = "none"  # prefill only; the rows of the other ops are always causal
    q_offset: int | None = None
    mask: torch.dtype | None = None
    mask_broadcast: tuple[bool, bool, bool, bool] = (False,) * 4
    mask_layout: str = "contiguous"
    seq_lens: tuple[int, ...] | None = None
    block_size: int = 0  # 0: not paged
    head_major_pool: bool = False
    scale: float | None = None
    # Of the decode ops.
    window_left: int = -1
    window_right: int = -1
    sink_tokens: int = 0
    sinks: bool = False
    alibi_slopes: bool = False
    softcap: float = 0.0
    tree: str | None = None

    def __str__(self) -> str:
        parts = [
            f"{self.index:03}-{self.op}-{SHORT[self.dtype]}-D{self.head_dim}x{self.value_dim}",
            f"B{self.batch}H{self.q_heads}:{self.kv_heads}L{self.q_len}x{self.kv_len}",
            self.causality if self.op == "prefill" else "",
            f"mask_{SHORT[self.mask]}" if self.mask is not None else "",
            f"block{self.block_size}" if self.block_size else "",
            f"window{self.window_left}" if self.window_left >= 0 else "",
            f"first{self.sink_tokens}" if self.sink_tokens else "",
            *(name for name in ("sinks", "alibi_slopes", "softcap", "tree") if getattr(self, name)),
        ]
        return "-".join(part for part in parts if part)

    @property
    def numbers(self) -> dict[str, Any]:
        """The options that are numbers and not left out."""
        defaults = {"scale": None, "window_left": -1, "window_right": -1, "sink_tokens": 0, "softcap": 0.0}
        return {name: getattr(self, name) for name, none in defaults.items() if getattr(self, name) != none}

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.seq_lens if self.seq_lens is not None else (self.kv_len,) * self.batch

    @property
    def first_positions(self) -> list[int]:
        """The absolute position of query row 0 in each sequence."""
        if self.op == "prefill":
            offset = self.kv_len - self.q_len if self.q_offset is None else self.q_offset
            return [offset] * self.batch
        return [length - self.q_len for length in self.lengths]


@dataclass
class Operand:
    """One tensor argument: a flat storage on the CPU and the view of it that the op is given."""

    base: Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def on(self, device: str | torch.device) -> tuple[Tensor, Tensor]:
        """The whole storage on that device, and the view."""
        base = self.base.to(device)
        return base, base.as_strided(self.size, self.stride, self.offset)


@dataclass
class Case:
    """A problem with its numbers. `clean` holds dense query, key, value, mask and the other tensors, without
    any NaN."""

    problem: Problem
    operands: dict[str, Operand]
    clean: dict[str, Tensor]
    visible: Tensor  # bool [B, Hq, Lq, Lk]
    options: dict[str, Any] = field(default_factory=dict)

    def arguments(self, device: str | torch.device) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Keyword arguments of the op on that device, and the storages behind them."""
        bases, arguments = {}, {}
        for name, operand in self.operands.items():
            bases[name], arguments[name] = operand.on(device)
        return {**arguments, **self.options}, bases


# ---- drawing problems


def draw(count: int, seed: int = 0) -> list[Problem]:
    """`count` problems that bring together as many pairs of features as they can (features.py)."""
    chosen = features.choose(_candidates(5 * count + 20, seed), of=5)
    return [replace(problem, index=i) for i, problem in zip(range(count), chosen, strict=False)]


def _candidates(count: int, seed: int) -> list[Problem]:
    """`count` problems in which every axis takes each of its values about equally often."""
    rng = random.Random(seed)

    def deck(values: tuple[Any, ...]) -> list[Any]:
        cards = [values[i % len(values)] for i in range(count)]
        rng.shuffle(cards)
        return cards

    ops = deck(("prefill", "prefill", "decode", "paged_decode"))
    dims, groups = deck(HEAD_DIMS), deck(GROUPS)
    layouts = list(zip(deck(LAYOUTS), deck(LAYOUTS), deck(LAYOUTS), strict=True))
    masks, mask_layouts, causalities = (
        deck(MASKS),
        deck(("contiguous", "offset", "padded_rows")),
        deck(CAUSALITIES),
    )
    broadcasts = deck(tuple(tuple(bool(bits >> d & 1) for d in range(4)) for bits in range(16)))
    block_sizes = deck(BLOCK_SIZES)
    of_decode = {
        "window_left": deck(WINDOWS_LEFT),
        "window_right": deck(WINDOWS_RIGHT),
        "sink_tokens": deck(SINK_TOKENS),
        "softcap": deck(SOFTCAPS),
        "sinks": deck((False, False, True)),
        "alibi_slopes": deck((False, False, True)),
        "tree": deck(TREES),
    }

    problems = []
    for i in range(count):
        op, (q_heads, kv_heads), (head_dim, value_dim) = ops[i], groups[i], dims[i]
        batch = rng.choice((1, 2, 3))
        if op == "prefill":
            q_len, kv_len = _length(rng), _length(rng)
        else:
            q_len = rng.choice((1, rng.randint(1, 8), rng.randint(1, 16)))
            kv_len = rng.randint(200, MAX_CACHE) if rng.random() < 0.3 else _length(rng)
        batch, q_len, kv_len = _fit(batch, q_len, kv_len, q_heads * (head_dim + value_dim))
        if op == "paged_decode":
            kv_len = -(-kv_len // block_sizes[i]) * block_sizes[i]
        rows = q_heads // kv_heads * q_len
        causality = causalities[i] if op == "prefill" else "none"
        offsets = {"top_left": 0, "offset": rng.randint(-3, kv_len)}
        problems.append(
            Problem(
                index=i,
                op=op,
                dtype=DTYPES[features.dtype_for(rng, seed, op, HEAD_DIMS.index(dims[i]), rows)],
                batch=batch,
                q_heads=q_heads,
                kv_heads=kv_heads,
                q_len=q_len,
                kv_len=kv_len,
                head_dim=head_dim,
                value_dim=value_dim,
                layouts=layouts[i],
                causality=causality,
                q_offset=offsets.get(causality),
                mask=masks[i],
                mask_broadcast=broadcasts[i],
                mask_layout=mask_layouts[i],
                seq_lens=_seq_lens(rng, op, batch, kv_len),
                block_size=block_sizes[i] if op == "paged_decode" else 0,
                head_major_pool=rng.random() < 0.5,
                scale=rng.choice((None, None, 0.0625, 0.3)),
                **({name: cards[i] for name, cards in of_decode.items()} if op != "prefill" else {}),
            )
        )
    return problems


def _length(rng: random.Random) -> int:
    """Half of the lengths are short: that is where tiles are ragged."""
    return rng.randint(1, 40) if rng.random() < 0.5 else rng.randint(1, MAX_LENGTH)


def _fit(batch: int, q_len: int, kv_len: int, work_per_pair: int) -> tuple[int, int, int]:
    while batch * q_len * kv_len * work_per_pair > MAX_WORK:
        if batch > 1:
            batch -= 1
        elif q_len >= kv_len:
            q_len = q_len * 2 // 3
        else:
            kv_len = kv_len * 2 // 3
    return batch, q_len, kv_len


def _seq_lens(rng: random.Random, op: str, batch: int, capacity: int) -> tuple[int, ...] | None:
    if op == "prefill" or (op == "decode" and rng.random() < 0.2):
        return None
    lengths = [
        rng.choice((0, capacity, rng.randint(0, capacity), rng.randint(1, capacity))) for _ in range(batch)
    ]
    return tuple(lengths)


# ---- what each query sees


def visibility(problem: Problem, mask: Tensor | None, tree: Tensor | None = None) -> Tensor:
    """bool [B, Hq, Lq, Lk]: key j is visible to row i. A window's right end is behind the causal one."""
    keys = torch.arange(problem.kv_len)
    rows = torch.arange(problem.q_len)
    causal = problem.op != "prefill" or problem.causality != "none"
    visible = torch.empty(problem.batch, problem.q_heads, problem.q_len, problem.kv_len, dtype=torch.bool)
    for b, (length, first) in enumerate(zip(problem.lengths, problem.first_positions, strict=True)):
        seen = (keys < length).expand(problem.q_len, -1)
        if causal:
            seen = seen & (keys <= (first + rows)[:, None])
        if problem.window_left >= 0:
            in_window = keys >= (first + rows)[:, None] - problem.window_left
            seen = seen & (in_window | (keys < problem.sink_tokens))
        if tree is not None:
            bits = tree.expand(problem.batch, -1)[b]
            for draft in range(max(0, -first), problem.q_len):
                seen[:, first + draft] &= (bits >> draft & 1).bool()
        visible[b] = seen
    if mask is not None and mask.dtype == torch.bool:
        visible &= mask
    return visible


def _mask(problem: Problem, generator: torch.Generator) -> Tensor | None:
    """The mask as it is broadcast: size 1 where `mask_broadcast` says so."""
    if problem.mask is None:
        return None
    full = (problem.batch, problem.q_heads, problem.q_len, problem.kv_len)
    size = [1 if broadcast else n for n, broadcast in zip(full, problem.mask_broadcast, strict=True)]
    if problem.mask == torch.bool:
        return torch.rand(size, generator=generator) < 0.7
    values = torch.randn(size, generator=generator) * 2
    values[torch.rand(size, generator=generator) < 0.1] = -torch.inf
    return values.to(problem.mask)


# ---- laying tensors out


def lay_out(values: Tensor, layout: str, fill: Any = float("nan")) -> Operand:
    """Puts `values` [B, H, L, D] into a storage full of `fill` with the strides of that layout."""
    stored = values
    if layout == "expanded_batch":
        stored = values[:1]
    elif layout == "expanded_heads":
        stored = values[:, :1]
    batch, heads, length, dim = stored.shape
    offset, step, row = 0, 1, dim
    if layout == "offset":
        offset = 3  # off every vector boundary
    elif layout == "padded_rows":
        offset, row = 8, dim + 4
    elif layout == "every_other":
        offset, step, row = 1, 2, 2 * dim
    if layout == "token_major":
        stride = (length * heads * row, row, heads * row, step)
    else:
        stride = (heads * length * row, length * row, row, step)
    base = torch.full((offset + batch * heads * length * row + 5,), fill, dtype=values.dtype)
    base.as_strided(stored.shape, stride, offset).copy_(stored)
    if layout == "expanded_batch":
        stride = (0, *stride[1:])
    elif layout == "expanded_heads":
        stride = (stride[0], 0, *stride[2:])
    return Operand(base, tuple(values.shape), stride, offset)


def _values(shape: tuple[int, ...], dtype: torch.dtype, layout: str, generator: torch.Generator) -> Tensor:
    """Normal numbers that are equal along the dimensions which the layout expands."""
    values = torch.randn(shape, generator=generator).to(dtype)
    if layout == "expanded_batch":
        values = values[:1].expand(shape)
    elif layout == "expanded_heads":
        values = values[:, :1].expand(shape)
    return values.contiguous()


def _poison(values: Tensor, visible: Tensor, layout: str) -> Tensor:
    """`values` [B, Hkv, Lk, *] with NaN in the keys that no row of any of their query heads sees."""
    batch, kv_heads, kv_len, _ = values.shape
    used = visible.reshape(batch, kv_heads, -1, kv_len).any(dim=2)
    if layout == "expanded_batch":
        used = used.any(dim=0, keepdim=True).expand_as(used)
    elif layout == "expanded_heads":
        used = used.any(dim=1, keepdim=True).expand_as(used)
    return values.masked_fill(~used[..., None], float("nan"))


def _paged(problem: Problem, values: Tensor, table: Tensor, num_blocks: int, layout: str) -> Operand:
    """A pool [num_blocks, block_size, Hkv, *] of NaN with the sequences' keys in the blocks of `table`."""
    batch, kv_heads, _, dim = values.shape
    pool = torch.full((num_blocks, kv_heads, problem.block_size, dim), float("nan"), dtype=values.dtype)
    for b in range(batch):
        for logical, physical in enumerate(table[b].tolist()):
            if physical >= 0:
                start = logical * problem.block_size
                pool[physical] = values[b, :, start : start + problem.block_size]
    if problem.head_major_pool:
        operand = lay_out(pool, layout)
        order = (0, 2, 1, 3)
        return Operand(
            operand.base,
            tuple(operand.size[d] for d in order),
            tuple(operand.stride[d] for d in order),
            operand.offset,
        )
    return lay_out(pool.transpose(1, 2).contiguous(), layout)


def _block_table(problem: Problem, rng: random.Random) -> tuple[Tensor, int]:
    """int32 [B, max_blocks], shuffled, -1 past each sequence's end; and the size of the pool."""
    assert problem.seq_lens is not None
    max_blocks = problem.kv_len // problem.block_size
    needed = [-(-length // problem.block_size) for length in problem.seq_lens]
    num_blocks = sum(needed) + 3
    physical = list(range(num_blocks))
    rng.shuffle(physical)
    table = torch.full((problem.batch, max_blocks), -1, dtype=torch.int32)
    for b, blocks in enumerate(needed):
        table[b, :blocks] = torch.tensor([physical.pop() for _ in range(blocks)], dtype=torch.int32)
    return table, num_blocks


def _per_head_and_tree(problem: Problem, generator: torch.Generator) -> dict[str, Tensor]:
    """sinks, alibi_slopes and tree_mask, as far as the problem has them."""
    tensors = {}
    if problem.sinks:
        tensors["sinks"] = torch.randn(problem.q_heads, generator=generator) * 2
    if problem.alibi_slopes:
        tensors["alibi_slopes"] = torch.rand(problem.q_heads, generator=generator) * 0.2
    if problem.tree:
        size = (problem.q_len,) if problem.tree == "shared" else (problem.batch, problem.q_len)
        tensors["tree_mask"] = torch.randint(0, 2**problem.q_len, size, generator=generator)
    return tensors


def _spread(values: Tensor) -> Operand:
    """Every other element of a storage; NaN, or all bits, between them."""
    fill = torch.nan if values.is_floating_point() else -1
    base = torch.full((2 * values.numel() + 1,), fill, dtype=values.dtype)
    base[1::2] = values.flatten()
    return Operand(base, tuple(values.shape), tuple(2 * step for step in values.stride()), 1)


def _flat(values: Tensor) -> Operand:
    return Operand(values.reshape(-1), tuple(values.shape), values.stride(), 0)


def build(problem: Problem, seed: int = 0) -> Case:
    """The numbers of a problem: operands with NaN wherever nothing may look, and clean dense copies."""
    generator = torch.Generator().manual_seed(seed * 100003 + problem.index)
    rng = random.Random(seed * 100003 + problem.index)
    p = problem
    q_layout, k_layout, v_layout = p.layouts
    if p.block_size:  # the pool's first dimensions are blocks and slots: nothing to expand there
        k_layout, v_layout = (
            name if name.startswith(("padded", "off")) else "contiguous" for name in p.layouts[1:]
        )
    query = _values((p.batch, p.q_heads, p.q_len, p.head_dim), p.dtype, q_layout, generator)
    key = _values((p.batch, p.kv_heads, p.kv_len, p.head_dim), p.dtype, k_layout, generator)
    value = _values((p.batch, p.kv_heads, p.kv_len, p.value_dim), p.dtype, v_layout, generator)
    mask = _mask(p, generator)
    extra = _per_head_and_tree(p, generator)
    visible = visibility(p, mask, extra.get("tree_mask"))

    clean = {"query": query, "key": key, "value": value, **extra}
    operands = {"query": lay_out(query, q_layout)} | {name: _spread(t) for name, t in extra.items()}
    key, value = _poison(key, visible, k_layout), _poison(value, visible, v_layout)
    if p.block_size:
        table, num_blocks = _block_table(p, rng)
        operands["key_cache"] = _paged(p, key, table, num_blocks, k_layout)
        operands["value_cache"] = _paged(p, value, table, num_blocks, v_layout)
        operands["block_tables"] = _flat(table)
    else:
        operands["key"] = lay_out(key, k_layout)
        operands["value"] = lay_out(value, v_layout)
    if p.seq_lens is not None:
        operands["seq_lens"] = _flat(torch.tensor(p.seq_lens, dtype=torch.int32))
    if mask is not None:
        clean["attn_mask"] = mask
        operands["attn_mask"] = lay_out(
            mask, p.mask_layout, fill=True if mask.dtype == torch.bool else float("nan")
        )

    options = p.numbers
    if p.op == "prefill" and p.causality != "none":
        options["is_causal"] = True
        if p.q_offset is not None:
            options["q_offset"] = p.q_offset
    return Case(p, operands, clean, visible, options)
