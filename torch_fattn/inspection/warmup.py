"""Compiling ahead."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from numbers import Integral
from typing import Any

import torch

from ..operators import BACKWARDS, OPERATORS
from ..operators.kv_formats import KV_FORMATS
from ..runtime.signatures import SIGNATURES, public, shown
from .compiled import CompiledKernel, compiled_kernels, counted
from .plans import Explanation, check_op
from .sizes import operands_of

__all__ = ["Warmup", "warmup"]

LENGTHS = (64, 4096)
# Keys of one chunk, of a few, which a threadgroup may have at once, and of many.
DECODE_LENGTHS = (64, 200, 500, 1000, 4096)
_SIZES = tuple(name for name in inspect.signature(operands_of).parameters if name != "op")
_DTYPES = {"dtype": False, "mask": True}  # None is valid
_NUMBERS = {"kv_heads": True, "q_len": True, "value_dim": True} | dict.fromkeys(
    ("batch", "heads", "kv_len", "head_dim", "block_size", "parts"), False
)


@dataclass(frozen=True)
class Warmup:
    """What `warmup` did."""

    kernels: list[CompiledKernel] = field(default_factory=list)  # all kernels of the calls
    compiled: list[CompiledKernel] = field(default_factory=list)  # those compiled by this warm-up
    seconds: float = 0.0  # of the whole warm-up

    def __str__(self) -> str:
        made, there = counted(len(self.compiled)), len(self.kernels) - len(self.compiled)
        lines = [f"compiled {made} in {self.seconds:.2f} s; {there} were there already"]
        return "\n".join(lines + [f"  {kernel}" for kernel in self.compiled])


@public("torch_fattn.warmup", renames=False)
def warmup(calls: str | Iterable[tuple[str, Mapping[str, Any]]], *operands: Any, **options: Any) -> Warmup:
    """Compiles the kernels of future calls, so that the first call is as fast as the others.

    Nothing is computed, launched or allocated, except by the tests of tensor operations (M5). A kernel is
    compiled once per process for a combination of dtype, head dims, tile and features, on its first use or
    here. Lengths matter in three cases: a prefill of few rows (`q_len=16`), one whose keys are cut into parts
    (the same with kv_len=4096), and a decode with room for few keys in few sequences (kv_len of 200 to 1,000,
    and the batch of the calls) have their own kernels. warmup may run in a thread: a call that needs a kernel
    under compilation waits only for that kernel.

        warmup("decode", heads=32, kv_heads=8, head_dim=128, dtype=torch.float16)
        warmup("prefill", query, key, value, is_causal=True)
        warmup([("prefill", model | {"is_causal": True}), ("decode", model)])

    Args:
        calls: an operator as `explain` takes it; or a list of (operator, keywords).
        operands: example tensors, also by name, on any device; those on "meta" cost nothing. Unlike sizes,
            they have an alignment: rows that are not aligned to 16 bytes have their own kernels.
        options: those of the operator; tensors among them may be on "meta" too. Without `operands` also
            sizes: dtype (float16), batch (1), heads (32), kv_heads (as heads), head_dim (128), value_dim (as
            head_dim), q_len (1, or as kv_len), kv_len (64 and 4096; of decodes also 200, 500 and 1000),
            block_size (16), kv_format, parts (2), seq_lens (of decode; True and False), mask (of prefill: the
            dtype of an attn_mask; none). A list or tuple means one call for each member.

    Returns the kernels that the calls launch, those that were compiled now, and the seconds.

    Raises:
        TypeError: a keyword that is neither a size nor an option of the operator; a size of another type.
        ValueError: a size below 1; what the operator itself refuses.
    """
    if not isinstance(calls, str):
        if operands or options:
            raise ValueError(
                "torch_fattn.warmup: a list of calls has its keywords inside; write (op, keywords) for each"
            )
        return _warm(plan for op, keywords in _pairs(calls) for plan in _plans(op, (), dict(keywords)))
    return _warm(_plans(calls, operands, options))


def _warm(plans: Iterable[Explanation]) -> Warmup:
    """Compiles the kernels of the plans, which are made on demand."""
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
    check_op("warmup", op)
    plan = getattr(torch.ops.fattn, f"_plan_{op}")
    signature = SIGNATURES[f"fattn.{op}"]
    has_operands = bool(operands) or not options.keys().isdisjoint(signature.operands)
    by_sizes = not has_operands and op in (*OPERATORS, *BACKWARDS, "mask_map")
    _check_names(op, options, has_operands, by_sizes)
    options.pop("return_lse", None)  # it has no kernels of its own
    if has_operands:
        signature.check_call(operands, options)
        yield Explanation(op, plan(*operands, **options, compile=True))
        return
    if not by_sizes:
        raise ValueError(
            f"torch_fattn.warmup: {op} is not described by sizes; pass example tensors, which may be on "
            '"meta"'
        )
    sizes = {name: options.pop(name) for name in _SIZES if name in options}
    signature.check((), options)
    if op != "merge":
        sizes.setdefault("kv_len", DECODE_LENGTHS if op.endswith("decode") else LENGTHS)
    if op == "decode":
        sizes.setdefault("seq_lens", (True, False))
    lists = [value if isinstance(value, (list, tuple)) else (value,) for value in sizes.values()]
    for name, values in zip(sizes, lists, strict=True):
        for value in values:
            _check_size(op, name, value)
    for chosen in product(*lists):
        try:
            tensors, keywords = operands_of(op, **dict(zip(sizes, chosen, strict=True)))
        except ValueError as error:
            raise ValueError(f"torch_fattn.warmup: {error}") from None
        yield Explanation(op, plan(*tensors, **{**keywords, **options}, compile=True))


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


def _check_names(op: str, options: dict[str, Any], has_operands: bool, by_sizes: bool) -> None:
    """Refuses an unknown keyword. torch's own message would show the schema of the planning operator."""
    names = SIGNATURES[f"fattn.{op}"].names
    for name in (each for each in options if each not in names):
        refusal = f"torch_fattn.warmup: {op} has no option {name!r}; "
        if name not in _SIZES:
            known = ("sizes", _SIZES) if by_sizes else ("arguments", names)
            raise TypeError(f"{refusal}the {known[0]} are {', '.join(known[1])}")
        if has_operands:
            raise TypeError(f"{refusal}leave it out, since the operands have sizes")


def _check_size(op: str, name: str, value: Any) -> None:
    """One value of a size: a number of any type with `__index__`."""
    given = f"torch_fattn.warmup: {name} {shown(value)}"
    if name in _DTYPES:
        if not (isinstance(value, torch.dtype) or (value is None and _DTYPES[name])):
            raise TypeError(f"{given} is not a torch.dtype; pass for example torch.float16")
    elif name == "seq_lens":
        if not isinstance(value, bool):
            raise TypeError(f"{given} is not a bool; pass True or False, or tensors for all operands")
    elif name in _NUMBERS:
        if value is None and _NUMBERS[name]:
            return
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"{given} is not a whole number; pass one of at least 1")
        if value < 1:
            raise ValueError(f"{given} is below 1; pass a number of at least 1")
    elif name == "kv_format" and value is not None:
        if value not in KV_FORMATS:
            raise ValueError(f"{given} is not one of {', '.join(KV_FORMATS)}; leave it out for keys of dtype")
        if op in OPERATORS and op != "merge" and "kv_format" not in SIGNATURES[f"fattn.{op}"].names:
            raise ValueError(f"{given} is of a quantised cache, and {op} takes none; leave it out")
