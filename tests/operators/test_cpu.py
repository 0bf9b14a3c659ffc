"""The fallback in plain PyTorch: its parts that the tests of all devices do not reach."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import drawing, problems
from tests.helpers.accuracy import assert_close

PROBLEMS = drawing.draw(60, seed=2)
CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)


@pytest.mark.host_only
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_all_sequences_at_once(problem: problems.Problem) -> None:
    """On CPU tensors, with the kernel registered for CUDA."""
    case = problems.build(problem, seed=2)
    arguments, bases = case.arguments("cpu")
    before = {name: base.clone() for name, base in bases.items()}
    out, lse = getattr(torch.ops.fattn, problem.op).default.redispatch(CUDA, **arguments)
    assert_close(case, out, lse)
    for name, base in bases.items():
        assert torch.equal(base.view(torch.uint8), before[name].view(torch.uint8)), f"{name} was written"


@pytest.mark.parametrize("wrong", ["head_dim", "option"])
def test_refusals_are_the_same(wrong: str) -> None:
    """A refusal does not depend on the device."""
    messages = []
    for device in ("cpu", "mps"):
        query = torch.randn(1, 2, 3, 60 if wrong == "head_dim" else 64, device=device)
        options = {"window_right": -3} if wrong == "option" else {}
        with pytest.raises((ValueError, NotImplementedError)) as caught:
            torch.ops.fattn.prefill(query, query, query, **options)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
