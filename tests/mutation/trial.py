"""What a mutant is tried on: a call of an operator as a plan, its buffers, and what checks the results.

Calls of attention may be changed in ways that the generators of random problems do not draw: numbers that
must not spread, integers out of range, more sequences than lanes, and keys and grids cut as those of calls
that are too long to be tried here.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torch_fattn.reference as reference
from tests.helpers import (
    backward_problems,
    cache_problems,
    direct_launch,
    features,
    linear_problems,
    logits_problems,
    problems,
    rms_norm_problems,
    rotary_problems,
    tensor_kernels,
)
from tests.helpers.accuracy import assert_close
from tests.helpers.backward_problems import BackwardProblem
from tests.helpers.cache_problems import WriteProblem
from tests.helpers.gradient_accuracy import assert_gradients_close
from tests.helpers.linear_problems import LinearProblem
from tests.helpers.logits_problems import LogitsProblem
from tests.helpers.problems import Problem
from tests.helpers.rms_norm_problems import RmsNormProblem
from tests.helpers.rotary_problems import RotaryProblem

CHECKS = "race,bounds,uninit,bytes"
WATCHDOG = 10.0  # seconds for a threadgroup that takes hundredths of one
SEED = 7
# Arguments of a backward that the forward lacks.
OF_RESULTS = ("grad_out", "grad_lse", "out", "lse", "out_remainder")
f32, f16, bf16 = problems.DTYPES

Counts = Mapping[str, int]
Plan = dict[str, Any]
Made = tuple[dict[str, Any], Callable[..., None]]  # arguments, and what checks the results
# Buffers of a launch, and what checks them when it is done.
Prepared = tuple[Mapping[str, Tensor], Callable[[], None]]


@dataclass(frozen=True, eq=False)
class Trial:
    name: str
    plan: Plan
    prepare: Callable[[], Prepared]
    facts: tuple[Any, ...] = ()  # of the problem
    tensor_layout: str | None = None  # of cooperative tensors

    @property
    def pipelines(self) -> list[tuple[Any, ...]]:
        return [(step["source"], *sorted(step["macros"].items())) for step in self.plan["passes"]]

    def reached(self) -> set[Any]:
        found: set[Any] = set()
        for step in self.plan["passes"]:
            facts = (*sorted(step["constants"].items()), *self.facts)
            found |= {(step["source"], macro) for macro in step["macros"].items()}
            found |= {(step["source"], *pair) for pair in itertools.combinations(facts, 2)}
        return found

    def run(self, mutate: direct_launch.Mutate | None = None, cache: Path | None = None) -> Counts:
        """Launches the kernels, checks the result, and returns the counts."""
        buffers, check = self.prepare()
        launch = partial(direct_launch.launch, checks=CHECKS, watchdog=WATCHDOG, cache=cache)
        counts: Counter[str] = Counter()
        for step in self.plan["passes"]:
            counters = launch(step, buffers, mutate, tensor_layout=self.tensor_layout)
            counts.update({name: count for name, count in counters.items() if isinstance(count, int)})
            for way, space in itertools.product(("bytes_read", "bytes_written"), ("device", "threadgroup")):
                counts[f"{space}_bytes"] += counters[way][space]
        check()
        return counts


# ---- what generators do not draw


def _bad_key(arguments: dict[str, Any], rng: random.Random) -> None:
    """NaN in a key reaches the rows that see it; what a mask hides from all rows reaches none."""
    key, mask = arguments.get("key", arguments.get("key_cache")), arguments.get("attn_mask")
    if key.numel() and key.is_floating_point():
        key[tuple(map(rng.randrange, key.shape[:-1]))][::3] = torch.nan
        if mask is not None and mask.shape[-1] > 1 and "value" in arguments:
            hidden = rng.sample(range(mask.shape[-1]), min(3, mask.shape[-1] - 1))
            mask[..., hidden] = False if mask.dtype == torch.bool else -torch.inf
            arguments["value"][:, :, hidden, 1::2] = rng.choice((torch.nan, torch.inf))


def _steep(arguments: dict[str, Any], rng: random.Random) -> None:
    """Sinks of any size, and scores of some hundreds or far below 0."""
    if arguments.get("scale") is None and arguments["query"].dtype != f32:
        arguments["query"] *= 64.0
    if (sinks := arguments.get("sinks")) is not None:
        largest = torch.finfo(sinks.dtype).max
        sizes = (0.5, -1.0, largest, -largest, -torch.inf, torch.inf)
        for head in range(len(sinks)):
            sinks[head] = rng.choice(sizes[: 5 if "grad_out" in arguments else 6])
    if (slopes := arguments.get("alibi_slopes")) is not None:
        slopes[..., 0] = -16.0
    mask = arguments.get("attn_mask")
    if mask is not None and mask.dtype != torch.bool:
        mask[..., : mask.shape[-1] // 2] -= 1000.0
        mask -= 1000.0


def _strange(arguments: dict[str, Any], rng: random.Random) -> None:
    """Lengths, starts and blocks out of range; without the NaN that they may lead to."""
    for name, each in arguments.items():
        if isinstance(each, Tensor) and each.is_floating_point():
            each.nan_to_num_(0.25)
        elif name == "cu_seqlens_k":  # no key is of two sequences
            each[0], each[rng.randrange(1, len(each)) :] = -5, 2**31 - 1
            each[2:][-1:] = -(2**31)
        elif name in ("seq_lens", "block_tables", "cu_seqlens_q"):
            for place in itertools.product(*map(range, each.shape)):
                if rng.random() < 0.3:
                    each[place] = rng.choice((-5, 3, 70, 1000, 2**31 - 1, -(2**31)))
    for name, rows in (("max_seqlen_q", "query"), ("max_seqlen_k", "key")):
        if name in arguments:
            arguments[name] = len(arguments[rows])


def _many(problem: Problem, rng: random.Random) -> Problem:
    """More sequences than a simdgroup has lanes, or about as many; most of them short."""
    batch, small, block = rng.choice((30, 31, 33, 41, 70)), rng.choice((1, 2, 9)), max(problem.block_size, 1)
    lengths = [rng.choice((0, 1, 2, rng.randint(0, 40))) for _ in range(batch - 1)]
    rows, where = [rng.randint(0, small) for _ in lengths], rng.choice((0, batch - 1))
    lengths.insert(where, rng.randint(200, 260))
    rows.insert(where, 50)
    sizes: dict[str, Any] = {"batch": batch, "q_heads": 2, "kv_heads": 1, "kv_len": -(-260 // block) * block}
    sizes |= {"q_len": small} if problem.q_lens is None else {"q_len": 50, "q_lens": tuple(rows)}
    return replace(problem, seq_lens=tuple(lengths), **sizes)


def _changed(problem: Problem, change: str) -> Problem:
    """With layouts that the operators do not copy, and that the change can write or cut."""
    others = {"every_other": "padded_rows"}
    if change in ("cut", *CHANGES_OF_NUMBERS):
        others |= dict.fromkeys(("expanded_batch", "expanded_heads"), "token_major")
        # Rows near the keys: slopes multiply the distances, and no tolerance here has them.
        offset = problem.q_offset and min(problem.q_offset, problem.kv_len)
        problem = replace(problem, q_offset=offset)
    layouts: Any = tuple(others.get(layout, layout) for layout in problem.layouts)
    if change == "many" and problem.op != "prefill":
        problem = _many(problem, random.Random(problem.index))
    return replace(problem, layouts=layouts, token_major_out=problem.token_major_out and change != "cut")


def _cut(plan: Plan, rng: random.Random) -> None:
    """Into parts and slices."""
    first, *others = plan["passes"]
    if first["source"].startswith("decode"):
        if others:
            direct_launch.cut(plan, rng.choice((64, 128, 256)), rng.choice((2, 3, 5)))
    elif first["source"].startswith("prefill") and rng.random() < 0.6:
        if others:
            direct_launch.set_params(first, {"max_parts": 2, "min_part": 1, "largest_part": 8})
        else:
            direct_launch.cut_prefill(plan, 4, 2)
    else:
        for step in plan["passes"][: 2 if "backward" in first["source"] else 1]:
            direct_launch.cut_into_slices(step, rng.choice((2, 3, 5)))


# ---- attention

CHANGES_OF_NUMBERS = {"bad key": _bad_key, "steep": _steep, "strange": _strange}
# What is done to problems in turn. NaN in rows that see no key changes no gradient, nor does an error of lse,
# the origin of weights.
CHANGES = ("as drawn", "cut", "many", "as drawn", *CHANGES_OF_NUMBERS)
BACKWARD_CHANGES = ("as drawn", "cut", "many", "blind", "shifted", "steep", "strange")


class Device(NamedTuple):
    """The GPU that a trial is planned for: by default the smallest."""

    family: int = 7
    tensor: str | None = None  # the state of its tensor operations
    layout: str | None = None  # of its cooperative tensors


SMALLEST = Device()
# random:2 differs from every known layout, and reductions match; under random:0 nothing does.
ON_TENSORS = (Device(10, "registers", "random:2"), Device(10, "threadgroup", "random:0"))


def of_problem(problem: Problem, device: Device = SMALLEST, change: str = "as drawn") -> Trial:
    problem = _changed(problem, change)
    return _of_attention(problem.op, problem, partial(_forward, problem, change), device, change)


def of_backward(problem: BackwardProblem, device: Device = SMALLEST, change: str = "as drawn") -> Trial:
    forward = _changed(problem.forward, change)
    layout = problem.grad_layout.replace("every_other", "offset")
    problem = replace(problem, forward=forward, grad_layout=layout)
    return _of_attention(problem.op, forward, partial(_backward, problem, change), device, change)


def _of_attention(op: str, forward: Problem, make: Callable[[], Made], device: Device, change: str) -> Trial:
    is_backward = op != forward.op
    results: tuple[str, ...] = direct_launch.GRADIENTS if is_backward else ("out", "lse")
    buffers_of = direct_launch.backward_buffers if is_backward else direct_launch.buffers_of

    def prepare() -> Prepared:
        arguments, check = make()
        buffers = buffers_of(op, arguments, plan)
        if has_remainder:
            buffers["out_remainder"] = torch.full_like(buffers["out"], torch.nan)
        return buffers, lambda: check(*map(buffers.__getitem__, results))

    plan = direct_launch.plan_of(op, make()[0], device.family, tensor=device.tensor)
    if change == "cut":
        _cut(plan, random.Random(forward.index))
    if has_remainder := change == "cut" and op in ("prefill", "varlen_prefill") and forward.dtype != f32:
        results += ("out_remainder",)
        for step in plan["passes"][-1:]:
            step["constants"]["out_remainder"] = True
            step["bindings"]["out_remainder"] = direct_launch.SLOTS["out_remainder"]
    axes = ("heads", "batch", "keys", "queries", "seq_lens", "causality", "kv_format", "scale")
    found = features.features(forward)
    facts = (("change", change), ("tensor", device.tensor), *((axis, found.get(axis)) for axis in axes))
    return Trial(f"{change}: {op} of {forward}", plan, prepare, facts, device.layout)


def _forward(problem: Problem, change: str) -> Made:
    case = problems.build(problem, SEED)
    arguments, _ = case.arguments("cpu")
    if change not in CHANGES_OF_NUMBERS:
        return arguments, partial(assert_close, case)
    _change_numbers(arguments, change, problem.index)
    return arguments, lambda *found: _assert_near(found, getattr(reference, problem.op)(**arguments))


def _backward(problem: BackwardProblem, change: str) -> Made:
    case = backward_problems.build(problem, SEED)
    arguments = backward_problems.as_launched(case.arguments("cpu")[0])
    if change == "blind" and problem.forward.q_lens is None:
        sees = case.forward.visible.any(-1)[..., None]
        arguments |= {name: arguments[name].where(sees, torch.nan) for name in ("query", "grad_out")}
    if change == "shifted" and problem.out == "none" and not problem.forward.sinks:
        arguments["lse"] += 0.25
    if change not in CHANGES_OF_NUMBERS:
        return arguments, lambda *found: assert_gradients_close(case, found)
    arguments["grad_out"] = arguments["grad_out"].clone()
    _change_numbers(arguments, change, problem.index)
    given = {name: each for name, each in arguments.items() if name not in OF_RESULTS}
    out, lse = getattr(reference, problem.forward.op)(**given)
    arguments["lse"] = lse.float()
    if arguments["out"] is not None:
        arguments["out"] = saved = out.to(arguments["out"].dtype)
        if "out_remainder" in arguments:
            arguments["out_remainder"] = backward_problems.remainder_of(out, saved)
    return arguments, lambda *found: _assert_near(found, getattr(reference, problem.op)(**arguments))


def _change_numbers(arguments: dict[str, Any], change: str, seed: int) -> None:
    CHANGES_OF_NUMBERS[change](arguments, random.Random(seed))
    if "mask_map" in arguments:
        arguments["mask_map"] = reference.mask_map(arguments["attn_mask"]).to(torch.uint8)


def _assert_near(found: Iterable[Tensor], exact: Iterable[Tensor | None]) -> None:
    """NaN, too, must be where the reference has it and nowhere else."""
    results = [pair for pair in zip(found, exact, strict=True) if pair[1] is not None and pair[1].numel()]
    tolerance = max(8 * torch.finfo(results[0][0].dtype).eps, 2e-5)
    for result, wanted in results:
        largest = float(wanted.abs().where(wanted.isfinite(), 0.0).max().clamp(1, 100))
        close = partial(torch.testing.assert_close, rtol=1e-3, atol=tolerance * largest, equal_nan=True)
        close(result.float(), wanted.float())


# ---- the other operators


def of_write(problem: WriteProblem, block: int = 0) -> Trial:
    """`block`: slots of a block, if they are given, of which the caches have the first."""
    case = cache_problems.build(problem, SEED)
    plan = direct_launch.plan_of("cache_write", case.arguments("cpu")[0])
    if block:
        (step,) = plan["passes"]
        direct_launch.set_params(step, {"block_size": block, "slots": problem.num_blocks * block})

    def prepare() -> Prepared:
        arguments, memory = case.arguments("cpu")
        copied = {n: arguments[n].contiguous() for n in ("key", "value") if arguments[n].stride(-1) != 1}
        if block:
            slots = arguments["slot_mapping"]
            far = slots // problem.block_size * block + slots % problem.block_size
            copied["slot_mapping"] = slots.new_empty_strided(slots.shape, slots.stride()).copy_(far)
        return arguments | copied, lambda: cache_problems.assert_written(case, memory)

    return Trial(f"write: {problem}", plan, prepare, (("rows", problem.special), ("block", block)))


def of_rotary(problem: RotaryProblem) -> Trial:
    case = rotary_problems.build(problem)

    def prepare() -> Prepared:
        arguments, memory = case.arguments("cpu")
        exact, key = reference.rotary(**rotary_problems.of_rotary(arguments))
        out = torch.full_like(exact, torch.nan, dtype=problem.dtype)

        def check() -> None:
            rotary_problems.assert_close(out, exact, problem, "query_norm" in arguments)
            if rotary_problems.is_exact(problem, "key_norm" in arguments):
                expected = rotary_problems.written(case, key.to(problem.dtype))
                # The sign of a NaN depends on the order of operands.
                both = ({n: x.masked_fill(x != x, 0) for n, x in each.items()} for each in (memory, expected))
                cache_problems.assert_same_memory(*both)

        rows = arguments.keys() & {"query", "key", "value", "query_norm", "key_norm"}
        copied = {n: arguments[n].contiguous() for n in rows if arguments[n].stride(-1) != 1}
        return {**arguments, **copied, "out": out}, check

    plan = direct_launch.plan_of("rotary_write", case.arguments("cpu")[0])
    return Trial(f"rotary: {problem}", plan, prepare, (("place", problem.place), ("norm", problem.norm)))


def of_norm(problem: RmsNormProblem) -> Trial:
    operands, options = rms_norm_problems.build(problem)
    arguments = {name: each.of(each.base) for name, each in operands.items()}
    plan = direct_launch.plan_of("rms_norm", arguments | options)

    def prepare() -> Prepared:
        out = torch.full_like(torch.ops.fattn.rms_norm(**arguments, **options), torch.nan)
        buffers = {n: x if x.stride(-1) == 1 else x.contiguous() for n, x in arguments.items()}
        return buffers | {"out": out}, lambda: rms_norm_problems.assert_close(out, arguments | options)

    return Trial(f"rms_norm: {problem}", plan, prepare, (("norm", problem.norm),))


def of_linear(problem: LinearProblem) -> Trial:
    case = linear_problems.build(problem)
    plan = direct_launch.plan_of(problem.op, case.arguments("cpu")[0])

    def prepare() -> Prepared:
        arguments, bases = case.arguments("cpu")
        out = torch.full_like(case.expected["out"][1], torch.nan, dtype=problem.dtype)
        strided = {"x", "beta", "b", *(() if problem.channel_decay else ("g", "a"))}
        buffers = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
        buffers |= {n: x.contiguous() for n, x in buffers.items() if x.stride(-1) != 1 and n not in strided}
        chunks = torch.full((plan["scratch_bytes"] // 4,), torch.nan)
        return buffers | {"out": out, "chunks": chunks}, lambda: case.check(out, bases)

    names = ("states", "packed", "kind", "writes_state")
    facts = (
        *((name, getattr(problem, name)) for name in names),
        ("heads", problem.channel_decay, getattr(problem, "key_heads", 1) > 1),
    )
    return Trial(f"{problem.op}: {problem}", plan, prepare, facts)


def of_logits(problem: LogitsProblem, slice_size: int = 0, columns: int = 0) -> Trial:
    """If they are given: threadgroups of a dispatch, and columns of a row, of which these are the first."""
    operand = logits_problems.build(problem).operand
    plan = direct_launch.plan_of(problem.op, problem.call(operand.of(operand.base)))
    for step in plan["passes"]:
        if columns:
            direct_launch.set_params(step, {"columns": columns})
        if slice_size:
            direct_launch.cut_into_slices(step, slice_size)

    def prepare() -> Prepared:
        buffers, case = logits_problems.arguments(problem)
        return buffers, lambda: case.assert_close(buffers["out"])

    facts = ("columns", problem.shape[-1:]), ("layout", problem.layout)
    return Trial(f"logits: {problem}", plan, prepare, facts)


def of_map(dtype: torch.dtype, *size: int, slice_size: int = 0, layout: str = "padded_rows") -> Trial:
    """mask_map of a patchy mask `[batch, heads, rows, keys]`."""
    batch, heads, *rows_and_keys = size
    problem = Problem(0, "prefill", f16, batch, heads, heads, *rows_and_keys, 8, 8, mask=dtype)  # type: ignore[arg-type]
    case = problems.build(replace(problem, mask_pattern="patches", mask_layout=layout), SEED)
    mask = case.arguments("cpu")[0]["attn_mask"]
    if dtype != torch.bool:  # whole cells of a small number, and cells that hide keys in their last row only
        mask[0, 0, :16, :32], mask[0, 0, 16:32, :32] = -5.0, 0.0
        mask[0, 0, 31, :32] = -torch.inf
    plan = direct_launch.plan_of("mask_map", {"attn_mask": mask})
    if slice_size:
        direct_launch.cut_into_slices(plan["passes"][0], slice_size)

    def prepare() -> Prepared:
        exact = reference.mask_map(mask)
        cells = torch.full(exact.shape, 255, dtype=torch.uint8)
        check = partial(torch.testing.assert_close, rtol=0, atol=0)
        return {"attn_mask": mask, "mask_map": cells}, lambda: check(cells.double(), exact)

    return Trial(f"mask_map: {problems.SHORT[dtype]}-{layout}", plan, prepare, (("layout", layout),))


def of_merge(dtype: torch.dtype, parts: int, columns: int) -> Trial:
    """Some parts, and all parts of some rows, saw no key."""
    generator = torch.Generator().manual_seed(parts)
    outs = torch.randn(parts, 2, 2, 3, columns, generator=generator).to(dtype)
    lses = torch.randn(parts, 2, 2, 3, generator=generator) * 5
    lses[1, 0, 0] = lses[:, 1, 1, 0] = -torch.inf
    outs[1, 0, 0] = torch.nan
    arguments = {"outs": outs, "lses": lses}
    plan = direct_launch.plan_of("merge", arguments)

    def prepare() -> Prepared:
        buffers = direct_launch.buffers_of("merge", arguments, plan)
        exact = reference.merge(**arguments)
        return buffers, lambda: _assert_near((buffers["out"], buffers["lse"]), exact)

    return Trial(f"merge: {problems.SHORT[dtype]}-{parts}", plan, prepare, (("columns", columns),))


def of_probe(layout: str, columns: tuple[int, int, int], registers: bool, room: int) -> Trial:
    """The facts that tensor_probe lists of a layout, all or as many as `room` holds. `columns` has the number
    of columns of keys, of scores and of the output."""
    key = torch.zeros(1, 1, 64, columns[0], dtype=f16)
    operands = {"query": key, "key": key, "value": key[..., :512]}
    (prefill,) = direct_launch.plan_of("prefill", operands, 10, tensor="registers")["passes"]
    head, matches = tensor_kernels.HEAD_FACTS, registers and layout != "random:4"

    def check(facts: Tensor) -> None:
        assert facts[3:6].tolist() == [matches] * 3 and (facts[1] > 0) == registers
        end = head + 64 * int(facts[0] + facts[2])
        assert (facts[end:] == -7).all() and (facts[head:end] != -7).all(), "as long as the lists are"
        if end < room:
            tensor_kernels.probe_of(facts).assert_each_once(*columns[1:])

    def prepare() -> Prepared:
        facts = torch.full((room,), -7, dtype=torch.int32)
        return {"tensor_facts": facts}, lambda: check(facts)

    plan = {"passes": [tensor_kernels.probe_step(prefill, registers=registers, room=room)]}
    facts = (layout, columns, registers, room)
    return Trial(f"probe: {facts}", plan, prepare, facts, layout)
