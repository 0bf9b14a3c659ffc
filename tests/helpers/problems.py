"""A seeded generator of attention problems, and their operands laid out in every way that the ops accept.

Everything that no query may see is NaN: slots past `seq_lens`, future and masked keys, unused cache blocks,
the gaps between strided rows and the memory around a view. References get the clean copy, without NaN.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from tests.helpers.caches import Cache, as_scales, first_scales, poison
from tests.helpers.kv_formats import GROUPED, columns, name_of
from tests.helpers.layouts import Operand, flat, lay_out, packed, spread, starts
from tests.helpers.visibility import visibility
from torch_fattn import reference
from torch_fattn.operators import ATTENTION

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
# Beside those: D, Dv, and whether the value is a view of the key's first columns, as only decode reads it.
WIDE_HEAD_DIMS = (
    *((d, dv, False) for d, dv in ((136, 136), (192, 128), (256, 256), (24, 328), (512, 512), (576, 512))),
    *((d, dv, True) for d, dv in ((64, 40), (160, 128), (288, 256), (576, 512))),
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
MASK_PATTERNS = ("entries", "patches")  # what is drawn one by one: entries, or patches that are mostly alike
BLOCK_SIZES = (1, 8, 16, 32, 256)
MAX_LENGTH = 300
MAX_CACHE = 1100
# Multiply-adds of one problem: a software GPU does about 1e8 a second.
MAX_WORK = 2e7
DECODES = ("decode", "paged_decode")
PACKED = ("paged_prefill", "varlen_prefill")
OPS = ATTENTION


@dataclass(frozen=True)
class Score:
    """The place of a score: row i and key j of a head, in a sequence."""

    sequence: int
    head: int
    distance: int  # the key's position less the row's


Rule = Callable[[float, Any, Score], float]


@dataclass(frozen=True)
class Option:
    """An option of the operators, as a field of Problem."""

    values: tuple[Any, ...]  # drawn, each as often as it is here; the first is the default and is left out
    ops: tuple[str, ...]  # that have it
    shown: str  # what the name of a problem says of it
    argument: str  # of the operator
    tensor: Callable[[Problem, torch.Generator], Tensor] | None  # what makes the argument, if it is a tensor
    # What the argument makes of a score, in plain Python: tests/operators/test_reference.py applies it.
    rule: Rule | None
    refused: tuple[Any, ...]  # values that raise a ValueError


def option(
    *values: Any,
    ops: tuple[str, ...] = OPS,
    shown: str = "",
    argument: str = "",
    tensor: Callable[[Problem, torch.Generator], Tensor] | None = None,
    rule: Rule | None = None,
    refused: tuple[Any, ...] = (),
) -> Any:
    each = Option(values, ops, shown, argument, tensor, rule, refused)
    return field(default=values[0], metadata={"option": each})


def _parameter_dtype(problem: Problem) -> torch.dtype:
    """A layer's parameters have the dtype of its operands, or are kept in float32."""
    return problem.dtype if problem.index % 3 else torch.float32


def _sinks(problem: Problem, generator: torch.Generator) -> Tensor:
    return (torch.randn(problem.q_heads, generator=generator) * 2).to(_parameter_dtype(problem))


def _slopes(problem: Problem, generator: torch.Generator) -> Tensor:
    by_sequence = (problem.batch,) if problem.index % 2 else ()
    slopes = torch.rand(*by_sequence, problem.q_heads, generator=generator) * 0.2
    return slopes.to(_parameter_dtype(problem))


def _limited(score: float, cap: float, _: Score) -> float:
    return cap * math.tanh(score / cap)


def _sloped(score: float, slopes: Tensor, of: Score) -> float:
    return score + float((slopes[of.sequence] if slopes.dim() == 2 else slopes)[of.head]) * of.distance


def _tree(problem: Problem, generator: torch.Generator) -> Tensor:
    rows, size = problem.q_len, (problem.batch, problem.q_len)[problem.tree == "shared" :]
    return torch.randint(-(2**63) * (rows > 62), 2 ** min(rows, 62), size, generator=generator)


