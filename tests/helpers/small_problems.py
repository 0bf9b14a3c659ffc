"""Small problems of every operator, changed in the fields that a test is about."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.conftest import counted_launches
from tests.helpers import problems
from tests.helpers.accuracy import assert_close
from tests.helpers.problems import PACKED, Case, Problem

Results = tuple[Tensor, Tensor]


def problem(op: str, dtype: torch.dtype = torch.float32, index: int = 0, **changes: Any) -> Problem:
    """Two sequences. The batch and the largest lengths follow from `q_lens` and `seq_lens`."""
    fields: dict[str, Any] = {"batch": 2, "q_heads": 4, "kv_heads": 2, "q_len": 20, "kv_len": 37}
    fields |= {"head_dim": 64, "block_size": 16 if op.startswith("paged") else 0}
    if op != "prefill":
        fields |= {"q_len": 4, "kv_len": 96, "seq_lens": (61, 96)}
    if op in PACKED:
        fields |= {"q_len": 30, "q_lens": (30, 1), "causality": "bottom_right"}
    if rows := changes.get("q_lens"):
        fields |= {"batch": len(rows), "q_len": max(rows)}
    if keys := changes.get("seq_lens"):
        fields |= {"batch": len(keys), "kv_len": max(1, *keys)}
    fields |= changes
    block = max(fields["block_size"], 1)
    fields["kv_len"] = -(-fields["kv_len"] // block) * block
    fields.setdefault("value_dim", fields["head_dim"])
    return Problem(index=index, op=op, dtype=dtype, **fields)


def run(case: Case, device: str) -> Results:
    out, lse = getattr(torch.ops.fattn, case.problem.op)(**case.arguments(device)[0])
    return out.cpu(), lse.cpu()


def check(problem: Problem, device: str = "mps", *, kernels: tuple[str, ...] = ()) -> Results:
    """Runs the problem, with NaN wherever nothing may look, and compares it with float64. `kernels`: those
    that run, each once, unless any may."""
    case = problems.build(problem)
    with counted_launches() as launches:
        results = run(case, device)
    assert not kernels or launches == (dict.fromkeys(kernels, 1) if device == "mps" else {})
    assert_close(case, *results)
    return results


def with_values(case: Case, **tensors: Tensor) -> Case:
    """The case with other numbers in dense, contiguous operands."""
    for name, tensor in tensors.items():
        case.clean[name] = tensor
        case.operands[name] = problems.lay_out(tensor, "contiguous")
    return case


def row_of(case: Case, operand: str, place: int) -> Tensor:
    """That key, value or scales of the first sequence, `[kv_heads, ..]`, in the memory of the operand."""
    paged = case.problem.block_size > 0
    side = case.operands[f"{operand}_cache" if paged and operand in ("key", "value") else operand]
    if not paged:
        return side.of(side.base)[0, :, place]
    table = case.operands["block_tables"]
    block, slot = divmod(place, case.problem.block_size)
    return side.of(side.base)[int(table.of(table.base)[0, block]), slot]
