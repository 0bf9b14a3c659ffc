"""Writes the tables of bench/APPLE.md: lower bounds on the kernels' times, from counts and published figures.

python -m bench roofline
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch_fattn.inspection.chips import (
    CHIPS,
    EXPS,
    L2_BYTES,
    ON_CORE_BYTES,
    PRODUCT_FLOPS,
    Chip,
)

from ..backends import counting
from ..backends.samples import count_prefill, count_prefill_on_tensors, polynomial
from ..cases.arguments import Parser
from ..cases.calls import Call
from ..cases.shapes import SHAPES
from ..peers import fattn

PAGE = Path(__file__).parents[1] / "APPLE.md"
DECODE_LENGTHS = (2048, 4096)  # keys of the counted decodes; counts are linear in the keys

CALLS = (
    *(Call("decode", 32, 8, 128, 1, n, model="Llama-3-8B") for n in (4096, 32768, 131072)),
    *(Call("decode", 16, 8, 128, 1, n, model="Qwen3-0.6B") for n in (32768,)),
    *(
        Call("prefill", 32, 32, head_dim, n, n, causal=True)
        for head_dim, n in itertools.product((64, 128), (2048, 8192))
    ),
    Call("prefill", 20, 20, 64, 1500, 1500, model="Whisper-large encoder"),
    Call("prefill", 24, 24, 128, 4608, 4608, model="FLUX-like"),
)
# Drafts of a speculative decode, and multi-head latent attention with its projections absorbed: calls of the
# part on M5 alone.
TENSOR_CALLS = (
    *(Call("decode", 32, 8, 128, rows, 8192, model="drafts") for rows in (6, 16)),
    *(call for call in SHAPES["tensor"] if call.latent_dim and call.op != "paged_decode"),
)
M5_CORES = 10


@dataclass(frozen=True)
class Work:
    """The work of a call, without the partial results of a split, which depend on the GPU."""

    products: float  # of simdgroups
    tensor_products: float  # of tensor operations
    exps: float
    on_core: float  # bytes that the lanes load from and store to threadgroup and device memory
    device: float  # bytes that the lanes load from and store to device memory
    partial_reads: float  # reads of partial results per byte written


def _work_of(counts: counting.Counts) -> Work:
    device = counts.traffic(*counting.ROLES)
    written = sum(dispatch.written["partial"] for dispatch in counts.dispatches)
    read = sum(dispatch.read["partial"] for dispatch in counts.dispatches)
    return Work(
        products=counts.total("products") - counts.total("tensor_products"),
        tensor_products=counts.total("tensor_products"),
        exps=counts.total("exps"),
        on_core=device + counts.threadgroup_bytes,
        device=device,
        partial_reads=read / written if written else 0.0,
    )


def work(call: Call, on_tensors: bool = False) -> Work:
    """Counts small lengths and extrapolates: counts are polynomials of the length."""
    call = replace(call, model="")
    if not call.is_decode:
        return _work_of(count_prefill_on_tensors(call) if on_tensors else count_prefill(call, _count))
    points = [_work_of(_count(replace(call, kv_len=n), on_tensors)) for n in DECODE_LENGTHS]

    def at_length(name: str) -> float:
        return float(polynomial(DECODE_LENGTHS, [getattr(point, name) for point in points], call.kv_len))

    names = ("products", "tensor_products", "exps", "on_core", "device")
    return replace(points[-1], **{name: at_length(name) for name in names})


@functools.cache
def _count(call: Call, on_tensors: bool = False) -> counting.Counts:
    if on_tensors:
        return counting.count_on_tensors(call, "registers", M5_CORES)
    return counting.count_ours(call)


@functools.cache
def _takes_tensors(call: Call) -> bool:
    """Whether the plan for a GPU with tensor units, whose self-test passed, takes them."""
    plan = fattn.plan_of(call, family=10, cores=M5_CORES, tensor="registers")
    return any("tensor" in step["kernel"] for step in plan["passes"])


def _works(calls: Iterable[Call]) -> dict[tuple[Call, bool], Work]:
    """The work of each call, on GPUs without tensor operations and with them."""
    done = {}
    for call in calls:
        done[call, False] = done[call, True] = work(call)
        if _takes_tensors(call):
            done[call, True] = work(call, on_tensors=True)
    return done


def _partial_bytes(call: Call, done: Work, chip: Chip) -> float:
    """Returns the traffic of the partial results of the plan for this chip."""
    state = "registers" if done.tensor_products else "off"
    plan = fattn.plan_of(call, family=chip.family, cores=chip.cores, tensor=state)
    return float(plan["scratch_bytes"]) * (1 + done.partial_reads)


def limits(call: Call, done: Work, chip: Chip) -> dict[str, float]:
    """Returns the least seconds for each resource whose figure is published.

    Device memory is charged with the least bytes and the partial results. Repeated reads are assumed to hit
    the caches, which have a limit of their own.
    """
    partial = _partial_bytes(call, done, chip) if call.is_decode else 0.0
    amounts = {
        "memory": (call.least_bytes + partial, (chip.ram_gb_s or 0) * 1e9),
        "products": (done.products * PRODUCT_FLOPS, chip.products),
        "tensor units": (done.tensor_products * PRODUCT_FLOPS, chip.tensor_operations),
        "L2": (done.device, chip.per_cycle(L2_BYTES)),
        "on-core data": (done.on_core, chip.per_cycle(ON_CORE_BYTES)),
        "exp2": (done.exps, chip.per_cycle(EXPS)),
    }
    if not done.tensor_products:
        del amounts["tensor units"]
    return {name: amount / rate for name, (amount, rate) in amounts.items() if rate}


def describe(call: Call) -> str:
    return f"{call.op} {call}" + (f" ({call.model})" if call.model else "")


def _bound(call: Call, done: Work, chip: Chip) -> tuple[float, str] | None:
    """The longest of the limits and its name, or None if the figure of the binding one is not published."""
    seconds = limits(call, done, chip)
    bound_by = "memory" if call.is_decode else "tensor units" if done.tensor_products else "products"
    if bound_by not in seconds:
        return None
    binding = max(seconds, key=lambda name: seconds[name])
    return seconds[binding], binding


def _cell(call: Call, done: Work, chip: Chip) -> str:
    bound = _bound(call, done, chip)
    return f"{_milliseconds(bound[0])} {bound[1]}" if bound else "–"


def _two_times(call: Call, done: Work, chip: Chip) -> Iterator[str]:
    """The least time by the tensor units, and the time at the rate of the fastest published attention on
    simdgroup products, for the operations of the visible pairs; in place of either that of memory if it is
    longer."""

    def cell(products: float, memory: float) -> str:
        return _milliseconds(products) if products >= memory else f"{_milliseconds(memory)} memory"

    seconds = limits(call, done, chip)
    yield cell(seconds["tensor units"], seconds["memory"])
    if rate := chip.simdgroup_attention:
        memory = limits(call, replace(done, tensor_products=0), chip)["memory"]
        yield cell(call.flops / rate / 1e12, memory)
    else:
        yield "–"


def _milliseconds(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:.3f}" if ms < 1 else f"{ms:.2f}" if ms < 10 else f"{ms:.1f}" if ms < 100 else f"{ms:.0f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rule = "|" + "---|" * len(head)
    first, *others = ("| " + " | ".join(cells) + " |" for cells in (head, *rows))
    return "\n".join([first, rule, *others])


def tables() -> Iterator[str]:
    """The tables of the page, in order."""
    works = _works(CALLS)
    done = {(call, chip): works[call, chip.tensor_operations is not None] for call in CALLS for chip in CHIPS}
    m1 = CHIPS[0]
    shares = []
    for call in CALLS:
        seconds = limits(call, done[call, m1], m1)
        longest = max(seconds.values())
        shares.append([describe(call), *(f"{value / longest:.0%}" for value in seconds.values())])
    names = list(limits(CALLS[0], done[CALLS[0], m1], m1))
    bests = [[describe(call), *(_cell(call, done[call, chip], chip) for chip in CHIPS)] for call in CALLS]
    with_units = [chip for chip in CHIPS if chip.tensor_operations]
    on_units = {call: works[call, True] for call in CALLS if not call.is_decode}
    on_units |= {call: work(call, on_tensors=True) for call in TENSOR_CALLS}
    ceilings = [
        [describe(call), *(cell for chip in with_units for cell in _two_times(call, on_units[call], chip))]
        for call in on_units
    ]
    ceiling_names = [f"{chip.name}, {what}" for chip in with_units for what in ("tensor", "simdgroup")]
    yield _table(["call", *(chip.name for chip in CHIPS)], bests)
    yield _table(["call", *names], shares)
    yield _table(["call", *ceiling_names], ceilings)
    yield figures()


def figures() -> str:
    chips = [
        [
            chip.name,
            str(chip.cores),
            f"{chip.ram_gb_s:.0f}" if chip.ram_gb_s else "not in our sources",
            f"{chip.products / 1e12:.1f}" if chip.products else "not published",
            f"{chip.tensor_operations / 1e12:.1f}"
            if chip.tensor_operations
            else "none"
            if chip.family < 10
            else "not published",
            chip.note,
        ]
        for chip in CHIPS
    ]
    columns = ("chip", "cores", "memory GB/s", "8x8x8 products TFLOP/s", "tensor TFLOP/s", "note")
    return _table(columns, chips)


def main(arguments: list[str] | None = None) -> int:
    Parser(prog="python -m bench roofline", description=__doc__).parse_args(arguments)
    written = tables()
    page = re.sub(r"(^\|.*\n)+", lambda _: next(written) + "\n", PAGE.read_text(), flags=re.M)
    PAGE.write_text(page)
    print(f"wrote the tables of {PAGE.name}")
    return 0
