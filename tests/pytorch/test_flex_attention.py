"""flex_attention on these kernels computes what torch's eager one does, or says what to use instead."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torchs
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, noop_mask

import torch_fattn
from tests.conftest import counted_launches
from torch_fattn.integrations.flex_attention import attention as ours
from torch_fattn.integrations.flex_attention import flex_attention, mask_of

DEVICES = ["cpu", "mps"]
HEADS, KV_HEADS = 4, 2
Mod = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def mask_mods(draw: random.Random, longest: int, device: str) -> dict[str, Mod]:
    at, left = draw.randrange(longest), draw.randrange(12)
    document = torch.tensor(sorted(draw.choices(range(4), k=longest)), device=device)
    return {
        "causal": lambda b, h, q, k: q >= k,
        "aligned to the end": lambda b, h, q, k: q + at >= k,
        "window": lambda b, h, q, k: (q >= k) & (q - k <= left),
        "two-sided": lambda b, h, q, k: (q - k).abs() <= left,
        "prefix": lambda b, h, q, k: (k < at) | (q >= k),
        "streaming": lambda b, h, q, k: (q >= k) & ((k < at) | (q - k <= left)),
        "documents": lambda b, h, q, k: document[q] == document[k],
        "causal documents": lambda b, h, q, k: (document[q] == document[k]) & (q >= k),
        "of the head": lambda b, h, q, k: (h % 2 == 0) | (q >= k),
        "of the sequence": lambda b, h, q, k: k < 1 + 9 * b,
        "nothing": lambda b, h, q, k: k < 0,
    }


def score_mods(draw: random.Random, device: str) -> dict[str, Mod]:
    cap = draw.choice([0.7, 5.0, 30.0])
    slopes = torch.tensor([draw.choice([0.5, 0.03, -0.2, 0.0]) for _ in range(HEADS)], device=device)
    of_sequences = slopes * torch.tensor([[1.0], [2.0], [0.5]], device=device)
    bias = torch.tensor([[draw.random() for _ in range(96)] for _ in range(96)], device=device)
    return {
        "identity": lambda s, b, h, q, k: s,
        "soft cap": lambda s, b, h, q, k: cap * torch.tanh(s / cap),
        "ALiBi": lambda s, b, h, q, k: s + slopes[h] * (k - q),
        "ALiBi of sequences": lambda s, b, h, q, k: s - of_sequences[b, h] * (q - k),
        "bias": lambda s, b, h, q, k: s + bias[q, k],
        "distance": lambda s, b, h, q, k: s - 0.1 * (q - k).abs(),
        "both": lambda s, b, h, q, k: cap * torch.tanh(s / cap) + slopes[h] * (k - q),
    }


def heads(draw: random.Random, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(draw.randrange(2**31)))


def one_off(draw: random.Random, rows: int, keys: int, mask_mod: Mod | None, score_mod: Mod | None) -> Any:
    """A pair of functions that differ from these in one pair, key or row."""
    row, column = draw.randrange(rows), draw.randrange(keys)
    kind, hides = draw.randrange(3), draw.random() < 0.5

    def there(q: Tensor, k: Tensor) -> Tensor:
        return [(q == row) & (k == column), q == row, k == column][kind]

    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        s = score_mod(s, b, h, q, k)
        return torch.where(there(q, k), -torch.inf, s) if hides else s + torch.where(there(q, k), 1.0, 0.0)

    return mask_mod and (lambda b, h, q, k: mask_mod(b, h, q, k) ^ there(q, k)), score_mod and score


def hiding(mask_mod: Mod, score_mod: Mod | None = None) -> Mod:
    """Both in one score_mod."""
    return lambda s, *at: torch.where(mask_mod(*at), score_mod(s, *at) if score_mod else s, -torch.inf)


def exact(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Mod | None = None, mask_mod: Mod | None = None
) -> tuple[Tensor, Tensor]:
    """In float64, with the functions themselves at every place."""
    lengths = enumerate((*query.shape[:3], key.shape[2]))
    indices = [torch.arange(n, device=query.device).view(-1, *[1] * (3 - i)) for i, n in lengths]
    query, key, value = (each.cpu().double() for each in (query, key, value))
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    scores = query @ key.mT * query.shape[-1] ** -0.5
    scores = score_mod(scores, *indices) if score_mod else scores
    scores = scores.where(mask_mod(*indices).cpu(), -torch.inf) if mask_mod else scores
    return scores.softmax(-1).nan_to_num(0) @ value, scores.logsumexp(-1)


@pytest.mark.parametrize("device", ["cpu", "cpu", "mps"])
@pytest.mark.filterwarnings("ignore:return_lse is deprecated")
def test_random(device: str) -> None:
    """Recognised functions, and functions that differ from one in a pair, key or row."""
    for _ in range(100):
        check_random(device, random.SystemRandom().randrange(2**32))


@pytest.mark.host_only
@pytest.mark.filterwarnings("ignore:return_lse is deprecated")
def test_random_notices_what_samples_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: one pair away from a recognised function is taken for that function."""
    right = ours.boxes_of
    wrong: Any = lambda of, *wanted: right(of.arguments[0] if of.name == "xor" else of, *wanted)  # noqa: E731
    monkeypatch.setattr(ours, "boxes_of", wrong)
    with pytest.raises(AssertionError, match="seed"):
        for seed in range(100):
            check_random("cpu", seed)


