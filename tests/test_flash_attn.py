"""torch_fattn.flash_attn: flash-attn's functions, against float64, and their signatures."""

from __future__ import annotations

import inspect
import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import counted_launches
from torch_fattn import flash_attn as fa

LIMITS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
WINDOWS = ((-1, -1), (-1, -1), (4, 0), (3, 5), (-1, 2), (7, -1))


def attention_ref(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: tuple[int, int], softcap: float,
    scale: float | None, slopes: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What flash-attn documents, one sequence in float64: q `[Lq, H, D]`; out like it, and lse `[H, Lq]`."""
    q, k, v = (t.double().transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[0] // t.shape[0], dim=0) for t in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    distance = torch.arange(k.shape[1]) - position
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * distance.abs()
    left, right = window[0], 0 if causal else window[1]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    scores = scores.masked_fill(hidden, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0)[..., None])
    return (weights @ v).transpose(0, 1), lse


def check(out: Tensor, lse: Tensor, exact: Tensor, exact_lse: Tensor) -> None:
    assert out.is_contiguous() and out.shape == exact.shape and lse.shape == exact_lse.shape
    limit = LIMITS[out.dtype]
    assert torch.allclose(out.cpu().double(), exact, atol=limit, rtol=limit)
    assert torch.allclose(lse.cpu().double(), exact_lse, atol=limit * 4, rtol=1e-4)


def options_of(rng: random.Random, heads: int) -> dict[str, Any]:
    options: dict[str, Any] = {"causal": rng.random() < 0.5, "window_size": rng.choice(WINDOWS)}
    if rng.random() < 0.4:
        options["softcap"] = 5.0
    if rng.random() < 0.4:
        options["softmax_scale"] = 0.2
    if rng.random() < 0.4:
        options["alibi_slopes"] = torch.rand(heads)
    return options


def reference_options(options: dict[str, Any]) -> dict[str, Any]:
    return {
        "causal": options["causal"],
        "window": options["window_size"],
        "softcap": options.get("softcap", 0.0),
        "scale": options.get("softmax_scale"),
    }


def on(device: str, options: dict[str, Any]) -> dict[str, Any]:
    return {name: v.to(device) if isinstance(v, Tensor) else v for name, v in options.items()}


@pytest.mark.parametrize("seed", range(24))
def test_dense(seed: int, device: str) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype = rng.choice(list(LIMITS))
    batch, (heads, kv_heads) = rng.choice((1, 2)), rng.choice(((4, 4), (4, 2), (3, 1)))
    q_len, kv_len, dim = rng.choice((1, 5, 16, 30)), rng.choice((1, 8, 33)), rng.choice((32, 64))
    q = torch.randn(batch, q_len, heads, dim).to(dtype)
    kv = torch.randn(batch, kv_len, 2, kv_heads, dim).to(dtype)
    options = options_of(rng, heads)
    slopes = options.get("alibi_slopes")
    if slopes is not None and rng.random() < 0.5:
        slopes = options["alibi_slopes"] = torch.rand(batch, heads)
    results = [
        attention_ref(
            q[b], kv[b, :, 0], kv[b, :, 1],
            slopes=slopes if slopes is None or slopes.dim() == 1 else slopes[b], **reference_options(options),
        )
        for b in range(batch)
    ]  # fmt: skip
    exact, exact_lse = (torch.stack([r[i] for r in results]) for i in (0, 1))
    with counted_launches() as launches:
        out, lse, empty = fa.flash_attn_kvpacked_func(
            q.to(device), kv.to(device), **on(device, options), return_attn_probs=True
        )
    assert bool(launches) == (device == "mps") and empty.numel() == 0
    check(out, lse, exact, exact_lse)
    k, v = kv.to(device).unbind(2)
    assert torch.equal(fa.flash_attn_func(q.to(device), k, v, **on(device, options)).cpu(), out.cpu())
    if heads == kv_heads and q_len == kv_len:
        qkv = torch.cat([q[:, :, None], kv], dim=2).to(device)
        assert torch.equal(fa.flash_attn_qkvpacked_func(qkv, **on(device, options)).cpu(), out.cpu())


@pytest.mark.parametrize("seed", range(16))
def test_packed(seed: int, device: str) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype = rng.choice(list(LIMITS))
    (heads, kv_heads), dim = rng.choice(((4, 4), (4, 2))), rng.choice((32, 64))
    k_lens = [rng.choice((0, 1, 9, 33)) for _ in range(3)]
    self_attention = rng.random() < 0.3 and heads == kv_heads
    q_lens = k_lens if self_attention else [rng.choice((0, 1, 6, 20)) for _ in range(3)]
    cu_q, cu_k = (torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32) for n in (q_lens, k_lens))
    q = torch.randn(sum(q_lens), heads, dim).to(dtype)
    kv = torch.randn(sum(k_lens), 2, kv_heads, dim).to(dtype)
    options = options_of(rng, heads)
    if not (options["causal"] or options["window_size"][1] == 0):
        options.pop("alibi_slopes", None)
    slopes = options.get("alibi_slopes")
    results = [
        attention_ref(q[a:b], kv[c:d, 0], kv[c:d, 1], slopes=slopes, **reference_options(options))
        for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False)
    ]
    exact, exact_lse = torch.cat([r[0] for r in results]), torch.cat([r[1] for r in results], dim=1)
    lens = (cu_q.to(device), cu_k.to(device), max(q_lens), max(k_lens))
    out, lse, _ = fa.flash_attn_varlen_kvpacked_func(
        q.to(device), kv.to(device), *lens, **on(device, options), return_attn_probs=True
    )
    check(out, lse, exact, exact_lse)
    k, v = kv.to(device).unbind(1)
    again = fa.flash_attn_varlen_func(q.to(device), k, v, *lens, **on(device, options))
    assert torch.equal(again.cpu(), out.cpu())
    if self_attention:
        qkv = torch.cat([q[:, None], kv], dim=1).to(device)
        again = fa.flash_attn_varlen_qkvpacked_func(qkv, cu_q.to(device), max(q_lens), **on(device, options))
        assert torch.equal(again.cpu(), out.cpu())


def rotated(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x `[L, H, D]`, column by column, as the rotation of a complex number."""
    out, half = x.double().clone(), cos.shape[1]
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        turn = torch.complex(cos[positions, i].double(), sin[positions, i].double())[:, None]
        turned = torch.complex(x[..., a].double(), x[..., b].double()) * turn
        out[..., a], out[..., b] = turned.real, turned.imag
    return out.to(x.dtype)


@pytest.mark.parametrize("seed", range(30))
def test_cache(seed: int, device: str) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype = rng.choice(list(LIMITS))
    batch, (heads, kv_heads), dim = 2, rng.choice(((4, 4), (4, 2))), rng.choice((32, 64))
    q_len, new = rng.choice((1, 3, 16, 20)), rng.choice((0, 1, 3))
    lens = torch.tensor([rng.randint(0, 20), rng.randint(0, 20)], dtype=torch.int32)
    way = rng.choice(("dense", "picked", "paged"))
    options = options_of(rng, heads)
    if not (options["causal"] or options["window_size"][1] == 0):
        options.pop("alibi_slopes", None)
    table = None
    if way == "paged":
        pools = [torch.randn(16, 8, kv_heads, dim).to(dtype) for _ in range(2)]
        table = torch.randperm(16)[:8].view(2, 4).to(torch.int32)
    else:
        pools = [torch.randn(4, 32, kv_heads, dim).to(dtype) for _ in range(2)]
    picked = torch.tensor([3, 1], dtype=torch.int32) if way == "picked" else None

    def keys_of(pool: Tensor, b: int) -> Tensor:
        """A view or a copy of what the sequence has room for, `[32, Hkv, D]`."""
        if table is not None:
            return pool[table[b].long()].flatten(0, 1)
        return pool[b if picked is None else int(picked[b])]

    q = torch.randn(batch, q_len, heads, dim).to(dtype)
    fresh = [torch.randn(batch, new, kv_heads, dim).to(dtype) for _ in range(2)] if new else [None, None]
    rotary: dict[str, Any] = {}
    expected_q, expected_fresh = q.clone(), [f.clone() if f is not None else None for f in fresh]
    if new and rng.random() < 0.5:
        angles, interleaved = torch.rand(64, 8), rng.random() < 0.5
        cos, sin = angles.cos(), angles.sin()
        rotary = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
        local = options["causal"] or options["window_size"] != (-1, -1)
        for b in range(batch):
            steps = torch.arange(q_len) if local else torch.zeros(q_len, dtype=torch.int64)
            expected_q[b] = rotated(q[b], int(lens[b]) + steps, cos, sin, interleaved)
            assert fresh[0] is not None and expected_fresh[0] is not None
            expected_fresh[0][b] = rotated(
                fresh[0][b], int(lens[b]) + torch.arange(new), cos, sin, interleaved
            )
    on_device = [pool.to(device) for pool in pools]
    out, lse = fa.flash_attn_with_kvcache(
        q.to(device), *on_device, *(f if f is None else f.to(device) for f in fresh),
        cache_seqlens=lens.to(device),
        cache_batch_idx=None if picked is None else picked.to(device),
        block_table=None if table is None else table.to(device),
        return_softmax_lse=True, **on(device, rotary), **on(device, options),
    )  # fmt: skip
    results = []
    for b in range(batch):
        first, last = int(lens[b]), int(lens[b]) + new
        keys, values = (keys_of(pool, b).clone() for pool in pools)
        if new:
            assert expected_fresh[0] is not None and expected_fresh[1] is not None
            keys[first:last], values[first:last] = expected_fresh[0][b], expected_fresh[1][b]
        for pool, expected in zip(on_device, (keys, values), strict=True):
            assert torch.allclose(keys_of(pool.cpu(), b).float(), expected.float(), atol=LIMITS[dtype])
        results.append(
            attention_ref(
                expected_q[b], keys[:last], values[:last], slopes=options.get("alibi_slopes"),
                **reference_options(options),
            )
        )  # fmt: skip
    exact, exact_lse = (torch.stack([r[i] for r in results]) for i in (0, 1))
    limit = 2 * LIMITS[dtype]
    assert out.shape == exact.shape and torch.allclose(out.cpu().double(), exact, atol=limit, rtol=limit)
    assert lse.shape == exact_lse.shape and torch.allclose(
        lse.cpu().double(), exact_lse, atol=4 * limit, rtol=1e-3
    )


def test_queries_turn_alike_where_no_window_is_none() -> None:
    """Rows that see the same keys are rotated as the first; a window of None is none, as -1 is."""
    q, k, v, *cache = (torch.randn(1, n, 2, 32, device="mps") for n in (3, 3, 3, 16, 16))
    angles = torch.rand(32, 8, device="mps")

    def call(window: tuple[int | None, int | None]) -> Tensor:
        caches = [c.clone() for c in cache]
        return fa.flash_attn_with_kvcache(
            q, *caches, k, v, angles.cos(), angles.sin(), cache_seqlens=5, window_size=window
        ).cpu()

    assert torch.equal(call((None, None)), call((-1, -1)))
    assert not torch.allclose(call((99, 99)), call((-1, -1)), atol=1e-3)  # the control


def test_cache_lengths_as_a_number_or_left_out() -> None:
    q, k, v = (torch.randn(2, n, 2, 32, device="mps") for n in (1, 20, 20))
    whole = fa.flash_attn_func(q, k, v)
    assert torch.equal(fa.flash_attn_with_kvcache(q, k, v).cpu(), whole.cpu())
    assert torch.equal(fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=20).cpu(), whole.cpu())
    shorter = fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=7)
    assert torch.allclose(shorter.cpu(), fa.flash_attn_func(q, k[:, :7], v[:, :7]).cpu(), atol=1e-6)


