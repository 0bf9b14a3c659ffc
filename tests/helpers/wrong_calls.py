"""Valid calls, and the faults that make each of them wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Arguments = dict[str, Any]
UNSUPPORTED = NotImplementedError


def valid(op: str, device: str = "mps") -> Arguments:
    """Arguments of a call that works."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    def int32(*values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32).to(device)

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
    pools = {"key_cache": randn(5, 16, 2, 64), "value_cache": randn(5, 16, 2, 40)}
    return arguments | pools | {"block_tables": int32([3, 1], [0, 4])}


def sliced(name: str, *index: Any) -> Callable[[Arguments], Arguments]:
    return lambda a: {name: a[name][index]}


def cast(name: str, dtype: torch.dtype) -> Callable[[Arguments], Arguments]:
    return lambda a: {name: a[name].to(dtype)}


def option(**values: Any) -> Callable[[Arguments], Arguments]:
    return lambda _: values


def head_dim(dim: int, *names: str) -> Callable[[Arguments], Arguments]:
    return lambda a: {n: torch.zeros(*a[n].shape[:-1], dim, device="mps") for n in names}


def int8_caches(dim: int) -> Callable[[Arguments], Arguments]:
    def change(a: Arguments) -> Arguments:
        rows = {n: a[n].new_zeros(*a[n].shape[:-1], dim) for n in ("query", "key", "value")}
        scales = {f"{n}_scales": rows[n][..., 0].float() for n in ("key", "value")}
        return rows | {n: rows[n].to(torch.int8) for n in ("key", "value")} | scales

    return change


