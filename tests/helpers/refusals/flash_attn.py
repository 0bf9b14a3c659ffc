"""Refusals of flash-attn's functions; see __init__.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.helpers.flash_attn_oracle import Options, rotated
from tests.helpers.public_calls import VALID
from tests.helpers.refusals import Refusal
from tests.helpers.wrong_calls import Arguments
from torch_fattn import flash_attn

DENSE, PACKED, CACHE = (
    VALID[f"torch_fattn.flash_attn.flash_attn_{name}"]() for name in ("func", "varlen_func", "with_kvcache")
)
ROTARY = {name: CACHE[name] for name in ("rotary_cos", "rotary_sin")}
FILLED = {name: CACHE[name] for name in ("q", "k_cache", "v_cache", "cache_seqlens")}
APPENDED = {name: CACHE[name] for name in ("k", "v")}
SLOPES = torch.tensor([[0.5, 0.25, 0.125, 1.0], [0.1, 0.2, 0.3, 0.4]])
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
FLOAT8 = DENSE["k"].to(torch.float8_e4m3fn)
JOINED = {"q": torch.cat((DENSE["q"], DENSE["q"]), -1), "k": torch.cat((DENSE["k"], DENSE["v"]), -1)}
CACHES = ("k_cache", "v_cache")
BOTH_IN_ONE = torch.zeros(2, 1, dtype=torch.int32)


def dense(**changes: Any) -> Callable[[], Tensor]:
    return lambda: flash_attn.flash_attn_func(**DENSE | changes)


def packed(**changes: Any) -> Callable[[], Tensor]:
    return lambda: flash_attn.flash_attn_varlen_func(**PACKED | changes)


def cached(arguments: Arguments, **changes: Any) -> Callable[[], Tensor]:
    """A call with fresh caches."""

    def call() -> Tensor:
        given = arguments | changes
        for name in ("k_cache", "v_cache"):
            if given[name].stride(0):  # but for an expanded one
                given[name] = given[name].detach().clone().requires_grad_(given[name].requires_grad)
        return flash_attn.flash_attn_with_kvcache(**given)

    return call


def exact_dense(options: Options | None = None, **changes: Tensor) -> Callable[[], Tensor]:
    def call() -> Tensor:
        q, k, v = ((DENSE | changes)[name] for name in "qkv")
        return torch.stack([(options or Options()).attend(b, q[b], k[b], v[b])[0] for b in range(q.shape[0])])

    return call


def turned(x: Tensor) -> Tensor:
    lens = CACHE["cache_seqlens"]
    return torch.stack([rotated(row, lens[b : b + 1], *ROTARY.values(), True) for b, row in enumerate(x)])


THREE = {"q": torch.cat((CACHE["q"], CACHE["q"][:1])), "cache_seqlens": torch.tensor([3, 5, 4]).int()}
WITH_GRADIENT = CACHE["k_cache"].clone().requires_grad_()
SEVEN = torch.tensor([7, 7], dtype=torch.int32)
ODD = {name: FILLED[name][..., :15].clone() for name in ("q", "k_cache")} | {"cache_seqlens": SEVEN}
ODD |= {name: APPENDED[name][..., :15] for name in ("k", "v")}

REFUSALS: list[Refusal] = [
    Refusal("move q with .to(k.device)", dense(k=DENSE["k"].to("mps"), v=DENSE["v"].to("mps"))),
    Refusal("pass torch.float32, torch.float16 or torch.bfloat16", dense(q=DENSE["q"].double())),
    Refusal("convert with .to(q.dtype)", dense(k=DENSE["k"].double())),
    Refusal("pass a multiple of them, and transpose q and the keys if yours have the heads before the length",
            dense(q=DENSE["q"][:, :, :3]), dense(q=DENSE["q"][:, :, :2])),
    Refusal("use F.scaled_dot_product_attention of the transposed [batch, heads, length, head_dim], with an "
            "attn_mask that holds the ALiBi bias, or call under torch.no_grad()",
            dense(q=DENSE["q"].clone().requires_grad_(), alibi_slopes=SLOPES[0]),
            torch.no_grad()(dense(q=DENSE["q"].clone().requires_grad_(), alibi_slopes=SLOPES[0]))),
    Refusal("[4], or also for each sequence, [2, 4]", dense(alibi_slopes=SLOPES[0, :3]),
            dense(alibi_slopes=SLOPES)),
    Refusal("convert it with .float()", dense(alibi_slopes=SLOPES.double())),
    Refusal("a number up to 1e+30, or 0.0 for none", dense(softcap=1e39), dense(softcap=1e30)),
    Refusal("pass None for the default, 1 / sqrt(head size)", dense(softmax_scale=float("nan"))),
    Refusal("pass a multiple of them, and transpose q and the keys if yours have the heads before the length",
            dense(**{name: DENSE[name].transpose(1, 2) for name in "qkv"})),
    Refusal("convert it with .to(torch.int32)", packed(cu_seqlens_k=PACKED["cu_seqlens_k"].long())),
    Refusal("it begins with 0", packed(cu_seqlens_q=PACKED["cu_seqlens_q"][:0])),
    Refusal("pass the keys of the longest sequence", packed(max_seqlen_k=-1)),
    *(Refusal("pass the rows of the longest sequence", packed(max_seqlen_q=rows))
      for rows in (None, PACKED["cu_seqlens_q"])),
    Refusal("pass [4]", packed(s_aux=SINKS[:3])),
    Refusal("pass [4, 4, 16]", packed(out=PACKED["q"][:3])),
    *(Refusal("use torch_fattn.prefill with an attn_mask", packed(**{name: value}))
      for name, value in (("mask_mod", max), ("block_sparse_tensors", ()), ("dynamic_causal", SINKS))),
    Refusal("use the functions of torch_fattn.distributed", packed(cp_world_size=2)),
    Refusal("pass [num_blocks, block_size, kv_heads, head_dim]", packed(block_table=BOTH_IN_ONE)),
    Refusal("pass [batch, length, heads, head_dim]", dense(k=DENSE["k"].flatten(0, 1))),
    Refusal("pass one of them", packed(s_aux=SINKS, learnable_sink=SINKS), packed(learnable_sink=SINKS)),
    Refusal("pass their product in torch.float16 or torch.bfloat16",
            dense(k=FLOAT8, k_descale=torch.full((2, 2), 0.5)),
            dense(**{n: DENSE[n].half() for n in "qv"}, k=(FLOAT8.float() * 0.5).half()),
            exact_dense(k=FLOAT8.float() * 0.5)),
    Refusal("pass the second query joined to q, and the values joined to the keys", dense(qv=DENSE["q"]),
            dense(**JOINED), exact_dense(**JOINED)),
    Refusal("use torch_fattn.prefill with an attn_mask", dense(attention_chunk=2)),
    Refusal("use flash_attn_varlen_func, with cache_seqlens as seqused_k",
            cached(FILLED, q=FILLED["q"].flatten(0, 1), cu_seqlens_q=torch.arange(3, dtype=torch.int32)),
            lambda: flash_attn.flash_attn_varlen_func(
                FILLED["q"].flatten(0, 1), *(FILLED[n].unflatten(1, (-1, 4)).flatten(0, 1) for n in CACHES),
                torch.arange(3, dtype=torch.int32), max_seqlen_q=1, max_seqlen_k=8,
                seqused_k=FILLED["cache_seqlens"], page_table=torch.tensor([[0, 1], [2, 3]]).int(),
            )[:, None],
            cached(FILLED)),
    Refusal("quantise the result", packed(output_scale=torch.ones(1))),
    Refusal("rotate q and k before the call",
            cached(FILLED | APPENDED, rotary_seqlens=CACHE["cache_seqlens"], **ROTARY),
            cached(FILLED | APPENDED | {n: turned(CACHE[n]) for n in "qk"}),
            cached(FILLED | APPENDED, **ROTARY)),
    # Refusals about caches.
    Refusal("use the model's own functions for this layer",
            cached(CACHE | {n: CACHE[n][..., :1].repeat(1, 1, 1, 584) for n in ("q", "k", "v", *CACHES)})),
    Refusal("pass [2, blocks]", cached(FILLED, block_table=BOTH_IN_ONE[:, 0])),
    Refusal("pass at most 8", cached(CACHE, **dict.fromkeys(ROTARY, torch.ones(8, 9)))),
    Refusal("pass a tuple (a whole number", cached(FILLED, window_size=(3,))),
    *(Refusal("allocate separate memory for every element", refused) for refused in (
        lambda: flash_attn.flash_attn_with_kvcache(**ODD, v_cache=ODD["k_cache"][:1].expand(2, -1, -1, -1)),
        cached(FILLED, out=FILLED["q"][:1].expand(2, -1, -1, -1)))),
    *(
        Refusal("pass a cache of as many sequences, or cache_batch_idx", cached(FILLED, **THREE), followed)
        for followed in (
            cached(FILLED, **THREE, cache_batch_idx=torch.tensor([0, 1, 0])),
            cached(FILLED, **THREE, **{name: FILLED[name][[0, 1, 0]] for name in CACHES}),
        )
    ),
    Refusal("pass both or neither", cached(FILLED, k=APPENDED["k"]), cached(FILLED)),
    Refusal("pass both or neither", cached(FILLED, v=APPENDED["v"]), cached(FILLED, **APPENDED)),
    Refusal("pass all four", cached(FILLED, **ROTARY)),
    Refusal("at least 8", cached(CACHE, **{name: angles[:7] for name, angles in ROTARY.items()}),
            cached(CACHE, **{name: angles[:8] for name, angles in ROTARY.items()})),
    Refusal("convert it with .to(q.dtype)",
            cached(CACHE, rotary_cos=torch.ones(8, 4).int(), rotary_sin=torch.zeros(8, 4))),
    Refusal("pass at most 8", cached(FILLED, cache_seqlens=9), cached(FILLED, cache_seqlens=8)),
    Refusal("pass at most 7", cached(FILLED, **APPENDED, cache_seqlens=8),
            cached(FILLED, **APPENDED, cache_seqlens=7)),
    Refusal("pass separate memory for each",
            lambda: flash_attn.flash_attn_with_kvcache(**ODD, v_cache=ODD["k_cache"]),
            lambda: flash_attn.flash_attn_with_kvcache(**ODD, v_cache=ODD["k_cache"].clone())),
    Refusal("pass it", cached(FILLED, **APPENDED, cache_seqlens=None)),
    Refusal("different entries in cache_batch_idx",
            cached(FILLED | APPENDED, cache_seqlens=SEVEN, cache_batch_idx=torch.tensor([1, 1])),
            cached(FILLED | APPENDED, cache_seqlens=SEVEN, cache_batch_idx=torch.tensor([0, 1])),
            checked=True),
    Refusal("leave out cache_batch_idx",
            cached(FILLED, block_table=BOTH_IN_ONE, cache_batch_idx=BOTH_IN_ONE[:, 0]),
            cached(FILLED, block_table=BOTH_IN_ONE)),
    Refusal("pass k_cache.detach()", cached(FILLED, **APPENDED, k_cache=WITH_GRADIENT),
            cached(FILLED, **APPENDED, k_cache=WITH_GRADIENT.detach())),
    Refusal("allocate separate memory for every element, without .expand()",
            cached(FILLED, **APPENDED, v_cache=CACHE["v_cache"][:1].expand(2, -1, -1, -1))),
]  # fmt: skip