def test_keys_beyond_the_cache_are_dropped() -> None:
    q, new = torch.randn(1, 1, 2, 32, device="mps"), torch.randn(1, 3, 2, 32, device="mps")
    k, v = (torch.zeros(2, 4, 2, 32, device="mps") for _ in range(2))
    fa.flash_attn_with_kvcache(q, k, v, new, new, cache_seqlens=2)
    assert torch.equal(k[0, 2:].cpu(), new[0, :2].cpu()) and not k[1].any(), "the next sequence is untouched"


def test_a_paged_varlen_call(device: str) -> None:
    torch.manual_seed(0)
    pools = [torch.randn(6, 4, 2, 32, device=device) for _ in range(2)]
    table = torch.tensor([[4, 0], [2, 5]], dtype=torch.int32, device=device)
    cu_q, cu_k = (torch.tensor(n, dtype=torch.int32, device=device) for n in ([0, 3, 5], [0, 7, 12]))
    q = torch.randn(5, 4, 32, device=device)
    out = fa.flash_attn_varlen_func(q, *pools, cu_q, cu_k, 3, 7, causal=True, block_table=table)
    for b, (rows, length) in enumerate((((0, 3), 7), ((3, 5), 5))):
        k, v = (pool[table[b].long()].flatten(0, 1)[:length].cpu() for pool in pools)
        exact, _ = attention_ref(
            q[slice(*rows)].cpu(), k, v, causal=True, window=(-1, -1), softcap=0.0, scale=None, slopes=None
        )
        assert torch.allclose(out[slice(*rows)].cpu().double(), exact, atol=1e-5)


