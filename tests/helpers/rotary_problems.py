"""A seeded generator of rotary and rotary_write calls. Memory around rows, tables and weights is NaN, and
caches are poison (cache_problems)."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.helpers.cache_problems import (
    EVEN,
    POOL_LAYOUTS,
    Arguments,
    WriteCase,
    caches,
    deal,
    make_special,
    slots_of,
)
from tests.helpers.kv_formats import KV_FORMATS, name_of
from tests.helpers.layouts import Operand, lay_out, spread, strided
from tests.helpers.problems import DTYPES, SHORT
from torch_fattn import reference

# Head dims of key and value, rotated columns, and the first of them.
DIMS = (
    *((8, 8, 8, 0), (36, 24, 36, 0), (64, 40, 64, 0), (80, 80, 32, 0)),
    *((128, 128, 64, 64), (192, 128, 64, 128), (256, 256, 6, 3), (576, 64, 64, 512)),
)
GROUPED_DIMS = ((64, 64, 64, 0), (96, 160, 48, 0), (192, 128, 64, 128), (576, 64, 10, 6))
# Another choice of these is another kernel module.
COMPILED: dict[str, tuple[Any, ...]] = {
    "dtype": DTYPES,
    "kv_format": KV_FORMATS,
    "dims": DIMS,
    "style": ("halves", "pairs", "pairs_to_halves"),
    "norm": ("none", "rounded", "plus_one", "float"),
    "float_tables": EVEN,
    "float_weights": EVEN,
    "long_slots": EVEN,
}
CHOICES = COMPILED | {
    "batch": (1, 2, 3),
    "length": (1, 1, 2, 3, 5, 17),
    "heads": (1, 3, 4, 4, 4, 4, 4, 0),
    "kv_heads": (1, 2, 1, 2, 1, 2, 0),
    "narrow": EVEN,
    "one_table": EVEN,
    "table_layout": ("contiguous", "transposed", "padded"),
    "row_layout": ("packed", "contiguous", "token_major", "offset", "every_other"),
    "normed": ("both", "query", "key"),
    "place": ("start", "starts", "start_of_all", "slots"),
    "pool_layout": POOL_LAYOUTS,
    "token_major_out": EVEN,
    "special": EVEN,  # rows of NaN, infinities, zeros, huge and tiny numbers; with a norm, a NaN
}


class RotaryProblem(SimpleNamespace):
    """Has an index, and one of each of the choices."""

    @property
    def options(self) -> Arguments:
        _, _, rotary_dim, offset = self.dims
        options = {"style": self.style, "rotary_offset": offset, "token_major_out": self.token_major_out}
        options |= {"rotary_dim": rotary_dim} if self.narrow else {}
        options |= {"norm": self.norm, "eps": 1e-5} if self.norm != "none" else {}
        options |= {"start": 2} if self.place != "slots" else {}
        if self.kv_format not in ("float", "int8"):
            options["kv_format"] = name_of(self.kv_format)
        return options

    def __str__(self) -> str:
        what = (
            f"{self.index:03}",
            self.kv_format,
            SHORT[self.dtype],
            self.style,
            "x".join(map(str, self.dims)),
        )
        return "-".join((*what, f"B{self.batch}L{self.length}", self.norm, self.place, self.row_layout))


def draw(count: int, seed: int = 0) -> list[RotaryProblem]:
    return [RotaryProblem(**one) for one in deal(CHOICES, COMPILED, count, seed, GROUPED_DIMS)]


@dataclass
class RotaryCase(WriteCase):
    slots: Tensor  # of every token, -1 or beyond the cache: dropped


def of_rotary(arguments: Arguments) -> Arguments:
    """The arguments of rotary among those of rotary_write."""
    names = (each.name for each in torch.ops.fattn.rotary.default._schema.arguments)
    return {name: arguments[name] for name in names if name in arguments}


def build(p: RotaryProblem) -> RotaryCase:
    generator = torch.Generator().manual_seed(p.index)

    def randn(*shape: int, in_float: bool = False) -> Tensor:
        return torch.randn(shape, generator=generator).to(torch.float32 if in_float else p.dtype)

    dim, value_dim, rotary_dim, _ = p.dims
    sizes = {"query": (p.heads, dim), "key": (p.kv_heads, dim), "value": (p.kv_heads, value_dim)}
    rows = {name: randn(p.batch, h, p.length, d) for name, (h, d) in sizes.items()}
    for each in rows.values() if p.special else ():
        if p.norm == "none":
            make_special(each, generator)
        elif each.numel():
            each[-1, -1, -1, 5] = torch.nan
    operands = _rows(p, rows)
    way: dict[str, Any] = {"transposed": {"order": (0, 2, 1)}, "padded": {"offset": 5, "gaps": {2: 3}}}
    for name in ("cos", "sin"):
        table = randn(
            1 if p.one_table else p.batch, p.length, rotary_dim >> p.narrow, in_float=p.float_tables
        )
        operands[name] = strided(table.shape, table.dtype, **way.get(p.table_layout, {})).holding(table)
    if p.norm != "none":
        for name in ("query", "key") if p.normed == "both" else (p.normed,):
            operands[f"{name}_norm"] = spread(randn(dim, in_float=p.float_weights))
    return RotaryCase(p, operands, _add_caches(p, operands, generator))


def _rows(p: RotaryProblem, rows: dict[str, Tensor]) -> dict[str, Operand]:
    if p.row_layout != "packed":
        return {name: lay_out(each, p.row_layout) for name, each in rows.items()}
    # Views of one projection [batch, length, columns].
    together = torch.cat([each.transpose(1, 2).flatten(2) for each in rows.values()], -1)
    base, operands, begin, width = together.flatten(), {}, 0, together.shape[2]
    for name, each in rows.items():
        operands[name] = Operand(base, tuple(each.shape), (p.length * width, each.shape[3], width, 1), begin)
        begin += each.shape[1] * each.shape[3]
    return operands


def _add_caches(p: RotaryProblem, operands: dict[str, Operand], generator: torch.Generator) -> Tensor:
    """Returns the slot of each token."""
    is_paged, dtype = p.place == "slots", torch.int64 if p.long_slots else torch.int32
    block = 5 if is_paged else p.length + 6
    blocks = -(-p.batch * p.length // block) + 1 if is_paged else p.batch
    for name, dim in (("key", p.dims[0]), ("value", p.dims[1])):
        operands |= caches(p, name, (blocks, block, p.kv_heads), dim)
    least, largest = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    if is_paged:
        slots = slots_of(p, p.batch * p.length, blocks * block, generator)
        operands["slot_mapping"] = spread(slots.view(p.batch, p.length))
        return slots
    first = torch.zeros(p.batch, dtype=torch.int64)
    if p.place != "start":
        ways = torch.tensor((3, -1, 7, least, largest)).roll(-p.index)
        first = ways[: p.batch] if p.place == "starts" else ways[:1].expand(p.batch)
        operands["starts"] = spread(first.to(dtype))
        if p.place == "start_of_all":
            operands["starts"] = Operand(ways[:1].to(dtype), (), (), 0)
    places = first[:, None].clamp(-1, block) + 2 + torch.arange(p.length)
    slots = torch.arange(p.batch)[:, None] * block + places
    return slots.masked_fill((first[:, None] < 0) | (places >= block), -1).flatten()


def is_exact(p: RotaryProblem, normed: bool) -> bool:
    """Whether every rounding is one to 16 bits of a number that float32 holds as float64 does."""
    return not (normed or p.dtype == torch.float32 or p.float_tables)


def assert_close(mine: Tensor, exact: Tensor, p: RotaryProblem, normed: bool) -> None:
    """Bit for bit, or each rounding of a norm (2), of products and of the sum may fall differently, once."""
    assert mine.dtype == p.dtype and mine.shape == exact.shape
    assert (mine.transpose(1, 2) if p.token_major_out else mine).is_contiguous()
    special = ~exact.isfinite()
    torch.testing.assert_close(mine[special].double(), exact[special], rtol=0, atol=0, equal_nan=True)
    mine, exact = (x.double().masked_fill(special, 0.0) for x in (mine, exact))
    if is_exact(p, normed):
        assert torch.equal(mine, exact)
    elif exact.numel():
        largest = exact.abs().amax(-1, keepdim=True)
        assert ((mine - exact).abs() <= 6 * torch.finfo(p.dtype).eps / 2 * largest).all()


def written(case: RotaryCase, key: Tensor) -> dict[str, Tensor]:
    """All memory after `cache_write` of this rotated key, by the reference."""
    arguments, bases = case.arguments("cpu")
    rows = (x.transpose(1, 2).flatten(0, 1) for x in (key, arguments["value"]))
    stored = {n: arguments[n] for n in ("key_scales", "value_scales", "kv_format") if n in arguments}
    reference.cache_write(*rows, arguments["key_cache"], arguments["value_cache"], case.slots, **stored)
    return bases


def valid(op: str = "rotary_write", device: str = "mps") -> Arguments:
    """Arguments of a call that works: two sequences of three tokens, four blocks of two slots."""
    sizes = {"query": (2, 4, 3, 64), "key": (2, 2, 3, 64), "value": (2, 2, 3, 40)}
    sizes |= {"cos": (2, 3, 64), "sin": (2, 3, 64), "key_cache": (4, 2, 2, 64), "value_cache": (4, 2, 2, 40)}
    generator = torch.Generator().manual_seed(0)
    arguments: Arguments = {n: torch.randn(size, generator=generator).to(device) for n, size in sizes.items()}
    if op == "rotary":
        return of_rotary(arguments)
    return arguments | {"slot_mapping": torch.tensor([[3, -1, 6], [0, 7, 1]], device=device)}
