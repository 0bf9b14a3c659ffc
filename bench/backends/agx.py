"""Costs of kernels on M1 and M2 without a GPU: ours and the peers', compiled by Mesa (softmetal/docs/agx.md).

A digest ties a row to the kernel's text, macros and constants, and to the compiler. If the digest of today's
kernel differs, the row is stale.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from ..cases.calls import Call
from ..peers import fattn, llama_source
from ..peers.launch import OURS, Pass
from ..peers.registry import PEERS, launch
from . import agx_step

if TYPE_CHECKING:
    from softmetal.testing import agx as compiler

Row = dict[str, Any]

FAMILY, CORES = 7, 8  # an M1
FAST_MATH = (llama_source.IMPL,)  # the others are compiled with -fno-fast-math or MTLMathModeSafe
_DTYPES = ("float16", "bfloat16", "float32")
_LENGTHS = {
    "prefill": (1024, 1024),
    "prefill_backward": (1024, 1024),
    "decode": (1, 8192),
    "paged_decode": (1, 8192),
}  # rows and keys
_BACKWARDS = ("backward_query", "backward_key")
# The macros of a tile, and their units: row fragments, keys of a step and simdgroups; of a backward the owned
# fragments of eight, the rows or keys of a step, groups of simdgroups, and simdgroups.
_ROWS, _KEYS, _GROUPS = "FATTN_ROW_FRAGMENTS", "FATTN_TILE_KEYS", "FATTN_ROW_GROUPS"
_SIMDGROUPS = "FATTN_SIMDGROUPS"
_TILE = {"r": (_ROWS, 1), "k": (_KEYS, 1), "s": (_SIMDGROUPS, 1)}
_BACKWARD_TILES = {
    "backward_query": {"o": (_ROWS, 1), "w": (_KEYS, 1), "g": (_GROUPS, 1), "s": (_SIMDGROUPS, 1)},
    "backward_key": {"o": (_KEYS, 8), "w": ("FATTN_STEP_ROWS", 1), "g": (_GROUPS, 1), "s": (_SIMDGROUPS, 1)},
}
# llama.cpp's branches for quantised caches are dead in these kernels, but copy matrices between address
# spaces, which cannot be translated.
_WITHOUT_DEAD_BRANCHES = (
    (re.compile(r"\bif \((is_same<[^()]*)\)"), r"if constexpr (\1)"),
    (re.compile(r"reg = \(type4x4\)\(\*src\);"), "reg = type4x4(0.0f);"),
)


@dataclass(frozen=True)
class Entry:
    """A pipeline to compile, and its place in the table."""

    impl: str
    call: str
    shape: str  # of our tile
    op: str
    dtype: str
    head_dim: int
    kernel: compiler.Kernel
    part: str  # plain or option
    version: str = ""  # of a peer
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, str]:
        """Rows with the same key are the same pipeline at different times."""
        return self.impl, self.call, self.shape

    @property
    def digest(self) -> str:
        from softmetal.testing.agx import version

        text = repr((version(), self.version, replace(self.kernel, include=())))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


# ---- the entries


def entries() -> Iterator[Entry]:
    """Our pipelines, and the kernels of the peers that are installed."""
    for call, options in _our_calls():
        yield entry_of(call, plan_of(call, **options), options)
    yield from _our_backwards()
    yield from _our_others()
    for peer in PEERS:
        if peer.version() != "not installed":
            yield from _theirs(peer, _plain_calls())


def _call(op: str, dtype: str, head_dim: int, group: int = 4, **changes: Any) -> Call:
    rows, keys = _LENGTHS[op]
    return replace(Call(op, 32, 32 // group, head_dim, rows, keys, dtype=dtype), **changes)


def _plain_calls() -> Iterator[Call]:
    """Calls that the peers have kernels for as well."""
    for dtype in _DTYPES:
        for dim in (40, 64, 72, 80, 96, 112, 128, 256):
            yield _call("prefill", dtype, dim)
    for dtype in _DTYPES:
        for dim in (64, 96, 128, 256):
            yield _call("decode", dtype, dim)
    for group in (1, 8, 16):
        yield _call("decode", "float16", 128, group)


def _our_calls() -> Iterator[tuple[Call, dict[str, Any]]]:
    for call in _plain_calls():
        yield call, {}
    for dtype in _DTYPES:
        yield _call("prefill", dtype, 512), {}
        yield _call("decode", dtype, 512), {}
    yield _call("decode", "float16", 192), {}
    for dtype in _DTYPES[:2]:
        for dim in (64, 128):
            for changes in ({"causal": True}, {"causal": True, "window_left": 255}, {"sinks": True}):
                yield _call("prefill", dtype, dim, **changes), {}
            yield _call("prefill", dtype, dim, mask="prefix"), {}
            yield _call("prefill", dtype, dim), {"softcap": 50.0}
    # By lanes: one row, and two. The plain calls have float16 with one row of 128.
    for dtype, dim, group in itertools.product(_DTYPES, (64, 96, 128, 256), (1, 2)):
        if (dtype, dim, group) != ("float16", 128, 1):
            yield _call("decode", dtype, dim, group), {}
    for dim, group in itertools.product((64, 96, 128, 256), (1, 2)):
        for kv_format in ("int8", "int4", "fp8_e4m3"):
            yield _call("decode", "float16", dim, group, kv_format=kv_format), {}
    for dim in (64, 96, 128):
        for kv_format in ("int8", "int4", "fp8_e4m3"):
            yield _call("decode", "float16", dim, kv_format=kv_format), {}
    # Short caches, of which a threadgroup has all chunks: it runs 512 threads.
    for dim, group in ((64, 4), (128, 4), (128, 1), (256, 1)):
        yield _call("decode", "float16", dim, q_heads=8 * group, kv_heads=8, kv_len=512), {}
    yield _call("paged_decode", "float16", 96, block_size=16, window_left=1023), {}
    for dim in (64, 128):
        yield _call("paged_decode", "float16", dim, block_size=16), {}
        yield _call("decode", "float16", dim, window_left=1023), {}
        yield _call("decode", "float16", dim, sinks=True), {}
        yield _call("decode", "float16", dim), {"softcap": 50.0}


def name_of(call: Call, options: Mapping[str, Any] | None = None) -> str:
    words = [call.op, call.dtype, f"D{call.head_dim}"]
    words += [f"group {call.group_size}"] if call.is_decode else []
    words += [f"rows {call.q_len}"] if call.is_decode and call.q_len > 1 else []
    words += [f"N={call.kv_len}"] if call.kv_len != _LENGTHS[call.op][1] else []
    words += ["causal"] if call.causal else []
    words += [f"window {call.window_left + 1}"] if call.window_left >= 0 else []
    words += [word for word in (call.mask and "mask", call.sinks and "sinks", call.kv_format) if word]
    return " ".join([*words, *(options or {})])


def plan_of(call: Call, family: int = FAMILY, cores: int = CORES, **options: Any) -> dict[str, Any]:
    return fattn.plan_of(call, family=family, cores=cores, **options)


def attend_of(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The pass that reads the keys, as one dispatch: the kernel is the same if it is split into several."""
    found = next(one for one in plan["passes"] if _ROWS in one["macros"])
    return {name: value for name, value in found.items() if name != "slice"}