ALL = slice(None)
# op, what is wrong, the exception, and words that the sentence must hold: the value and the limit.
WRONG: list[tuple[str, str, Callable[[Arguments], Arguments], type[Exception], list[str]]] = [
    ("prefill", "query of rank 3", sliced("query", 0), ValueError, ["query", "3"]),
    ("prefill", "key of rank 3", sliced("key", 0), ValueError, ["key", "3"]),
    ("prefill", "value of rank 5", lambda a: {"value": a["value"][None]}, ValueError, ["value", "5"]),
    ("prefill", "batch sizes differ", sliced("key", slice(1)), ValueError, ["batch", "2", "1"]),
    ("prefill", "key and value heads differ", sliced("value", ALL, slice(1)), ValueError, ["head", "2", "1"]),
    (
        "prefill",
        "key and value lengths differ",
        sliced("value", ALL, ALL, slice(23)),
        ValueError,
        ["24", "23"],
    ),
    ("prefill", "head dims differ", sliced("key", ..., slice(56)), ValueError, ["head_dim", "64", "56"]),
    ("prefill", "3 query heads on 2", sliced("query", ALL, slice(3)), ValueError, ["3", "2", "Hq % Hkv"]),
    ("prefill", "D not a multiple of 8", head_dim(60, "query", "key"), ValueError, ["60", "8"]),
    ("prefill", "Dv not a multiple of 8", head_dim(12, "value"), ValueError, ["12", "8"]),
    ("prefill", "D of 0", head_dim(0, "query", "key"), ValueError, ["0", "8"]),
    ("prefill", "D above 576", head_dim(584, "query", "key"), UNSUPPORTED, ["584", "576"]),
    ("prefill", "D above 576, and odd", head_dim(580, "query", "key"), UNSUPPORTED, ["580", "576"]),
    ("prefill", "Dv above 576", head_dim(640, "value"), UNSUPPORTED, ["640", "576"]),
    ("decode", "D above 576", head_dim(584, "query", "key"), UNSUPPORTED, ["584", "576"]),
    ("decode", "Dv above 576", head_dim(640, "value"), UNSUPPORTED, ["640", "576"]),
    (
        "paged_decode",
        "D above 576",
        head_dim(1024, "query", "key_cache", "value_cache"),
        UNSUPPORTED,
        ["1024", "576"],
    ),
    ("decode", "int8 of D above 576", int8_caches(584), UNSUPPORTED, ["584", "576"]),
    ("prefill", "integer query", cast("query", torch.int32), TypeError, ["int32"]),
    ("prefill", "mixed dtypes", cast("value", torch.float16), TypeError, ["float32", "float16"]),
    ("prefill", "key on the CPU", lambda a: {"key": a["key"].cpu()}, ValueError, ["key", "cpu", "mps"]),
    (
        "prefill",
        "integer mask",
        lambda _: {"attn_mask": torch.ones(9, 24, dtype=torch.int64, device="mps")},
        TypeError,
        ["attn_mask", "int64"],
    ),
    (
        "prefill",
        "mask of another length",
        lambda _: {"attn_mask": torch.ones(9, 23, device="mps")},
        ValueError,
        ["attn_mask", "23", "24"],
    ),
    (
        "prefill",
        "mask of rank 5",
        lambda _: {"attn_mask": torch.ones(1, 1, 1, 9, 24, device="mps")},
        ValueError,
        ["attn_mask"],
    ),
    (
        "prefill",
        "mask on the CPU",
        lambda _: {"attn_mask": torch.ones(9, 24)},
        ValueError,
        ["attn_mask", "cpu"],
    ),
    ("prefill", "negative window", option(window_left=-2), ValueError, ["window_left", "-2"]),
    ("prefill", "negative sink tokens", option(sink_tokens=-1), ValueError, ["sink_tokens", "-1"]),
    ("prefill", "negative softcap", option(softcap=-3.0), ValueError, ["softcap", "-3"]),
    ("prefill", "NaN softcap", option(softcap=float("nan")), ValueError, ["softcap", "nan"]),
    ("prefill", "infinite softcap", option(softcap=float("inf")), ValueError, ["softcap", "inf"]),
    ("prefill", "softcap beyond float32", option(softcap=1e39), ValueError, ["softcap 1e+39", "above 1e+30"]),
    ("prefill", "softcap below float32", option(softcap=1e-60), ValueError, ["softcap 1e-60", "0.125"]),
    ("prefill", "NaN scale", option(scale=float("nan")), ValueError, ["scale nan", "finite"]),
    ("decode", "infinite scale", option(scale=float("-inf")), ValueError, ["scale -inf", "finite"]),
    ("paged_decode", "scale beyond float32", option(scale=1e39), ValueError, ["scale 1e+39", "finite"]),
    ("prefill", "key on meta", lambda a: {"key": a["key"].to("meta")}, ValueError, ["key", "meta", "mps"]),
    ("merge", "lses on the CPU", lambda a: {"lses": a["lses"].cpu()}, ValueError, ["lses", "cpu", "outs"]),
    (
        "prefill",
        "window far from all keys",
        option(window_left=4, q_offset=2**30 + 1),
        ValueError,
        ["q_offset 1073741825", "1073741824"],
    ),
    (
        "prefill",
        "distances from far away",
        lambda _: {"alibi_slopes": torch.ones(4, device="mps"), "q_offset": -(2**40)},
        ValueError,
        ["q_offset -1099511627776", "1073741824"],
    ),
    (
        "prefill",
        "sinks of 3 heads",
        lambda _: {"sinks": torch.zeros(3, device="mps")},
        ValueError,
        ["sinks", "3", "4"],
    ),
    ("paged_prefill", "query of rank 4", lambda a: {"query": a["query"][None]}, ValueError, ["query", "4"]),
    (
        "paged_prefill",
        "int64 cu_seqlens",
        cast("cu_seqlens_q", torch.int64),
        TypeError,
        ["cu_seqlens_q", "int64", "int32"],
    ),
    (
        "paged_prefill",
        "cu_seqlens without an end",
        sliced("cu_seqlens_q", slice(2)),
        ValueError,
        ["cu_seqlens_q has 2", "3", "block_tables"],
    ),
    (
        "paged_prefill",
        "cu_seqlens of rank 2",
        lambda a: {"cu_seqlens_q": a["cu_seqlens_q"][None]},
        ValueError,
        ["cu_seqlens_q", "2"],
    ),
    (
        "paged_prefill",
        "cu_seqlens on the CPU",
        lambda a: {"cu_seqlens_q": a["cu_seqlens_q"].cpu()},
        ValueError,
        ["cu_seqlens_q", "cpu"],
    ),
    (
        "paged_prefill",
        "seq_lens of another batch",
        sliced("seq_lens", slice(1)),
        ValueError,
        ["block_tables", "2", "seq_lens", "1"],
    ),
    ("varlen_prefill", "query of rank 4", lambda a: {"query": a["query"][None]}, ValueError, ["query", "4"]),
    ("varlen_prefill", "key of rank 4", lambda a: {"key": a["key"][None]}, ValueError, ["key", "4"]),
    ("varlen_prefill", "mixed dtypes", cast("value", torch.float16), TypeError, ["float32", "float16"]),
    ("varlen_prefill", "fewer values", sliced("value", slice(21)), ValueError, ["row count", "22", "21"]),
    ("varlen_prefill", "value heads", sliced("value", ALL, slice(1)), ValueError, ["head count", "2", "1"]),
    ("varlen_prefill", "head dims", sliced("key", ..., slice(56)), ValueError, ["head_dim", "64", "56"]),
    (
        "varlen_prefill",
        "starts of one sequence and of two",
        sliced("cu_seqlens_q", slice(2)),
        ValueError,
        ["cu_seqlens_q has 2", "cu_seqlens_k has 3"],
    ),
    (
        "decode",
        "int4 of another head size",
        lambda a: {n: a[n].new_zeros(2, 2, 32, 64).byte() for n in ("key", "value")} | {"kv_format": "int4"},
        ValueError,
        ["query has head_dim 64 and key has 64 bytes (128 columns of int4)"],
    ),
    (
        "prefill",
        "the length before the heads",
        lambda a: {n: a[n].transpose(1, 2) for n in ("query", "key", "value")},
        ValueError,
        ["9 query heads cannot share 24", ".transpose(1, 2)"],
    ),
    ("varlen_prefill", "3 heads on 2", sliced("query", ALL, slice(3)), ValueError, ["3", "2", "Hq % Hkv"]),
    ("varlen_prefill", "D above 576", head_dim(584, "query", "key"), UNSUPPORTED, ["584", "576"]),
    (
        "varlen_prefill",
        "int64 starts",
        cast("cu_seqlens_k", torch.int64),
        TypeError,
        ["cu_seqlens_k", "int64"],
    ),
    ("varlen_prefill", "batches", sliced("cu_seqlens_q", slice(2)), ValueError, ["cu_seqlens_q has 2", "3"]),
    ("varlen_prefill", "no entries", sliced("cu_seqlens_k", slice(0)), ValueError, ["cu_seqlens_k", "no"]),
    ("varlen_prefill", "negative rows", option(max_seqlen_q=-1), ValueError, ["max_seqlen_q -1", "most"]),
    ("varlen_prefill", "negative keys", option(max_seqlen_k=-7), ValueError, ["max_seqlen_k -7", "most"]),
    (
        "varlen_prefill",
        "starts on the CPU",
        lambda a: {"cu_seqlens_k": a["cu_seqlens_k"].cpu()},
        ValueError,
        ["cu_seqlens_k", "cpu"],
    ),
    (
        "varlen_prefill",
        "far q_offset",
        option(q_offset=2**40, window_left=3),
        ValueError,
        ["q_offset", "position"],
    ),
    ("paged_prefill", "negative rows", option(max_seqlen_q=-1), ValueError, ["max_seqlen_q -1", "most"]),
    ("paged_prefill", "window of -2", option(window_left=-2), ValueError, ["window_left", "-2"]),
    ("paged_prefill", "half value pool", cast("value_cache", torch.float16), TypeError, ["float16"]),
    (
        "paged_prefill",
        "3 query heads on 2",
        sliced("query", ALL, slice(3)),
        ValueError,
        ["3", "2", "Hq % Hkv"],
    ),
    (
        "paged_decode",
        "17 query rows",
        lambda a: {"query": a["query"].repeat(1, 1, 9, 1)[:, :, :17]},
        UNSUPPORTED,
        ["17", "16", "fattn.paged_prefill"],
    ),
    (
        "decode",
        "17 query rows",
        lambda a: {"query": a["query"].repeat(1, 1, 9, 1)[:, :, :17]},
        UNSUPPORTED,
        ["17", "16"],
    ),
    ("decode", "int64 seq_lens", cast("seq_lens", torch.int64), TypeError, ["seq_lens", "int64", "int32"]),
    ("decode", "seq_lens of another batch", sliced("seq_lens", slice(1)), ValueError, ["seq_lens", "1", "2"]),
    (
        "decode",
        "seq_lens of rank 2",
        lambda a: {"seq_lens": a["seq_lens"][None]},
        ValueError,
        ["seq_lens", "2"],
    ),
    (
        "decode",
        "seq_lens on the CPU",
        lambda a: {"seq_lens": a["seq_lens"].cpu()},
        ValueError,
        ["seq_lens", "cpu"],
    ),
    (
        "decode",
        "5 query heads on 2",
        lambda a: {"query": a["query"].repeat(1, 2, 1, 1)[:, :5]},
        ValueError,
        ["5", "2"],
    ),
    (
        "decode",
        "int32 tree mask",
        lambda _: {"tree_mask": torch.ones(2, dtype=torch.int32, device="mps")},
        TypeError,
        ["tree_mask", "int32", "int64"],
    ),
    (
        "paged_decode",
        "tree mask of another length",
        lambda _: {"tree_mask": torch.ones(2, 3, dtype=torch.int64, device="mps")},
        ValueError,
        ["tree_mask", "[2, 3]", "[2, 2]"],
    ),
    (
        "decode",
        "tree mask on the CPU",
        lambda _: {"tree_mask": torch.ones(2, dtype=torch.int64)},
        ValueError,
        ["tree_mask", "cpu"],
    ),
    (
        "decode",
        "sinks of 3 heads",
        lambda _: {"sinks": torch.zeros(3, device="mps")},
        ValueError,
        ["sinks", "3", "4"],
    ),
    (
        "decode",
        "sinks on the CPU",
        lambda _: {"sinks": torch.zeros(4)},
        ValueError,
        ["sinks", "cpu"],
    ),
    (
        "paged_decode",
        "integer slopes",
        lambda _: {"alibi_slopes": torch.zeros(4, dtype=torch.int32, device="mps")},
        TypeError,
        ["alibi_slopes", "int32"],
    ),
    (
        "decode",
        "slopes of rank 3",
        lambda _: {"alibi_slopes": torch.zeros(1, 2, 4, device="mps")},
        ValueError,
        ["alibi_slopes", "3", "[query heads] or [batch, query heads]"],
    ),
    (
        "decode",
        "slopes of another batch",
        lambda _: {"alibi_slopes": torch.zeros(7, 4, device="mps")},
        ValueError,
        ["alibi_slopes", "batch size", "7"],
    ),
    ("decode", "window of -2", option(window_left=-2), ValueError, ["window_left", "-2"]),
    ("decode", "NaN softcap", option(softcap=float("nan")), ValueError, ["softcap", "nan"]),
    ("decode", "negative right window", option(window_right=-7), ValueError, ["window_right", "-7"]),
    (
        "paged_decode",
        "float block table",
        cast("block_tables", torch.float32),
        TypeError,
        ["block_tables", "float32"],
    ),
    (
        "paged_decode",
        "int64 block table",
        cast("block_tables", torch.int64),
        TypeError,
        ["block_tables", "int64"],
    ),
    ("paged_decode", "block table of rank 1", sliced("block_tables", 0), ValueError, ["block_tables", "1"]),
    (
        "paged_decode",
        "block table of another batch",
        sliced("block_tables", slice(1)),
        ValueError,
        ["block_tables"],
    ),
    ("paged_decode", "pools of different sizes", sliced("value_cache", slice(4)), ValueError, ["5", "4"]),
    ("paged_decode", "block sizes differ", sliced("value_cache", ALL, slice(8)), ValueError, ["16", "8"]),
    ("paged_decode", "pool of rank 3", sliced("key_cache", 0), ValueError, ["key_cache", "3"]),
    (
        "paged_decode",
        "blocks of 0 keys",
        lambda a: {n: a[n][:, :0] for n in ("key_cache", "value_cache")},
        ValueError,
        ["block_size", "0"],
    ),
    ("paged_decode", "half pools", cast("key_cache", torch.float16), TypeError, ["float16", "float32"]),
    ("merge", "lses of another shape", sliced("lses", ALL, slice(1)), ValueError, ["lses"]),
    ("merge", "half lses", cast("lses", torch.float16), TypeError, ["lses", "float16", "float32"]),
    ("merge", "outs of rank 4", sliced("outs", 0), ValueError, ["outs", "4"]),
    ("merge", "no parts", lambda a: {"outs": a["outs"][:0], "lses": a["lses"][:0]}, ValueError, ["0 parts"]),
    ("merge", "integer outs", cast("outs", torch.int64), TypeError, ["outs", "int64"]),
]
