"""Refusals of flash-attn's functions, compared with flash_attn_oracle.py; see __init__.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import torch_fattn
from tests.helpers.flash_attn_oracle import Options, rotated
from tests.helpers.public_calls import VALID, heads
from tests.helpers.refusals import Refusal
from tests.helpers.wrong_calls import Arguments
from torch_fattn import flash_attn, reference

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
CHUNKS = (torch.arange(3)[:, None] + 2) // 2 == torch.arange(5) // 2
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


def exact_packed(sinks: Tensor | None = None) -> Callable[[], Tensor]:
    q, k, v = (PACKED[name] for name in "qkv")
    attend = Options(sinks=sinks).attend
    parts = [(q[b * 3 :][:3], *(t[b * 5 :][:5] for t in (k, v))) for b in (0, 1)]
    return lambda: torch.cat([attend(b, *part)[0] for b, part in enumerate(parts)])


def exact_cached(
    lens: tuple[int, ...] = (3, 5),
    idx: tuple[int, ...] = (0, 1),
    *,
    appended: bool = False,
    turned: bool = False,
) -> Callable[[], Tensor]:
    def call() -> Tensor:
        outs = []
        for b, (i, n) in enumerate(zip(idx, lens, strict=True)):
            q, keys, values = CACHE["q"][b % 2], CACHE["k_cache"][i, :n], CACHE["v_cache"][i, :n]
            if appended:
                own = APPENDED["k"][b]
                if turned:
                    q, own = (rotated(x, torch.tensor([n]), *ROTARY.values(), True) for x in (q, own))
                keys, values = torch.cat((keys, own)), torch.cat((values, APPENDED["v"][b]))
            outs.append(Options().attend(b, q, keys, values)[0])
        return torch.stack(outs)

    return call


def turned(x: Tensor) -> Tensor:
    lens = CACHE["cache_seqlens"]
    return torch.stack([rotated(row, lens[b : b + 1], *ROTARY.values(), True) for b, row in enumerate(x)])


def _gradient_by_distance(attention: Callable[..., Tensor]) -> Callable[[], Tensor]:
    def call() -> Tensor:
        q = DENSE["q"].clone().requires_grad_()
        attention(q).square().sum().backward()
        assert q.grad is not None
        return q.grad

    return call


def _biased(q: Tensor) -> Tensor:
    query, key, value = (t.transpose(1, 2) for t in (q, DENSE["k"], DENSE["v"]))
    distance = (
        torch.arange(q.shape[1])[:, None] + key.shape[2] - q.shape[1] - torch.arange(key.shape[2])
    ).abs()
    bias = -SLOPES[0, :, None, None] * distance
    return F.scaled_dot_product_attention(query, key, value, bias, enable_gqa=True).transpose(1, 2)


def _biased_by_hand(q: Tensor) -> Tensor:
    out = [Options(slopes=SLOPES[:1]).attend(0, q[b], DENSE["k"][b], DENSE["v"][b])[0] for b in range(len(q))]
    return torch.stack(out)


THREE = {"q": torch.cat((CACHE["q"], CACHE["q"][:1])), "cache_seqlens": torch.tensor([3, 5, 4]).int()}
WITH_GRADIENT = CACHE["k_cache"].clone().requires_grad_()
SEVEN = torch.tensor([7, 7], dtype=torch.int32)
ODD = {name: FILLED[name][..., :15].clone() for name in ("q", "k_cache")} | {"cache_seqlens": SEVEN}
ODD |= {name: APPENDED[name][..., :15] for name in ("k", "v")}
NOTHING = PACKED["cu_seqlens_q"][:0]

REFUSALS: list[Refusal] = [
    Refusal("move q with .to('mps:0')", dense(k=DENSE["k"].to("mps"), v=DENSE["v"].to("mps")),
            dense(**{name: DENSE[name].to("mps:0") for name in "qkv"}), exact_dense()),
    Refusal("pass torch.float32, torch.float16 or torch.bfloat16", dense(q=DENSE["q"].double()),
            dense(q=DENSE["q"].double().to(torch.float32)), exact_dense()),
    Refusal("convert with .to(q.dtype)", dense(k=DENSE["k"].double()),
            dense(k=DENSE["k"].double().to(DENSE["q"].dtype)), exact_dense()),
    Refusal("pass a multiple of them, and transpose q and the keys if yours have the heads before the length",
            dense(q=DENSE["q"][:, :, :3]), dense(q=DENSE["q"][:, :, :2]),
            exact_dense(q=DENSE["q"][:, :, :2])),
    Refusal("use F.scaled_dot_product_attention of the transposed [batch, heads, length, head_dim], with an "
            "attn_mask that holds the ALiBi bias, or call under torch.no_grad()",
            _gradient_by_distance(
                lambda q: flash_attn.flash_attn_func(**DENSE | {"q": q}, alibi_slopes=SLOPES[0])
            ),
            _gradient_by_distance(_biased), _gradient_by_distance(_biased_by_hand)),
    *(
        Refusal(
            "[4], or also for each sequence, [2, 4]",
            dense(alibi_slopes=SLOPES[0, :3]),
            dense(alibi_slopes=slopes),
            exact_dense(Options(slopes=slopes)),
        )
        for slopes in (SLOPES, SLOPES[0])
    ),
    Refusal("convert it with .float()", dense(alibi_slopes=SLOPES.double()),
            dense(alibi_slopes=SLOPES.double().float()), exact_dense(Options(slopes=SLOPES))),
    *(
        Refusal(
            "a number up to 1e+30, or 0.0 for none",
            dense(softcap=1e39),
            dense(softcap=cap),
            exact_dense(),
        )
        for cap in (1e30, 0.0)
    ),
    Refusal("pass None for the default, 1 / sqrt(head size)", dense(softmax_scale=float("nan")),
            dense(softmax_scale=None), exact_dense(Options(scale=0.25))),
    Refusal("pass a multiple of them, and transpose q and the keys if yours have the heads before the length",
            dense(**{name: DENSE[name].transpose(1, 2) for name in "qkv"}), dense(), exact_dense()),
    Refusal("convert it with .to(torch.int32)", packed(cu_seqlens_k=PACKED["cu_seqlens_k"].long()),
            packed(cu_seqlens_k=PACKED["cu_seqlens_k"].long().to(torch.int32)), exact_packed()),
    Refusal("it begins with 0", packed(cu_seqlens_q=NOTHING),
            packed(cu_seqlens_q=torch.cat((torch.tensor([0]), torch.tensor([3, 1]).cumsum(0))).int()),
            exact_packed()),
    Refusal("pass the keys of the longest sequence", packed(max_seqlen_k=-1), packed(max_seqlen_k=5),
            exact_packed()),
    Refusal("pass [batch, length, heads, head_dim]", dense(k=DENSE["k"].flatten(0, 1)),
            dense(k=DENSE["k"].flatten(0, 1).view(2, 5, 2, 16)),
            exact_dense()),
    Refusal("pass one of them", packed(s_aux=SINKS, learnable_sink=SINKS),
            packed(learnable_sink=SINKS), exact_packed(sinks=SINKS)),
    Refusal("pass their product in torch.float16 or torch.bfloat16",
            dense(k=FLOAT8, k_descale=torch.full((2, 2), 0.5)),
            dense(**{n: DENSE[n].half() for n in "qv"}, k=(FLOAT8.float() * 0.5).half()),
            exact_dense(k=FLOAT8.float() * 0.5)),
    Refusal("pass the second query joined to q, and the values joined to the keys", dense(qv=DENSE["q"]),
            dense(**JOINED), exact_dense(**JOINED)),
    Refusal("use torch_fattn.prefill with an attn_mask", dense(attention_chunk=2),
            lambda: torch_fattn.prefill(*(DENSE[n].transpose(1, 2) for n in "qkv"), CHUNKS).transpose(1, 2),
            lambda: reference.prefill(*(DENSE[n].transpose(1, 2) for n in "qkv"), CHUNKS)[0].transpose(1, 2)),
    Refusal("use flash_attn_varlen_func, with cache_seqlens as seqused_k",
            cached(FILLED, q=FILLED["q"].flatten(0, 1), cu_seqlens_q=torch.arange(3, dtype=torch.int32)),
            lambda: flash_attn.flash_attn_varlen_func(
                FILLED["q"].flatten(0, 1), *(FILLED[n].unflatten(1, (-1, 4)).flatten(0, 1) for n in CACHES),
                torch.arange(3, dtype=torch.int32), max_seqlen_q=1, max_seqlen_k=8,
                seqused_k=FILLED["cache_seqlens"], page_table=torch.tensor([[0, 1], [2, 3]]).int(),
            )[:, None],
            exact_cached()),
    Refusal("quantise the result", packed(output_scale=torch.ones(1)), packed(), exact_packed()),
    Refusal("rotate q and k before the call",
            cached(FILLED | APPENDED, rotary_seqlens=CACHE["cache_seqlens"], **ROTARY),
            cached(FILLED | APPENDED | {n: turned(CACHE[n]) for n in "qk"}),
            exact_cached(appended=True, turned=True)),
    # Refusal about caches.
    *(
        Refusal(
            "pass a cache of as many sequences, or cache_batch_idx",
            cached(FILLED, **THREE),
            cached(FILLED, **THREE, **right),
            exact_cached((3, 5, 4), (0, 1, 0)),
        )
        for right in (
            {"cache_batch_idx": torch.tensor([0, 1, 0])},
            {name: FILLED[name][[0, 1, 0]] for name in ("k_cache", "v_cache")},
        )
    ),
    Refusal("pass both or neither", cached(FILLED, k=APPENDED["k"]), cached(FILLED), exact_cached()),
    Refusal("pass both or neither", cached(FILLED, v=APPENDED["v"]), cached(FILLED, **APPENDED),
            exact_cached(appended=True)),
    Refusal("pass all four", cached(FILLED, **ROTARY), cached(FILLED, **ROTARY, **APPENDED),
            exact_cached(appended=True, turned=True)),
    Refusal("at least 8", cached(CACHE, **{name: angles[:7] for name, angles in ROTARY.items()}),
            cached(CACHE, **{name: angles[:8] for name, angles in ROTARY.items()}),
            exact_cached(appended=True, turned=True)),
    Refusal(
        "convert it with .to(q.dtype)",
        cached(CACHE, rotary_cos=torch.ones(8, 4).int(), rotary_sin=torch.zeros(8, 4)),
        cached(CACHE, rotary_cos=torch.ones(8, 4).int().to(CACHE["q"].dtype), rotary_sin=torch.zeros(8, 4)),
        exact_cached(appended=True),
    ),
    Refusal("pass at most 8", cached(FILLED, cache_seqlens=9), cached(FILLED, cache_seqlens=8),
            exact_cached((8, 8))),
    Refusal("pass at most 7", cached(FILLED, **APPENDED, cache_seqlens=8),
            cached(FILLED, **APPENDED, cache_seqlens=7), exact_cached((7, 7), appended=True)),
    Refusal("pass separate memory for each",
            lambda: flash_attn.flash_attn_with_kvcache(**ODD, v_cache=ODD["k_cache"]),
            lambda: flash_attn.flash_attn_with_kvcache(**ODD, v_cache=ODD["k_cache"].clone()),
            lambda: cached(ODD, v_cache=ODD["k_cache"].clone())()),
    Refusal("pass it", cached(FILLED, **APPENDED, cache_seqlens=None), cached(FILLED, **APPENDED),
            exact_cached(appended=True)),
    Refusal("different entries in cache_batch_idx",
            cached(FILLED | APPENDED, cache_seqlens=SEVEN, cache_batch_idx=torch.tensor([1, 1])),
            cached(FILLED | APPENDED, cache_seqlens=SEVEN, cache_batch_idx=torch.tensor([0, 1])),
            exact_cached((7, 7), appended=True), checked=True),
    Refusal("leave out cache_batch_idx",
            cached(FILLED, block_table=BOTH_IN_ONE, cache_batch_idx=BOTH_IN_ONE[:, 0]),
            cached(FILLED, block_table=BOTH_IN_ONE), exact_cached(idx=(0, 0))),
    Refusal("pass k_cache.detach()",
            cached(FILLED, **APPENDED, k_cache=WITH_GRADIENT),
            cached(FILLED, **APPENDED, k_cache=WITH_GRADIENT.detach()), exact_cached(appended=True)),
    Refusal("allocate separate memory for every element, without .expand()",
            cached(FILLED, **APPENDED, v_cache=CACHE["v_cache"][:1].expand(2, -1, -1, -1)),
            cached(FILLED, **APPENDED, v_cache=CACHE["v_cache"].clone()), exact_cached(appended=True)),
]  # fmt: skip
