"""rotary and rotary_write: the float64 reference, and the bits of transformers' functions and of
`cache_write`. What rotary_write has in common with it is in test_cache_write.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_fattn
from tests.conftest import Checked, counted_launches
from tests.helpers import rotary_problems
from tests.helpers.cache_problems import assert_same_memory
from tests.helpers.rotary_problems import RotaryProblem, assert_close, of_rotary, written
from tests.helpers.tensors import same_bits, tensors_in
from torch_fattn import reference

PROBLEMS = rotary_problems.draw(60)
ORDERS = ("forward", "reverse", "random")  # of the threads


def run_in_poison(function: Callable[..., Any], arguments: dict[str, Any]) -> list[Tensor]:
    """The results, in memory that held NaN: the allocator returns that of the results of a call before."""
    for each in tensors_in(function(**arguments)):
        each.fill_(torch.nan)
    del each
    return [each.cpu() for each in tensors_in(function(**arguments))]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_problem(problem: RotaryProblem, device: str, checked: Checked) -> None:
    case = rotary_problems.build(problem)
    arguments, bases = case.arguments(device)
    with checked(order=ORDERS[problem.index % 3]), counted_launches() as launches:
        out, key = run_in_poison(torch_fattn.rotary, of_rotary(arguments))
        [again] = run_in_poison(torch_fattn.rotary_write, arguments)
    assert launches == ({"fattn_rotary": 4} if device == "mps" and problem.heads + problem.kv_heads else {})
    on_cpu, of_reference = case.arguments("cpu")
    exact_out, exact_key = reference.rotary(**of_rotary(on_cpu))
    assert_close(out, exact_out, problem, "query_norm" in arguments)
    assert_close(key, exact_key, problem, "key_norm" in arguments)
    assert same_bits(again, out) and again.stride() == out.stride()
    assert_same_memory(bases, written(case, key))
    assert same_bits(reference.rotary_write(**on_cpu), exact_out)
    assert_same_memory(of_reference, written(case, exact_key.to(problem.dtype)))


# ---- transformers' functions


def of_model(name: str) -> Any:
    return pytest.importorskip(f"transformers.models.{name}.modeling_{name}")


# Function, style, share of the columns, whether a column of the table is of a pair.
MODELS = {
    "llama": ("apply_rotary_pos_emb", "halves", 1.0, False),
    "glm4_moe": ("apply_rotary_pos_emb", "halves", 0.5, False),
    "helium": ("apply_rotary_pos_emb", "pairs", 1.0, False),
    "glm4": ("apply_rotary_pos_emb", "pairs", 0.5, False),
    "deepseek_v3": ("apply_rotary_pos_emb_interleave", "pairs_to_halves", 1.0, False),
    "gpt_oss": ("apply_rotary_pos_emb", "halves", 1.0, True),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model", MODELS)
def test_bits_of_transformers(model: str, dtype: torch.dtype, device: str) -> None:
    name, style, share, narrow = MODELS[model]
    dim, width = 64, int(64 * share)
    query, key = (torch.randn(2, h, 5, dim).to(dtype) for h in (4, 2))
    angles = (torch.arange(5)[:, None] + 7) * 1e4 ** -(torch.arange(width // 2) * 2 / width)
    both = angles.mT.contiguous().mT if narrow else torch.cat((angles, angles), -1)  # GPT-OSS transposes it
    for table_dtype in (dtype, torch.float32) if model == "llama" else (dtype,):
        tables = [(table[None] * 1.3).to(table_dtype) for table in (both.cos(), both.sin())]
        expected = getattr(of_model(model), name)(query, key, *tables)
        operands = (each.to(device) for each in (query, key, *tables))
        mine = torch_fattn.rotary(*operands, style=style, rotary_dim=width if narrow else None)
        assert all(torch.equal(a.cpu(), b.to(dtype)) for a, b in zip(mine, expected, strict=True)), (
            table_dtype
        )