def entry_of(call: Call, plan: Mapping[str, Any], options: Mapping[str, Any] | None = None) -> Entry:
    attend = attend_of(plan)
    plain = not options and call == _call(call.op, call.dtype, call.head_dim, call.group_size)
    by_hand = attend.get("registers", {}).get("total")
    return _ours(call, plan, attend, name_of(call, options), call.op, _TILE, plain, by_hand)


def _ours(
    call: Call,
    plan: Mapping[str, Any],
    one: dict[str, Any],
    name: str,
    op: str,
    tile: Mapping[str, tuple[str, int]] | None = None,
    plain: bool = True,
    by_hand: int | None = None,
) -> Entry:
    """The entry of one pass of a plan, and the macros of its tile if it has one."""
    macros = one["macros"]
    shape = " ".join(f"{key}{int(macros[macro]) // unit}" for key, (macro, unit) in (tile or {}).items())
    kernel = _kernel(fattn.pass_of(one, call.dtype), fast_math=False)
    facts = {"tuning": plan["tuning"], "by_hand": by_hand}
    part = "plain" if plain else "option"
    return Entry(OURS, name, shape, op, call.dtype, call.head_dim, kernel, part, facts=facts)


def _our_backwards() -> Iterator[Entry]:
    for dtype, dim in itertools.product(_DTYPES, (64, 80, 96, 128, 256)):
        yield from _backward(_call("prefill_backward", dtype, dim), {})
    yield from _backward(_call("prefill_backward", "float32", 32), {})
    for dtype, dim in itertools.product(_DTYPES[:2], (64, 128)):
        plain = _call("prefill_backward", dtype, dim)
        for changes in ({"causal": True}, {"causal": True, "window_left": 255}, {"mask": "prefix"}):
            yield from _backward(replace(plain, **changes), {})
        yield from _backward(plain, {"softcap": 50.0})
        slopes = torch.empty(plain.q_heads, device="meta")
        yield from _backward(replace(plain, sinks=True), {"alibi_slopes": slopes})


