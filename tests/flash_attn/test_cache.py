"""torch_fattn.flash_attn.flash_attn_with_kvcache, against float64: all that its options make together."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import Checked
from tests.helpers.flash_attn_oracle import LIMITS, Options, bits, check, draw_options, rotated
from torch_fattn import flash_attn as fa

BATCH, CAPACITY, BLOCK = 2, 24, 8


@dataclass
class Problem:
    seed: int
    storage: str = "dense"  # or "picked", or "paged"
    dtype: torch.dtype = torch.float32
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (32, 32)
    q_len: int = 1
    new: int = 0
    lens: tuple[int, ...] | None = (20, 9)
    leftpad: tuple[int, ...] | None = None
    rotary: str | None = None  # "interleaved" or "halves"
    angles: int = CAPACITY  # positions of the table
    integers: torch.dtype = torch.int32  # of lengths and indices
    options: Options = field(default_factory=Options)

    def sequence(self, pool: Tensor, picked: Tensor | None, table: Tensor | None, b: int) -> Tensor:
        """The slots of a sequence's keys in the pool, as indices of `[-1, Hkv, D]`."""
        if table is not None:
            return (table[b].long()[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
        return torch.arange(CAPACITY) + CAPACITY * (b if picked is None else int(picked[b]))

    def check(self, device: str) -> None:
        torch.manual_seed(self.seed)
        heads, kv_heads = self.heads
        paged = self.storage == "paged"
        shape = (8, BLOCK) if paged else (4, CAPACITY)
        pools = [torch.randn(*shape, kv_heads, dim).to(self.dtype) for dim in self.dims]
        table = torch.randperm(8)[:6].view(BATCH, 3).to(torch.int32) if paged else None
        picked = torch.tensor([3, 1], dtype=self.integers) if self.storage == "picked" else None
        q = torch.randn(BATCH, self.q_len, heads, self.dims[0]).to(self.dtype)
        fresh = [torch.randn(BATCH, self.new, kv_heads, d).to(self.dtype) for d in self.dims]
        tensors: dict[str, Tensor | None] = {
            "q": q,
            "k": fresh[0] if self.new else None,
            "v": fresh[1] if self.new else None,
            "cache_seqlens": None if self.lens is None else torch.tensor(self.lens, dtype=self.integers),
            "cache_leftpad": None
            if self.leftpad is None
            else torch.tensor(self.leftpad, dtype=self.integers),
            "cache_batch_idx": picked,
            "block_table": table,
        }
        rotary: dict[str, Any] = {}
        if self.rotary and self.new:
            angle = torch.rand(self.angles, 8) * 6
            tensors |= {"rotary_cos": angle.cos(), "rotary_sin": angle.sin()}
            rotary = {"rotary_interleaved": self.rotary == "interleaved"}

        results, written = [], [pool.clone() for pool in pools]
        untouched = torch.ones(shape[0] * shape[1], dtype=torch.bool)
        places = [self.sequence(pools[0], picked, table, b) for b in range(BATCH)]
        for b, place in enumerate(places):
            filled = min(max(CAPACITY if self.lens is None else self.lens[b], 0), CAPACITY)
            rows, keys = q[b], fresh[0][b]
            if rotary:
                angles = (tensors["rotary_cos"], tensors["rotary_sin"], rotary["rotary_interleaved"])
                local = self.options.causal or max(self.options.window) >= 0
                rows = rotated(rows, filled + torch.arange(self.q_len) * local, *angles)
                keys = rotated(keys, filled + torch.arange(self.new), *angles)
            has_slots = self.lens is None or self.lens[b] >= 0
            end = min(filled + self.new, CAPACITY) if has_slots else 0
            untouched[place[filled:end]] = False
            for pool, added in zip(written, (keys, fresh[1][b]), strict=True):
                pool.flatten(0, 1)[place[filled:end]] = added[: end - filled]
            first = 0 if self.leftpad is None else self.leftpad[b]
            # Slots outside the sequence are NaN and have no influence.
            for pool in (*pools, *written):
                pool.flatten(0, 1)[place[end:]] = torch.nan
                pool.flatten(0, 1)[place[: min(first, filled)]] = torch.nan
            k, v = (pool.flatten(0, 1)[place[:end]] for pool in written)
            results.append(self.options.attend(b, rows, k, v, first))

        on_device = {name: None if t is None else t.to(device) for name, t in tensors.items()}
        caches = [pool.to(device) for pool in pools]
        query = on_device.pop("q")
        assert query is not None
        out, lse = fa.flash_attn_with_kvcache(
            query, *caches, return_softmax_lse=True, **on_device, **rotary, **self.options.arguments(device)
        )
        exact, exact_lse = (torch.stack([r[i] for r in results]) for i in (0, 1))
        check(out, lse, exact, exact_lse, slack=2.0)
        for cache, pool, before in zip(caches, written, pools, strict=True):
            kept, given = (bits(c.cpu().flatten(0, 1)[untouched]) for c in (cache, before))
            assert torch.equal(kept, given), "written to another place"
            limit = LIMITS[self.dtype]
            assert torch.allclose(cache.cpu().float(), pool.float(), atol=limit, rtol=limit, equal_nan=True)
        for name, tensor in on_device.items():
            original = tensors[name]
            assert original is None or (tensor is not None and torch.equal(bits(tensor), bits(original))), (
                name
            )
        assert torch.equal(bits(query), bits(q))


def drawn(seed: int) -> Problem:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    heads = rng.choice(((4, 4), (4, 2), (3, 1)))
    new = rng.choice((0, 1, 3))
    return Problem(
        seed,
        storage=rng.choice(("dense", "picked", "paged")),
        dtype=rng.choice(list(LIMITS)),
        heads=heads,
        dims=rng.choice(((32, 32), (32, 32), (20, 13))),
        q_len=rng.choice((1, 3, 20)),
        new=new,
        lens=None
        if new == 0 and rng.random() < 0.1
        else tuple(
            rng.choice((rng.randint(0, CAPACITY), 0, -3, CAPACITY, CAPACITY + 5)) for _ in range(BATCH)
        ),
        leftpad=tuple(rng.randint(0, 9) for _ in range(BATCH)) if rng.random() < 0.3 else None,
        rotary=rng.choice((None, "interleaved", "halves")),
        angles=rng.choice((CAPACITY, CAPACITY + 32)),
        options=draw_options(rng, BATCH, heads[0]),
        integers=rng.choice((torch.int32, torch.int64)),
    )


@pytest.mark.parametrize("seed", range(30))
def test_random_on_mps(seed: int, checked: Checked) -> None:
    with checked():
        drawn(seed).check("mps")


@pytest.mark.host_only
def test_random_on_the_cpu() -> None:
    for seed in range(100, 300):
        drawn(seed).check("cpu")


def test_a_block_or_a_sequence_that_the_cache_has_not() -> None:
    q = torch.randn(1, 1, 2, 16, device="mps")
    for wrong in (-1, 2, 2**30, 2**32):
        caches = [torch.zeros(2, 4, 2, 16, device="mps") for _ in range(2)]
        index = torch.tensor([wrong], device="mps")
        for arguments in ({"cache_batch_idx": index}, {"block_table": index[:, None].clamp(max=2).int()}):
            for rows in (1, 20):
                for leftpad in (None, torch.ones(1, dtype=torch.int32, device="mps")):
                    out = fa.flash_attn_with_kvcache(
                        q.expand(1, rows, 2, 16), *caches, q, q, cache_seqlens=3, cache_leftpad=leftpad,
                        **arguments,
                    )  # fmt: skip
                    assert not out.any() and not caches[0].any()


def test_odd_sequences_lie_anywhere() -> None:
    """A cache `[B, H, capacity, D]` under a padding on the left, of which only a copy is in flash-attn's
    order."""
    torch.manual_seed(0)
    heads_first = [torch.randn(BATCH, 2, CAPACITY, 32) for _ in range(2)]
    q = torch.randn(BATCH, 20, 4, 32)
    caches = [cache.transpose(1, 2) for cache in heads_first]
    lens, first = (torch.tensor(n, dtype=torch.int32) for n in ((20, 9), (3, 5)))
    for device in ("cpu", "mps"):
        arguments = {"cache_seqlens": lens.to(device), "cache_leftpad": first.to(device)}
        on_device = [cache.to(device) for cache in heads_first]
        out = fa.flash_attn_with_kvcache(
            q.to(device), *(cache.transpose(1, 2) for cache in on_device), causal=True, **arguments
        )
        exact = [
            Options(causal=True).attend(b, q[b], *(c[b, : int(lens[b])] for c in caches), int(first[b]))[0]
            for b in range(BATCH)
        ]
        assert torch.allclose(out.cpu().double(), torch.stack(exact), atol=1e-5)


def test_queries_are_rotated_alike_without_a_window() -> None:
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


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_a_cache_without_room(device: str) -> None:
    q, cache = torch.randn(1, 2, 2, 16, device=device), torch.zeros(1, 0, 2, 16, device=device)
    lens = torch.zeros(1, dtype=torch.int32, device=device)
    out, lse = fa.flash_attn_with_kvcache(q, cache, cache, q, q, cache_seqlens=lens, return_softmax_lse=True)
    assert not out.any() and (lse == -torch.inf).all()


@pytest.mark.host_only
def test_a_cache_without_heads() -> None:
    """Its strides are meaningless."""
    q, cache = torch.randn(2, 2, 0, 16), torch.zeros(1, 8, 0, 16).expand(2, -1, -1, -1)
    lens = torch.zeros(2, dtype=torch.int32)
    out, lse = fa.flash_attn_with_kvcache(q, cache, cache, q, q, cache_seqlens=lens, return_softmax_lse=True)
    assert out.shape == q.shape and lse.shape == (2, 0, 2)


def call(**changes: Any) -> Tensor:
    """One that is right, but for the changes; it must leave the caches alone if it is refused."""
    q, k, v = torch.ones(3, 2, 3, 2, 16, device="mps")
    caches = {name: zeros(2, 12, 2, 16) for name in ("k_cache", "v_cache")}
    arguments = {"q": q, **caches, "k": k, "v": v, "cache_seqlens": long(3, 5), "causal": True}
    try:
        return fa.flash_attn_with_kvcache(**arguments | changes)
    except Exception:
        assert not any(cache.any() for cache in caches.values()), "written before it was refused"
        raise


def long(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="mps")


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, device="mps")


ANGLES = ("rotary_cos", "rotary_sin")
CHECKED: dict[str, tuple[Any, str]] = {
    "negative": (lambda: {"cache_seqlens": long(3, -1)}, r"cache_seqlens\[1\] is -1 .* between 0 and 9"),
    "no room": (lambda: {"cache_seqlens": long(3, 10)}, r"cache_seqlens\[1\] is 10 .* between 0 and 9"),
    "padding": (lambda: {"cache_leftpad": long(4, 0)}, r"cache_leftpad\[0\] is 4 .* between 0 and 3"),
    "index": (lambda: {"cache_batch_idx": long(0, 2)}, r"cache_batch_idx\[1\] is 2 .* between 0 and 1"),
    "overlap": (lambda: {"cache_batch_idx": long(1, 1)}, "new keys of sequences 0 and 1 have the same place"),
    "block": (lambda: {"block_table": long(0, -1)[:, None]}, r"block_table\[1, 0\] is -1 .* between 0 and 1"),
    "angle": (
        lambda: {"q": zeros(2, 6, 2, 16), "cache_seqlens": long(7, 3)} | dict.fromkeys(ANGLES, zeros(12, 4)),
        r"cache_seqlens\[0\] is 7 .* between 0 and 6",
    ),
}


@pytest.mark.parametrize("wrong", CHECKED)
def test_numbers_on_the_device_when_asked(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, words = CHECKED[wrong]
    call(**changes())  # the control
    monkeypatch.setenv("FATTN_CHECK", "1")
    with pytest.raises(ValueError, match=f"torch_fattn.flash_attn.flash_attn_with_kvcache: {words}"):
        call(**changes())
    call(cache_leftpad=long(0, 5), cache_batch_idx=long(1, 0))
    # A table that ends with the cache is too short for a row there, and there is none.
    table = dict.fromkeys(ANGLES, zeros(12, 4))
    empty = dict.fromkeys(("q", "k", "v"), zeros(2, 0, 2, 16))
    call(**table, **empty, cache_seqlens=long(12, 3))
