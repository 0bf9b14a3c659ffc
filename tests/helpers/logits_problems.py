"""Random problems of the operators on logits: shapes, layouts with NaN in their gaps, values that must not
spread, and the largest error allowed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.helpers.layouts import Operand, strided
from tests.helpers.tensors import same_bits
from torch_fattn import reference
from torch_fattn.operators import LOGITS_OPERATORS

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = ("contiguous", "offset", "permuted", "padded", "every_other", "expanded", "many_dims")
COLUMNS = (1, 2, 3, 4, 7, 8, 31, 64, 100, 128, 129, 256, 257, 500, 512, 513, 1000, 1024, 2500, 5000)
ROW_OPS = tuple(
    op
    for op in LOGITS_OPERATORS
    if getattr(torch.ops.fattn, op).default._schema.arguments[1].has_default_value()
)
LONG = (16384, 16388, 20001, 40000)  # around the longest row that is read once, and behind it


def keywords(op: str, x: Tensor, cap: float) -> dict[str, Any]:
    return {"scores": x, "softcap": cap} if op in ROW_OPS else {"x": x, "cap": cap}


def _capped(logits: Tensor, cap: float) -> Tensor:
    return torch.tanh(logits / cap) * cap if cap else logits


def _softmax(logits: Tensor, cap: float) -> Tensor:
    return _capped(logits, cap).masked_fill(logits == -torch.inf, -torch.inf).softmax(-1).nan_to_num()


IN_FLOAT32 = {"softcap": _capped, "softmax": _softmax}  # with torch's own functions


@dataclass(frozen=True)
class LogitsProblem:
    index: int
    op: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: str = "contiguous"
    cap: float = 0.0

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.shape)) or "0d"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.index}-{self.op}-{dtype}-{sizes}-{self.layout}-cap{self.cap:g}"

    def call(self, x: Tensor) -> dict[str, Any]:
        """The arguments of the operator."""
        return keywords(self.op, x, self.cap)


@dataclass(frozen=True)
class LogitsCase:
    problem: LogitsProblem
    values: Tensor
    operand: Operand

    def run(self, device: str) -> Tensor:
        """The result of torch_fattn, on the CPU."""
        base, view = self.operand.on(device)
        before = base.cpu().clone()
        result: Tensor = getattr(torch.ops.fattn, self.problem.op)(**self.problem.call(view))
        assert same_bits(base.cpu(), before), "the operand was written"
        assert result.is_contiguous()
        return result.cpu()

    def assert_close(self, result: Tensor) -> None:
        """At most twice as far from float64 as torch's own functions in float32, rounded; NaN and 0 where the
        contract has them."""
        problem = self.problem
        exact = getattr(reference, problem.op)(**problem.call(self.values))
        assert result.dtype == problem.dtype and result.shape == exact.shape
        numbers = exact.isfinite()
        assert torch.equal(result.isnan(), exact.isnan()), "NaN in another place"
        assert torch.equal(result.double()[exact.isinf()], exact[exact.isinf()])
        if problem.op == "softmax":
            assert torch.all(result[exact == 0] == 0), "a hidden entry weighs exactly 0"
        in_float32 = IN_FLOAT32[problem.op](self.values.float(), problem.cap)
        theirs = (in_float32.to(problem.dtype).double() - exact)[numbers].abs().amax() if numbers.any() else 0
        error = (result.double() - exact)[numbers].abs()
        limit = 2 * float(theirs) + 1e-6 * max(1.0, problem.cap)
        assert not error.numel() or error.max() <= limit, f"error {error.max():.3g} > {limit:.3g}"


def draw(count: int, seed: int = 0) -> list[LogitsProblem]:
    """Every pair of op and layout comes up again and again; a few rows are long."""
    chance = random.Random(seed)
    problems = []
    for index in range(count):
        op = LOGITS_OPERATORS[index % len(LOGITS_OPERATORS)]
        layout = LAYOUTS[index // len(LOGITS_OPERATORS) % len(LAYOUTS)]
        columns = chance.choice(LONG if index % 11 == 10 else COLUMNS)
        if layout == "many_dims":
            shape: tuple[int, ...] = (2, 1, 3, 2, 2, 2, 3, min(columns, 300))
        else:
            outer = [chance.choice((1, 2, 3, 5)) for _ in range(chance.randrange(4))]
            shape = (*outer, columns) if math.prod(outer) * columns < 2**17 else (2, columns)
        cap = chance.choice((0.5, 5.0, 30.0)) if op not in ROW_OPS or chance.random() < 0.4 else 0.0
        dtype = DTYPES[index // len(LOGITS_OPERATORS) % 3]
        problems.append(LogitsProblem(index, op, dtype, shape, layout, cap))
    return problems


def build(problem: LogitsProblem, seed: int = 0) -> LogitsCase:
    generator = torch.Generator().manual_seed(seed * 1000 + problem.index)
    values = torch.randn(problem.shape, generator=generator) * 4
    if values.dim():
        rows = values.view(-1, values.shape[-1])  # of every kind, if there are enough
        rows[0] -= 300  # whose weights underflow unless they are taken by their largest
        for row, entry in enumerate((-torch.inf, None, torch.nan, torch.inf)):
            if entry is not None and row < len(rows):
                rows[row, torch.randint(rows.shape[1], (), generator=generator)] = entry
        rows[4:5, -1] = 3e4
        if len(rows) > 1:
            rows[1] = -torch.inf
    values = values.to(problem.dtype)
    operand = lay_out(values, problem.layout)
    return LogitsCase(problem, operand.of(operand.base).clone(), operand)


def lay_out(values: Tensor, layout: str) -> Operand:
    """Puts the tensor into a storage with NaN between its elements."""
    dims = range(values.dim())
    padded = {"offset": 8, "gaps": dict.fromkeys(dims, 4)}  # on vector boundaries, if the sizes are
    ways: dict[str, dict[str, Any]] = {
        "offset": {"offset": 3},
        "permuted": {"order": dims[::-1]},
        "padded": padded,
        "many_dims": padded,
        "every_other": {"offset": 1, "step": 2},
        "expanded": {"expanded": 0 if values.dim() > 1 else None},
    }
    return strided(values.shape, values.dtype, **ways.get(layout, {})).holding(values)


def arguments(problem: LogitsProblem) -> tuple[dict[str, Any], LogitsCase]:
    """For a launch without the extension: the operand, as a plan names it, and a result full of NaN."""
    case = build(problem)
    view = case.operand.of(case.operand.base)
    out = torch.full(problem.shape, torch.nan, dtype=problem.dtype)
    return {"logits": view, "out": out}, case
