"""Counts a call exactly on softmetal: bytes by operand, 8x8x8 products, barriers and the like, per dispatch.

Products of tensor operations are counted in 8x8x8 products too. Every lane's load counts, even if 31 others
read the same address: caches and broadcasts are not modelled.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..cases import buffers
from ..cases.calls import Call

if TYPE_CHECKING:
    from ..peers.launch import Launch

# The operands whose traffic a call cannot avoid; "partial": partial results, from one dispatch to the next;
# "other": lse, lengths, block tables.
ROLES = ("key", "value", "scales", "query", "out", "partial", "other")
_ROLE_OF_BINDING = {
    "key": "key",
    "value": "value",
    "key_scales": "scales",
    "value_scales": "scales",
    "query": "query",
    "out": "out",
    "partial_out": "partial",
    "partial_sum": "partial",
}
OPERATIONS = ("exps", "threadgroup_barriers", "simdgroup_barriers", "simd_reductions", "shuffles")
RATIOS = ("cache_ratio", "distinct_ratio", "bytes_ratio", "partial_ratio", "products_ratio", "exps_per_pair")
MANY = 64  # enough heads to fill a GPU


@dataclass(frozen=True)
class Dispatch:
    kernel: str
    grid: tuple[int, ...]
    threads: tuple[int, ...]
    products: int  # 8x8x8, those of tensor operations included
    tensor_products: int  # of tensor operations alone
    simd_reductions: int
    shuffles: int
    threadgroup_barriers: int
    simdgroup_barriers: int
    exps: int
    threadgroup_read: int
    threadgroup_written: int
    read: Mapping[str, int]  # device bytes by role
    written: Mapping[str, int]
    distinct: Mapping[str, int]  # device bytes read, each once per threadgroup


def _dispatch(
    kernel: str,
    grid: Sequence[int],
    threads: Sequence[int],
    counters: Mapping[str, Any],
    buffers: Mapping[str, Mapping[int, int]],
    role_of: Callable[[int], str | None],
) -> Dispatch:
    """`buffers` has bytes by slot, for each way; `role_of` returns None for a slot in constant memory."""
    traffic: dict[str, Any] = {}
    for way in ("read", "written", "distinct"):
        traffic[way] = dict.fromkeys(ROLES, 0)
        for slot, count in buffers[f"buffers_{way}"].items():
            role = role_of(int(slot))
            if role is not None:
                traffic[way][role] += count
    return Dispatch(
        kernel=kernel,
        grid=tuple(grid),
        threads=tuple(threads),
        products=counters["products"] + counters["tensor_products"],
        tensor_products=counters["tensor_products"],
        **{name: counters[name] for name in OPERATIONS},
        threadgroup_read=counters["bytes_read"]["threadgroup"],
        threadgroup_written=counters["bytes_written"]["threadgroup"],
        **traffic,
    )


@dataclass(frozen=True)
class Counts:
    call: Call
    dispatches: tuple[Dispatch, ...]

    def total(self, field: str) -> int:
        return sum(getattr(dispatch, field) for dispatch in self.dispatches)

    def traffic(self, *roles: str) -> int:
        """Device bytes read and written in these roles."""
        return sum(d.read[role] + d.written[role] for d in self.dispatches for role in roles)

    @property
    def cache_ratio(self) -> float:
        """K and V bytes read, as a multiple of each visible row once per key-value head."""
        return self.traffic("key", "value") / (self.call.least_bytes - self.call.row_bytes)

    @property
    def distinct_ratio(self) -> float:
        """The same multiple, but each byte counts once for every threadgroup that reads it."""
        return self.distinct_bytes / (self.call.least_bytes - self.call.row_bytes)

    @property
    def distinct_bytes(self) -> int:
        """K and V bytes read, each once for every threadgroup that reads it."""
        return sum(d.distinct[role] for d in self.dispatches for role in ("key", "value"))

    @property
    def bytes_ratio(self) -> float:
        """Device bytes except partial results, as a multiple of the least possible."""
        return self.traffic(*(role for role in ROLES if role != "partial")) / self.call.least_bytes

    @property
    def partial_ratio(self) -> float:
        return self.traffic("partial") / self.call.least_bytes

    @property
    def products_ratio(self) -> float:
        return self.total("products") / self.call.least_products

    @property
    def threadgroup_bytes(self) -> int:
        return self.total("threadgroup_read") + self.total("threadgroup_written")

    @property
    def exps_per_pair(self) -> float:
        return self.total("exps") / (self.call.batch * self.call.q_heads * self.call.visible_pairs)

    def as_json(self) -> dict[str, Any]:
        return {
            **{name: round(getattr(self, name), 4) for name in RATIOS},
            "least_bytes": self.call.least_bytes,
            "least_products": self.call.least_products,
            "dispatches": [dict(vars(dispatch)) for dispatch in self.dispatches],
        }


@contextlib.contextmanager
def tile_of_prefill(query: Tensor, key: Tensor, value: Tensor) -> Iterator[None]:
    """Inside this context, every prefill of that dtype and head size uses the tile of this one, even if it
    has few rows."""
    import torch_fattn
    from torch_fattn.tuning import candidates, tuned_file

    gpu = tuned_file.Gpu.this()
    plan = torch_fattn.explain("prefill", query, key, value, family=gpu.family, cores=gpu.cores)
    kernel = plan.passes[0]["kernel"].removeprefix("fattn_")
    dim = max(query.shape[-1], value.shape[-1])
    sizes = dict(candidates.sizes_of_plan(kernel, plan))
    row = tuned_file.TunedRow(kernel, str(query.dtype).removeprefix("torch."), dim, dim, sizes)
    tuned_file.set_tuning(gpu, [row], "the tile of a larger call")
    try:
        yield
    finally:
        tuned_file.set_tuning(gpu, [], "")


@contextlib.contextmanager
def tile_of_many_heads(call: Call) -> Iterator[None]:
    """Inside this context, a prefill uses the tile of a call with many heads, of which it is a sample. The
    planner would choose smaller tiles for a few heads, which do not fill the GPU."""
    if call.op != "prefill":
        yield
        return
    many = replace(call, q_heads=MANY * call.q_heads, kv_heads=MANY * call.kv_heads, mask="")
    with tile_of_prefill(*many.operands("meta").values()):
        yield


def count_ours(call: Call, *, count_bytes: bool = True) -> Counts:
    """Runs the operator on device="mps" and reads softmetal's counters."""
    with tile_of_many_heads(call):
        return _count_ours(call, count_bytes)


