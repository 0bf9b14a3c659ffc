"""cache_write: exact bits in every format and layout, dropped tokens, and an op that mutates its arguments
in torch. Its refusals are in tests/refusals/test_cache_write.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torch_fattn
from tests.conftest import Checked, counted_launches, needs_emulator
from tests.helpers import cache_problems
from tests.helpers.cache_problems import WriteCase, WriteProblem, assert_written, valid
from tests.helpers.wrong_calls import refusal
from torch_fattn import reference

PROBLEMS = cache_problems.draw(120)
ORDERS = ("forward", "reverse", "random")  # of the threads


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
def test_two_tokens_with_one_slot_are_a_race(checked: Checked) -> None:
    """The control of the test above: the findings are loud."""
    arguments = valid() | {"slot_mapping": torch.tensor([3, 3, 1], device="mps")}
    with pytest.raises(RuntimeError, match="race"), checked():
        torch_fattn.cache_write(**arguments)


# ---- which slots are written


@pytest.mark.parametrize("slots", [(-1, -1, -1), (8, 9, 2**31), (-(2**63), 2**63 - 1, 2**32)])
def test_invalid_slots_are_not_written(slots: tuple[int, ...], device: str, checked: Checked) -> None:
    arguments = valid("int8", device)
    tensors = {n: a for n, a in arguments.items() if isinstance(a, Tensor)}
    before = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
    with checked():
        torch_fattn.cache_write(**arguments | {"slot_mapping": torch.tensor(slots, device=device)})
    assert all(torch.equal(tensors[name].cpu(), before[name]) for name in tensors)
    torch_fattn.cache_write(**arguments)
    assert not torch.equal(tensors["key_cache"].cpu(), before["key_cache"])


@pytest.mark.parametrize(
    ("slots", "words"),
    [
        ((3, -1, 8), ["slot_mapping[2]", "8", "num_blocks * block_size = 8"]),
        ((2**40, 1, 2), ["slot_mapping[0]", str(2**40)]),
        ((5, -1, 5), ["slot_mapping[0] and [2]", "both 5"]),
    ],
)
def test_bad_slots_raise_when_asked(
    slots: tuple[int, ...], words: list[str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FATTN_CHECK", "1")
    arguments = valid(device=device)
    torch_fattn.cache_write(**arguments)
    before = arguments["key_cache"].cpu().clone()
    arguments["slot_mapping"] = torch.tensor(slots, device=device)
    with refusal("fattn.cache_write", ValueError, *words):
        torch_fattn.cache_write(**arguments)
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
    places = [(slot // block_size, slot % block_size) for slot in slots.tolist()]
    for pool in (*pools, *scales):
        for block, place in places:
            pool[block, place].zero_()
    torch_fattn.cache_write(
        *(r.to("mps") for r in rows), *pools, slots.to("mps"), key_scales=scales[0], value_scales=scales[1]
    )
    for row, pool, scale in zip(rows, pools, scales, strict=True):
        q, exact = reference.quantise(row, "int8")
        assert exact is not None
        for token, (block, place) in enumerate(places):
            assert torch.equal(pool[block, place].cpu(), q[token])
            assert torch.equal(scale[block, place].cpu(), exact[token])


def test_rows_that_lie_in_the_cache(device: str) -> None:
    """Tokens move within the pool: they are read before anything is written."""
    pools = [torch.randn(2, 4, 3, 16) for _ in range(2)]
    expected = [pool.clone() for pool in pools]
    for pool in expected:
        rows = pool.view(8, 3, 16)
        rows[[5, 4, 7]] = rows[[4, 5, 6]].clone()
    on_device = [pool.to(device) for pool in pools]
    keys, values = (pool.view(8, 3, 16)[4:7] for pool in on_device)
    torch_fattn.cache_write(keys, values, *on_device, torch.tensor([5, 4, 7], device=device))
    assert all(torch.equal(a.cpu(), b) for a, b in zip(on_device, expected, strict=True))


@pytest.mark.parametrize("kv_format", ["float", "int8", "int4"])
def test_a_value_that_is_the_first_columns_of_the_key(kv_format: str, device: str) -> None:
    """Multi-head latent attention: written once."""
    arguments = valid(kv_format, device)
    columns = 32 if kv_format != "int4" else 16
    arguments["value"] = arguments["key"][..., :32]
    arguments["value_cache"] = arguments["key_cache"][..., :columns]
    if kv_format != "float":
        scales = arguments["key_scales"]
        arguments["value_scales"] = scales[:, :, :, :1] if kv_format == "int4" else scales
    plan = torch_fattn.explain("cache_write", **arguments)
    assert plan.passes[0]["grid"][1] == 1
    alone = valid(kv_format, device)
    torch_fattn.cache_write(**arguments)
    torch_fattn.cache_write(**alone)
    for name in ("key_cache", "key_scales"):
        if name in arguments:
            mine, other = (x[name].cpu().view(torch.uint8) for x in (arguments, alone))
            assert torch.equal(mine, other)


# ---- what torch sees


def test_gradients(device: str) -> None:
    arguments = valid(device=device)
    cache = arguments["key_cache"].zero_()
    arguments["key"].requires_grad_()
    version = cache._version
    torch_fattn.cache_write(**arguments)
    assert cache._version == version + 1 and not cache.requires_grad
    arguments["value_cache"].requires_grad_()
    before = cache.cpu().clone()
    arguments["slot_mapping"] = arguments["slot_mapping"] - 1
    with pytest.raises(RuntimeError, match=r"value_cache requires grad.*\.detach\(\)"):
        torch_fattn.cache_write(**arguments)
    assert torch.equal(cache.cpu(), before)
    with torch.no_grad():
        torch_fattn.cache_write(**arguments)
    assert not torch.equal(cache.cpu(), before)


def test_a_graph_that_saved_the_cache_notices() -> None:
    arguments = valid(device="cpu")
    cache = arguments["key_cache"].zero_()
    weight = torch.ones(64, dtype=torch.float16, requires_grad=True)
    product = (cache * weight).sum()
    torch_fattn.cache_write(**arguments)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