def _blocks(problem: Problem, generator: torch.Generator) -> Tensor:
    """Of any density, with rows of hidden blocks, for each sequence and head or for all."""
    assert problem.block_mask is not None
    whole = (problem.batch, problem.q_heads, problem.q_len, problem.kv_len)
    size = [-(-n // block) for n, block in zip(whole, (1, 1, *problem.block_mask), strict=True)]
    size[:2] = [n if problem.index >> bit & 1 else 1 for bit, n in enumerate(size[:2])]
    density = torch.rand((*size[:3], 1), generator=generator) * 1.5 - 0.25
    visible = torch.rand(size, generator=generator) < density
    if problem.index % 3:
        return visible
    return visible * torch.randint(1, 256, size, generator=generator, dtype=torch.uint8)


@dataclass(frozen=True)
class Problem:
    index: int
    op: str
    dtype: torch.dtype
    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int  # decode: the capacity; varlen_prefill: the most that a sequence has
    head_dim: int
    value_dim: int
    value_in_key: bool = False  # decode: the value is a view of the key's first columns
    layouts: tuple[str, str, str] = ("contiguous",) * 3
    causality: str = "none"  # of the prefills; the rows of the decodes are always causal
    q_offset: int | None = None
    mask: torch.dtype | None = None
    mask_broadcast: tuple[bool, bool, bool, bool] = (False,) * 4
    mask_layout: str = "contiguous"
    mask_pattern: str = "entries"
    mask_map: bool = False  # prefill: one is given
    seq_lens: tuple[int, ...] | None = None
    block_size: int = 0  # 0: not paged
    head_major_pool: bool = False
    q_lens: tuple[int, ...] | None = None  # packed: rows of each sequence; q_len is the most
    spare_rows: int = 0  # packed rows, and packed keys, of no sequence
    shared_keys: int = 0  # that all sequences begin with, in whole blocks if paged
    sharpness: float = 1.0  # factor of the query: above 1, most rows have a dominant key
    kv_format: str = "float"
    # The options: all that is drawn, passed and refused of each is its line here. Rules apply in this order.
    window_left: int = option(-1, -1, -1, 0, 1, 5, 40, 200, 10**9, shown="window{}", refused=(-2,))
    window_right: int = option(-1, -1, 0, 3, shown="right{}", refused=(-7,))
    sink_tokens: int = option(0, 0, 1, 4, 40, 300, shown="first{}", refused=(-1,))
    sinks: bool = option(False, False, True, tensor=_sinks)
    softcap: float = option(0.0, 0.0, 2.0, 30.0, rule=_limited, refused=(-3.0, math.nan, math.inf, 1e39))
    alibi_slopes: bool = option(False, False, True, tensor=_slopes, rule=_sloped)
    scale: float | None = option(None, None, 0.0625, 0.3, refused=(math.nan, -math.inf, 1e39))
    tree: str | None = option(
        None, None, None, "shared", "each", ops=DECODES, argument="tree_mask", tensor=_tree
    )
    block_mask: tuple[int, int] | None = option(  # the block size
        *(None, None, None, None, (32, 32), (64, 128), (128, 64), (32, 256)),
        ops=("prefill",),
        shown="blocks{0[0]}x{0[1]}",
        tensor=_blocks,
    )
    token_major_out: bool = option(False, True, ops=("prefill", *DECODES), shown="token_major")

    def __str__(self) -> str:
        parts = [
            f"{self.index:03}-{self.op}-{SHORT[self.dtype]}-D{self.head_dim}x{self.value_dim}",
            f"B{self.batch}H{self.q_heads}:{self.kv_heads}L{self.q_len}x{self.kv_len}",
            self.causality if not self.is_decode else "",
            f"rows{'+'.join(map(str, self.q_lens))}" if self.q_lens is not None else "",
            f"mask_{SHORT[self.mask]}" if self.mask is not None else "",
            *(("patches",) if self.mask_pattern == "patches" else ()),
            *(("map",) if self.mask_map else ()),
            "value_in_key" if self.value_in_key else "",
            f"block{self.block_size}" if self.block_size else "",
            self.kv_format if self.kv_format != "float" else "",
            "sharp" if self.sharpness > 1 else "",
            *((OPTIONS[name].shown or name).format(value) for name, value in self.options.items()),
        ]
        return "-".join(part for part in parts if part)

    @property
    def options(self) -> dict[str, Any]:
        """The fields that are options and not left out."""
        every = ((name, getattr(self, name), each.values[0]) for name, each in OPTIONS.items())
        return {name: value for name, value, default in every if value != default}

    @property
    def numbers(self) -> dict[str, Any]:
        """The arguments of these options that are not tensors."""
        numbers = {
            OPTIONS[name].argument or name: value
            for name, value in self.options.items()
            if OPTIONS[name].tensor is None
        }
        return numbers | ({} if self.block_mask is None else {"block_size": self.block_mask})

    def tensors(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Those that are tensors."""
        chosen = {name: OPTIONS[name] for name in self.options}
        return {
            each.argument or name: each.tensor(self, generator)
            for name, each in chosen.items()
            if each.tensor is not None
        }

    @property
    def is_decode(self) -> bool:
        return self.op in DECODES

    @property
    def has_packed_keys(self) -> bool:
        return self.op == "varlen_prefill"

    @property
    def is_causal(self) -> bool:
        return self.is_decode or self.causality != "none"

    @property
    def rows(self) -> tuple[int, ...]:
        """Query rows of each sequence."""
        return self.q_lens if self.q_lens is not None else (self.q_len,) * self.batch

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.seq_lens if self.seq_lens is not None else (self.kv_len,) * self.batch

    @property
    def first_positions(self) -> list[int]:
        """The absolute position of query row 0 in each sequence."""
        if self.q_offset is not None:
            return [self.q_offset] * self.batch
        return [length - rows for length, rows in zip(self.lengths, self.rows, strict=True)]


OPTIONS: dict[str, Option] = {
    each.name: each.metadata["option"] for each in fields(Problem) if "option" in each.metadata
}
TENSORS = {each.argument or name for name, each in OPTIONS.items() if each.tensor is not None}


@dataclass
class Case:
    """A problem with its numbers. `clean` holds dense query, key, value, mask and the other tensors, without
    any NaN; a packed query is padded there to the longest."""

    problem: Problem
    operands: dict[str, Operand]
    clean: dict[str, Tensor]
    visible: Tensor  # bool [B, Hq, Lq, Lk]
    options: dict[str, Any] = field(default_factory=dict)

    def arguments(self, device: str | torch.device) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Keyword arguments of the op on that device, and the storages behind them."""
        moved = {id(operand.base): operand.base.to(device) for operand in self.operands.values()}
        bases = {name: moved[id(operand.base)] for name, operand in self.operands.items()}
        arguments = {name: operand.of(bases[name]) for name, operand in self.operands.items()}
        return {**arguments, **self.options}, bases


# ---- building operands


def _mask(problem: Problem, generator: torch.Generator) -> Tensor | None:
    """The mask as it is broadcast: size 1 where `mask_broadcast` says so."""
    if problem.mask is None:
        return None
    full = (problem.batch, problem.q_heads, problem.q_len, problem.kv_len)
    size = [1 if broadcast else n for n, broadcast in zip(full, problem.mask_broadcast, strict=True)]
    if problem.mask == torch.bool:
        visible = torch.rand(size, generator=generator) < 0.7
        if problem.mask_pattern == "patches":
            kind = patches(size, generator)
            visible = (visible | (kind == 2)) & (kind != 0)
        return visible
    values = torch.randn(size, generator=generator) * 2
    values[torch.rand(size, generator=generator) < 0.1] = -torch.inf
    if problem.mask_pattern == "patches":
        kind = patches(size, generator)
        values = values.masked_fill(kind == 2, 0.0).masked_fill(kind == 0, -torch.inf)
    return values.to(problem.mask)


def patches(size: Sequence[int], generator: torch.Generator) -> Tensor:
    """0, 1 or 2 for each entry. Rows and keys are cut, mostly inside tiles, and all entries of a patch
    between cuts are alike: hidden, mixed, or whole."""

    def numbers(length: int) -> Tensor:
        """Lengths of the pieces of rows or keys, about 40 each."""
        every = 8 if torch.rand((), generator=generator) < 0.3 else 1  # some where tiles do
        cuts = torch.rand(length, generator=generator) < every / 40
        return (cuts & (torch.arange(length) % every == 0)).cumsum(0)

    batch, heads, rows, keys = size
    row, key = numbers(rows), numbers(keys)
    kinds = torch.tensor([0, 0, 1, 2, 2])
    drawn = torch.randint(0, 5, (batch, heads, rows + 1, keys + 1), generator=generator)
    return kinds[drawn[:, :, row][..., key]]


def drawn_values(
    shape: tuple[int, ...], dtype: torch.dtype, layout: str, generator: torch.Generator
) -> Tensor:
    """Normal numbers that are equal along the dimensions which the layout expands."""
    values = torch.randn(shape, generator=generator).to(dtype)
    if layout == "expanded_batch":
        values = values[:1].expand(shape)
    elif layout == "expanded_heads":
        values = values[:, :1].expand(shape)
    return values.contiguous()


def _poison(values: Tensor, visible: Tensor, layout: str, fill: float, shared: int) -> Tensor:
    """`values` [B, Hkv, Lk, *] with `fill` in the keys that no row of any of their query heads sees."""
    batch, kv_heads, kv_len, _ = values.shape
    used = visible.reshape(batch, kv_heads, -1, kv_len).any(dim=2)
    used[..., :shared] = used[..., :shared].any(dim=0)
    if layout == "expanded_batch":
        used = used.any(dim=0, keepdim=True).expand_as(used)
    elif layout == "expanded_heads":
        used = used.any(dim=1, keepdim=True).expand_as(used)
    return values.masked_fill(~used[..., None], fill)


def _paged(
    problem: Problem, values: Tensor, table: Tensor, num_blocks: int, layout: str, fill: float
) -> Operand:
    """A pool [num_blocks, block_size, Hkv, *] of `fill` with the sequences' keys in the blocks of `table`."""
    batch, kv_heads, _, dim = values.shape
    pool = torch.full((num_blocks, kv_heads, problem.block_size, dim), fill, dtype=values.dtype)
    for b in range(batch):
        for logical, physical in enumerate(table[b].tolist()):
            if physical >= 0:
                start = logical * problem.block_size
                pool[physical] = values[b, :, start : start + problem.block_size]
    if problem.head_major_pool:
        return lay_out(pool, layout, fill).permuted(0, 2, 1, 3)
    return lay_out(pool.transpose(1, 2).contiguous(), layout, fill)


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
    used = [b for b, length in enumerate(problem.seq_lens) if length > 0]
    shared = problem.shared_keys // problem.block_size
    table[used, :shared] = table[used[:1], :shared]
    return table, num_blocks


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
    query = (
        drawn_values((p.batch, p.q_heads, p.q_len, p.head_dim), p.dtype, q_layout, generator) * p.sharpness
    )
    key = drawn_values((p.batch, p.kv_heads, p.kv_len, p.head_dim), p.dtype, k_layout, generator)
    value = drawn_values((p.batch, p.kv_heads, p.kv_len, p.value_dim), p.dtype, v_layout, generator)
    for each in (key, value):
        each[:, :, : p.shared_keys] = each[:1, :, : p.shared_keys]
    if p.value_in_key:
        value = key[..., : p.value_dim]
    mask = _mask(p, generator)
    extra = p.tensors(generator)
    visible = visibility(p, mask, extra.get("tree_mask"), extra.get("block_mask"))

    clean = {"query": query, **extra}
    if p.q_lens is None:
        operands = {"query": lay_out(query, q_layout)}
    else:
        operands = {
            "query": packed(query, p.q_lens, p.spare_rows, q_layout),
            "cu_seqlens_q": starts(p.q_lens),
        }
    if p.has_packed_keys:
        operands["cu_seqlens_k"] = starts(p.lengths)
    operands |= {name: spread(t) for name, t in extra.items()}
    table, num_blocks = _block_table(p, rng) if p.block_size else (None, 0)
    if table is not None:
        operands["block_tables"] = flat(table) if p.q_lens is None else spread(table)
    kv_format = name_of(p.kv_format)

    def placed(values: Tensor, layout: str, fill: float) -> Operand:
        poisoned = _poison(values, visible, layout, fill, p.shared_keys)
        if p.has_packed_keys:
            return packed(poisoned, p.lengths, p.spare_rows, layout)
        if table is None:
            return lay_out(poisoned, layout, fill)
        return _paged(p, poisoned, table, num_blocks, layout, fill)

    sides = (("key", key, k_layout), ("value", value, v_layout))
    for name, values, layout in sides[: 1 if p.value_in_key else 2]:
        cache = Cache.of(values, p.kv_format)
        clean[name] = cache.clean
        operands[f"{name}_cache" if p.block_size else name] = placed(cache.stored, layout, poison(kv_format))
        if cache.scales is not None:
            # The pairs of a group lie together; all else may have any strides.
            scales_layout = "padded_rows" if layout == "every_other" and kv_format in GROUPED else layout
            operands[f"{name}_scales"] = as_scales(placed(cache.scales, scales_layout, torch.nan), kv_format)
    if p.value_in_key:
        suffix = "_cache" if p.block_size else ""
        operands[f"value{suffix}"] = operands[f"key{suffix}"].first_columns(columns(kv_format, p.value_dim))
        clean["value"] = clean["key"][..., : p.value_dim]
        if "key_scales" in operands:
            operands["value_scales"] = first_scales(operands["key_scales"], p.value_dim, kv_format)
    if p.seq_lens is not None and not p.has_packed_keys:
        operands["seq_lens"] = flat(torch.tensor(p.seq_lens, dtype=torch.int32))
    if mask is not None:
        clean["attn_mask"] = mask
        operands["attn_mask"] = lay_out(
            mask, p.mask_layout, fill=True if mask.dtype == torch.bool else float("nan")
        )
        if p.mask_map:
            operands["mask_map"] = lay_out(reference.mask_map(mask).to(torch.uint8), p.mask_layout, fill=0)

    options = p.numbers
    if kv_format != "float" and (kv_format != "int8" or p.index % 2):  # int8 need not be named
        options["kv_format"] = kv_format
    if p.q_lens is not None:
        options |= {"max_seqlen_q": p.q_len, "is_causal": p.is_causal}
    elif p.op == "prefill" and p.is_causal:
        options["is_causal"] = True
    options |= {"max_seqlen_k": p.kv_len} if p.has_packed_keys else {}
    options |= {"q_offset": p.q_offset} if p.q_offset is not None else {}
    return Case(p, operands, clean, visible, options)
