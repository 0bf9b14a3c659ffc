"""A seeded generator of cache_write calls: rows, pools and scales laid out in every way that the op takes.

Everything outside the rows and pools is poison: the gaps between strided rows are NaN or 0xa5, and so is all
that no token may write.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.helpers.kv_formats import GROUPED, KV_FORMATS, UNSCALED, columns, name_of
from tests.helpers.layouts import Operand, lay_out, spread, strided
from tests.helpers.problems import DTYPES, SHORT
from tests.helpers.tensors import same_bits
from torch_fattn import reference
from torch_fattn.operators.kv_formats import KV_FORMATS as TABLE

DIMS = ((8, 8), (64, 64), (40, 72), (128, 128), (96, 160), (192, 128), (256, 8), (576, 512))
GROUPED_DIMS = ((32, 32), (64, 64), (96, 160), (192, 128), (576, 512))
POOL_LAYOUTS = ("nhd", "hnd", "offset", "padded", "slot_gaps", "blocks_last")
ROW_LAYOUTS = ("contiguous", "token_major", "offset", "padded_rows", "every_other", "expanded_heads")
EVEN = (False, True)
# Another choice of these is another kernel module.
COMPILED: dict[str, tuple[Any, ...]] = {
    "kv_format": KV_FORMATS,
    "dtype": DTYPES,
    "dims": DIMS,
    "long_slots": EVEN,
}
CHOICES = COMPILED | {
    "tokens": (1, 2, 5, 9, 17, 40),
    "kv_heads": (1, 2, 3, 8),
    "num_blocks": (1, 2, 3, 6),
    "block_size": (1, 5, 8, 16, 32),
    "pool_layout": POOL_LAYOUTS,
    "row_layout": ROW_LAYOUTS,
    "special": EVEN,
    "value_in_key": (False, False, True),
}
BYTE = 0xA5

Arguments = dict[str, Any]


@dataclass(frozen=True)
class WriteProblem:
    index: int
    kv_format: str
    dtype: torch.dtype
    tokens: int
    kv_heads: int
    head_dim: int
    value_dim: int
    num_blocks: int
    block_size: int
    pool_layout: str = "nhd"
    row_layout: str = "contiguous"
    long_slots: bool = True
    special: bool = False  # rows of NaN, infinities, zeros, huge and tiny numbers
    value_in_key: bool = False  # the value is the first columns of the key, here and in the cache

    def __str__(self) -> str:
        parts = (
            f"{self.index:03}-{self.kv_format}-{SHORT[self.dtype]}-D{self.head_dim}x{self.value_dim}",
            f"T{self.tokens}H{self.kv_heads}-{self.num_blocks}x{self.block_size}",
            f"{self.pool_layout}-{self.row_layout}",
            "int64" if self.long_slots else "int32",
        )
        return "-".join(parts)

    @property
    def options(self) -> dict[str, Any]:
        if self.kv_format in ("float", "int8"):  # the dtypes say it
            return {}
        return {"kv_format": name_of(self.kv_format)}


@dataclass
class WriteCase:
    problem: Any  # with its options; here a WriteProblem
    operands: dict[str, Operand]

    def arguments(self, device: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Keyword arguments of the op on that device, and the storages behind them, which are copies."""
        copies = {id(operand.base): operand.base.to(device, copy=True) for operand in self.operands.values()}
        bases = {name: copies[id(operand.base)] for name, operand in self.operands.items()}
        arguments = {name: operand.of(bases[name]) for name, operand in self.operands.items()}
        return {**arguments, **self.problem.options}, bases


