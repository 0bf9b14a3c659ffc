"""A model of the time of a call on an Apple GPU. It can be wrong: `python -m bench model` prints its errors.

    seconds = the longer of compute and memory + what of the shorter does not overlap with it + launch
    compute = steps x cycles of a step / (4 schedulers x clock), on the core with the most threadgroups
    memory  = bytes that must move / achieved bandwidth

A step is an iteration of the kernel's hottest loop. Its cycles are simulated for the threads that are
resident on a core of M1 or M2 (bench/results/agx.json); compute takes no less than the published rate of
products allows. Steps follow from the tile, bytes and launches from the plan.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch_fattn.inspection.chips import PRODUCT_CYCLES, PRODUCT_FLOPS, Chip

from ..backends import agx
from ..cases.calls import Call
from ..peers import mlx_metal

Row = Mapping[str, Any]

SCHEDULERS, LANES = 4, 32
LATER = 9  # the first family with dynamic registers, bfloat instructions, and unpublished cycles


@dataclass(frozen=True)
class Figures:
    """What is fitted to published times of the peers' kernels, and the bandwidth, which is not."""

    bandwidth: float  # share of the specified memory bandwidth that programs which only read achieve
    overlap: float  # share of the shorter of compute and memory that the longer hides
    launch_us: float  # of a dispatch that waits for another, among queued calls
    wait_us: float  # of a call that the host waits for
    rest_7: float  # cycles of M1 and M2 besides those of products, over the simulated ones
    clock_9: float  # GHz at which a scheduler of family 9 (M3, M4) would take the cycles of M1
    clock_10: float  # and of family 10 (M5)

    def clock(self, chip: Chip) -> float | None:
        return {9: self.clock_9, 10: self.clock_10}.get(chip.family, chip.gigahertz)


@dataclass(frozen=True)
class Demand:
    """The work of a call."""

    cycles: float  # of one scheduler, for all steps
    threadgroups: int
    bytes: float
    dispatches: int
    products: int = 0
    row: Row = field(default_factory=dict, compare=False)  # of the kernel's costs
    exact: bool = True  # it is of this very pipeline


def parts(demand: Demand, chip: Chip, figures: Figures) -> tuple[float, float]:
    """Seconds of compute and of memory."""
    clock = figures.clock(chip)
    if clock is None or chip.ram_gb_s is None:
        raise LookupError(f"no clock or bandwidth of {chip.name} is published; choose another chip")
    fullest = math.ceil(demand.threadgroups / chip.cores) / demand.threadgroups
    cycles = demand.cycles
    if chip.family < LATER:  # the cycles of products are published
        products = PRODUCT_CYCLES * demand.products
        cycles = products + figures.rest_7 * (cycles - products)
    compute = cycles * fullest / (SCHEDULERS * clock * 1e9)
    if chip.products is not None:
        compute = max(compute, demand.products * PRODUCT_FLOPS / chip.products)
    return compute, demand.bytes / (figures.bandwidth * chip.ram_gb_s * 1e9)


def seconds(demand: Demand, chip: Chip, figures: Figures, timing: str = "queued") -> float:
    compute, memory = parts(demand, chip, figures)
    hidden = figures.overlap * min(compute, memory)
    launch = {"queued": demand.dispatches * figures.launch_us, "waited": figures.wait_us, "difference": 0.0}
    return compute + memory - hidden + launch[timing] / 1e6


# ---- the demand of a call