# Names and defaults of flash-attn 2.8.
TAIL = "dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None "
TAIL += "deterministic=False return_attn_probs=False"
SIGNATURES = {
    "flash_attn_func": "q k v " + TAIL,
    "flash_attn_qkvpacked_func": "qkv " + TAIL,
    "flash_attn_kvpacked_func": "q kv " + TAIL,
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k " + TAIL
    + " block_table=None",
    "flash_attn_varlen_qkvpacked_func": "qkv cu_seqlens max_seqlen " + TAIL,
    "flash_attn_varlen_kvpacked_func": "q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k " + TAIL,
    "flash_attn_with_kvcache": "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None "
    "cache_seqlens=None cache_batch_idx=None cache_leftpad=None block_table=None softmax_scale=None "
    "causal=False window_size=(-1,-1) softcap=0.0 rotary_interleaved=True alibi_slopes=None num_splits=0 "
    "return_softmax_lse=False",
}  # fmt: skip


@pytest.mark.host_only
@pytest.mark.parametrize("name", fa.__all__)
def test_signatures(name: str) -> None:
    parameters = inspect.signature(getattr(fa, name)).parameters.values()
    ours = [
        p.name if p.default is p.empty else f"{p.name}={str(p.default).replace(' ', '')}" for p in parameters
    ]
    assert ours == SIGNATURES[name].split()


