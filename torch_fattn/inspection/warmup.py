"""`warmup`: compiles kernels ahead of time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from ..runtime.signatures import public, shown
from .compiled import CompiledKernel, compiled_kernels, counted
from .planning import plans_of
from .plans import Explanation
from .sizes import SIZES, call_of, check_op, has_operands

__all__ = ["Warmup", "warmup"]

NAME = "torch_fattn.warmup"
LENGTHS = (64, 4096)
# Keys of one chunk, of a few chunks in one threadgroup, and of many chunks.
DECODE_LENGTHS = (64, 200, 500, 1000, 4096)


@dataclass(frozen=True)
class Warmup:
    """The result of `warmup`."""

    kernels: list[CompiledKernel] = field(default_factory=list)  # all kernels of the calls
    compiled: list[CompiledKernel] = field(default_factory=list)  # the kernels that this warm-up compiled
    seconds: float = 0.0  # of the whole warm-up

    def __str__(self) -> str:
        made, there = counted(len(self.compiled)), len(self.kernels) - len(self.compiled)
        lines = [f"compiled {made} in {self.seconds:.2f} s; {there} were there already"]
        return "\n".join(lines + [f"  {kernel}" for kernel in self.compiled])


@public(NAME, renames=False)
def warmup(calls: str | Iterable[tuple[str, Mapping[str, Any]]], *operands: Any, **options: Any) -> Warmup:
    """Compiles the kernels of future calls, so that first calls are not slower.

    Nothing is computed, launched or allocated, except by the self-test of tensor operations (M5). A kernel is
    compiled once per process for each combination of dtype, head dims, tile and features, on first use or
    here. Three cases have their own kernels by length: a prefill of few rows (`q_len=16`), one whose keys are
    cut into parts (also kv_len=4096), and a small decode (kv_len of 200 to 1,000, with the batch of the
    calls). warmup may run in a thread: a call that needs a kernel under compilation waits only for that
    kernel.

        warmup("decode", heads=32, kv_heads=8, head_dim=128, dtype=torch.float16)
        warmup("prefill", query, key, value, is_causal=True)
        warmup([("prefill", model | {"is_causal": True}), ("decode", model)])

    Args:
        calls: a function's name, as in `explain`; or a list of (name, keywords).
        operands: example tensors, also by name, on any device; those on "meta" cost nothing. Unlike sizes,
            they have strides: rows that are not aligned to 16 bytes have their own kernels.
        options: those of the function; tensors may be on "meta" too. Without `operands`, also the sizes of
            `explain`; a list or tuple means one call per member. Defaults are those of `explain`, except
            kv_len (64 and 4096; decodes also 200, 500 and 1000) and seq_lens of `decode` (both).

    Returns all kernels of the calls, those compiled now, and the seconds.

    Raises:
        TypeError: a keyword that is neither a size nor an option; a size of another type.
        ValueError: a size below 1; otherwise as the operator.
    """
    if not isinstance(calls, str):
        if operands or options:
            raise ValueError(
                "torch_fattn.warmup: a list of calls has its keywords inside; write (op, keywords) for each"
            )
        return _warm(plan for op, keywords in _pairs(calls) for plan in _plans(op, (), dict(keywords)))
    return _warm(_plans(calls, operands, options))


def _warm(plans: Iterable[Explanation]) -> Warmup:
    """Compiles the kernels of the plans, which are generated lazily."""
    before = len(compiled_kernels())
    start = time.perf_counter()
    launches = [launch for plan in plans for launch in plan.passes]
    seconds = time.perf_counter() - start
    mine = [
        (number, kernel)
        for number, kernel in enumerate(compiled_kernels())
        if any(kernel.is_launched_by(launch) for launch in launches)
    ]
    return Warmup([k for _, k in mine], [k for number, k in mine if number >= before], seconds)


def _plans(op: str, operands: tuple[Any, ...], options: dict[str, Any]) -> Iterator[Explanation]:
    check_op(NAME, op)
    lists = {}
    if not has_operands(op, operands, options):
        if op != "merge":
            options.setdefault("kv_len", DECODE_LENGTHS if op.endswith("decode") else LENGTHS)
        if op == "decode":
            options.setdefault("seq_lens", (True, False))
        lists = {n: value for n, value in options.items() if n in SIZES and isinstance(value, (list, tuple))}
    chosen = [dict(zip(lists, values, strict=True)) for values in product(*lists.values())]
    for call in [call_of(NAME, op, operands, options | sizes) for sizes in chosen]:
        yield Explanation(op, plans_of(op, call, compile=True))


def _pairs(calls: Iterable[Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not isinstance(calls, Iterable) or getattr(calls, "ndim", 1) == 0:
        raise TypeError(
            f"torch_fattn.warmup: calls is {shown(calls)}; pass an operator, or a list of (op, keywords)"
        )
    for call in calls:
        if not (isinstance(call, (tuple, list)) and len(call) == 2 and isinstance(call[1], Mapping)):
            raise TypeError(
                f"torch_fattn.warmup: calls holds {shown(call)}, which is not a call; write (op, keywords) "
                "for each"
            )
        yield call[0], call[1]
