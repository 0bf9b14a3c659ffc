"""Problems of tests/helpers/problems.py in which all sequences begin with the same keys, and the operands of
`shared_prefix_decode` and `shared_prefix_paged_decode` for them, with NaN wherever no row looks."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.helpers import drawing, features, problems
from tests.helpers.caches import Cache, as_scales, poison
from tests.helpers.kv_formats import name_of
from tests.helpers.layouts import Operand, flat, lay_out
from tests.helpers.problems import Case, Problem
from torch_fattn.operators.options import PointwiseOptions

# Whether the prefix and the suffixes are dense or paged; "pool": both in one pool.
KINDS = ("dense", "paged_suffix", "pool")
# Few head sizes: each is compiled for the rows of a sequence, and for those of all sequences.
HEAD_DIMS = ((64, 64, False), (128, 64, False), (80, 40, False))
WIDE_HEAD_DIMS = ((192, 128, False), (64, 40, True), (576, 512, True))
EVERY_DIMS = (*((*dims, False) for dims in problems.HEAD_DIMS), *problems.WIDE_HEAD_DIMS)


@dataclass(frozen=True)
class SharedProblem:
    """`whole.kv_len` keys at most for each sequence, `prefix` of which are common."""

    whole: Problem
    prefix: int
    kind: str
    block_size: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.prefix}-{self.whole}"

    @property
    def index(self) -> int:
        return self.whole.index

    @property
    def capacity(self) -> int:
        return self.whole.kv_len - self.prefix


def draw(count: int, seed: int = 0) -> list[SharedProblem]:
    rng = random.Random(seed)
    return [_draw_one(rng, i) for i in range(count)]


def _draw_one(rng: random.Random, index: int) -> SharedProblem:
    kind = KINDS[index % len(KINDS)]
    for_prefill = rng.random() < 0.3  # many rows, and nothing that the prefills do not take
    dims = rng.choice(HEAD_DIMS if for_prefill else HEAD_DIMS + WIDE_HEAD_DIMS)
    head_dim, value_dim, value_in_key = dims
    q_heads, kv_heads = rng.choice(problems.GROUPS)
    q_len = rng.choice((1, 1, 2, rng.randint(1, 16)))
    batch = 40 * kv_heads // (q_heads * q_len) + 1 if for_prefill else rng.choice((1, 2, 3, 7))
    tree = rng.choice((None, None, "shared", "each"))
    least_own = q_len if tree else q_len - 1
    block_size = rng.choice((1, 8, 16, 32)) if kind != "dense" else 0
    prefix = rng.choice((0, rng.randint(1, 20), rng.randint(1, 300)))
    capacity = least_own + rng.choice((0, rng.randint(0, 40), rng.randint(0, 150)))
    if kind == "pool":
        prefix = -(-prefix // block_size) * block_size
    if block_size:
        capacity = -(-capacity // block_size) * block_size
    if prefix + capacity == 0:
        capacity = max(block_size, 1)
    while (
        not for_prefill
        and batch > 1
        and batch * q_heads * q_len * (prefix + capacity) * head_dim > problems.MAX_WORK / 2
    ):
        batch -= 1
    suffixes = [rng.choice((least_own, rng.randint(least_own, capacity), capacity)) for _ in range(batch)]
    lengths: list[int] | None = [prefix + suffix for suffix in suffixes]
    if kind == "dense" and rng.random() < 0.3:
        lengths = None
    elif kind == "pool" and rng.random() < 0.3:
        assert lengths is not None
        lengths[rng.randrange(batch)] = 0
    plain = not for_prefill and dims in HEAD_DIMS
    formats = drawing.kv_formats(head_dim, value_dim) if plain else ("float",)
    rows = q_heads // kv_heads * q_len if plain else 1
    dtype, kv_format = features.types_for(rng, 0, "decode", EVERY_DIMS.index(dims), rows, formats)
    whole = Problem(
        index,
        "decode",
        problems.DTYPES[dtype],
        batch,
        q_heads,
        kv_heads,
        q_len,
        prefix + capacity,
        head_dim,
        value_dim,
        value_in_key,
        layouts=(rng.choice(("contiguous", "offset", "token_major", "padded_rows")),) * 3,
        mask=rng.choice(problems.MASKS) if not for_prefill and rng.random() < 0.5 else None,
        mask_broadcast=(rng.random() < 0.5,) * 2 + (rng.random() < 0.5, rng.random() < 0.2),
        seq_lens=None if lengths is None else tuple(lengths),
        window_left=rng.choice((-1, 10**9) if for_prefill else (-1, 0, 30, 200, 10**9)),
        sink_tokens=rng.choice((0, 0, 2, 40, 300)),
        sinks=rng.random() < 0.3,
        alibi_slopes=not for_prefill and rng.random() < 0.4,
        tree=tree,
        kv_format=kv_format,
        **{name: rng.choice(problems.OPTIONS[name].values) for name in PointwiseOptions.__annotations__},
    )
    return SharedProblem(whole, prefix, kind, block_size)


def build(shared: SharedProblem) -> tuple[Case, dict[str, Any]]:
    """The case of the whole, for the float64 reference, and the arguments of the function on the CPU."""
    p, prefix = shared.whole, shared.prefix
    case = problems.build(replace(p, kv_format="float"))
    arguments = {
        name: operand.of(operand.base)
        for name, operand in case.operands.items()
        if name not in ("key", "value", "seq_lens")
    }
    case = replace(case, problem=p, clean=dict(case.clean))
    table, num_blocks = _tables(shared)
    sides: dict[str, dict[str, Tensor]] = {"key": {}, "value": {}}
    for name, side in sides.items():
        values = case.clean[name].clone()
        values[:, :, :prefix] = values[:1, :, :prefix]
        cache = Cache.of(values, p.kv_format)
        case.clean[name] = cache.clean
        kv_format = name_of(p.kv_format)
        side |= _parts(shared, case.visible, name, cache.stored, table, num_blocks, poison(kv_format))
        if cache.scales is not None:
            parts = _parts(shared, case.visible, f"{name}_scales", cache.scales, table, num_blocks, torch.nan)
            side |= {part: as_scales(operand, kv_format) for part, operand in parts.items()}
        if p.value_in_key and name == "value":
            side = sides["key"]
            side |= {
                part.replace("key", "value"): operand.first_columns(p.value_dim)
                for part, operand in list(side.items())
            }
            case.clean["value"] = case.clean["key"][..., : p.value_dim]
    bases: dict[int, Tensor] = {}
    for side in sides.values():
        for part, operand in side.items():
            arguments.setdefault(part, operand.of(bases.setdefault(id(operand.base), operand.base)))
    if table is not None:
        arguments["block_tables"] = flat(table).of(table.reshape(-1))
    if p.seq_lens is not None:
        behind = 0 if shared.kind == "pool" else prefix
        arguments["seq_lens"] = torch.tensor([n - behind for n in p.seq_lens], dtype=torch.int32)
    if shared.kind == "pool":
        arguments["shared_blocks"] = prefix // shared.block_size
    arguments |= case.options
    if p.kv_format not in ("float", "int8"):
        arguments["kv_format"] = name_of(p.kv_format)
        if shared.kind != "pool":
            arguments["prefix_kv_format"] = arguments["kv_format"]
    return case, arguments


def _tables(shared: SharedProblem) -> tuple[Tensor | None, int]:
    """The block table, and the number of blocks."""
    if shared.kind == "dense":
        return None, 0
    p, rng = shared.whole, random.Random(shared.whole.index)
    assert p.seq_lens is not None
    if shared.kind == "paged_suffix":
        suffixes = tuple(length - shared.prefix for length in p.seq_lens)
        return problems._block_table(
            replace(p, kv_len=shared.capacity, seq_lens=suffixes, block_size=shared.block_size), rng
        )
    table, num_blocks = problems._block_table(replace(p, block_size=shared.block_size), rng)
    blocks = shared.prefix // shared.block_size
    used = [b for b, length in enumerate(p.seq_lens) if length > 0]
    for b in used:
        table[b, :blocks] = table[used[0], :blocks]
    return table, num_blocks


def _parts(
    shared: SharedProblem,
    visible: Tensor,
    name: str,
    values: Tensor,
    table: Tensor | None,
    num_blocks: int,
    fill: float,
) -> dict[str, Operand]:
    """Prefix and suffix of one tensor `[B, Hkv, kv_len, *]`, or the pool of both."""
    p, prefix = shared.whole, shared.prefix
    common, own = values[:, :, :prefix], values[:, :, prefix:]
    if prefix > 0:
        common = problems._poison(common, visible[..., :prefix], "expanded_batch", fill)
    if shared.capacity > 0:
        own = problems._poison(own, visible[..., prefix:], "contiguous", fill)
    layout = p.layouts[1]
    if shared.kind == "pool":
        assert table is not None
        paged = replace(p, block_size=shared.block_size)
        whole = torch.cat((common, own), dim=2)
        pool = problems._paged(paged, whole, table, num_blocks, _pool_layout(layout), fill)
        return {name if "scales" in name else f"{name}_cache": pool}
    parts = {f"prefix_{name}": lay_out(common[:1], layout, fill)}
    if table is None:
        parts[name] = lay_out(own, layout, fill)
    else:
        paged = replace(p, block_size=shared.block_size)
        parts[name] = problems._paged(paged, own, table, num_blocks, _pool_layout(layout), fill)
    return parts


def _pool_layout(layout: str) -> str:
    return layout if layout in ("padded_rows", "offset") else "contiguous"
