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
from tests.helpers.problems import OPTIONS
from torch_fattn import reference

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
    """Arguments of a call that works."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    def int32(*values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32).to(device)

    if op.endswith("_backward"):
        forward = op.removesuffix("_backward")
        results = getattr(reference, forward)(**valid(forward, "cpu"))
        named = {"out": results[0].float().to(device), "lse": results[1].float().to(device)}
        named |= {f"grad_{name}": randn(*result.shape) for name, result in named.items()}
        return named | valid(forward, device)
    if op == "prefill":
        return {"query": randn(2, 4, 9, 64), "key": randn(2, 2, 24, 64), "value": randn(2, 2, 24, 40)}
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


def sliced(name: str, *index: Any) -> Change:
    return lambda a: {name: a[name][index]}


def on_cpu(name: str) -> Change:
    return lambda a: {name: a[name].cpu()}


def zeros_for(name: str, *shape: int, device: str = "mps", **options: Any) -> Change:
    return lambda _: {name: torch.zeros(shape, device=device, **options)}


def query_rows(count: int) -> Change:
    return lambda a: {"query": a["query"].repeat(1, 1, count, 1)[:, :, :count]}


def cast(name: str, dtype: torch.dtype) -> Change:
    return lambda a: {name: a[name].to(dtype)}


def option(**values: Any) -> Change:
    return lambda _: values


def without(*names: str) -> Change:
    return lambda _: dict.fromkeys(names)


def head_dim(dim: int, *names: str) -> Change:
    return lambda a: {n: torch.zeros(*a[n].shape[:-1], dim, device="mps") for n in names}


def int8_caches(dim: int) -> Change:
    def change(a: Arguments) -> Arguments:
        rows = {n: a[n].new_zeros(*a[n].shape[:-1], dim) for n in ("query", "key", "value")}
        scales = {f"{n}_scales": rows[n][..., 0].float() for n in ("key", "value")}
        return rows | {n: rows[n].to(torch.int8) for n in ("key", "value")} | scales

    return change


ALL = slice(None)
WRONG: dict[str, list[Fault]] = {
    "prefill": [
        fault("query of rank 3", sliced("query", 0), "query", "3"),
        fault("key of rank 3", sliced("key", 0), "key", "3"),
        fault("value of rank 5", sliced("value", None), "value", "5"),
        fault("batch sizes differ", sliced("key", slice(1)), "batch", "2", "1"),
        fault("key and value heads differ", sliced("value", ALL, slice(1)), "head", "2", "1"),
        fault("key and value lengths differ", sliced("value", ALL, ALL, slice(23)), "24", "23"),
        fault("head dims differ", sliced("key", ..., slice(56)), "head_dim", "64", "56"),
        fault("3 query heads on 2", sliced("query", ALL, slice(3)), "3", "2", "Hq % Hkv"),
        fault("D not a multiple of 8", head_dim(60, "query", "key"), "60", "8"),
        fault("Dv not a multiple of 8", head_dim(12, "value"), "12", "8"),
        fault("D of 0", head_dim(0, "query", "key"), "0", "8"),
        unsupported("D above 576", head_dim(584, "query", "key"), "584", "576"),
        unsupported("D above 576, and odd", head_dim(580, "query", "key"), "580", "576"),
        unsupported("Dv above 576", head_dim(640, "value"), "640", "576"),
        mistyped("integer query", cast("query", torch.int32), "int32"),
        mistyped("mixed dtypes", cast("value", torch.float16), "float32", "float16"),
        fault("key on the CPU", on_cpu("key"), "key", "cpu", "mps"),
        mistyped("integer mask", zeros_for("attn_mask", 9, 24, dtype=torch.int64), "attn_mask", "int64"),
        fault("mask of another length", zeros_for("attn_mask", 9, 23), "attn_mask", "23", "24"),
        fault("mask of rank 5", zeros_for("attn_mask", 1, 1, 1, 9, 24), "attn_mask"),
        fault("mask on the CPU", zeros_for("attn_mask", 9, 24, device="cpu"), "attn_mask", "cpu"),
        fault("softcap below float32", option(softcap=1e-60), "softcap 1e-60", "0.125"),
        fault("key on meta", lambda a: {"key": a["key"].to("meta")}, "key", "meta", "mps"),
        fault("window far from all keys", option(window_left=4, q_offset=2**30 + 1), "q_offset 1073741825",
              "1073741824"),
        fault("distances from far away",
              lambda _: {"alibi_slopes": torch.ones(4, device="mps"), "q_offset": -(2**40)},
              "q_offset -1099511627776", "1073741824"),
        fault("sinks of 3 heads", zeros_for("sinks", 3), "sinks", "3", "4"),
        mistyped("int64 seq_lens", zeros_for("seq_lens", 2, dtype=torch.int64), "seq_lens", "int64", "int32"),
        fault("seq_lens of another batch", zeros_for("seq_lens", 3, dtype=torch.int32), "seq_lens", "3", "2"),
        fault("seq_lens and q_offset",
              lambda a: zeros_for("seq_lens", 2, dtype=torch.int32)(a) | {"q_offset": 3},
              "q_offset 3 came with seq_lens", "pass one of them"),
        fault("the length before the heads",
              lambda a: {n: a[n].transpose(1, 2) for n in ("query", "key", "value")},
              "9 query heads cannot share 24", ".transpose(1, 2)"),
    ],
    "decode": [
        unsupported("D above 576", head_dim(584, "query", "key"), "584", "576"),
        unsupported("Dv above 576", head_dim(640, "value"), "640", "576"),
        unsupported("int8 of D above 576", int8_caches(584), "584", "576"),
        fault(
            "int4 of another head size",
            lambda a: (
                {n: a[n].new_zeros(2, 2, 32, 64).byte() for n in ("key", "value")} | {"kv_format": "int4"}
            ),
            "query has head_dim 64 and key has 64 bytes (128 columns of int4)",
        ),
        unsupported("a tree of 65 rows", lambda a: query_rows(65)(a) | {"tree_mask": a["seq_lens"].new_zeros(
                    65, dtype=torch.int64)}, "65", "64"),
        mistyped("int64 seq_lens", cast("seq_lens", torch.int64), "seq_lens", "int64", "int32"),
        fault("seq_lens of another batch", sliced("seq_lens", slice(1)), "seq_lens", "1", "2"),
        fault("seq_lens of rank 2", sliced("seq_lens", None), "seq_lens", "2"),
        fault("seq_lens on the CPU", on_cpu("seq_lens"), "seq_lens", "cpu"),
        fault("5 query heads on 2", lambda a: {"query": a["query"].repeat(1, 2, 1, 1)[:, :5]}, "5", "2"),
        mistyped("int32 tree mask", zeros_for("tree_mask", 2, dtype=torch.int32), "tree_mask", "int32",
                 "int64"),
        fault("tree mask on the CPU", zeros_for("tree_mask", 2, dtype=torch.int64, device="cpu"), "tree_mask",
              "cpu"),
        fault("sinks of 3 heads", zeros_for("sinks", 3), "sinks", "3", "4"),
        fault("sinks on the CPU", zeros_for("sinks", 4, device="cpu"), "sinks", "cpu"),
        fault("slopes of rank 3", zeros_for("alibi_slopes", 1, 2, 4), "alibi_slopes", "3",
              "[query heads] or [batch, query heads]"),
        fault("slopes of another batch", zeros_for("alibi_slopes", 7, 4), "alibi_slopes", "batch size", "7"),
    ],
    "paged_decode": [
        unsupported("D above 576", head_dim(1024, "query", "key_cache", "value_cache"), "1024", "576"),
        fault("tree mask of another length", zeros_for("tree_mask", 2, 3, dtype=torch.int64), "tree_mask",
              "[2, 3]", "[2, 2]"),
        mistyped("integer slopes", zeros_for("alibi_slopes", 4, dtype=torch.int32), "alibi_slopes", "int32"),
        mistyped("float block table", cast("block_tables", torch.float32), "block_tables", "float32"),
        mistyped("int64 block table", cast("block_tables", torch.int64), "block_tables", "int64"),
        fault("block table of rank 1", sliced("block_tables", 0), "block_tables", "1"),
        fault("block table of another batch", sliced("block_tables", slice(1)), "block_tables"),
        fault("pools of different sizes", sliced("value_cache", slice(4)), "5", "4"),
        fault("block sizes differ", sliced("value_cache", ALL, slice(8)), "16", "8"),
        fault("pool of rank 3", sliced("key_cache", 0), "key_cache", "3"),
        fault("blocks of 0 keys", lambda a: {n: a[n][:, :0] for n in ("key_cache", "value_cache")},
              "block_size", "0"),
        mistyped("half pools", cast("key_cache", torch.float16), "float16", "float32"),
    ],
    "merge": [
        fault("lses on the CPU", on_cpu("lses"), "lses", "cpu", "outs"),
        fault("lses of another shape", sliced("lses", ALL, slice(1)), "lses"),
        mistyped("half lses", cast("lses", torch.float16), "lses", "float16", "float32"),
        fault("outs of rank 4", sliced("outs", 0), "outs", "4"),
        fault("no parts", lambda a: {"outs": a["outs"][:0], "lses": a["lses"][:0]}, "0 parts"),
        mistyped("integer outs", cast("outs", torch.int64), "outs", "int64"),
    ],
    "paged_prefill": [
        fault("query of rank 4", sliced("query", None), "query", "4"),
        mistyped("int64 cu_seqlens", cast("cu_seqlens_q", torch.int64), "cu_seqlens_q", "int64", "int32"),
        fault("cu_seqlens without an end", sliced("cu_seqlens_q", slice(2)), "cu_seqlens_q has 2", "3",
              "block_tables"),
        fault("cu_seqlens of rank 2", sliced("cu_seqlens_q", None), "cu_seqlens_q", "2"),
        fault("cu_seqlens on the CPU", on_cpu("cu_seqlens_q"), "cu_seqlens_q", "cpu"),
        fault("seq_lens of another batch", sliced("seq_lens", slice(1)), "block_tables", "2", "seq_lens",
              "1"),
        fault("negative rows", option(max_seqlen_q=-1), "max_seqlen_q -1", "longest"),
        mistyped("half value pool", cast("value_cache", torch.float16), "float16"),
        fault("3 query heads on 2", sliced("query", ALL, slice(3)), "3", "2", "Hq % Hkv"),
    ],
    "varlen_prefill": [
        fault("query of rank 4", sliced("query", None), "query", "4"),
        fault("key of rank 4", sliced("key", None), "key", "4"),
        mistyped("mixed dtypes", cast("value", torch.float16), "float32", "float16"),
        fault("fewer values", sliced("value", slice(21)), "row count", "22", "21"),
        fault("value heads", sliced("value", ALL, slice(1)), "head count", "2", "1"),
        fault("head dims", sliced("key", ..., slice(56)), "head_dim", "64", "56"),
        fault("starts of one sequence and of two", sliced("cu_seqlens_q", slice(2)), "cu_seqlens_q has 2",
              "cu_seqlens_k has 3"),
        fault("3 heads on 2", sliced("query", ALL, slice(3)), "3", "2", "Hq % Hkv"),
        unsupported("D above 576", head_dim(584, "query", "key"), "584", "576"),
        mistyped("int64 starts", cast("cu_seqlens_k", torch.int64), "cu_seqlens_k", "int64"),
        fault("batches", sliced("cu_seqlens_q", slice(2)), "cu_seqlens_q has 2", "3"),
        fault("no entries", sliced("cu_seqlens_k", slice(0)), "cu_seqlens_k", "no"),
        fault("negative rows", option(max_seqlen_q=-1), "max_seqlen_q -1", "longest"),
        fault("negative keys", option(max_seqlen_k=-7), "max_seqlen_k -7", "longest"),
        fault("starts on the CPU", on_cpu("cu_seqlens_k"), "cu_seqlens_k", "cpu"),
        fault("far q_offset", option(q_offset=2**40, window_left=3), "q_offset", "position"),
    ],
    "prefill_backward": [
        fault("grad_out of rank 3", sliced("grad_out", 0), "grad_out", "3"),
        fault("grad_out of another length", sliced("grad_out", ALL, ALL, slice(8)), "grad_out",
              "[2, 4, 8, 40]", "[2, 4, 9, 40]"),
        fault("grad_out on the CPU", on_cpu("grad_out"), "grad_out", "cpu", "mps"),
        mistyped("half grad_out", cast("grad_out", torch.float16), "grad_out", "float16", "float32"),
        fault("no grad_out", without("grad_out"), "grad_out is None", error=TypeError),
        fault("grad_lse of rank 4", sliced("grad_lse", None), "grad_lse", "4"),
        mistyped("half grad_lse", cast("grad_lse", torch.float16), "grad_lse", "float16", "float32"),
        fault("lse of another batch", sliced("lse", slice(1)), "lse", "[1, 4, 9]", "[2, 4, 9]"),
        mistyped("half lse", cast("lse", torch.float16), "lse", "float16", "float32"),
        fault("lse on the CPU", on_cpu("lse"), "lse", "cpu"),
        fault("out as wide as keys", zeros_for("out", 2, 4, 9, 64), "out", "[2, 4, 9, 64]", "[2, 4, 9, 40]"),
        mistyped("half out", cast("out", torch.float16), "out", "float16", "float32"),
        mistyped("int8 keys", cast("key", torch.int8), "int8", "float32"),
        fault("lengths differ", sliced("value", ALL, ALL, slice(23)), "24", "23"),
        unsupported("D above 256", head_dim(264, "query", "key"), "264", "256"),
        unsupported("Dv above 256",
                    lambda a: {n: torch.zeros(*a[n].shape[:-1], 320, device="mps")
                               for n in ("value", "out", "grad_out")}, "320", "256"),
        fault("sinks of 3 heads", zeros_for("sinks", 3), "sinks", "3", "4"),
        fault("mask of another length", zeros_for("attn_mask", 9, 23), "attn_mask", "23", "24"),
        fault("far q_offset", option(q_offset=2**40, window_left=3), "q_offset", "position"),
    ],
    "varlen_prefill_backward": [
        fault("grad_out of rank 4", sliced("grad_out", None), "grad_out", "4"),
        fault("fewer rows", sliced("grad_out", slice(8)), "grad_out", "[8, 4, 40]", "[9, 4, 40]"),
        fault("lse by rows", lambda a: {"lse": a["lse"].mT}, "lse", "[9, 4]", "[4, 9]"),
        fault("grad_lse of one head", sliced("grad_lse", slice(1)), "grad_lse", "[1, 9]", "[4, 9]"),
        mistyped("half grad_out", cast("grad_out", torch.float16), "grad_out", "float16", "float32"),
        mistyped("int64 starts", cast("cu_seqlens_k", torch.int64), "cu_seqlens_k", "int64"),
        unsupported("D above 256", head_dim(264, "query", "key"), "264", "256"),
        fault("negative rows", option(max_seqlen_q=-1), "max_seqlen_q -1", "longest"),
    ],
}  # fmt: skip
for _name, _option in OPTIONS.items():
    for _op in _option.ops:
        for _value in _option.refused:
            _words = f"{_name} {_value:g}"
            WRONG[_op].append(fault(_words, option(**{_name: _value}), _words))
