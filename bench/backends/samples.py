"""Small samples of a call, which softmetal can run, and the counts of the whole call from theirs.

A prefill's counts are exactly a quadratic polynomial of its length, among lengths with the same remainder in
the last tile. It is counted at four such lengths: three determine the polynomial, the fourth must lie on it.
Lengths at which other kernels run are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from ..cases.calls import Call
from .counting import ROLES, Counts, Dispatch, count_on_tensors

SAMPLES = 4
PERIOD = 128  # a multiple of all tiles, ours and the peers'
# Products of one counted decode. softmetal does a few hundred thousand a second while it counts bytes.
WORK_LIMIT = 150_000
SHORTEST = 512
PEERS_LONGEST = 8192  # keys of a decode; for more, the peers' launch rules choose the same kernels


def count_prefill(call: Call, count: Callable[[Call], Counts], has_shared_passes: bool = False) -> Counts:
    """Returns the counts of the whole call.

    Heads and sequences are independent: one key-value head with its query heads is counted for all. If the
    heads of a sequence share a pass, such as one over its mask, two heads are counted as well. Query heads
    that share a latent vector are independent too: with so many rows, no tile has those of two heads.
    """
    kv_heads = call.q_heads if call.latent_dim and call.q_len >= PERIOD else call.kv_heads
    group_size = call.q_heads // kv_heads
    shortest = PERIOD + call.q_len % PERIOD
    shortest += -(-max(0, call.window_left) // PERIOD) * PERIOD  # shorter ones do not see the whole window
    candidates = [shortest + i * PERIOD for i in range(2 * SAMPLES)]
    if call.q_len <= candidates[SAMPLES - 1]:
        candidates = [call.q_len]
    longer = call.kv_len - call.q_len

    def counted(rows: int, heads: int) -> Counts:
        sample = replace(call, batch=1, q_heads=heads * group_size, kv_heads=heads)
        return count(replace(sample, q_len=rows, kv_len=rows + longer))

    sequences: list[list[Dispatch]] = []
    lengths: list[int] = []
    for rows in candidates:
        one = counted(rows, 1).dispatches
        # The planner may split the keys of a single head to fill the GPU, but not those of many heads.
        if sequences and [each.kernel for each in one] != [each.kernel for each in sequences[0]]:
            continue
        two = counted(rows, 2).dispatches if has_shared_passes and kv_heads > 1 else None
        sequences.append(_for_all_heads(one, two, kv_heads))
        lengths.append(rows)
        if len(lengths) == SAMPLES:
            break
    if len(lengths) < min(SAMPLES, len(candidates)):
        raise RuntimeError(f"{call}: among {candidates} rows, only {lengths} take the same kernels")
    return _scaled(call, sequences, lengths)


def count_prefill_on_tensors(call: Call) -> Counts:
    """The same of our kernel on tensor operations, with scores in registers. Its exponentials are left out:
    how often the maximum of a row grows depends on the data."""

    def count(one: Call) -> Counts:
        counts = count_on_tensors(one, "registers")
        return replace(counts, dispatches=tuple(replace(each, exps=0) for each in counts.dispatches))

    return count_prefill(call, count)


def _for_all_heads(one: Sequence[Dispatch], two: Sequence[Dispatch] | None, heads: int) -> list[Dispatch]:
    if two is None:
        return [replace(each, **_combined(lambda counts: heads * counts[0], [each])) for each in one]
    return [
        replace(pair[0], **_combined(lambda counts: counts[0] + (heads - 1) * (counts[1] - counts[0]), pair))
        for pair in zip(one, two, strict=True)
    ]


def _combined(combine: Callable[[list[int]], int], same: Sequence[Dispatch]) -> dict[str, Any]:
    """Combines each count of the dispatches into one."""
    fields: dict[str, Any] = {}
    for name, value in vars(same[0]).items():
        if isinstance(value, int):
            fields[name] = combine([getattr(one, name) for one in same])
        elif isinstance(value, Mapping):
            fields[name] = {role: combine([getattr(one, name)[role] for one in same]) for role in ROLES}
    return fields


def _scaled(call: Call, sequences: Sequence[Sequence[Dispatch]], lengths: Sequence[int]) -> Counts:
    """Extrapolates the counts of sequences of these lengths to those of the whole call."""

    def whole(values: Sequence[int]) -> int:
        if polynomial(lengths[:3], values[:3], lengths[-1]) != values[-1]:
            raise RuntimeError(
                f"{call}: {list(values)} at {list(lengths)} rows are not values of a quadratic polynomial"
            )
        return int(call.batch * polynomial(lengths[:3], values[:3], call.q_len))

    dispatches = []
    for same in zip(*sequences, strict=True):
        if len({one.threads for one in same}) != 1:
            raise RuntimeError(f"{call}: threadgroups are larger at {lengths[0]} rows than at {lengths[-1]}")
        grid = tuple(
            int(polynomial(lengths[:3], extents[:3], call.q_len))
            for extents in zip(*(one.grid for one in same), strict=True)
        )
        dispatches.append(replace(same[0], grid=grid, **_combined(whole, same)))
    return Counts(call, tuple(dispatches))


def polynomial(xs: Sequence[int], ys: Sequence[float], x: int) -> Fraction:
    """Evaluates the polynomial through the points at x."""
    total = Fraction(0)
    for i, y in enumerate(ys):
        term = Fraction(y)
        for j, other in enumerate(xs):
            if j != i:
                term *= Fraction(x - other, xs[i] - other)
        total += term
    return total


def our_decode(call: Call) -> Call:
    """Returns the decode with fewer keys, as long as the plan is the same.

    It keeps its heads and sequences, because they decide how many splits its keys are divided into.
    """
    while call.least_products > WORK_LIMIT and call.kv_len // 2 >= SHORTEST:
        smaller = replace(call, kv_len=call.kv_len // 2)
        if _grids(smaller) != _grids(call):
            break
        call = smaller
    return call


def peers_decode(call: Call) -> Call:
    """Returns the sample for the peers, whose launch rules do not depend on the number of key-value heads."""
    return replace(call, batch=1, q_heads=call.group_size, kv_heads=1, kv_len=min(call.kv_len, PEERS_LONGEST))


def _grids(call: Call) -> list[Any]:
    from ..peers.fattn import plan_of

    return [step["grid"] for step in plan_of(call)["passes"]]