def tile_products(call: Call, rows: int, keys: int) -> int:
    """8x8x8 products of a prefill whose threadgroups take `rows` rows, and all `keys` of a step if a row of
    theirs sees one."""
    packed = call.group_size if call.q_len < rows else 1  # rows of several heads in a threadgroup
    pairs = 0
    for first in range(0, call.q_len * packed, rows):
        last = min(first + rows, call.q_len * packed) - 1
        begin, end = call.visible_keys(first // packed)[0], call.visible_keys(last // packed)[1]
        pairs += rows * keys * max(0, math.ceil(end / keys) - begin // keys)
    return call.batch * call.q_heads // packed * pairs // 64 * _blocks_of_columns(call)


def packed_products(call: Call, fragments: int, keys: int) -> int:
    """Those of a decode whose threadgroups take the rows of a key-value head, in fragments of eight."""
    rows = math.ceil(call.group_size * call.q_len / (8 * fragments)) * fragments
    blocks = sum(math.ceil(length / keys) for length in _lengths(call)) * keys // 8
    return call.kv_heads * rows * blocks * _blocks_of_columns(call)


def _blocks_of_columns(call: Call) -> int:
    return math.ceil(call.head_dim / 8) + math.ceil(call.value_dim / 8)


def _lengths(call: Call) -> Sequence[int]:
    begin, end = call.visible_keys(0)[0], call.visible_keys(call.q_len - 1)[1]
    return call.lengths or [end - begin] * call.batch


def _cycles(row: Row, products: float, loaded_bytes: float, threadgroups: int) -> float:
    """Steps are counted by products, or by the bytes that lanes load where there are none. What is outside
    the loop runs once in every simdgroup, a cycle an instruction."""
    steps = products / row["products"] if row["products"] else loaded_bytes / (LANES * row["loaded"])
    outside = row["instructions"] * (1 - row["loop_bytes"] / row["code_bytes"])
    once = threadgroups * row["threads"] // LANES * outside
    likely: float = row["cycles"][1]
    return steps * likely + once


def peers_demand(impl: str, call: Call, chip: Chip, rows: Sequence[Row], reads_once: bool = True) -> Demand:
    """`reads_once`: MLX may read keys once for several heads."""
    # Later chips convert bfloat in one instruction, as all do half.
    dtype = "float16" if chip.family >= LATER and call.dtype == "bfloat16" else call.dtype
    row = _peers_row(impl, replace(call, dtype=dtype), rows, reads_once)
    if not call.is_decode:
        tile = re.match(r"(\d+) rows, (\d+) keys", row["note"])
        assert tile is not None, row["note"]
        tile_rows, tile_keys = int(tile[1]), int(tile[2])
        threadgroups = call.batch * call.q_heads * -(-call.q_len // tile_rows)
        products = tile_products(call, tile_rows, tile_keys)
        return Demand(_cycles(row, products, 0, threadgroups), threadgroups, call.least_bytes, 1, products)
    rows_of_head = call.group_size * call.q_len
    shared, threadgroups = 1, call.batch * call.q_heads * call.q_len * 32  # of llama.cpp
    splits, dispatches = 32, 2
    if impl == mlx_metal.IMPL:
        # The sources of published.csv name two passes on M5 Pro too, as on a Max.
        splits = mlx_metal.splits(call, "d" if chip.name.endswith("Ultra") else "s")
        threadgroups, dispatches = call.batch * call.kv_heads * splits, 2 if splits > 1 else 1
        shared = (mlx_metal.heads_per_read(call) if reads_once else None) or 1
    loaded = (call.least_bytes - call.row_bytes) * rows_of_head / shared
    partials = call.row_bytes // 2 * splits if dispatches > 1 else 0  # written and read, without sums
    return Demand(
        _cycles(row, 0, loaded, threadgroups), threadgroups, call.least_bytes + 2 * partials, dispatches
    )


def _peers_row(impl: str, call: Call, rows: Sequence[Row], reads_once: bool) -> Row:
    length = 8192 if reads_once or call.group_size < 8 else 4096
    q_len, kv_len = (call.q_len, length) if call.is_decode else (1024, 1024)
    sample = replace(call, batch=1, q_heads=call.group_size, kv_heads=1, causal=False)
    sample = replace(sample, q_len=q_len, kv_len=kv_len)
    return _find(rows, impl, agx.name_of(sample))


def _find(rows: Sequence[Row], impl: str, name: str) -> Row:
    for row in rows:
        if row["impl"] == impl and row["call"] == name and "cycles" in row:
            return row
    raise LookupError(
        f"bench/results/agx.json has no row '{impl} {name}'; install the peers and run `python -m bench agx "
        "--update`"
    )


def our_demand(call: Call, chip: Chip, rows: Sequence[Row], compiles: bool = False) -> Demand:
    """By the tiles of M1 and M2, also for later chips, of whose tiles nothing is known. A pipeline without a
    row is compiled if `compiles`, and the compiler is there."""
    if call.mask:
        raise LookupError("the keys that a mask hides are not modelled")
    plan = agx.plan_of(call, min(chip.family, LATER - 1), chip.cores)
    entry = agx.entry_of(call, plan)
    row = next((row for row in rows if row["digest"] == entry.digest), None)
    if row is None and compiles:
        row = _compiled(entry)
    exact = row is not None and "cycles" in row
    if row is None or "cycles" not in row:
        row = _alike(entry, rows)
    attend = agx.attend_of(plan)
    fragments, keys, simdgroups = (int(attend["macros"][name]) for name in agx.MACROS)
    if call.is_decode:
        products = packed_products(call, fragments, keys)
    else:
        rows_of_tile = 8 * fragments * int(attend["macros"].get("FATTN_ROW_GROUPS", simdgroups))
        products = tile_products(call, rows_of_tile, keys)
    threadgroups = math.prod(attend["grid"])
    return Demand(
        _cycles(row, products, call.least_bytes - call.row_bytes, threadgroups),
        threadgroups,
        call.least_bytes + 2 * plan["scratch_bytes"],
        len(plan["passes"]),
        products if row["products"] else 0,
        row,
        exact,
    )


_COMPILED: dict[str, Row] = {}


def _compiled(entry: agx.Entry) -> Row | None:
    if entry.digest not in _COMPILED:
        _COMPILED.update((entry.digest, row) for row in agx.measure([entry], []))
    return _COMPILED.get(entry.digest)


def _alike(entry: agx.Entry, rows: Sequence[Row]) -> Row:
    """A recorded pipeline of the same kernel, dtype, head size and tile, with other options."""
    for row in rows:
        same = all(row[name] == getattr(entry, name) for name in ("impl", "op", "dtype", "head_dim", "shape"))
        if same and "cycles" in row:
            return row
    raise LookupError(f"bench/results/agx.json has no row like '{entry.call}'")


# ---- the fit

_GRIDS: dict[str, list[float]] = {
    "overlap": [share / 20 for share in range(21)],
    "launch_us": [step / 4 for step in range(81)],
    "wait_us": [10.0 * step for step in range(101)],
    "rest_7": [share / 50 for share in range(101)],
    "clock_9": [step / 50 for step in range(25, 251)],
    "clock_10": [step / 50 for step in range(25, 251)],
}
_STARTS = [
    {"overlap": overlap, "launch_us": launch, "clock_10": clock}
    for overlap, launch, clock in itertools.product((0.5, 1.0), (1.0, 4.0, 8.0), (2.0, 4.0))
]


@dataclass(frozen=True)
class Check:
    """A published time, and what predicts it."""

    name: str
    kind: str
    chip: Chip
    seconds: float
    timing: str
    held_out: bool
    demand: Demand

    def error(self, figures: Figures) -> float:
        """The predicted time over the published one, less 1."""
        return seconds(self.demand, self.chip, figures, self.timing) / self.seconds - 1


def fit(checks: Sequence[Check], bandwidth: float) -> Figures:
    """The figures with the least sum of log(1 + (error / 15 %)^2), so that no row of another kind pulls all
    others; found one by one until none changes, from several starts. Held-out rows take no part."""
    fitted = [check for check in checks if not check.held_out]

    def loss(figures: Figures) -> float:
        return sum(math.log1p((math.log1p(check.error(figures)) / 0.15) ** 2) for check in fitted)

    def descend(best: Figures) -> Figures:
        while True:
            before = best
            for name, values in _GRIDS.items():
                tried = [best, *(replace(best, **{name: value}) for value in values)]
                best = min(tried, key=loss)
            if best == before:
                return best

    first = Figures(bandwidth, overlap=1, launch_us=4, wait_us=200, rest_7=1, clock_9=1.4, clock_10=2)
    return min((descend(replace(first, **start)) for start in _STARTS), key=loss)