def _backward(call: Call, options: dict[str, Any]) -> Iterator[Entry]:
    """The passes of a backward."""
    plan = plan_of(call, **options)
    is_plain = not options and call == _call(call.op, call.dtype, call.head_dim)
    for attend in plan["passes"]:
        attend = {name: value for name, value in attend.items() if name != "slice"}
        op = attend["kernel"].removeprefix("fattn_")
        if op == "mask_map":
            continue
        name = name_of(call, options).replace(call.op, op, 1)
        if op not in _BACKWARDS:
            name += " of sinks" if "sinks" in attend["bindings"] else " of slopes"
        yield _ours(call, plan, attend, name, op, _BACKWARD_TILES.get(op), is_plain)


def _our_others() -> Iterator[Entry]:
    """The passes of rotary_write, and of linear attention with the gates and norms of a layer."""
    for dim, norms in itertools.product((64, 128, 256), (False, True)):
        yield from _passes(Call("rotary_write", 32, 8, dim, 16, 16, block_size=16, norms=norms), {})
    for heads, by_channel in ((32, False), (16, True)):
        step = Call("gated_delta_step", heads, 16, 128, 16, 16, channel_decay=by_channel)
        yield from _passes(step, {})
        gates = {name: one for name, one in step.operands("meta").items() if name in ("A_log", "dt_bias")}
        yield from _passes(replace(step, op="gated_delta_rule"), {**gates, "use_qk_l2norm_in_kernel": True})


def _passes(call: Call, options: dict[str, Any]) -> Iterator[Entry]:
    plan = plan_of(call, **options)
    for one in plan["passes"]:
        op = one["kernel"].removeprefix("fattn_") if call.is_delta else call.op
        name = f"{op} {call.dtype} D{call.head_dim}"
        name += " norms" if call.norms else " decay per channel" if call.channel_decay else ""
        yield _ours(call, plan, one, name, op)


def _theirs(peer: ModuleType, calls: Iterable[Call]) -> Iterator[Entry]:
    for call in calls:
        try:
            chosen = launch(peer, call)
        except NotImplementedError:
            continue
        # The passes before it prepare the operands, and those after it merge.
        attend = max(chosen.passes, key=lambda one: len(one.arguments))
        kernel, facts = _kernel(attend, fast_math=peer.IMPL in FAST_MATH), {"note": chosen.note}
        identity = (peer.IMPL, name_of(call), "", call.op, call.dtype, call.head_dim)
        yield Entry(*identity, kernel, "plain", peer.version(), facts)


