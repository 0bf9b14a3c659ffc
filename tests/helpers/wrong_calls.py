"""Valid calls, and the faults that make each of them wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.conftest import counted_launches
from tests.helpers import cache_problems, rotary_problems
from tests.helpers.problems import OPTIONS
from torch_fattn import reference
from torch_fattn.inspection.sizes import linear_shapes
from torch_fattn.operators import LINEAR, ROTARY

Arguments = dict[str, Any]
Change = Callable[[Arguments], Arguments]


class Fault(NamedTuple):
    """A change that makes a valid call wrong, and words of the error: the value and the limit."""

    what: str
    change: Change
    words: tuple[str, ...]
    error: type[Exception]


def fault(what: str, change: Change, *words: str, error: type[Exception] = ValueError) -> Fault:
    return Fault(what, change, words, error)


@contextmanager
def refusal(name: str, error: type[Exception], *words: str) -> Iterator[None]:
    """Checks that a call launches nothing and raises an error with its name and these words, on one line."""
    with counted_launches() as launches, pytest.raises(error) as caught:
        yield
    sentence = str(caught.value)
    assert type(caught.value) is error and launches == {}
    assert sentence.startswith(f"{name}: ") and "\n" not in sentence and len(sentence) < 300, sentence
    assert all(word in sentence for word in words), sentence


mistyped = partial(fault, error=TypeError)
unsupported = partial(fault, error=NotImplementedError)


def valid(op: str, device: str = "mps") -> Arguments:
    """Arguments of a call that works; cache_write may be followed by a format."""
    if op in ROTARY:
        return rotary_problems.valid(op, device)
    if op.startswith("cache_write"):
        return cache_problems.valid(op.partition(" ")[2] or "float", device)
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    def int32(*values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32).to(device)

    if op in LINEAR:
        schema = getattr(torch.ops.fattn, op).default._schema
        shapes = linear_shapes(op, torch.float32, (2, 3), (2, 16), (4, 24))
        arguments = {a.name: randn(*shapes[a.name][1:]) for a in schema.arguments if a.name in shapes}
        return arguments | {"slots": int32(1, 0)}
    if op.endswith("_backward"):
        forward = op.removesuffix("_backward")
        results = getattr(reference, forward)(**valid(forward, "cpu"))
        named = {"out": results[0].float().to(device), "lse": results[1].float().to(device)}
        named |= {f"grad_{name}": randn(*result.shape) for name, result in named.items()}
        return named | valid(forward, device)
    if op == "prefill":
        return {"query": randn(2, 4, 9, 64), "key": randn(2, 2, 24, 64), "value": randn(2, 2, 24, 40)}
    if op == "rms_norm":
        return {"x": randn(3, 5, 64), "weight": randn(64), "gate": randn(3, 5, 64)}
    if op == "merge":
        return {"outs": randn(3, 2, 4, 5, 64), "lses": randn(3, 2, 4, 5)}
    if op == "varlen_prefill":
        arguments = {"query": randn(9, 4, 64), "key": randn(22, 2, 64), "value": randn(22, 2, 40)}
        arguments |= {"cu_seqlens_q": int32(0, 8, 9), "cu_seqlens_k": int32(0, 12, 20)}
        return arguments | {"max_seqlen_q": 8, "max_seqlen_k": 12}
    arguments = {"query": randn(2, 4, 2, 64), "seq_lens": int32(20, 32)}
    if op == "decode":
        return arguments | {"key": randn(2, 2, 32, 64), "value": randn(2, 2, 32, 40)}
    if op == "paged_prefill":
        arguments |= {"query": randn(9, 4, 64), "cu_seqlens_q": int32(0, 8, 9), "max_seqlen_q": 8}
        arguments["is_causal"] = True
    pools = {"key_cache": randn(5, 16, 2, 64), "value_cache": randn(5, 16, 2, 40)}
    return arguments | pools | {"block_tables": int32([3, 1], [0, 4])}


def changed(name: str, function: Callable[[Tensor], Tensor]) -> Change:
    return lambda a: {name: function(a[name])}


def sliced(name: str, *index: Any) -> Change:
    return changed(name, lambda x: x[index])


def on_cpu(name: str) -> Change:
    return changed(name, Tensor.cpu)


def cast(name: str, dtype: torch.dtype) -> Change:
    return changed(name, lambda x: x.to(dtype))


def zeros_for(name: str, *shape: int, device: str = "mps", **options: Any) -> Change:
    return lambda _: {name: torch.zeros(shape, device=device, **options)}


def option(**values: Any) -> Change:
    return lambda _: values


def without(*names: str) -> Change:
    return lambda _: dict.fromkeys(names)


def head_dim(dim: int, *names: str) -> Change:
    return lambda a: {n: a[n].new_zeros(*a[n].shape[:-1], dim) for n in names}


def int8_caches(dim: int) -> Change:
    def change(a: Arguments) -> Arguments:
        rows = {n: a[n].new_zeros(*a[n].shape[:-1], dim) for n in ("query", "key", "value")}
        scales = {f"{n}_scales": rows[n][..., 0].float() for n in ("key", "value")}
        return rows | {n: rows[n].to(torch.int8) for n in ("key", "value")} | scales

    return change


def int4_caches(a: Arguments) -> Arguments:
    return {n: a[n].new_zeros(2, 2, 32, 64).byte() for n in ("key", "value")} | {"kv_format": "int4"}


def columns_apart(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


def scales_of_halves(a: Arguments) -> Arguments:
    return {f"{name}_scales": a[f"{name}_cache"][..., 0].float() for name in ("key", "value")}


# Faults of several arguments, of layouts, and of tensors that a valid call lacks. The shapes, dtypes and
# devices of each argument are in tests/refusals/test_public_calls.py, and errors with advice in
# tests/helpers/refusals.
def one_value_head(a: Arguments) -> Arguments:
    return {"value": a["value"][:, :1], "value_cache": a["value_cache"][:, :, :1]}


WRONG: dict[str, list[Fault]] = {
    "prefill": [
        unsupported("Dv above 576", head_dim(640, "value"), "640", "576"),
        fault("mask on the CPU", zeros_for("attn_mask", 9, 24, device="cpu"), "attn_mask", "cpu"),
        fault("distances from far away",
              lambda _: {"alibi_slopes": torch.ones(4, device="mps"), "q_offset": -(2**40)},
              "q_offset -1099511627776", "1073741824"),
        fault("seq_lens and q_offset",
              lambda a: zeros_for("seq_lens", 2, dtype=torch.int32)(a) | {"q_offset": 3},
              "q_offset 3 came with seq_lens", "pass one of them"),
        fault("blocks on the CPU", zeros_for("block_mask", 1, 1, 1, 1, device="cpu", dtype=torch.bool),
              "block_mask", "cpu"),
        fault("blocks for all rows and keys", zeros_for("block_mask", 1, 1, 2, 1, dtype=torch.bool),
              "block_mask has shape [1, 1, 2, 1]", "[2, 4, 1, 1]"),
        fault("block size without blocks", lambda _: {"block_size": (128, 16)}, "has 16", "from 32 to 256"),
    ],
    "decode": [
        unsupported("int8 of D above 576", int8_caches(584), "584", "576"),
        mistyped("half scales of int8",
                 lambda a: int8_caches(64)(a) | {"key_scales": torch.ones(2, 2, 32, device="mps").half()},
                 "key_scales", "float16", "float32"),
        fault("scales of another shape",
              lambda a: int8_caches(64)(a) | {"value_scales": torch.ones(2, 1, 32, device="mps")},
              "value_scales", "shape"),
        fault("int4 of another head size", int4_caches,
              "query has head_dim 64 and key has 64 bytes (128 columns of int4)"),
        fault("tree mask on the CPU", zeros_for("tree_mask", 2, dtype=torch.int64, device="cpu"), "tree_mask",
              "cpu"),
        fault("sinks on the CPU", zeros_for("sinks", 4, device="cpu"), "sinks", "cpu"),
    ],
    "paged_decode": [
        unsupported("D above 576", head_dim(1024, "query", "key_cache", "value_cache"), "1024", "576"),
        fault("tree mask of another length", zeros_for("tree_mask", 2, 3, dtype=torch.int64), "tree_mask",
              "[2, 3]", "[2, 2]"),
    ],
    "merge": [],
    "paged_prefill": [],
    "varlen_prefill": [
        unsupported("D above 576", head_dim(584, "query", "key"), "584", "576"),
        fault("far q_offset", option(q_offset=2**40, window_left=3), "q_offset", "position"),
    ],
    "prefill_backward": [
        unsupported("Dv above 256", head_dim(320, "value", "out", "grad_out"), "320", "256"),
        fault("far q_offset", option(q_offset=2**40, window_left=3), "q_offset", "position"),
    ],
    "varlen_prefill_backward": [
        fault("lse by rows", changed("lse", lambda x: x.mT), "lse", "[9, 4]", "[4, 9]"),
        unsupported("D above 256", head_dim(264, "query", "key"), "264", "256"),
    ],
    "cache_write": [
        fault("values of one head", one_value_head, "key has head count 2", "value has 1"),
        unsupported("D of 584", head_dim(584, "key", "key_cache"), "584", "576"),
        fault("overlapping slots",
              changed("value_cache", lambda x: x.as_strided((4, 2, 2, 96), (384, 190, 95, 1))), "value_cache",
              "share memory"),
        fault("columns apart", changed("key_cache", columns_apart), "key_cache", "contiguous"),
        fault("scales", scales_of_halves, "key_scales", "float16", "leave it out"),
    ],
    "cache_write int8": [
        fault("no scales", without("key_scales", "value_scales"), "int8", "key_scales"),
        mistyped("half scales", cast("key_scales", torch.float16), "float16", "float32"),
        fault("scales too few", sliced("value_scales", slice(3)), "[3, 2, 2]", "[4, 2, 2]"),
        fault("scales on the CPU", on_cpu("key_scales"), "key_scales", "cpu"),
        fault("expanded scales", changed("key_scales", lambda x: x[:1].expand(4, -1, -1)), "key_scales",
              "share memory"),
    ],
    "cache_write fp8_e4m3": [fault("format not named", option(kv_format="auto"), "uint8", "name it")],
    "cache_write int4": [
        fault("no scales", without("key_scales", "value_scales"), "int4", "key_scales"),
        fault("scales apart", changed("key_scales", columns_apart), "key_scales", "last two dimensions"),
        fault("half a group",
              lambda a: {"value": a["value"][..., :80], "value_cache": a["value_cache"][..., :40]},
              "head_dim 80", "int4", "32"),
        fault("scales of a larger head",
              lambda a: {"value": a["value"][..., :64], "value_cache": a["value_cache"][..., :32]},
              "[4, 2, 2, 3, 2]", "[4, 2, 2, 2, 2]"),
    ],
    "rotary": [
        fault("tables of two widths", sliced("sin", ..., slice(32)), "64", "32"),
        fault("a short norm", zeros_for("key_norm", 63), "key_norm", "63"),
        fault("norms on the CPU", zeros_for("query_norm", 64, device="cpu"), "query_norm", "cpu"),
        unsupported("D of 580", head_dim(580, "query", "key"), "580", "576"),
    ],
    "rotary_write": [
        fault("fewer value heads", one_value_head, "key has head count 2", "value has 1"),
        fault("Dv of 6", lambda a: {n: a[n][..., :6] for n in ("value", "value_cache")}, "value head_dim 6"),
        fault("a cache that overlaps itself", changed("key_cache", lambda x: x[:1].expand(4, -1, -1, -1)),
              "key_cache", "share memory"),
        mistyped("slots of int16", cast("slot_mapping", torch.int16), "slot_mapping", "int16"),
        fault("slots and starts", zeros_for("starts", 2, dtype=torch.int64), "slot_mapping and starts"),
        fault("scales", scales_of_halves, "key_scales", "float32", "leave it out"),
    ],
    "rms_norm": [
        fault("a short weight", zeros_for("weight", 63), "x has columns 64", "weight has 63"),
        mistyped("a weight of another dtype", lambda a: {n: a[n].half() for n in ("x", "gate")} |
                 {"weight": a["weight"].bfloat16()}, "weight is torch.bfloat16", "x torch.float16"),
        fault("a gate on the CPU", on_cpu("gate"), "gate", "cpu"),
    ],
    "gated_delta_rule": [
        unsupported("Dk of 264", lambda a: head_dim(264, "query", "key")(a) |
                    {"state": a["state"].new_zeros(2, 4, 264, 24)}, "264", "256"),
        mistyped("halves and brain floats", lambda a: {n: a[n].half() for n in ("query", "key", "value")} |
                 {"beta": a["beta"].bfloat16()}, "beta is torch.bfloat16", "query torch.float16"),
        fault("a state of another size", zeros_for("state", 2, 4, 16, 16), "[2, 4, 16, 16]",
              "[2, 4, 16, 24]"),
        fault("an expanded state", changed("state", lambda x: x[:1].expand(2, -1, -1, -1)), "share memory"),
        fault("heads of a state apart", changed("state", lambda x: x.new_zeros(2, 8, 16, 24)[:, ::2]),
              "last three dimensions"),
        mistyped("a state in halves", cast("state", torch.float16), "state is torch.float16", "float32"),
        mistyped("slots of int64", cast("slots", torch.int64), "slots is torch.int64", "int32"),
    ],
    "gated_delta_step": [
        unsupported("17 tokens", lambda a: {n: a[n][:, :1].repeat(1, 17, *[1] * (a[n].dim() - 2))
                                            for n in ("query", "key", "value", "z", "a", "b")}, "17", "16",
                    "use fattn.causal_conv1d, fattn.gated_delta_rule and fattn.rms_norm"),
        unsupported("Dv of 264", lambda a: head_dim(264, "value", "z", "state")(a) |
                    {"norm_weight": a["norm_weight"].new_zeros(264),
                     **{n: a[n].new_zeros(2 * 32 + 4 * 264, 4) for n in ("conv_weight",)},
                     **dict.fromkeys(("conv_bias", "conv_state_out")),
                     "conv_state": a["conv_state"].new_zeros(2, 2 * 32 + 4 * 264, 3)},
                    "264", "256"),
        fault("states that overlap", changed("conv_state", lambda x: x[:1].expand(2, -1, -1)), "conv_state",
              "share memory"),
        fault("columns too few", sliced("conv_state", ..., slice(2)), "[2, 160, 2]", "3",
              "allocate a column for each token that the next ones see"),
        fault("more states of one kind", changed("state", lambda x: x.repeat(2, 1, 1, 1)), "conv_state",
              "4", "2"),
        fault("counts on the CPU", zeros_for("counts", 2, device="cpu", dtype=torch.int32), "counts", "cpu"),
        mistyped("counts of int64", zeros_for("counts", 2, dtype=torch.int64), "counts", "int64"),
        fault("counts of three", zeros_for("counts", 3, dtype=torch.int32), "counts", "[3]", "[2]",
              "pass the number of tokens of each sequence"),
        fault("an unknown gate", option(gate="swish"), "swish", "silu"),
        fault("a negative eps", option(eps=-1.0), "eps -1"),
    ],
    "causal_conv1d": [
        unsupported("nine taps", lambda a: {"weight": a["weight"].new_zeros(96, 9),
                                            "state": a["state"].new_zeros(2, 96, 8)}, "9 taps"),
        fault("columns apart", changed("state", columns_apart), "state", "contiguous"),
    ],
}  # fmt: skip
for _name, _option in OPTIONS.items():
    for _op in _option.ops:
        for _value in _option.refused:
            _words = f"{_name} {_value:g}"
            WRONG[_op].append(fault(_words, option(**{_name: _value}), _words))