def deal(
    choices: dict[str, tuple[Any, ...]],
    compiled: Collection[str],
    count: int,
    seed: int,
    grouped_dims: tuple[Any, ...] = (),
) -> list[dict[str, Any]]:
    """Every choice comes about equally often. Three problems share those that are compiled, because compiling
    takes longer than running."""
    rng, decks = random.Random(seed), dict[str, list[Any]]()
    some = -(-count // 3)
    for name, values in choices.items():
        cards = [values[i % len(values)] for i in range(some if name in compiled else count)]
        decks[name] = rng.sample(cards, len(cards)) * (3 if name in compiled else 1)
    for i, kv_format in enumerate(decks.get("kv_format", ())):
        if kv_format in GROUPED:
            decks["dims"][i] = grouped_dims[i % some % len(grouped_dims)]
    return [{"index": i} | {name: deck[i] for name, deck in decks.items()} for i in range(count)]


def draw(count: int, seed: int = 0) -> list[WriteProblem]:
    drawn = deal(CHOICES, COMPILED, count, seed, GROUPED_DIMS)
    for one in drawn:
        one["head_dim"], one["value_dim"] = one.pop("dims")
        one["value_in_key"] &= one["value_dim"] <= one["head_dim"]
    return [WriteProblem(**one) for one in drawn]


def build(problem: WriteProblem, seed: int = 0) -> WriteCase:
    p, generator = problem, torch.Generator().manual_seed(1000 * seed + problem.index)
    operands = {"slot_mapping": spread(slots_of(p, p.tokens, p.num_blocks * p.block_size, generator))}
    for name, dim in (("key", p.head_dim), ("value", p.value_dim)):
        rows = torch.randn(p.tokens, p.kv_heads, dim, generator=generator)
        rows[::3].abs_()  # minima above 0
        if p.special:
            make_special(rows, generator)
            rows[1::5] = -1e-39  # subnormal
        heads_first = rows.to(p.dtype).transpose(0, 1)[None]
        operands[name] = lay_out(heads_first, p.row_layout).permuted(2, 1, 3)
        operands |= caches(p, name, (p.num_blocks, p.block_size, p.kv_heads), dim)
    if p.value_in_key:
        operands["value"] = operands["key"].first_columns(p.value_dim)
        for name in {"value_cache", "value_scales"} & operands.keys():
            operands[name] = replace(operands[name.replace("value", "key")], size=operands[name].size)
    return WriteCase(p, operands)


def caches(p: Any, name: str, pool: tuple[int, ...], dim: int) -> dict[str, Operand]:
    """The cache of a problem, of keys or values, and its scales."""
    kind = TABLE.get(name_of(p.kv_format))
    stored = p.dtype if kind is None else kind.dtype
    found = {f"{name}_cache": poisoned((*pool, columns(p.kv_format, dim)), stored, p.pool_layout)}
    if kind is not None and p.kv_format not in UNSCALED:
        found[f"{name}_scales"] = poisoned(*kind.scales(pool, dim), p.pool_layout)
    return found


def slots_of(p: Any, tokens: int, count: int, generator: torch.Generator) -> Tensor:
    """Distinct slots of a cache of `count` in any order. A quarter of the tokens, or all, are dropped, by
    negative slots and by slots that the cache does not have."""
    dtype = torch.int64 if p.long_slots else torch.int32
    kept = torch.cat((torch.randperm(count, generator=generator), torch.full((tokens,), -1)))[:tokens]
    slots = kept[torch.randperm(tokens, generator=generator)].to(dtype)
    dropped = torch.tensor((-1, count, torch.iinfo(dtype).min, torch.iinfo(dtype).max)).roll(p.index)
    of_some = slots[p.index % 4 :: 1 if p.index % 8 == 4 else 4]
    of_some.copy_(dropped.repeat(tokens)[: len(of_some)])
    return slots


def make_special(rows: Tensor, generator: torch.Generator) -> None:
    """One kind of special number in each row of some, and rows that are special as a whole."""
    flat = rows.view(-1, rows.shape[-1])
    numbers = (math.nan, math.inf, -math.inf, 7e4, -1e9, 3e38, 449.0, 2.0**-130, -(2.0**-120), -0.0, 1e-8)
    for row in range(len(flat)):
        kind = int(torch.randint(0, len(numbers) + 6, (1,), generator=generator))
        if kind < len(numbers):
            column = int(torch.randint(0, rows.shape[-1], (1,), generator=generator))
            flat[row, column] = torch.tensor(numbers[kind], dtype=torch.float64)  # inf where it overflows
        else:
            size = (0.0, -1e-38, 1e-36, 1e4, 1e30, 1e-6)[kind - len(numbers)]
            flat[row] = (torch.ones(()) if kind % 2 else flat[row]).double() * size


def poisoned(size: tuple[int, ...], dtype: torch.dtype, layout: str) -> Operand:
    """A pool `[num_blocks, block_size, kv_heads, ..]` in memory whose every byte is poison."""
    columns = range(3, len(size))
    of_rows: dict[int, dict[str, Any]] = {0: {"step": 5}, 1: {"gaps": {3: 4}}, 2: {"gaps": {3: 1}}}
    ways: dict[str, dict[str, Any]] = {
        "hnd": {"order": (0, 2, 1, *columns)},
        "offset": {"offset": 2 if len(columns) == 2 else 3},
        "padded": of_rows[len(columns)],
        "slot_gaps": {"gaps": {2: 2 * size[2]}},
        "blocks_last": {"order": (2, 1, 0, *columns)},
    }
    pool = strided(size, torch.uint8, BYTE, **ways.get(layout, {}))
    base = torch.full((pool.base.numel() * dtype.itemsize,), BYTE, dtype=torch.uint8)
    return replace(pool, base=base.view(dtype))


def assert_written(case: WriteCase, memory: dict[str, Tensor]) -> None:
    """Exactly the bits of the definition, and no other writes. A value in the key is not written itself."""
    arguments, bases = case.arguments("cpu")
    if case.problem.value_in_key:
        arguments |= {n: arguments[n].clone() for n in ("value_cache", "value_scales") if n in arguments}
    reference.cache_write(**arguments)
    assert_same_memory(memory, bases)


def assert_same_memory(mine: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """All NaNs of scales are equal."""
    for name, expected in exact.items():
        pair = [mine[name].cpu(), expected]
        if name.endswith("scales"):
            pair = [x.masked_fill(x.isnan(), -1234.0) for x in pair]
        assert same_bits(*pair), name


def valid(kv_format: str = "float", device: str = "mps") -> Arguments:
    """Arguments of a call that works: three tokens, four blocks of two slots."""
    problem = WriteProblem(3, kv_format, torch.float16, 3, 2, 64, 96, 4, 2)
    arguments, _ = build(problem).arguments(device)
    arguments["slot_mapping"] = torch.tensor([3, -1, 6], device=device)
    return arguments