def _kernel(attend: Pass, fast_math: bool) -> compiler.Kernel:
    from softmetal.testing import agx as compiler

    pipeline, source = attend.pipeline, attend.pipeline.source
    for branch, replacement in _WITHOUT_DEAD_BRANCHES:
        source = branch.sub(replacement, source)
    return compiler.Kernel(
        source,
        pipeline.kernel,
        attend.threads,
        pipeline.macros,
        pipeline.constants,
        pipeline.threadgroup_memory,
        pipeline.include,
        fast_math,
        pipeline.name,
    )


# ---- the rows


def measure(chosen: Iterable[Entry], recorded: Iterable[Row], jobs: int = 2) -> list[Row]:
    """Returns the recorded row of an entry if its digest is right, and compiles the others. Without the
    compiler, a recorded row with another digest stands, marked as stale, and other entries have none."""
    from softmetal.testing import agx as compiler

    known = {(row["impl"], row["call"], row["shape"]): row for row in recorded}
    can_compile = compiler.is_built()

    def row_of(entry: Entry) -> Row | None:
        old = known.get(entry.key)
        if old is not None and old["digest"] == entry.digest:
            return {**old, **entry.facts}
        if can_compile:
            return _row(entry)
        return None if old is None else {**old, "stale": True}

    with ThreadPoolExecutor(jobs) as pool:
        return [row for row in pool.map(row_of, chosen) if row is not None]


def _row(entry: Entry) -> Row:
    from softmetal.testing import agx as compiler

    row: Row = {
        "impl": entry.impl,
        "call": entry.call,
        "shape": entry.shape,
        "part": entry.part,
        "op": entry.op,
        "dtype": entry.dtype,
        "head_dim": entry.head_dim,
        "digest": entry.digest,
        **({"version": entry.version} if entry.version else {}),
        **entry.facts,
    }
    try:
        costs = (
            _backward_costs(entry)
            if entry.op in _BACKWARDS
            else _costs(compiler.compile_kernel(entry.kernel))
        )
        return {**row, **costs}
    except compiler.AgxError as error:
        why = re.search(r"(?<=error: ).*|Assertion.*", str(error))
        return {**row, "refused": why[0] if why else str(error).partition(":")[0]}


def _costs(cost: compiler.Cost) -> Row:
    costs: Row = {
        "threads": cost.threadgroup_threads,
        "needed": cost.needed,
        "given": cost.given,
        "spills": cost.spills + cost.fills,
        "threadgroup_bytes": cost.threadgroup_bytes,
        "resident": cost.resident_threads,
        "resident_band": _resident_band(cost),
        "instructions": cost.instructions,
        "code_bytes": cost.code_bytes,
    }
    loop = cost.hot_loop
    if loop is None or loop.simulated is None:
        return costs
    band = loop.simulated
    if loop.steps:
        costs["steps"] = [
            [one.products, one.other_cycles, round(one.simulated.likely, 1)] for one in loop.steps
        ]
    return {
        **costs,
        "loop_needed": loop.needed,
        "loop_spills": loop.kinds.get("spill", 0) + loop.kinds.get("fill", 0),
        "loop_bytes": loop.code_bytes,
        "loaded": loop.loaded_bytes,
        "products": loop.kinds.get("product", 0),
        "issue": [loop.product_cycles, loop.other_cycles],
        "cycles": [band.best, band.likely, band.worst],
    }


def _backward_costs(entry: Entry) -> Row:
    walked, _ = _BACKWARD_TILES[entry.op]["w"]
    fragments = int(entry.kernel.macros[walked]) // 8
    cost, step = agx_step.costs(entry.kernel, fragments)
    return {**_costs(cost), **step}


def _resident_band(cost: compiler.Cost) -> list[int]:
    """Resident threads if another compiler gives one step of registers more, or fewer."""
    from softmetal.testing.agx import THREADS_BY_REGISTERS, resident_threads

    steps = sorted(set(THREADS_BY_REGISTERS.values()))
    place = steps.index(cost.threads_by_registers)
    near = (steps[min(max(one, 0), len(steps) - 1)] for one in (place - 1, place + 1))
    return [resident_threads(one, cost.threadgroup_threads, cost.threadgroup_bytes) for one in near]
