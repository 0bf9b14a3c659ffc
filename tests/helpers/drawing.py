"""Draws random problems (problems.py) that cover combinations of features."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

from tests.helpers import features
from tests.helpers.kv_formats import GROUPED, QUANTISED
from tests.helpers.problems import (
    BLOCK_SIZES,
    CAUSALITIES,
    DECODES,
    DTYPES,
    GROUPS,
    HEAD_DIMS,
    LAYOUTS,
    MASK_PATTERNS,
    MASKS,
    MAX_CACHE,
    MAX_LENGTH,
    MAX_WORK,
    OPS,
    OPTIONS,
    PACKED,
    WIDE_HEAD_DIMS,
    Problem,
)

FEW_ROWS = ((1, 1, 1), (3, 3, 1), (2, 1, 1), (4, 2, 1), (1, 1, 2), (2, 2, 2))  # heads, and rows of a query
# An offset far beyond the keys, where float32 still tells ALiBi's distances apart.
FAR = 2**20
# Only for prefills, so that their dims occur with all other features.
WIDE_PREFILLS = WIDE_HEAD_DIMS[:3] + WIDE_HEAD_DIMS[5:6]


def draw(
    count: int,
    seed: int = 0,
    *,
    ops: tuple[str, ...] = ("prefill", *OPS),
    work: float = MAX_WORK,
    of: int = 48,
) -> list[Problem]:
    """`count` problems that cover as many pairs of features as possible (features.py), each the best `of` so
    many. `work`: the most multiply-adds of one."""
    return [*_drawn(count, seed, ops, work, of)]


@cache
def _drawn(count: int, seed: int, ops: tuple[str, ...], work: float, of: int) -> tuple[Problem, ...]:
    chosen = features.choose(_candidates(of * (count + 4), seed, ops, work), of)
    return tuple(replace(problem, index=i) for i, problem in zip(range(count), chosen, strict=False))


def _candidates(
    count: int, seed: int, ops: tuple[str, ...] = ("prefill", *OPS), work: float = MAX_WORK
) -> list[Problem]:
    """`count` problems in which every axis takes each of its values about equally often."""
    rng = random.Random(seed)

    def deck(values: tuple[Any, ...], rng: random.Random = rng) -> list[Any]:
        cards = [values[i % len(values)] for i in range(count)]
        rng.shuffle(cards)
        return cards

    of_each = deck(ops)
    dims, groups = deck(HEAD_DIMS), deck(GROUPS)
    layouts = list(zip(deck(LAYOUTS), deck(LAYOUTS), deck(LAYOUTS), strict=True))
    masks, mask_layouts, causalities = (
        deck(MASKS),
        deck(("contiguous", "offset", "padded_rows")),
        deck(CAUSALITIES),
    )
    broadcasts = deck(tuple(tuple(bool(bits >> d & 1) for d in range(4)) for bits in range(16)))
    block_sizes = deck(BLOCK_SIZES)
    # Each has its own generator, so that a new option does not change the other fields.
    options = {name: deck(each.values, random.Random(f"{name} {seed}")) for name, each in OPTIONS.items()}
    wide = deck((*WIDE_HEAD_DIMS, *(None,) * len(WIDE_HEAD_DIMS)))
    forms = random.Random(f"masks {seed}")
    patterns = [forms.choice(MASK_PATTERNS) for _ in range(count)]
    maps = [forms.random() < 0.5 for _ in range(count)]
    few = random.Random(f"few rows {seed}")
    chunks, far = random.Random(f"chunks {seed}"), random.Random(f"far {seed}")
    lengths, many = random.Random(f"lengths {seed}"), random.Random(f"many rows {seed}")

    all_dims = [*((d, dv, False) for d, dv in HEAD_DIMS), *WIDE_HEAD_DIMS]
    problems = []
    for i in range(count):
        op, (q_heads, kv_heads) = of_each[i], groups[i]
        is_decode = op in DECODES
        narrow = not (wide[i] and (is_decode or wide[i] in WIDE_PREFILLS))
        head_dim, value_dim, value_in_key = (*dims[i], False) if narrow else wide[i]
        batch = rng.choice((1, 2, 3))
        if not is_decode:
            q_len, kv_len = (1 if rng.random() < 0.1 else _length(rng)), _length(rng)
        else:
            q_len = rng.choice((1, rng.randint(1, 8), rng.randint(1, 16)))
            if few.random() < 0.4:  # one or two packed rows
                q_heads, kv_heads, q_len = few.choice(FEW_ROWS)
            elif many.random() < 0.1:  # that run as a prefill
                q_len = many.randint(17, 64)
            kv_len = rng.randint(200, MAX_CACHE) if rng.random() < 0.3 else _length(rng)
        batch, q_len, kv_len = _fit(batch, q_len, kv_len, q_heads * (head_dim + value_dim), work)
        if op.startswith("paged"):
            kv_len = -(-kv_len // block_sizes[i]) * block_sizes[i]
        which_dims = all_dims.index((head_dim, value_dim, value_in_key))
        rows = q_heads // kv_heads * q_len
        takes_formats = op not in ("prefill", "varlen_prefill")
        formats = kv_formats(head_dim, value_dim) if takes_formats else ("float",)
        if is_decode and rows <= 2:
            formats = ("float", *formats)
        dtype, kv_format = features.types_for(rng, seed, op, which_dims, rows, formats)
        q_lens = _q_lens(rng, batch, q_len) if op in PACKED else None
        causality = "none" if is_decode else causalities[i]
        if op == "paged_prefill" and causality != "none":
            causality = "bottom_right"  # the only one that it has
        offsets = {"top_left": 0, "offset": far.choice((rng.randint(-3, kv_len), kv_len + 500, FAR))}
        problems.append(
            Problem(
                index=i,
                op=op,
                dtype=DTYPES[dtype],
                batch=batch,
                q_heads=q_heads,
                kv_heads=kv_heads,
                q_len=max(q_lens) if q_lens else q_len,
                kv_len=kv_len,
                head_dim=head_dim,
                value_dim=value_dim,
                value_in_key=value_in_key,
                layouts=layouts[i],
                causality=causality,
                q_offset=offsets.get(causality),
                mask=None if q_lens else masks[i],
                mask_broadcast=broadcasts[i],
                mask_layout=mask_layouts[i],
                mask_pattern=patterns[i] if op == "prefill" and masks[i] is not None else "entries",
                mask_map=op == "prefill" and masks[i] is not None and maps[i],
                seq_lens=_seq_lens(rng, op, batch, kv_len),
                block_size=block_sizes[i] if op.startswith("paged") else 0,
                head_major_pool=rng.random() < 0.5,
                q_lens=q_lens,
                spare_rows=rng.choice((0, 0, 3, 70)) if q_lens else 0,
                kv_format=kv_format,
                **{name: cards[i] for name, cards in options.items() if op in OPTIONS[name].ops},
            )
        )
        if masks[i] is not None:
            problems[-1] = replace(problems[-1], block_mask=None)
        if op == "prefill" and chunks.random() < 0.4:
            problems[-1] = _chunk(problems[-1], chunks, work)
        if problems[-1].q_offset is None and op == "prefill" and lengths.random() < 0.3:
            filled = _seq_lens(lengths, "decode", problems[-1].batch, problems[-1].kv_len)
            problems[-1] = replace(problems[-1], seq_lens=filled)
        if (problems[-1].q_offset or 0) > problems[-1].kv_len and far.random() < 0.75:  # see features()
            problems[-1] = replace(problems[-1], window_left=-1, window_right=-1)
    return problems


def _chunk(problem: Problem, rng: random.Random, work: float) -> Problem:
    """The same of few rows over keys enough to be cut into parts."""
    batch, kv_len = rng.choice((1, 1, 2)), rng.randint(1000, MAX_CACHE)
    of_row = batch * problem.q_heads * (problem.head_dim + problem.value_dim) * kv_len
    q_len = min(rng.randint(1, 40), max(int(work / of_row), 1))
    offset = rng.randint(kv_len // 2, kv_len) if problem.causality == "offset" else problem.q_offset
    window = problem.window_left if rng.random() < 0.3 else rng.choice((-1, 10**9))
    return replace(problem, batch=batch, q_len=q_len, kv_len=kv_len, q_offset=offset, window_left=window)


def kv_formats(head_dim: int, value_dim: int) -> tuple[str, ...]:
    """Those that a cache can have, as often as they should come. int4 comes the more often where it can be,
    since few head dims can."""
    others = (name for name in QUANTISED if name not in GROUPED)
    if (head_dim | value_dim) % 32:
        return ("float", "float", *others)
    return (*GROUPED, "float", *GROUPED, *others)


def _length(rng: random.Random) -> int:
    """Half of the lengths are short: that is where tiles are ragged."""
    return rng.randint(1, 40) if rng.random() < 0.5 else rng.randint(1, MAX_LENGTH)


def _fit(batch: int, q_len: int, kv_len: int, work_per_pair: int, work: float) -> tuple[int, int, int]:
    while batch * q_len * kv_len * work_per_pair > work:
        if batch > 1:
            batch -= 1
        elif q_len >= kv_len:
            q_len = q_len * 2 // 3
        else:
            kv_len = kv_len * 2 // 3
    return batch, q_len, kv_len


def _q_lens(rng: random.Random, batch: int, most: int) -> tuple[int, ...]:
    """Prompts, single tokens, and sequences that have no rows this time; not all of them."""
    rows = [rng.choice((0, 1, rng.randint(1, most), most)) for _ in range(batch)]
    return tuple(rows) if any(rows) else (1, *rows[1:])


def decode_kernel(p: Problem, value_in_key: bool | None = None) -> str:
    """The kernel that a decode launches. `value_in_key`: whether the values of the call still are."""
    dim = max(p.head_dim, p.value_dim)
    reads_once = p.value_in_key if value_in_key is None else value_in_key
    few_rows = p.q_heads // p.kv_heads * p.q_len <= 2
    if few_rows and dim <= 256 and not reads_once:
        return "fattn_decode_vector"
    return "fattn_decode_wide" if reads_once or dim > 128 else "fattn_decode"


def _seq_lens(rng: random.Random, op: str, batch: int, capacity: int) -> tuple[int, ...] | None:
    if op == "prefill" or (op == "decode" and rng.random() < 0.2):
        return None
    lengths = [
        rng.choice((0, capacity, rng.randint(0, capacity), rng.randint(1, capacity))) for _ in range(batch)
    ]
    return tuple(lengths)
