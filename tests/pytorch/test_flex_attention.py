"""flex_attention on these kernels computes what torch's eager one does, or says what to use instead."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torchs
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import torch_fattn
from tests.conftest import counted_launches
from torch_fattn.integrations.flex_attention import attention as ours
from torch_fattn.integrations.flex_attention import flex_attention, mask_of

DEVICES = ["cpu", "mps"]
HEADS, KV_HEADS = 4, 2
Mod = Callable[..., Tensor]
LENGTHS = [1, 5, 16, 40, 70]


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def mask_mods(draw: random.Random, longest: int, device: str) -> dict[str, Mod]:
    at, left = draw.randrange(longest), draw.randrange(12)
    document = torch.tensor(sorted(draw.choices(range(4), k=longest)), device=device)
    return {
        "causal": lambda b, h, q_idx, kv_idx: q_idx >= kv_idx,
        "aligned to the end": lambda b, h, q_idx, kv_idx: q_idx + at >= kv_idx,
        "window": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx <= left),
        "two-sided": lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() <= left,
        "prefix": lambda b, h, q_idx, kv_idx: (kv_idx < at) | (q_idx >= kv_idx),
        "streaming": lambda b, h, q_idx, kv_idx: (
            (q_idx >= kv_idx) & ((kv_idx < at) | (q_idx - kv_idx <= left))
        ),
        "documents": lambda b, h, q_idx, kv_idx: document[q_idx] == document[kv_idx],
        "causal documents": lambda b, h, q_idx, kv_idx: (
            (document[q_idx] == document[kv_idx]) & (q_idx >= kv_idx)
        ),
        "of the head": lambda b, h, q_idx, kv_idx: (h % 2 == 0) | (q_idx >= kv_idx),
        "of the sequence": lambda b, h, q_idx, kv_idx: kv_idx < 1 + 9 * b,
        "nothing": lambda b, h, q_idx, kv_idx: kv_idx < 0,
    }


def score_mods(draw: random.Random, device: str) -> dict[str, Mod]:
    cap, left = draw.choice([0.7, 5.0, 30.0]), draw.randrange(12)
    slopes = torch.tensor([draw.choice([0.5, 0.03, -0.2, 0.0]) for _ in range(HEADS)], device=device)
    of_sequences = slopes * torch.tensor([[1.0], [2.0], [0.5]], device=device)
    hidden = -torch.inf
    return {
        "identity": lambda score, b, h, q_idx, kv_idx: score,
        "soft cap": lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap),
        "ALiBi": lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx),
        "ALiBi of sequences": lambda score, b, h, q_idx, kv_idx: (
            score - of_sequences[b, h] * (q_idx - kv_idx)
        ),
        "both": lambda score, b, h, q_idx, kv_idx: (
            cap * torch.tanh(score / cap) + slopes[h] * (kv_idx - q_idx)
        ),
        "causal, ALiBi": lambda score, b, h, q_idx, kv_idx: torch.where(
            q_idx >= kv_idx, score + slopes[h] * (kv_idx - q_idx), hidden
        ),
        "window": lambda score, b, h, q_idx, kv_idx: torch.where(
            (q_idx >= kv_idx) & (q_idx - kv_idx <= left), score, hidden
        ),
        "prefix": lambda score, b, h, q_idx, kv_idx: torch.where(
            (q_idx >= kv_idx) | (kv_idx < left), cap * torch.tanh(score / cap), hidden
        ),
    }


HIDING = {"causal, ALiBi", "window", "prefix"}


def heads(draw: random.Random, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(draw.randrange(2**31)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(150))
@pytest.mark.filterwarnings("ignore:return_lse is deprecated")
def test_random(seed: int, device: str) -> None:
    draw = random.Random(seed)
    batch, rows, keys = draw.randint(1, 3), draw.choice(LENGTHS), draw.choice(LENGTHS)
    mask_name = draw.choice([None, *mask_mods(draw, 70, "cpu")])
    score_name = draw.choice([None, *score_mods(draw, "cpu")])
    if mask_name is not None and score_name in HIDING:
        score_name = None
    size, per_head = draw.choice([16, 48, 128, (32, 64)]), draw.random() < 0.5
    query = heads(draw, batch, HEADS, rows, 20)  # padded to 24
    key, value = heads(draw, draw.choice([1, batch]), KV_HEADS, keys, 20), heads(draw, 1, KV_HEADS, keys, 16)
    value = value.expand(key.shape[0], -1, -1, -1)
    of_mods = draw.randrange(2**31)

    def arguments(where: str) -> dict[str, Any]:
        mod = random.Random(of_mods)
        score_mod = score_mods(mod, where)[score_name] if score_name else None
        block_mask = None
        if mask_name:
            for_each = (batch, HEADS) if per_head or mask_name.startswith("of the") else (None, None)
            mask_mod = mask_mods(mod, 70, where)[mask_name]
            block_mask = create_block_mask(mask_mod, *for_each, rows, keys, device=where, BLOCK_SIZE=size)
        return {"score_mod": score_mod, "block_mask": block_mask, "enable_gqa": True, "return_lse": True}

    operands = query, key, value
    expanded = query, *(each.expand(batch, -1, -1, -1) for each in (key, value))
    wanted, wanted_lse = torchs.flex_attention(*expanded, **arguments("cpu"))
    given = arguments(device)
    with counted_launches() as launches:
        out, lse = flex_attention(*(each.to(device) for each in operands), **given)
    assert device == "cpu" or any(kernel.startswith("fattn_prefill") for kernel in launches)
    assert (out.cpu() - wanted).abs().max() < 2e-5
    assert torch.allclose(lse.cpu(), wanted_lse, atol=2e-5, rtol=2e-5)


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window_left": 7},
    "two-sided": {"is_causal": False, "window_left": 7, "window_right": 7},
    "prefix": {"is_causal": False, "window_right": 0, "sink_tokens": 30},
    "streaming": {"is_causal": True, "window_left": 7, "sink_tokens": 30},
    "aligned to the end": {"is_causal": False, "window_right": 30},
}


class Fixed(random.Random):
    def randrange(self, *limits: Any) -> int:
        return 30 if limits[0] > 12 else 7


@pytest.mark.host_only
@pytest.mark.parametrize("name", mask_mods(Fixed(), 70, "cpu"))
def test_masks_that_are_options(name: str) -> None:
    block_mask = create_block_mask(mask_mods(Fixed(), 70, "cpu")[name], 2, HEADS, 70, 70, device="cpu")
    query = torch.randn(2, HEADS, 70, 16)
    flex_attention(query, query, query, block_mask=block_mask)
    prepared = ours._prepared[block_mask]
    if name in OPTIONS:
        assert prepared.mask is None and prepared.options == {"q_offset": 0} | OPTIONS[name]
    else:
        assert prepared.mask is not None and prepared.options.keys() == {"mask_map"}
        assert torch.equal(prepared.options["mask_map"], torch_fattn.mask_map(block_mask))


def lists(*blocks: list[int], device: str) -> tuple[Tensor, Tensor]:
    counts = torch.tensor([[[len(row) for row in blocks]]], dtype=torch.int32, device=device)
    longest = max(map(len, blocks))
    padded = [row + [7] * (longest - len(row)) for row in blocks]  # what is behind the count is undefined
    return counts, torch.tensor([[padded]], dtype=torch.int32, device=device)


@pytest.mark.parametrize("device", DEVICES)
def test_the_blocks_decide(device: str) -> None:
    """A full block is visible and an absent one hidden, whatever mask_mod says."""
    block_mask = BlockMask.from_kv_blocks(
        *lists([0], [1], [], device=device),
        *lists([2], [], [0, 1], device=device),
        BLOCK_SIZE=(32, 48),
        mask_mod=lambda b, h, q_idx, kv_idx: (q_idx + kv_idx) % 2 == 0,
        seq_lengths=(75, 130),
    )
    wanted = torch.zeros(1, 1, 75, 130, dtype=torch.bool)
    odd = (torch.arange(75)[:, None] + torch.arange(130)) % 2 == 0
    wanted[..., :32, 96:] = wanted[..., 64:, :96] = True
    wanted[..., :32, :48], wanted[..., 32:64, 48:96] = odd[:32, :48], odd[32:64, 48:96]
    mask = mask_of(block_mask)
    assert torch.equal(mask.cpu(), wanted)
    cells = torch_fattn.mask_map(block_mask)
    assert torch.equal(cells, torch_fattn.mask_map(mask)) and {0, 1, 2} <= set(cells.flatten().tolist())
    query, key, value = (torch.randn(2, 2, n, 32, device=device) for n in (75, 130, 130))
    out = torch_fattn.prefill(query, key, value, mask, mask_map=cells)
    assert torch.equal(out, flex_attention(query, key, value, block_mask=block_mask))
    exact, _ = torch_fattn.reference.prefill(query, key, value, wanted)
    assert (out.cpu() - exact.cpu()).abs().max() < 1e-5


def test_gradients() -> None:
    block_mask = create_block_mask(
        lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 3 == 0, None, None, 40, 50, device="mps"
    )
    torch.manual_seed(0)
    operands = [torch.randn(1, n, length, 16) for n, length in ((4, 40), (2, 50), (2, 50))]
    mine = [each.to("mps").requires_grad_() for each in operands]
    theirs = [each.clone().requires_grad_() for each in operands]
    flex_attention(*mine, block_mask=block_mask, enable_gqa=True).square().sum().backward()
    mask = mask_of(block_mask).cpu()
    torch.nn.functional.scaled_dot_product_attention(*theirs, mask, enable_gqa=True).square().sum().backward()
    for one, other in zip(mine, theirs, strict=True):
        assert one.grad is not None and other.grad is not None
        assert (one.grad.cpu() - other.grad).abs().max() < 1e-4


@pytest.mark.host_only
def test_a_mask_is_made_once_and_lives_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[BlockMask] = []
    of = ours.block_masks.mask_of
    monkeypatch.setattr(ours.block_masks, "mask_of", lambda name, mask: made.append(0) or of(name, mask))  # type: ignore
    query = torch.randn(1, 1, 30, 16)

    def call(block_mask: BlockMask) -> Tensor:
        return flex_attention(query, query, query, block_mask=block_mask)

    block_mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx != kv_idx, 1, 1, 30, 30, device="cpu")
    before = call(block_mask)
    assert torch.equal(call(block_mask), before) and len(made) == 1
    block_mask.mask_mod = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
    assert not torch.equal(call(block_mask), before) and len(made) == 2
    prepared = weakref.ref(block_mask)
    del block_mask
    gc.collect()
    assert prepared() is None and not made[2:]


def refused_score_mods() -> Iterator[tuple[str, Mod, str]]:
    bias = torch.randn(40, 40)
    slope = torch.tensor(0.5, requires_grad=True)
    yield "scale", lambda s, b, h, q, k: 2 * s, r"multiplies the score by 2; pass scale="
    yield (
        "bias",
        lambda s, b, h, q, k: s + bias[q, k],
        r"not alibi_slopes\[h\].*; pass such a bias as attn_mask",
    )
    yield "distance", lambda s, b, h, q, k: s - 0.1 * (q - k).abs(), r"not alibi_slopes.*as attn_mask"
    yield "cap after bias", lambda s, b, h, q, k: 9 * torch.tanh((s + k - q) / 9), "softcap|alibi_slopes"
    yield "square", lambda s, b, h, q, k: s * s, r"not return softcap \* tanh"
    yield "sine", lambda s, b, h, q, k: torch.sin(s), r"not return softcap \* tanh"
    yield "documents", lambda s, b, h, q, k: torch.where(q // 9 == k // 9, s, -torch.inf), "create_block_mask"
    yield "NaN", lambda s, b, h, q, k: s * 0 + torch.nan, "infinite or NaN"
    yield "trained", lambda s, b, h, q, k: s + slope * (k - q), "requires? grad.*alibi_slopes"


@pytest.mark.host_only
@pytest.mark.parametrize(("mod", "sentence"), [pytest.param(m, s, id=n) for n, m, s in refused_score_mods()])
def test_score_mods_that_are_refused(mod: Mod, sentence: str) -> None:
    query = torch.randn(1, 2, 40, 16)
    with pytest.raises(NotImplementedError, match=f"flex_attention: score_mod .*{sentence}") as refusal:
        flex_attention(query, query, query, mod)
    assert "\n" not in str(refusal.value)


@pytest.mark.host_only
def test_what_a_score_mod_hides_beside_a_block_mask() -> None:
    query = torch.randn(1, 2, 40, 16)
    causal = create_block_mask(lambda b, h, q, k: q >= k, None, None, 40, 40, device="cpu")
    with pytest.raises(NotImplementedError, match="hide them in its mask_mod, with and_masks"):
        flex_attention(query, query, query, lambda s, b, h, q, k: torch.where(k > 3, s, -torch.inf), causal)
    distance = flex_attention(query, query, query, lambda s, b, h, q, k: s - 0.1 * (q - k).abs(), causal)
    wanted = torch_fattn.prefill(query, query, query, is_causal=True, alibi_slopes=torch.full((2,), 0.1))
    assert torch.allclose(distance, wanted, atol=1e-6), "where a row sees no key ahead, this is ALiBi"


@pytest.mark.host_only
def test_places_that_are_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    query = torch.randn(1, 1, 100, 16)

    def one_key(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return torch.where((q_idx == 13) & (kv_idx == 17), -torch.inf, score)

    assert flex_attention(query, query, query, one_key).shape == query.shape, "unnoticed"
    monkeypatch.setenv("FATTN_CHECK", "1")
    with pytest.raises(ValueError, match="score_mod is not .* everywhere"):
        flex_attention(query, query, query, one_key)
    for name, mod in score_mods(Fixed(), "cpu").items():
        assert flex_attention(*[query.expand(2, 4, -1, -1)] * 3, mod).shape == (2, 4, 100, 16), name


@pytest.mark.host_only
def test_calls_that_are_refused() -> None:
    query = torch.randn(2, 4, 40, 16)
    causal = create_block_mask(lambda b, h, q, k: q >= k, None, None, 40, 48, device="cpu", BLOCK_SIZE=16)
    with pytest.raises(
        ValueError, match=r"block_mask is for \[1, 1, 40, 48\] and the call for \[2, 4, 40, 40\]"
    ):
        flex_attention(query, query, query, block_mask=causal)
    with pytest.raises(ValueError, match="4 query heads and 2 key-value heads.*enable_gqa=True"):
        flex_attention(query, query[:, :2], query[:, :2])
    rows = causal[:, :, 1:2]
    with pytest.raises(
        ValueError,
        match="block_mask has 1 rows of blocks of 16.*set seq_lengths, and in a slice also mask_mod",
    ):
        mask_of(rows)
    rows.seq_lengths = (16, 48)
    with pytest.raises(ValueError, match="in a slice also mask_mod"):
        mask_of(rows)
    on_meta = causal.to("meta")
    with pytest.raises(ValueError, match=r"block_mask is on meta.*\.to\(\"cpu\"\)"):
        flex_attention(query, *[query[:, :, :1].expand(-1, -1, 48, -1)] * 2, block_mask=on_meta)
