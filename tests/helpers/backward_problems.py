"""Random problems of the backwards: a problem of a prefill, and the gradients of its results."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bench.cases.calls import REMAINDER_SCALE
from tests.helpers import drawing, problems
from tests.helpers.layouts import Operand, lay_out, packed, spread
from tests.helpers.problems import LAYOUTS, TENSORS, Case, Problem, drawn_values
from torch_fattn import reference
from torch_fattn.operators.backward import Gradients

OPS = ("prefill", "varlen_prefill")
NAMES = ("query", "key", "value", "sinks", "alibi_slopes")
MOST_WORK = 3e6  # multiply-adds of the forward; the backward has three and a half times as many
MOST_DIM = 256
SHARP = 8.0
# What is passed as the forward's result: none, in the dtype of the operands, the same with the remainder of
# 16 bits, or without rounding.
OUTS = ("none", "rounded", "remainder", "float32")


@dataclass(frozen=True)
class BackwardProblem:
    index: int
    forward: Problem
    grad_lse: bool = False
    out: str = "none"
    grad_layout: str = "contiguous"

    def __str__(self) -> str:
        return f"{self.forward}-out_{self.out}{'-lse' if self.grad_lse else ''}"

    @property
    def op(self) -> str:
        return f"{self.forward.op}_backward"


@dataclass
class BackwardCase:
    """`grad_out` `[B, Hq, Lq, Dv]` and `grad_lse` `[B, Hq, Lq]` or None have no NaN, and 0 in rows that do
    not exist. `exact` is in the shapes of the operator."""

    problem: BackwardProblem
    forward: Case
    operands: dict[str, Operand]
    grad_out: Tensor
    grad_lse: Tensor | None
    exact: Gradients

    def arguments(self, device: str | torch.device) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Keyword arguments of the op on that device, and the storages behind them."""
        arguments, bases = self.forward.arguments(device)
        for name, operand in self.operands.items():
            bases[name], arguments[name] = operand.on(device)
        return {"grad_lse": None, "out": None, **arguments}, bases

    @property
    def all_operands(self) -> dict[str, Operand]:
        return self.forward.operands | self.operands


def draw(count: int, seed: int = 0) -> list[BackwardProblem]:
    rng = random.Random(f"backward {seed}")
    drawn = drawing.draw(count, seed, ops=("prefill", *OPS), work=MOST_WORK, of=12)
    return [_with_gradients(problem, rng) for problem in drawn]


