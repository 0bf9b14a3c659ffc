"""rotary and rotary_write: the float64 reference, and the bits of `cache_write`. What rotary_write has in
common with it is in test_cache_write.py; models are in transformers/test_rotation.py."""

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
# So many tokens that a simdgroup takes several heads, and more heads than one takes.
MANY = {"index": 60, "batch": 2, "length": 515, "heads": 9, "kv_heads": 9, "dims": (36, 24, 36, 0)}
PROBLEMS.append(RotaryProblem(**vars(PROBLEMS[0]) | MANY))
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
