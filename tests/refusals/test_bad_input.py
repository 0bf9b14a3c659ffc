"""Wrong calls: one clear sentence each, nothing launched or changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_fattn
from tests.conftest import counted_launches
from tests.helpers.accuracy import assert_lse_close
from tests.helpers.tensors import same_bits, tensors_in
from tests.helpers.wrong_calls import WRONG, Arguments, Fault, refusal, valid
from torch_fattn.flash_attn import flash_attn_func
from torch_fattn.operators import OPERATORS
from torch_fattn.runtime.options import defaults_of


def refusal_of(op: str, arguments: Arguments) -> tuple[type[Exception], str]:
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as caught:
        getattr(torch.ops.fattn, op)(**arguments)
    return type(caught.value), str(caught.value)


def fake(arguments: Arguments, mode: FakeTensorMode) -> Arguments:
    return {n: mode.from_tensor(a) if isinstance(a, Tensor) else a for n, a in arguments.items()}


def call(op: str, arguments: Arguments) -> tuple[Tensor, ...]:
    result = getattr(torch_fattn, op)(**arguments, **({"return_lse": True} if op in OPERATORS else {}))
    torch.mps.synchronize()
    return result


@pytest.mark.parametrize("case", WRONG)
def test_the_control_works(case: str) -> None:
    op = case.split()[0]
    with counted_launches() as launches:
        call(op, valid(case))
    assert launches
    arguments = valid(case)
    results = getattr(torch.ops.fattn, op)(**arguments)
    with FakeTensorMode() as mode:
        fakes = getattr(torch.ops.fattn, op)(**fake(arguments, mode))
    for one, real in zip(tensors_in(fakes), tensors_in(results), strict=True):
        assert (one.shape, one.stride(), one.dtype) == (real.shape, real.stride(), real.dtype)
        assert one.device == real.device


@pytest.mark.parametrize(
    ("case", "fault"),
    [
        pytest.param(case, fault, id=f"{case}-{fault.what}")
        for case, faults in WRONG.items()
        for fault in faults
    ],
)
def test_wrong_call(case: str, fault: Fault) -> None:
    op, arguments = case.split()[0], valid(case)
    arguments |= fault.change(arguments)
    before = {name: a.cpu().clone() for name, a in arguments.items() if isinstance(a, Tensor)}
    with refusal(f"fattn.{op}", fault.error, *fault.words):
        call(op, arguments)
    assert same_bits({name: arguments[name] for name in before}, before)
    with FakeTensorMode() as mode:
        refused = refusal_of(op, fake(arguments, mode))
    assert refused == refusal_of(op, arguments), "torch.compile and export see it word for word"


@pytest.mark.host_only
@pytest.mark.parametrize("order", [("cpu", "meta"), ("meta", "cpu")])
def test_meta_and_device_tensors_do_not_mix(order: tuple[str, str]) -> None:
    """The op must not return uninitialised memory."""
    query, key = (torch.randn(1, 2, 4, 16, device=device) for device in order)
    error, sentence = refusal_of("prefill", {"query": query, "key": key, "value": key})
    assert error is ValueError
    assert sentence == (
        f"fattn.prefill: key is on {order[1]} and query on {order[0]}; move key with .to(query.device)"
    )
    out, _ = torch.ops.fattn.prefill(query.to("meta"), key.to("meta"), key.to("meta"))
    assert out.is_meta


@pytest.mark.parametrize("order", [("cpu", "mps"), ("mps", "cpu")])
def test_tensors_on_the_cpu_move(order: tuple[str, str]) -> None:
    """The advice moves tensors to the device of the keys: a cache is larger than a query."""
    query, key = (torch.randn(1, 2, 4, 16, device=device) for device in order)
    stays, moves = ("key", "query") if order[0] == "cpu" else ("query", "key")
    for call in (
        torch_fattn.prefill,
        torch_fattn.decode,
        torch.compile(torch_fattn.prefill, backend="eager"),
    ):
        with pytest.raises(Exception, match=rf"; move {moves} with \.to\({stays}\.device\)"):
            call(query, key, key)
    assert call(query.to(key.device), key, key).device == key.device


@pytest.mark.parametrize(
    ("name", "value"),
    [*(("scale", x) for x in (0.0, -0.5, 1e-30, 1e30)), *(("softcap", x) for x in (1e-30, 1e30))],
)
def test_every_finite_scale_and_softcap_is_accepted(name: str, value: float) -> None:
    """As in F.scaled_dot_product_attention: a scale of 0 averages, a negative one reverses the order."""
    arguments = valid("prefill") | {name: value}
    if (name, value) == ("scale", 1e30):
        arguments["query"] = arguments["query"] * 1e-30
    out, lse = call("prefill", arguments)
    exact_out, exact_lse = torch_fattn.reference.prefill(**arguments)
    assert torch.allclose(out.cpu().double(), exact_out, atol=1e-5)
    assert_lse_close(lse.cpu(), exact_lse, torch.float32)


@pytest.mark.parametrize("function", [torch_fattn.prefill, torch_fattn.reference.prefill])
def test_an_unknown_option(function: Callable[..., Any]) -> None:
    name = {torch_fattn.prefill: "fattn.prefill"}.get(function, "torch_fattn.reference.prefill")
    with pytest.raises(TypeError) as caught:
        function(**valid("prefill"), causal=True)
    options = ", ".join(each for each in defaults_of("prefill") if each != "attn_mask")
    assert options.startswith("mask_map, block_mask, block_size, is_causal, q_offset, seq_lens, ")
    hint = "(did you mean is_causal?)"
    assert str(caught.value) == f"{name}: there is no option 'causal' {hint}; the options are {options}"


@pytest.mark.host_only
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: torch_fattn.softmax(x, dim=-1),
         "no argument 'dim' (it is always the last one); the arguments are scores, softcap"),
        (lambda x: torch_fattn.softmax(x, -1),
         "fattn.softmax: too many positional arguments; the arguments by position are scores"),
        (lambda x: torch_fattn.softcap(x, softcap=5.0), "no argument 'softcap' (did you mean cap?); "),
        (lambda x: torch_fattn.prefill(x, x),
         "fattn.prefill: missing a required argument: 'value'; the arguments by position are query, key, "),
        (lambda x: torch_fattn.decode(x, x, x, return_softmax_lse=True), "(did you mean return_lse?); "),
        (lambda x: torch_fattn.decode(x, x, x, softmax_scale=1.0), "(did you mean scale?); "),
        (lambda x: torch_fattn.paged_decode(x, x, x, page_table=x), "(did you mean block_tables?); "),
        (lambda x: torch_fattn.prefill(x, x, x, mask=x), "(did you mean attn_mask?); "),
        (lambda x: torch_fattn.paged_prefill(x, x, x, x, x, x, 3),
         "fattn.paged_prefill: missing a required argument: 'is_causal'; pass it by name, True or False"),
        (lambda x: flash_attn_func(x, x, x, return_softmax_lse=True),
         "(did you mean return_attn_probs?); the arguments are q, k, v, dropout_p, softmax_scale, causal, "),
        (lambda x: flash_attn_func(x, x, x, sinks=x[0]), "(did you mean learnable_sink?); "),
        (lambda x: torch_fattn.explain("decode", kv_lenght=3), "(did you mean kv_len?); the sizes are dtype"),
        (lambda x: torch_fattn.explain("prefill", causal=True), "(did you mean is_causal?); the sizes are"),
    ],
)  # fmt: skip
def test_a_missing_argument(call: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(TypeError) as caught:
        call(torch.randn(1, 2, 3, 16))
    assert message in str(caught.value)


def test_pools_that_interleave() -> None:
    """One tensor for both, as vLLM has it: other elements, so accepted."""
    arguments = valid("cache_write") | {"value": torch.randn(3, 2, 64, device="mps").half()}
    pool = torch.zeros(4, 2, 2, 2, 64, device="mps", dtype=torch.float16)
    arguments["key_cache"], arguments["value_cache"] = pool.unbind(2)
    torch_fattn.cache_write(**arguments)
    assert torch.equal(pool[3, 0].cpu(), torch.stack((arguments["key"][2], arguments["value"][2])).cpu())


@pytest.mark.host_only
def test_negated_rows() -> None:
    """They are accepted, as a negated cache is not."""
    plain, negated = valid("cache_write", "cpu"), valid("cache_write", "cpu")
    negated |= {name: torch._neg_view(-negated[name]) for name in ("key", "value")}
    torch_fattn.cache_write(**plain)
    torch_fattn.cache_write(**negated)
    for name in ("key_cache", "value_cache"):
        assert same_bits(plain[name], negated[name])
