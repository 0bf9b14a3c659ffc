"""cache_write: exact bits in every format and layout; and what rotary_write has in common with it: dropped
tokens, operands that alias the caches, and mutated arguments in torch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_fattn
from tests.conftest import Checked, counted_launches, needs_emulator
from tests.helpers import cache_problems
from tests.helpers.cache_problems import WriteCase, WriteProblem, assert_written
from tests.helpers.tensors import same_bits
from tests.helpers.wrong_calls import refusal, valid
from torch_fattn import reference

PROBLEMS = cache_problems.draw(120)
ORDERS = ("forward", "reverse", "random")  # of the threads
of_both = pytest.mark.parametrize("op", ["cache_write", "rotary_write"])


def with_slots(op: str, device: str, *slots: int) -> dict[str, Any]:
    """A valid call in which the first tokens have these slots, and the others are dropped."""
    arguments = valid(op, device)
    arguments["slot_mapping"] = torch.full_like(arguments["slot_mapping"], -1)
    arguments["slot_mapping"].view(-1)[: len(slots)] = torch.tensor(slots)
    return arguments


def written(case: WriteCase, device: str) -> dict[str, Tensor]:
    """All memory that the call was given, afterwards."""
    arguments, bases = case.arguments(device)
    torch_fattn.cache_write(**arguments)
    return {name: base.cpu() for name, base in bases.items()}


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_problem(problem: WriteProblem, device: str, checked: Checked) -> None:
    case = cache_problems.build(problem)
    with checked(order=ORDERS[problem.index % 3]), counted_launches() as launches:
        memory = written(case, device)
    assert launches == ({"fattn_cache_write": 1} if device == "mps" else {})
    assert_written(case, memory)


@needs_emulator
@of_both
def test_two_tokens_with_one_slot_are_a_race(op: str, checked: Checked) -> None:
    """The control of the random problems: the findings are loud."""
    with pytest.raises(RuntimeError, match="race"), checked():
        getattr(torch_fattn, op)(**with_slots(op, "mps", 3, 3, 1))


# ---- which slots are written


@of_both
@pytest.mark.parametrize(
    ("slots", "words"),
    [
        ((3, -1, 8), ["slot_mapping[2]", "8", "num_blocks * block_size = 8"]),
        ((2**40, 1, 2), ["slot_mapping[0]", str(2**40)]),
        ((5, -1, 5), ["slot_mapping[0] and [2]", "both 5"]),
    ],
)
def test_bad_slots_raise_when_asked(
    op: str, slots: tuple[int, ...], words: list[str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FATTN_CHECK", "1")
    getattr(torch_fattn, op)(**valid(op, device))
    arguments = with_slots(op, device, *slots)
    before = arguments["key_cache"].cpu().clone()
    with refusal(f"fattn.{op}", ValueError, *words):
        getattr(torch_fattn, op)(**arguments)
    assert torch.equal(arguments["key_cache"].cpu(), before)


def test_past_2_to_the_31_elements() -> None:
    """int8, to stay at 2.4 GB; untouched memory is free if the system overcommits."""
    blocks, block_size, dim = 2**17, 32, 576
    pools = [torch.empty(blocks, block_size, 1, d, dtype=torch.int8, device="mps") for d in (dim, 8)]
    assert pools[0].numel() > 2**31
    scales = [torch.empty(blocks, block_size, 1, device="mps") for _ in pools]
    last = blocks * block_size - 1
    slots = torch.tensor([last, 7, last - block_size])
    rows = [torch.randn(3, 1, d) for d in (dim, 8)]
    memory = [each.flatten(0, 1) for each in (*pools, *scales)]
    for slot in slots.tolist():
        for each in memory:
            each[slot].zero_()
    torch_fattn.cache_write(
        *(r.to("mps") for r in rows), *pools, slots.to("mps"), key_scales=scales[0], value_scales=scales[1]
    )
    exact = zip(*(reference.quantise(row, "int8") for row in rows), strict=True)
    for mine, theirs in zip(memory, itertools.chain(*exact), strict=True):
        assert theirs is not None
        assert torch.equal(torch.stack([mine[slot].cpu() for slot in slots.tolist()]), theirs)


@pytest.mark.parametrize("op", ["cache_write", "cache_write int8", "rotary_write"])
def test_operands_that_lie_in_a_cache(op: str, device: str, checked: Checked) -> None:
    """They are read before anything is written."""
    operands = valid(op, device)
    if op == "rotary_write":
        operands |= {f"{name}_norm": torch.randn(64, device=device) for name in ("query", "key")}
    written = [name for name in operands if name.endswith(("_cache", "_scales"))]
    names = operands.keys() - {*written, "kv_format"}
    for name, home in itertools.product(names, written[::2]):
        results = []
        for copies in (False, True):
            arguments = operands | {each: operands[each].repeat_interleave(64, 0) for each in written}
            memory = arguments[home].flatten().view(torch.uint8)
            place = memory[: operands[name].nbytes].view(operands[name].dtype).view(operands[name].shape)
            place.copy_(operands[name])
            arguments[name] = place.clone() if copies else place
            with checked():
                out = getattr(torch_fattn, op.split()[0])(**arguments)
            results.append([arguments[each] for each in written] + [out] * (out is not None))
        assert same_bits(*results), (name, home)


# ---- what torch sees


@of_both
def test_gradients(op: str, device: str) -> None:
    arguments = valid(op, device)
    cache = arguments["key_cache"].zero_()
    arguments["key"].requires_grad_()
    version = cache._version
    getattr(torch_fattn, op)(**arguments)
    assert cache._version == version + 1 and not cache.requires_grad
    arguments["value_cache"].requires_grad_()
    before = cache.cpu().clone()
    arguments["slot_mapping"] = arguments["slot_mapping"] - 1
    with pytest.raises(RuntimeError, match=rf"{op}: value_cache requires grad.*\.detach\(\)"):
        getattr(torch_fattn, op)(**arguments)
    assert torch.equal(cache.cpu(), before)
    with torch.no_grad():
        getattr(torch_fattn, op)(**arguments)
    assert not torch.equal(cache.cpu(), before)
