"""Errors with advice, and calls that follow it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import torch_fattn
from tests.helpers import cache_problems
from tests.helpers.public_calls import heads
from tests.helpers.wrong_calls import Arguments, valid
from torch_fattn import reference


@dataclass(frozen=True)
class Refusal:
    """A wrong call, words of the advice in its error, and a call that follows it, if the valid calls of other
    tests do not. Where the advice is another way to the result, it must equal `expected`."""

    words: str
    wrong: Callable[[], Any]
    right: Callable[[], Any] | None = None
    expected: Callable[[], Any] | None = None
    checked: bool = False  # refused only with FATTN_CHECK=1


def of(op: str, **changes: Any) -> Arguments:
    return valid(op, "cpu") | changes


def run(op: str, **changes: Any) -> Callable[[], Tensor]:
    return lambda: getattr(torch_fattn, op)(**of(op, **changes))


def exact(op: str, **changes: Any) -> Callable[[], Tensor]:
    return lambda: getattr(reference, op)(**of(op, **changes))[0]


def of_op(
    words: str, op: str, wrong: Arguments, right: Arguments | None = None, checked: bool = False
) -> Refusal:
    """A call of the operator with `wrong` is refused; with `right` it has the result of the reference."""
    if right is None:
        return Refusal(words, run(op, **wrong), checked=checked)
    return Refusal(words, run(op, **wrong), run(op, **right), exact(op, **right), checked)


def of_write(
    words: str, wrong: Callable[[], Any], right: Callable[[], Any] | None = None, checked: bool = False
) -> Refusal:
    """`wrong` is refused; after `right` the cache holds the tokens."""
    return Refusal(words, wrong, right, right and (lambda: WRITTEN["key"][[0, 2]]), checked)


def padded_to(operand: Tensor, columns: int) -> Tensor:
    return F.pad(operand, (0, columns - operand.shape[-1]))


def _cut(op: str, *names: str, columns: int) -> Arguments:
    return {name: of(op)[name][..., :columns] for name in names}


def _pad_heads(op: str, key: str, **options: Any) -> Refusal:
    """Heads of 60, padded to 64."""
    odd = _cut(op, "query", key, columns=60)
    padded = {name: padded_to(operand, 64) for name, operand in odd.items()}
    scale = options or {"scale": 60**-0.5}
    message = f"pad query and {key} with zeros to 64" + ("" if options else " and pass scale=60 ** -0.5")
    return Refusal(
        message,
        run(op, **odd, **options),
        run(op, **padded, **scale),
        exact(op, **odd, **options),
    )


def _pad_values(op: str, value: str) -> Refusal:
    odd = _cut(op, value, columns=36)
    message = f"pad {value} with zeros to 40 and cut the result to 36 columns"
    padded = {value: padded_to(odd[value], 40)}
    return Refusal(
        message,
        run(op, **odd),
        lambda: run(op, **padded)()[..., :36],
        exact(op, **odd),
    )


def written(**changes: Any) -> Callable[[], Tensor]:
    """Calls cache_write and returns the written rows of the cache."""

    def call() -> Tensor:
        arguments = cache_problems.valid("float", "cpu") | changes
        torch_fattn.cache_write(**arguments)
        return arguments["key_cache"].flatten(0, 1)[[3, 6]]

    return call


WRITTEN = cache_problems.valid("float", "cpu")
WIDE = {
    "query": heads(1, 2, 3, 584),
    "key": heads(1, 2, 5, 584, seed=1),
    "value": heads(1, 2, 5, 584, seed=2),
}
QUANTISED, FP8 = (
    {
        name: part
        for side in ("key", "value")
        for name, part in zip(
            (side, f"{side}_scales"), reference.quantise(of("decode")[side], kv_format), strict=True
        )
    }
    for kv_format in ("int8", "fp8_e4m3")
)
HALVES = {name: torch.zeros(2, 2, 32, 20, dtype=torch.uint8) for name in ("key", "value")}
HALVES |= {f"{name}_scales": torch.zeros(2, 2, 32, 1, 2).half() for name in ("key", "value")}
HALVES["query"] = heads(2, 4, 2, 40)
MANY = heads(1, 1, 1, 8).expand(2**30 + 1, -1, -1, -1)
SHARED = tuple(of("prefill")[name] for name in ("query", "key", "value"))
BLOCKS = {"block_mask": torch.tensor([True, False, True, True]).view(2, 2, 1, 1).repeat(1, 2, 1, 1)}
SLOPES, MASK = torch.tensor([0.5, 0.25, 0.125, 1.0]), heads(9, 24) > 0


REFUSALS: list[Refusal] = [
    _pad_heads("prefill", "key"),
    _pad_heads("prefill", "key", scale=0.3),
    _pad_heads("paged_decode", "key_cache"),
    _pad_heads("varlen_prefill", "key"),
    _pad_values("prefill", "value"),
    _pad_values("paged_decode", "value_cache"),
    of_op("at least 8", "prefill", _cut("prefill", "query", "key", columns=0),
          _cut("prefill", "query", "key", columns=8)),
    Refusal("use F.scaled_dot_product_attention for this layer", lambda: torch_fattn.prefill(**WIDE)),
    of_op("use -1 for no limit or a number of keys >= 0", "prefill", {"window_left": -2}),
    of_op("use 0 for none", "prefill", {"sink_tokens": -1}),
    of_op("use 0 for none", "decode", {"softcap": 1e39}),
    of_op("use a larger one, or 0 for none", "prefill", {"softcap": 1e-60}, {"softcap": 1.0}),
    Refusal("use one nearer to 0: beyond all keys and windows the result does not change",
            run("prefill", window_left=4, sink_tokens=2, q_offset=2**30 + 1),
            run("prefill", window_left=4, sink_tokens=2, q_offset=24 + 4),
            exact("prefill", window_left=4, sink_tokens=2, q_offset=2**30 + 1)),
    Refusal("use one nearer to 0: beyond all keys and windows the result does not change",
            run("prefill", alibi_slopes=SLOPES, q_offset=-(2**31)),
            run("prefill", alibi_slopes=SLOPES, q_offset=-9),
            exact("prefill", alibi_slopes=SLOPES, q_offset=-(2**31))),
    *(of_op("pass a mask as attn_mask", "decode", {"seq_lens": mask}, {"seq_lens": None, "attn_mask": mask})
      for mask in (heads(2, 1, 2, 32) > 0, heads(2, 1, 2, 32))),
    Refusal("pass enable_gqa=True", lambda: torch_fattn.sdpa(*SHARED),
            lambda: torch_fattn.sdpa(*SHARED, enable_gqa=True)),
    of_op("leave it out for 1 / sqrt(head_dim)", "prefill", {"scale": float("nan")}),
    of_op("pass the query rows of the longest sequence", "varlen_prefill", {"max_seqlen_q": -1}),
    of_op("pass the keys of the longest sequence", "varlen_prefill", {"max_seqlen_k": -7}),
    Refusal("split the call", lambda: torch_fattn.decode(MANY, MANY, MANY),
            lambda: torch.cat([torch_fattn.decode(part, part, part) for part in MANY[:9].split(5)]),
            lambda: reference.decode(*[MANY[:9]] * 3)[0]),
    of_op("use blocks of 1 key or more", "paged_decode",
          {n: of("paged_decode")[n][:, :0] for n in ("key_cache", "value_cache")},
          {n: of("paged_decode")[n][:, :1] for n in ("key_cache", "value_cache")}),
    of_write("use blocks of 1 key or more, up to that",
             written(**{n: WRITTEN[n][:, :0] for n in ("key_cache", "value_cache")})),
    Refusal("pass at least one", run("merge", outs=of("merge")["outs"][:0], lses=of("merge")["lses"][:0]),
            run("merge", outs=of("merge")["outs"][:1], lses=of("merge")["lses"][:1])),
    Refusal("pass lses as [parts, heads, tokens]",
            lambda: torch_fattn.merge(of("merge")["outs"][:, 0].mT, of("merge")["lses"][:, 0].mT),
            lambda: torch_fattn.merge(of("merge")["outs"][:, 0].transpose(1, 2), of("merge")["lses"][:, 0]),
            lambda: exact("merge")()[0].transpose(0, 1)),
    Refusal("pass the bound of the result", lambda: torch_fattn.softcap(heads(3, 8), 0.0)),
    Refusal("leave out the dimensions in which it is expanded",
            lambda: torch.ops.fattn.mask_map(MASK.expand(2**20, 2**14, 9, 24))),
    Refusal("leave it out, since the operands have sizes",
            lambda: torch_fattn.explain("prefill", **of("prefill"), heads=4),
            lambda: torch_fattn.explain("prefill", **of("prefill"))),
    Refusal("use F.scaled_dot_product_attention, or tensors on the CPU",
            lambda: torch_fattn.explain("prefill", **of("prefill"), family=6)),
    of_op('name it: "fp8_e4m3" or "int4"', "decode", FP8, {**FP8, "kv_format": "fp8_e4m3"}),
    of_write(
        "use torch.float32, torch.float16, torch.bfloat16, torch.int8, or torch.uint8 with kv_format",
        written(key_cache=WRITTEN["key_cache"].int(), value_cache=WRITTEN["value_cache"].int()),
    ),
    Refusal("allocate them so, or name the format that they have",
            run("decode", **QUANTISED, kv_format="fp8_e4m3"), run("decode", **QUANTISED, kv_format="int8")),
    Refusal('use "auto", "int8", "fp8_e4m3" or "int4"', run("decode", **QUANTISED, kv_format="int3")),
    of_op('use "int8" or "fp8_e4m3"', "decode", {**HALVES, "kv_format": "int4"}, QUANTISED),
    of_op("[batch, heads, length, head_dim]", "prefill", {"key": None}),
    Refusal("move query with .to(key.device)",
            lambda: torch_fattn.prefill(heads(1, 2, 3, 8), *heads(2, 1, 2, 5, 8).to("mps"))),
    of_op("convert it with .to(torch.int32)", "decode", {"seq_lens": of("decode")["seq_lens"].long()}),
    of_op("leave it out", "decode", {"key_scales": QUANTISED["key_scales"]}),
    of_op("pass key_scales", "decode", {"key": QUANTISED["key"], "value": QUANTISED["value"]}, QUANTISED),
    of_op('pass both, or neither with kv_format "fp8_e4m3"', "decode",
          {**FP8 | {"value_scales": None}, "kv_format": "fp8_e4m3"}, {**FP8, "kv_format": "fp8_e4m3"}),
    of_write("allocate separate memory for every element, without .expand()",
             written(key_cache=WRITTEN["key_cache"][:1].expand(4, -1, -1, -1))),
    of_write("convert the rows with .to(key_cache.dtype)",
             written(**{n: WRITTEN[n].float() for n in ("key", "value")})),
    of_write(
        "pass separate memory for each, or value, value_cache and value_scales all as the first "
        "columns of their key counterparts",
        written(value_cache=WRITTEN["key_cache"], key_cache=WRITTEN["key_cache"], value=WRITTEN["key"]),
        written(value_cache=WRITTEN["key_cache"].clone(), value=WRITTEN["key"]),
    ),
    of_write("pass both, or neither", written(key_scales=torch.ones(4, 2, 2))),
    of_write("key_cache.detach()",
             written(key_cache=WRITTEN["key_cache"].clone().requires_grad_()),
             written(key_cache=WRITTEN["key_cache"].clone().requires_grad_().detach())),
    Refusal("pass the mask that it is the map of, too", run("prefill", mask_map=torch_fattn.mask_map(MASK)),
            run("prefill", attn_mask=MASK, mask_map=torch_fattn.mask_map(MASK))),
    of_op("make it with torch_fattn.mask_map(attn_mask)", "prefill",
          {"attn_mask": MASK, "mask_map": torch_fattn.mask_map(MASK).int()}),
    Refusal("leave it out and hide its blocks in attn_mask", run("prefill", **BLOCKS, attn_mask=MASK),
            run("prefill", attn_mask=MASK & BLOCKS["block_mask"]),
            exact("prefill", attn_mask=MASK, **BLOCKS)),
    of_op("leave mask_map out", "prefill", {**BLOCKS, "mask_map": torch_fattn.mask_map(MASK)}, BLOCKS),
    of_op("convert it with .bool()", "prefill", {"block_mask": BLOCKS["block_mask"].long()}, BLOCKS),
    of_op("use blocks of 64 or 128", "prefill", {**BLOCKS, "block_size": (128, 48)},
          {**BLOCKS, "block_size": (128, 64)}),
    Refusal("pass the rows and the keys of a block",
            lambda: torch.ops.fattn.prefill(**of("prefill"), **BLOCKS, block_size=[64])),
    of_op("expand a dimension in which all blocks are alike", "prefill",
          {"block_mask": BLOCKS["block_mask"][:, :2]}, {"block_mask": BLOCKS["block_mask"][:, :1]}),
    of_write("pass the result of its .resolve_neg()",
             written(key_cache=torch._neg_view(WRITTEN["key_cache"])),
             written(key_cache=torch._neg_view(WRITTEN["key_cache"]).resolve_neg())),
    Refusal("recreate it with torch_fattn.mask_map(attn_mask)",
            run("prefill", attn_mask=MASK, mask_map=torch_fattn.mask_map(torch.zeros_like(MASK))),
            run("prefill", attn_mask=MASK, mask_map=torch_fattn.mask_map(MASK)), checked=True),
    of_op("pass the rows of the longest sequence", "varlen_prefill", {"max_seqlen_q": 3}, checked=True),
    of_write("give every token a different slot, or -1 to drop it",
             written(slot_mapping=torch.tensor([3, 6, 6])), written(slot_mapping=torch.tensor([3, -1, 6])),
             checked=True),
]  # fmt: skip