def check_random(device: str, seed: int) -> None:
    draw = random.Random(seed)
    batch, rows, keys = draw.randint(1, 3), draw.randint(1, 96), draw.randint(1, 96)
    mask_name = draw.choice([None, *mask_mods(draw, 96, "cpu")])
    score_name = draw.choice([None, *score_mods(draw, "cpu")])
    size, per_head = draw.choice([16, 48, 128, (32, 64)]), draw.random() < 0.5
    query = heads(draw, batch, HEADS, rows, 20)  # padded to 24
    key, value = heads(draw, draw.choice([1, batch]), KV_HEADS, keys, 20), heads(draw, 1, KV_HEADS, keys, 16)
    value = value.expand(key.shape[0], -1, -1, -1)
    of_mods, is_off, is_one = draw.randrange(2**31), draw.random() < 0.7, draw.random() < 0.5
    with_lse: dict[str, Any] = draw.choice([{"return_lse": True}, {"return_aux": AuxRequest(lse=True)}])

    def mods(where: str) -> tuple[Mod | None, Mod | None]:
        mod = random.Random(of_mods)
        mask_mod = mask_mods(mod, 96, where)[mask_name] if mask_name else None
        score_mod = score_mods(mod, where)[score_name] if score_name else None
        if is_off:
            mask_mod, score_mod = one_off(mod, rows, keys, mask_mod, score_mod)
        return (None, hiding(mask_mod, score_mod)) if is_one and mask_mod else (mask_mod, score_mod)

    def arguments(where: str) -> dict[str, Any]:
        mask_mod, score_mod = mods(where)
        block_mask = None
        if mask_mod:
            for_each = (batch, HEADS) if per_head or mask_name.startswith("of the") else (None, None)
            block_mask = create_block_mask(mask_mod, *for_each, rows, keys, device=where, BLOCK_SIZE=size)
        return {"score_mod": score_mod, "block_mask": block_mask, "enable_gqa": True, **with_lse}

    about = f"seed {seed}: {mask_name}, {score_name}, {[batch, rows, keys, size, is_off, is_one]}"
    expanded = query, *(each.expand(batch, -1, -1, -1) for each in (key, value))
    mask_mod, score_mod = mods("cpu")
    with counted_launches() as launches:
        out, lse = flex_attention(query.to(device), key.to(device), value.to(device), **arguments(device))
    assert device == "cpu" or any(kernel.startswith("fattn_prefill") for kernel in launches)
    lse = getattr(lse, "lse", lse)
    for wanted, wanted_lse in (
        exact(*expanded, score_mod, mask_mod),
        torchs.flex_attention(*expanded, **arguments("cpu")),
    ):
        wanted_lse = getattr(wanted_lse, "lse", wanted_lse)
        assert (out.cpu() - wanted).abs().max() < 2e-5, about
        assert torch.allclose(lse.cpu().double(), wanted_lse.double(), atol=2e-5, rtol=2e-5), about


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
def test_masks_that_become_options(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = mock.Mock(wraps=ours.prefill)
    monkeypatch.setattr(ours, "prefill", prefill)
    mask_mod = mask_mods(Fixed(), 70, "cpu")[name]
    block_mask = create_block_mask(mask_mod, 2, HEADS, 70, 70, device="cpu", BLOCK_SIZE=32)
    query = torch.randn(2, HEADS, 70, 16)
    flex_attention(query, query, query, block_mask=block_mask)
    flex_attention(query, query, query, hiding(mask_mod))
    for (*_, mask), options in prefill.call_args_list:
        positional = options.keys() & {"is_causal", "window_left", "window_right", "sink_tokens"}
        assert {each: options[each] for each in positional} == OPTIONS.get(name, {"is_causal": False})
        assert (mask is None) == (name in OPTIONS or "block_mask" in options)
        cells = options.get("mask_map")
        assert cells is None or torch.equal(cells, torch_fattn.mask_map(block_mask))


def lists(*blocks: list[int], device: str) -> tuple[Tensor, Tensor]:
    counts = torch.tensor([[[len(row) for row in blocks]]], dtype=torch.int32, device=device)
    longest = max(map(len, blocks))
    padded = [row + [7] * (longest - len(row)) for row in blocks]  # what is behind the count is undefined
    return counts, torch.tensor([[padded]], dtype=torch.int32, device=device)


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_override_mask_mod(device: str) -> None:
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("size", "is_block_mask"), [((32, 64), True), ((96, 64), True), ((48, 64), False)])
def test_full_blocks(
    size: tuple[int, int], is_block_mask: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They become a block_mask of blocks that the kernels have, without a mask; beside a bias, a mask."""
    prefill = mock.Mock(wraps=ours.prefill)
    monkeypatch.setattr(ours, "prefill", prefill)
    counts, indices = lists([0, 2], [1], [0, 1, 2], device=device)
    none, rows = torch.zeros_like(counts), 2 * size[0] + 11
    of_size: dict[str, Any] = {"BLOCK_SIZE": size, "seq_lengths": (rows, 130)}
    blocks = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 1, 1]], dtype=torch.bool)
    shown = blocks.repeat_interleave(size[0], 0)[:rows].repeat_interleave(64, 1)[:, :130]
    query, key, value = (torch.randn(2, 2, n, 32, device=device) for n in (rows, 130, 130))
    for block_mask in (
        BlockMask.from_kv_blocks(none, indices, counts, indices, mask_mod=causal, **of_size),
        BlockMask.from_kv_blocks(counts, indices, **of_size),  # whose mask_mod hides nothing
    ):
        for score_mod, bias in ((None, 0.0), (biased, torch.arange(130) / 50)):
            out = flex_attention(query, key, value, score_mod, block_mask)
            exact, _ = torch_fattn.reference.prefill(
                query, key, value, bias + torch.where(shown, 0, -torch.inf)
            )
            assert (out.cpu() - exact).abs().max() < 1e-5
            (*_, mask), options = prefill.call_args
            assert (mask is None) == (is_block_mask and score_mod is None) == ("block_mask" in options)


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def biased(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score + kv_idx / 50


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("number", [-1, 3, 9])
def test_blocks_that_the_mask_does_not_have(
    number: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, indices = lists([0, number], [number], device=device)
    block_mask = BlockMask.from_kv_blocks(
        counts, indices, counts, indices, 16, noop_mask, (32, 48), compute_q_blocks=False
    )
    wanted = torch.zeros(1, 1, 32, 48, dtype=torch.bool)
    wanted[:, :, :16, :16] = True
    assert torch.equal(mask_of(block_mask).cpu(), wanted)
    monkeypatch.setenv("FATTN_CHECK", "1")
    with pytest.raises(
        ValueError, match=rf"mask_of: kv_indices of block_mask has {number} and .* between 0 and 2"
    ):
        mask_of(block_mask)


def test_gradients() -> None:
    block_mask = create_block_mask(lambda b, h, q, k: (q - k) % 3 == 0, None, None, 40, 50, device="mps")
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
@pytest.mark.parametrize(
    ("name", "size"), [("documents", 128), ("documents", 16), ("of the head", 16), ("window", 16)]
)
def test_a_second_call(name: str, size: int) -> None:
    """It does not wait for the device; a mask that depends on no tensor is not made again, and lives as long
    as its BlockMask."""
    query, slopes = torch.randn(1, 2, 70, 16), torch.tensor([0.5, 0.25])
    mask_mod = mask_mods(Fixed(), 70, "cpu")[name]
    score_mod = hiding(lambda b, h, q, k: q - k < 9, lambda s, b, h, q, k: s + slopes[h] * (k - q))
    block_mask = create_block_mask(mask_mod, 1, 2, 70, 70, device="cpu", BLOCK_SIZE=size)
    for waits in (size == 16, False):
        with torch.profiler.profile() as profile:
            flex_attention(query, query, query, score_mod, block_mask)
        seen = {each.key.removeprefix("aten::") for each in profile.key_averages()}
        assert bool({"_local_scalar_dense", "nonzero", "equal", "is_nonzero"} & seen) == waits
    assert ("index_put_" in seen) == (name == "documents")
    alive = weakref.ref(block_mask)
    del block_mask
    gc.collect()
    assert alive() is None


@pytest.mark.host_only
def test_mask_mod_has_the_indices_of_the_call() -> None:
    """A BlockMask of one head has the same blocks for all heads, not the same mask."""
    query = torch.randn(2, HEADS, 40, 16)
    mask_mod: Mod = lambda b, h, q, k: (b + h + q + k) % 3 > 0  # noqa: E731
    block_mask = create_block_mask(mask_mod, None, None, 40, 40, device="cpu", BLOCK_SIZE=16)
    out = flex_attention(query, query, query, block_mask=block_mask, kernel_options={"BLOCK_M": 64})
    assert (out - exact(query, query, query, None, mask_mod)[0]).abs().max() < 1e-5


SPELLINGS: dict[str, Mod] = {
    "logical_not by keyword": lambda s, b, h, q, k: torch.where(
        torch.logical_not(input=q < k), s, -torch.inf
    ),
    "abs by keyword": lambda s, b, h, q, k: torch.where(torch.abs(input=q - k) < 5, s, -torch.inf),
    "zeros like the score": lambda s, b, h, q, k: s + s.new_zeros(()) - 0.1 * k,
    "one of two results": lambda s, b, h, q, k: s + torch.stack([q * 0.1, k * 0.2]).max(0)[0],
    "parts": lambda s, b, h, q, k: s + torch.stack([q * 0.1, k * 0.2]).unbind()[1],
    "NaN where hidden": lambda s, b, h, q, k: torch.where(q >= k, s + torch.log(q - k + 1), -torch.inf),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SPELLINGS)
def test_other_spellings(name: str, device: str) -> None:
    query = torch.randn(1, 2, 40, 16)
    out = flex_attention(*[query.to(device)] * 3, SPELLINGS[name])
    wanted = torchs.flex_attention(query, query, query, SPELLINGS[name])
    assert (out.cpu() - wanted).abs().max() < 1e-5


def refused_score_mods() -> Iterator[tuple[str, Mod, str]]:
    slope = torch.tensor(0.5, requires_grad=True)
    yield "scale", lambda s, b, h, q, k: 2 * s, r"multiplies the score by 2; pass scale="
    yield (
        "cap after bias",
        lambda s, b, h, q, k: 9 * torch.tanh((s + k - q) / 9),
        r"not return softcap \* tanh",
    )
    yield "keyword", lambda s, b, h, q, k: 9 * torch.tanh(input=s / 9), r"not return softcap \* tanh"
    yield "square", lambda s, b, h, q, k: s * s, r"not return softcap \* tanh"
    yield "sine", lambda s, b, h, q, k: torch.sin(s), r"not return softcap \* tanh"
    yield "one pair", lambda s, b, h, q, k: torch.where((q == 3) & (k == 5), s, 2 * s), r"softcap \* tanh"
    yield "hiding by value", lambda s, b, h, q, k: torch.where(s > 0, s, -torch.inf), r"softcap \* tanh"
    yield "values", lambda s, b, h, q, k: s if s > 0 else -s, "cannot be traced.*torch's flex_attention"
    yield "trained", lambda s, b, h, q, k: s + slope * (k - q), "requires? grad.*alibi_slopes"


@pytest.mark.host_only
@pytest.mark.parametrize(("mod", "sentence"), [pytest.param(m, s, id=n) for n, m, s in refused_score_mods()])
def test_score_mods_that_are_refused(mod: Mod, sentence: str) -> None:
    query = torch.randn(1, 2, 40, 16)
    with pytest.raises(NotImplementedError, match=f"flex_attention: score_mod .*{sentence}") as refusal:
        flex_attention(query, query, query, mod)
    assert "\n" not in str(refusal.value)
