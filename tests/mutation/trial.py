"""Trials for mutants: a small call of an op, with the right result and bounds of its counts (counts.txt)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torch_fattn.reference as reference
from tests.helpers import cache_problems, direct_launch, logits_problems, problems
from tests.helpers.accuracy import assert_close
from tests.helpers.cache_problems import WriteProblem
from tests.helpers.logits_problems import LogitsProblem
from tests.helpers.problems import Problem

CHECKS = "race,bounds,uninit,bytes"
WATCHDOG = 10.0  # seconds for a threadgroup that takes hundredths of one
_COUNTED = (
    *("products", "tensor_products", "simd_reductions", "shuffles"),
    *("threadgroup_barriers", "simdgroup_barriers", "exps"),
    *("device_loads", "device_stores", "threadgroup_loads", "threadgroup_stores"),
)
_SPACES = ("device", "threadgroup")
f32, f16, bf16 = problems.DTYPES

Counts = dict[str, int]
Plan = dict[str, Any]
# Buffers of a launch, and what checks them when it is done.
Prepared = tuple[Mapping[str, Tensor], Callable[[], None]]


@dataclass(frozen=True)
class Device:
    """The GPU that a trial is planned for: by default the smallest."""

    family: int = 7
    tensor: str | None = None  # the state of its tensor operations
    tensor_layout: str | None = None  # of its cooperative tensors

    def plan_of(self, op: str, arguments: Mapping[str, Any]) -> Plan:
        return direct_launch.plan_of(op, arguments, self.family, tensor=self.tensor)


@dataclass(frozen=True)
class Trial:
    name: str
    plan_for: Callable[[Device], Plan]
    prepare: Callable[[Plan], Prepared]
    counted: bool = True  # has bounds of its counts
    device: Device = Device()

    def plan(self) -> Plan:
        return self.plan_for(self.device)

    def kernels(self) -> set[str]:
        """The sources that it launches."""
        return {step["source"] for step in self.plan()["passes"]}

    def run(self, mutate: direct_launch.Mutate | None = None, cache: Path | None = None) -> Counts:
        """Launches the kernels, checks the result, and returns the counts."""
        plan = self.plan()
        buffers, check = self.prepare(plan)
        counts: Counts = dict.fromkeys([*_COUNTED, *(f"{space}_bytes" for space in _SPACES)], 0)
        for step in plan["passes"]:
            counters = direct_launch.launch(
                step,
                buffers,
                mutate,
                checks=CHECKS,
                watchdog=WATCHDOG,
                cache=cache,
                tensor_layout=self.device.tensor_layout,
            )
            for name in _COUNTED:
                counts[name] += counters[name]
            for space in _SPACES:
                counts[f"{space}_bytes"] += counters["bytes_read"][space] + counters["bytes_written"][space]
        check()
        return counts


def of_call(
    name: str,
    op: str,
    arguments: Mapping[str, Any],
    check: Callable[[Tensor, Tensor], None],
    change: Callable[[Plan], None] = lambda plan: None,
) -> Trial:
    """`check` is given out and lse; `change` is made to the plan."""

    def plan(device: Device) -> Plan:
        made = device.plan_of(op, arguments)
        change(made)
        return made

    def prepare(plan: Plan) -> Prepared:
        buffers = direct_launch.buffers_of(op, arguments, plan)
        return buffers, lambda: check(buffers["out"], buffers["lse"])

    return Trial(name, plan, prepare)


def of_problem(
    name: str,
    op: str,
    dtype: torch.dtype,
    *sizes: int,
    change: Callable[[Plan], None] = lambda plan: None,
    index: int = 0,
    **options: Any,
) -> Trial:
    """`sizes` are those of Problem: batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim."""
    case = problems.build(Problem(index, op, dtype, *sizes, **options), seed=7)  # type: ignore[arg-type]
    arguments, _ = case.arguments("cpu")
    return of_call(name, op, arguments, lambda out, lse: assert_close(case, out, lse), change)


def of_one_launch(name: str, dtype: torch.dtype, *sizes: int, **options: Any) -> Trial:
    """A decode of a short cache, which must have the bits that two launches give for a larger one."""
    case = problems.build(Problem(0, "decode", dtype, *sizes, **options), seed=7)  # type: ignore[arg-type]
    arguments, _ = case.arguments("cpu")

    @functools.cache
    def of_two_launches() -> tuple[Tensor, Tensor]:
        larger = arguments | {each: _lengthened(arguments[each]) for each in ("key", "value")}
        plan = direct_launch.plan_of("decode", larger)
        assert [len(direct_launch.plan_of("decode", arguments)["passes"]), len(plan["passes"])] == [1, 2]
        buffers = direct_launch.buffers_of("decode", larger, plan)
        for step in plan["passes"]:
            direct_launch.launch(step, buffers)
        return buffers["out"], buffers["lse"]

    def check(out: Tensor, lse: Tensor) -> None:
        assert_close(case, out, lse)
        assert all(map(torch.equal, (out, lse), of_two_launches())), "bits of two launches"

    return of_call(name, "decode", arguments, check)


def _lengthened(cache: Tensor) -> Tensor:
    """With room for more keys than one launch takes."""
    return torch.cat((cache, torch.full_like(cache, torch.nan).repeat(1, 1, 4, 1)), dim=2)


def every_option(op: str, sizes: tuple[int, ...] = (2, 4, 2, 3, 70, 64, 32), **fields: Any) -> Trial:
    """Every option of the op at once, with parameters of layers in float16 and slopes of each sequence. Not
    counted, because a new option may change the counts."""
    options = {name: each.values[-1] for name, each in problems.OPTIONS.items() if op in each.ops}
    options |= {"window_left": 20, "sink_tokens": 4, **fields}
    trial = of_problem(f"{op}-every-option", op, f16, *sizes, index=1, **options)
    return replace(trial, counted=False)


def of_operands(name: str, op: str, tolerance: float = 0.02, **arguments: Any) -> Trial:
    """NaN, too, must be where the reference has it and nowhere else."""
    exact_out, exact_lse = getattr(reference, op)(**arguments)

    def check(out: Tensor, lse: Tensor) -> None:
        for result, exact in ((out.double(), exact_out), (lse.double(), exact_lse)):
            torch.testing.assert_close(result, exact, rtol=1e-3, atol=tolerance, equal_nan=True)

    return of_call(name, op, arguments, check)


def of_write(kv_format: str, dtype: torch.dtype, *sizes: int, name: str = "", **options: Any) -> Trial:
    """A trial of cache_write. `sizes` are those of WriteProblem: tokens, kv_heads, head_dim, value_dim,
    num_blocks, block_size."""
    problem = WriteProblem(0, kv_format, dtype, *sizes, **options)  # type: ignore[arg-type]
    case = cache_problems.build(problem, seed=7)

    def prepare(plan: Plan) -> Prepared:
        arguments, memory = case.arguments("cpu")
        return arguments, lambda: cache_problems.assert_written(case, memory)

    arguments, _ = case.arguments("cpu")
    return Trial(
        name or f"write-{kv_format}", lambda device: device.plan_of("cache_write", arguments), prepare
    )


def of_logits(
    op: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    layout: str,
    cap: float,
    slice_size: int = 0,
    change: Callable[[Plan], None] = lambda plan: None,
) -> Trial:
    """A trial of softmax or softcap, in dispatches of `slice_size` threadgroups if it is given."""
    problem = LogitsProblem(7, op, dtype, shape, layout, cap)

    def plan(device: Device) -> Plan:
        operand = logits_problems.build(problem).operand
        made = device.plan_of(op, problem.call(operand.of(operand.base)))
        change(made)
        if slice_size:
            (step,) = made["passes"]
            direct_launch.cut_into_slices(step, slice_size)
        return made

    def prepare(plan: Plan) -> Prepared:
        buffers, case = logits_problems.arguments(problem)
        return buffers, lambda: case.assert_close(buffers["out"])

    sizes = "x".join(map(str, shape))
    return Trial(f"{op}-{problems.SHORT[dtype]}-{sizes}-{layout}", plan, prepare)


def of_map(dtype: torch.dtype, *size: int, slice_size: int = 0, layout: str = "padded_rows") -> Trial:
    """A trial of mask_map, with a patchy mask `[batch, heads, rows, keys]`."""
    problem = Problem(
        0, "prefill", f16, size[0], size[1], size[1], *size[2:], 8, 8, mask=dtype, mask_pattern="patches"
    )  # fmt: skip
    case = problems.build(replace(problem, mask_layout=layout), seed=7)
    mask = case.arguments("cpu")[0]["attn_mask"]
    if dtype != torch.bool:  # whole cells of a small number, and cells that hide keys in their last row only
        mask[0, 0, :16, :32], mask[0, 0, 16:32, :32] = -5.0, 0.0
        mask[0, 0, 31, :32] = -torch.inf

    def plan(device: Device) -> Plan:
        made = device.plan_of("mask_map", {"attn_mask": mask})
        if slice_size:
            direct_launch.cut_into_slices(made["passes"][0], slice_size)
        return made

    def prepare(plan: Plan) -> Prepared:
        exact = reference.mask_map(mask)
        cells = torch.full(exact.shape, 255, dtype=torch.uint8)

        def check() -> None:
            assert torch.equal(cells.double(), exact)

        return {"attn_mask": mask, "mask_map": cells}, check

    return Trial(f"mask-map-{problems.SHORT[dtype]}-{layout}", plan, prepare)


def randn(dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)