def _count_ours(call: Call, count_bytes: bool) -> Counts:
    import softmetal
    import torch_fattn

    positional, keywords = call.arguments(call.operands("mps"))
    plan = torch_fattn.explain(call.op, *positional, **keywords)
    counted = softmetal.checks(count_bytes=count_bytes, count_distinct=count_bytes)
    with counted, softmetal.record() as launches:
        getattr(torch_fattn, call.op)(*positional, **keywords)
    ran = [launch for launch in launches if launch["kernel"].startswith("fattn_")]
    if [launch["kernel"] for launch in ran] != [step["kernel"] for step in plan.passes]:
        raise RuntimeError(f"fattn.{call.op}: the kernels that ran are not those of the plan")
    dispatches = []
    for launch, step in zip(ran, plan.passes, strict=True):
        roles = {
            slot: _ROLE_OF_BINDING.get(name, "other")
            for name, slot in step["bindings"].items()
            if name != "params"
        }
        dispatches.append(
            _dispatch(
                launch["kernel"], launch["grid"], launch["threads"], launch["counters"], launch, roles.get
            )
        )
    return Counts(call, tuple(dispatches))


def run_on_harness(launch: Launch, buffers: Mapping[str, Tensor], checks: str = "") -> tuple[Dispatch, ...]:
    """Launches kernels on softmetal's SIMT runtime, without the Metal framework.

    `checks` names its checks ("race", "bounds", "uninit") and its counters ("bytes", "distinct").
    """
    from softmetal.testing import Library

    dispatches = []
    for step in launch.passes:
        pipeline = step.pipeline
        library = Library(
            pipeline.source,
            defines=pipeline.macros,
            mode="checked" if checks else "fast",
            include=pipeline.include,
            only=pipeline.kernel,
            std=pipeline.std,
        )
        index_of = library.function_constants() if pipeline.constants else {}
        constants = {index_of[name]: value for name, value in pipeline.constants.items()}
        arguments = step.arguments
        bound = [arguments.get(slot) for slot in range(max(arguments) + 1)]
        counters = library.pipeline(pipeline.kernel, constants).run(
            [buffers[value] if isinstance(value, str) else value for value in bound],
            step.grid,
            step.threads,
            pipeline.threadgroup_memory,
            checks=checks,
        )
        roles = {slot: _role(name) for slot, name in arguments.items() if isinstance(name, str)}
        dispatches.append(_dispatch(pipeline.kernel, step.grid, step.threads, counters, counters, roles.get))
    return tuple(dispatches)


def count_on_tensors(call: Call, state: str, cores: int = 1) -> Counts:
    """Counts our plan for a GPU with tensor units in this state, "registers" or "threadgroup". With one core
    a prefill is counted as one of many heads, without a split. The result is checked."""
    from ..peers import fattn
    from ..peers.launch import OURS_ON_TENSORS

    launch = fattn.launch(call, cores, fattn.TENSOR_FAMILY, state)
    if launch.impl not in OURS_ON_TENSORS.values():
        raise NotImplementedError(f"fattn.{call.op} {call} does not take tensor operations")
    return _count_launch(call, launch)[0]


_DERIVED_FROM_CACHE = re.compile(r"(key|value)_(q8_0|with_spare)")


def _role(buffer: str) -> str:
    """Returns the role of a buffer of cases/buffers.py; all scratch is partial results."""
    buffer = _DERIVED_FROM_CACHE.sub(r"\1", buffer).removesuffix("_float32")
    if buffer in ("seq_lens", "block_tables", "mask", "seen", "lse"):
        return "other"
    return _ROLE_OF_BINDING.get(buffer, "partial")


def count_peer(peer: ModuleType, call: Call, whole_rows: int = 0) -> tuple[Counts, float, str]:
    """Returns the counts of a peer's kernels, the largest error of their result, and the launch rule's note.

    With `whole_rows`, the rule chooses for a prompt of that many rows, of which this call is a sample. Raises
    NotImplementedError if the peer has no kernel of its own for the call, or a wrong result.
    """
    from ..peers import registry

    launch = registry.launch(peer, replace(call, whole_rows=whole_rows))
    counts, error = _count_launch(call, launch)
    return counts, error, launch.note


def _count_launch(call: Call, launch: Launch) -> tuple[Counts, float]:
    operands = buffers.make(call, launch.buffers, launch.scratch, "cpu", seed=0)
    dispatches = run_on_harness(launch, operands, "bytes,distinct")
    error, relative = buffers.errors(call, operands, launch.out_rows_first, "cpu")
    if not relative < buffers.TOLERANCE[call.dtype]:
        raise NotImplementedError(f"{launch.impl} computes {call} wrongly: relative error {relative:.1e}")
    return Counts(call, dispatches), error