def test_refusals() -> None:
    q = torch.randn(2, 20, 2, 32, device="mps")
    slopes = torch.ones(2, device="mps")
    cu = torch.tensor([0, 20], dtype=torch.int32, device="mps")
    with counted_launches() as launches:
        with pytest.raises(NotImplementedError, match=r"flash_attn_func: dropout_p 0\.1 is not 0"):
            fa.flash_attn_func(q, q, q, 0.1)
        with pytest.raises(NotImplementedError, match="alibi_slopes of 1 dimensions with causal=False"):
            fa.flash_attn_varlen_func(q[0], q[0], q[0], cu, cu, 20, 20, alibi_slopes=slopes)
        with pytest.raises(NotImplementedError, match="cache_leftpad is not supported"):
            fa.flash_attn_with_kvcache(q, q, q, cache_leftpad=cu)
        with pytest.raises(ValueError, match="appended at cache_seqlens, which is None"):
            fa.flash_attn_with_kvcache(q, q, q, q, q)
        with pytest.raises(ValueError, match="one of k and v is None"):
            fa.flash_attn_with_kvcache(q, q, q, q, cache_seqlens=0)
        with pytest.raises(ValueError, match="leave out cache_batch_idx"):
            fa.flash_attn_with_kvcache(q, q, q, cache_batch_idx=cu, block_table=cu[None])
        with pytest.raises(ValueError, match="rotary_cos needs rotary_sin, and k and v"):
            fa.flash_attn_with_kvcache(q, q, q, rotary_cos=q)
    assert not launches
    out = fa.flash_attn_func(q.requires_grad_(), q, q)
    with pytest.raises(RuntimeError, match="fattn has no backward"):
        out.sum().backward()


@pytest.mark.parametrize("rows", [1, 20])
def test_a_cache_of_too_few_sequences_is_refused_untouched(rows: int) -> None:
    q, k = (torch.ones(3, rows, 2, 16, device="mps") for _ in range(2))
    caches = [torch.zeros(2, 32, 2, 16, device="mps") for _ in range(2)]
    with pytest.raises(ValueError, match="q has batch size 3 and k_cache 2"):
        fa.flash_attn_with_kvcache(q, *caches, k, k, cache_seqlens=3)
    assert not caches[0].any()


@pytest.mark.parametrize("dims", [(60, 60), (20, 13), (64, 30)])
def test_head_sizes_that_are_padded(dims: tuple[int, int]) -> None:
    """By the caller in flash-attn's own code too: the scale is that of the true size."""
    dim, value_dim = dims
    q, k, v = (torch.randn(1, rows, 2, d) for rows, d in ((9, dim), (20, dim), (20, value_dim)))
    exact, exact_lse = attention_ref(
        q[0], k[0], v[0], causal=True, window=(-1, -1), softcap=0.0, scale=None, slopes=None
    )
    with counted_launches() as launches:
        for rows in (1, 9):  # by decode, by prefill
            out, lse, _ = fa.flash_attn_func(
                q[:, -rows:].to("mps"), k.to("mps"), v.to("mps"), causal=True, return_attn_probs=True
            )
            check(out[0], lse[0], exact[-rows:], exact_lse[:, -rows:])
        starts = [torch.tensor([0, n], dtype=torch.int32, device="mps") for n in (9, 20)]
        packed = (tensor[0].to("mps") for tensor in (q, k, v))
        out, lse, _ = fa.flash_attn_varlen_func(*packed, *starts, 9, 20, causal=True, return_attn_probs=True)
        check(out, lse, exact, exact_lse)
    assert sum(count for kernel, count in launches.items() if "prefill" in kernel or "decode" in kernel) >= 3


def test_a_cache_is_not_padded() -> None:
    q, cache = torch.randn(1, 1, 2, 60, device="mps"), torch.randn(1, 9, 2, 60, device="mps")
    with pytest.raises(ValueError, match=r"head size of 60 is no multiple of 8.*softmax_scale"):
        fa.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=9)


def test_no_limit_may_be_none() -> None:
    q = torch.randn(1, 5, 2, 16, device="mps")
    limited = fa.flash_attn_func(q, q, q, window_size=(2, -1))
    assert torch.equal(fa.flash_attn_func(q, q, q, window_size=(2, None)), limited)