def _with_gradients(problem: Problem, rng: random.Random) -> BackwardProblem:
    if problem.q_len < 8 and problem.kv_len > 400:  # for which eight rows are multiplied
        lengths = problem.seq_lens and tuple(length // 4 for length in problem.seq_lens)
        problem = replace(problem, kv_len=problem.kv_len // 4, seq_lens=lengths)
    if max(problem.head_dim, problem.value_dim) > MOST_DIM:
        problem = replace(problem, head_dim=rng.choice((200, 256)), value_dim=rng.choice((24, 256)))
    return BackwardProblem(
        index=problem.index,
        forward=replace(problem, sharpness=rng.choice((1.0, 1.0, 1.0, SHARP))),
        grad_lse=rng.random() < 0.4,
        out=rng.choice([out for out in OUTS if out != "remainder" or problem.dtype != torch.float32]),
        grad_layout=rng.choice(LAYOUTS),
    )


def build(problem: BackwardProblem, seed: int = 0, forward: Case | None = None) -> BackwardCase:
    """The numbers of a problem: NaN wherever nothing may look. `forward`: the numbers of the forward."""
    p = problem.forward
    case = problems.build(p, seed) if forward is None else forward
    generator = torch.Generator().manual_seed(seed * 100003 + problem.index + 7)
    rows = (p.batch, p.q_heads, p.q_len)
    exist = torch.arange(p.q_len) < torch.tensor(p.rows)[:, None, None]  # [B, 1, Lq]
    grad_out = drawn_values((*rows, p.value_dim), p.dtype, problem.grad_layout, generator)
    grad_lse = torch.randn(rows, generator=generator) if problem.grad_lse else None

    arguments = clean_arguments(case)
    results = getattr(reference, p.op)(**arguments)
    of_rows = {"grad_out": grad_out, "grad_lse": grad_lse}
    clean = {name: None if each is None else pack_rows(p, each) for name, each in of_rows.items()}
    exact = getattr(reference, problem.op)(**clean, out=results[0], lse=results[1], **arguments)

    out, lse = results[0].float().contiguous(), _poisoned(p, results[1].float())
    operands = {"lse": spread(lse)}
    if p.q_lens is None:
        operands["grad_out"] = lay_out(grad_out, problem.grad_layout)
    else:
        operands["grad_out"] = packed(grad_out, p.q_lens, p.spare_rows, problem.grad_layout)
    if problem.out != "none":
        saved = out if problem.out == "float32" else out.to(p.dtype)
        operands["out"] = spread(saved)
        if problem.out == "remainder":
            operands["out_remainder"] = spread(remainder_of(out, saved))
    if clean["grad_lse"] is not None:
        operands["grad_lse"] = spread(_poisoned(p, clean["grad_lse"]))
    masked = None if grad_lse is None else grad_lse.masked_fill(~exist, 0.0)
    return BackwardCase(problem, case, operands, grad_out.masked_fill(~exist[..., None], 0.0), masked, exact)


def remainder_of(out: Tensor, saved: Tensor) -> Tensor:
    return ((out - saved) * REMAINDER_SCALE).to(saved.dtype)


def as_launched(arguments: dict[str, Any]) -> dict[str, Any]:
    """The operator gives its kernels a contiguous lse, its gradient likewise, and contiguous rows of `out`
    and its remainder; here there is NaN between them."""
    launched = dict(arguments)
    for name in ("lse", "grad_lse"):
        if launched[name] is not None:
            launched[name] = launched[name].contiguous()
    for name in ("out", "out_remainder"):
        if (rows := launched.get(name)) is not None:
            padded = rows.new_full((*rows.shape[:-1], rows.shape[-1] + 3), torch.nan)
            launched[name] = padded[..., : rows.shape[-1]].copy_(rows)
    return launched


def clean_arguments(case: Case) -> dict[str, Any]:
    """The arguments of the forward without NaN, for the reference."""
    p, clean = case.problem, case.clean
    arguments = {name: clean[name] for name in TENSORS if name in clean} | case.options
    if p.q_lens is None:
        arguments |= {n: clean[n] for n in ("query", "key", "value", "attn_mask") if n in clean}
        return arguments | ({} if p.seq_lens is None else {"seq_lens": torch.tensor(p.seq_lens)})
    arguments |= {
        name: case.operands[name].of(case.operands[name].base) for name in ("cu_seqlens_q", "cu_seqlens_k")
    }
    arguments |= {name: pack(clean[name], p.lengths, p.spare_rows) for name in ("key", "value")}
    return arguments | {"query": pack_rows(p, clean["query"])}


def pack_rows(problem: Problem, rows: Tensor) -> Tensor:
    """`[B, Hq, Lq, ..]` as the operator takes it: the same, or packed, `[T, Hq, D]` or `[Hq, T]`."""
    if problem.q_lens is None:
        return rows
    if rows.dim() == 3:
        return pack(rows[..., None], problem.q_lens, problem.spare_rows)[..., 0].T
    return pack(rows, problem.q_lens, problem.spare_rows)


def pack(rows: Tensor, lengths: tuple[int, ...], spare: int) -> Tensor:
    """`[B, H, L, D]` to `[T, H, D]`, with `spare` rows of 0 at the end."""
    parts = [rows[b, :, :length] for b, length in enumerate(lengths)]
    return torch.cat([*parts, rows.new_zeros(rows.shape[1], spare, rows.shape[3])], dim=1).transpose(0, 1)


def _poisoned(problem: Problem, numbers: Tensor) -> Tensor:
    """lse or its gradient with NaN in rows of no sequence."""
    if problem.q_lens is None or problem.spare_rows == 0:
        return numbers
    numbers = numbers.clone()
    numbers[:, -problem.spare_rows :] = torch.nan
    return numbers
