"""Packed sequences, by positions that restart or by FlashAttention's lengths, take one packed call and no
mask."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from tests.conftest import counted_launches
from tests.helpers.synchronisations import Synchronisations
from tests.transformers.calls import Call
from tests.transformers.tiny_models import (
    BERT,
    COMMON,
    DEVICE,
    LAYERS,
    MODERN_BERT,
    TOLERANCE,
    VISIBLE_ERROR,
    WINDOW,
    assert_same_gradients,
    both_forward,
    pair,
    prompt,
    tiny,
)
from torch_fattn.integrations.transformers import attend, attention, masks, packing, register, use_packed
from torch_fattn.integrations.transformers.compat import CACHE
from torch_fattn.integrations.transformers.visibility import write_packed, write_pattern

MODELS = {name: tiny(name) for name in ("llama", "mistral", "gemma2", "gemma3")}
MODELS["llama-20"] = tiny("llama", head_dim=20)
# Its mask does not depend on positions.
GPT_OSS = tiny("gpt_oss")
LENGTHS = [[13, 1, 10], [2, 17, 5]]


def positions(batch: int) -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in lens]) for lens in LENGTHS[:batch]])


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_positions_that_restart(name: str, batch: int, calls: list[Call]) -> None:
    ours, eager = pair(AutoModelForCausalLM, MODELS[name])
    ids, _ = prompt(length=24, batch=batch)
    with counted_launches() as launches:
        inputs = {"input_ids": ids, "position_ids": positions(batch), "use_cache": False}
        mine, theirs = both_forward(ours, eager, **inputs)
    assert (mine - theirs).abs().max() < TOLERANCE
    assert launches["fattn_prefill"] == LAYERS == len(calls)
    ends = [0, 13, 14, 24, 26, 43, 48][: 1 + 3 * batch]
    for call in calls:
        assert call.op == "varlen_prefill" and call["is_causal"]
        assert call["cu_seqlens_q"].tolist() == ends and call["max_seqlen_q"] == (17 if batch == 2 else 13)
    kinds = {"mistral": [True] * LAYERS, "llama": [False] * LAYERS, "llama-20": [False] * LAYERS}
    windows = [WINDOW - 1 if sliding else -1 for sliding in kinds.get(name, [True, False])]
    assert [call["window_left"] for call in calls] == windows


def one_by_one(model: PreTrainedModel, ids: torch.Tensor, lens: list[int], **options: Any) -> torch.Tensor:
    """The first output for each sequence alone, `[tokens, ..]`."""
    pieces = [model(piece[None], **options)[0] for piece in ids.flatten().split(lens)]
    return torch.cat(pieces, dim=1)[0]


@pytest.mark.parametrize("batch", [1, 2])
def test_positions_that_the_mask_ignores(batch: int, calls: list[Call]) -> None:
    """A second forward has other positions in the same tensor."""
    ours, eager = pair(AutoModelForCausalLM, GPT_OSS)
    ids, _ = prompt(length=24, batch=batch)
    places = positions(batch).to(DEVICE)
    for lens in ([13, 1, 10], [24]) if batch == 1 else ([13, 1, 10, 2, 17, 5],):
        with torch.no_grad():
            mine = ours(ids.to(DEVICE), position_ids=places, use_cache=False).logits.cpu()
            theirs = one_by_one(eager, ids, lens, use_cache=False)
        assert (mine.flatten(0, 1) - theirs).abs().max() < TOLERANCE
        places.copy_(torch.arange(24))
    packed = [call for call in calls if call.op == "varlen_prefill"]
    assert len(packed) == LAYERS and [call["window_left"] for call in packed] == [WINDOW - 1, -1]


def test_control_unread_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "restarts_of", lambda *_: None)
    with pytest.raises(AssertionError):
        test_positions_that_the_mask_ignores(1, [])


def test_positions_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a forward of several rows, whatever the number of layers, and never in a decode step."""
    asked: list[int] = []
    find = packing._find
    monkeypatch.setattr(packing, "_find", lambda ids, batch: asked.append(batch) or find(ids, batch))
    ours, _ = pair(AutoModelForCausalLM, GPT_OSS)
    ids = prompt(length=24)[0].to(DEVICE)
    with torch.no_grad():
        cache = ours(ids, use_cache=True).past_key_values
        assert len(asked) == 1
        with Synchronisations() as waits:
            ours(ids[:, :1], **{CACHE: cache})
        assert len(asked) == 1 and not waits.ops
        ours(ids, position_ids=positions(2).to(DEVICE), use_cache=False)
    assert len(asked) == 2


CAUSAL = torch.ones(24, 24, dtype=torch.bool).tril()
APART = CAUSAL & (torch.arange(24) >= 13).eq((torch.arange(24) >= 13)[:, None])
RIGHT = CAUSAL & (torch.arange(24) < 20)
MASKS: dict[str, tuple[torch.Tensor, bool]] = {
    "causal": (torch.ones((), dtype=torch.bool).expand(1, 24), True),
    "a window": (write_pattern(1, 24, 24, WINDOW, None, "cpu"), True),
    "whole": (CAUSAL[None, None], True),
    "additive": (torch.zeros(1, 1, 24, 24).masked_fill(~CAUSAL, torch.finfo(torch.float32).min), True),
    "apart": (APART[None, None], False),
    "padding": (torch.arange(24)[None] < 20, False),
    "whole padding": (RIGHT[None, None], False),
}


@pytest.mark.parametrize("by", ["positions", "cache", "bias", "lengths"])
@pytest.mark.parametrize("form", MASKS)
def test_masks_that_let_sequences_see_one_another(form: str, by: str) -> None:
    """Separated, or refused with advice; accepted where the mask separates them, and where there is one."""
    mask, mixes = MASKS[form]
    layer = nn.Module()
    layer.is_causal = True  # type: ignore[assignment]
    query = torch.randn(1, 2, 24, 16)
    place = torch.cat((torch.arange(13), torch.arange(11)))[None]
    if "padding" in form:
        place = (torch.arange(24) * (torch.arange(24) < 20))[None]
    options: dict[str, Any] = {"position_ids": place}
    if by == "lengths":
        ends = torch.tensor([0, 13, 24], dtype=torch.int32)
        options = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    options |= {"use_cache": by == "cache"}
    if by == "bias":
        options["position_bias"] = torch.zeros(1, 1, 1, 24)
    if by == "lengths" and "padding" in form:
        return  # lengths come without padding
    if not mixes or (by in ("positions", "lengths") and form in ("causal", "a window")):
        out, _ = attend(layer, query, query, query, mask, **options)
        second = APART if mixes or form == "apart" else RIGHT
        if form == "a window":
            second = second & CAUSAL.triu(1 - WINDOW)
        exact = torch.nn.functional.scaled_dot_product_attention(query, query, query, second)
        assert (out - exact.transpose(1, 2)).abs().max() < 1e-5
    else:
        advice = r"would see one another; pass (use_cache=False|each in a row of its own|a 4D attention_mask)"
        with pytest.raises(NotImplementedError, match=advice):
            attend(layer, query, query, query, mask, **options)
    options |= {"position_ids": torch.arange(24)[None], "cu_seq_lens_q": None, "cu_seq_lens_k": None}
    assert attend(layer, query, query, query, mask, **options)[0].shape == (1, 24, 2, 16)


def test_sequences_of_one_token() -> None:
    """They leave no room for where they end, and take the mask."""
    ours, eager = pair(AutoModelForCausalLM, tiny("llama"))
    ids, _ = prompt(length=3, batch=1)
    inputs = {"input_ids": ids, "position_ids": torch.zeros(1, 3, dtype=torch.long), "use_cache": False}
    mine, theirs = both_forward(ours, eager, **inputs)
    assert (mine - theirs).abs().max() < TOLERANCE


@pytest.mark.parametrize("device", ["cpu", DEVICE])  # of the lengths
@pytest.mark.parametrize("longest", [True, False])
@pytest.mark.parametrize("lens", [[13, 1, 10], [5, 2, 3]])
@pytest.mark.parametrize("config", [MODELS["llama"], GPT_OSS], ids=lambda config: config.model_type)
def test_lengths_that_are_given(
    config: PreTrainedConfig, lens: list[int], longest: bool, device: str, calls: list[Call]
) -> None:
    """From a collator for FlashAttention, with positions and without. The mask of a sliding layer has its
    window, and the lengths determine who sees whom."""
    ours, eager = pair(AutoModelForCausalLM, config)
    ids, _ = prompt(length=sum(lens), batch=1)
    ends = torch.tensor([0, *lens], device=device).cumsum(0).to(torch.int32)
    given: dict[str, Any] = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "use_cache": False}
    if longest:
        given |= {"max_length_q": max(lens), "max_length_k": max(lens)}
    places = torch.cat([torch.arange(n) for n in lens])[None].to(DEVICE)
    with torch.no_grad():
        theirs = one_by_one(eager, ids, lens, use_cache=False)
        for place in (places, None):
            mine = ours(ids.to(DEVICE), position_ids=place, **given).logits[0].cpu()
            assert (mine - theirs).abs().max() < TOLERANCE
    assert [call.op for call in calls] == ["varlen_prefill"] * 2 * LAYERS
    windows = [WINDOW - 1, -1] if config is GPT_OSS else [-1, -1]
    assert [call["window_left"] for call in calls] == windows * 2


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("head_dim", [16, 584])
@pytest.mark.filterwarnings("ignore:fattn attention in Module")
def test_the_attention_function_alone(causal: bool, window: int | None, head_dim: int) -> None:
    """Queries and keys of different lengths; a window is symmetric where rows are not causal, as for
    flash attention in transformers. Heads that are too wide go through sdpa attention, in which the lengths
    must not be lost."""
    register(on_unsupported="sdpa")
    layer = nn.Module()
    layer.num_key_value_groups = 2  # type: ignore[assignment]
    query = torch.randn(1, 4, 9, head_dim, device=DEVICE)
    key, value = torch.randn(2, 1, 2, 17, head_dim, device=DEVICE)
    cu_q, cu_k = torch.tensor([0, 2, 2, 9]), torch.tensor([0, 6, 9, 17])
    with counted_launches() as launches:
        out, _ = attend(
            layer,
            query,
            key,
            value,
            None,
            is_causal=causal,
            sliding_window=window,
            cu_seq_lens_q=cu_q,
            cu_seq_lens_k=cu_k,
        )
    assert launches.get("fattn_prefill", 0) == (head_dim == 16)
    for q0, q1, k0, k1 in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
        rows, keys = int(q1 - q0), int(k1 - k0)
        distance = torch.arange(keys) - torch.arange(rows)[:, None] - (keys - rows)
        seen = distance <= 0 if causal else torch.ones(rows, keys, dtype=torch.bool)
        if window is not None:
            seen = seen & (distance.abs() < window)
        operands = (query[:, :, q0:q1], key[:, :, k0:k1], value[:, :, k0:k1])
        exact = torch.nn.functional.scaled_dot_product_attention(
            *(operand.cpu().double() for operand in operands), attn_mask=seen, enable_gqa=True
        )
        exact = torch.where(seen.any(-1)[None, None, :, None], exact, 0.0)
        assert rows == 0 or (out[:, q0:q1].cpu() - exact.transpose(1, 2)).abs().max() < 1e-5


@pytest.mark.parametrize("head_dim", [16, 584])
@pytest.mark.filterwarnings("ignore:fattn attention in Module")
def test_lengths_of_an_encoder(head_dim: int) -> None:
    """They cut a mask that hides nothing, in which windows no longer matter. A mask that hides keys, and the
    keys of another sequence, are refused where sequences would see one another."""
    register(on_unsupported="sdpa")
    layer = nn.Module()
    layer.is_causal, layer.num_key_value_groups = False, 1  # type: ignore[assignment]
    query = torch.randn(1, 4, 9, head_dim, device=DEVICE)
    ends = torch.tensor([0, 4, 9])
    options: dict[str, Any] = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "sliding_window": 2}
    everything = torch.ones((), dtype=torch.bool, device=DEVICE)
    out, _ = attend(layer, query, query, query, everything.expand(1, 1, 9, 9), **options)
    pieces = [torch.nn.functional.scaled_dot_product_attention(x, x, x) for x in query.cpu().split([4, 5], 2)]
    assert (out.cpu() - torch.cat(pieces, 2).transpose(1, 2)).abs().max() < 1e-5
    window = (torch.arange(9)[:, None] - torch.arange(9)).abs() < 2
    for mask in (window[None, None], everything.cpu()[None, None, None].repeat(1, 1, 1, 9)):
        with pytest.raises(NotImplementedError, match="would see one another.*4D attention_mask"):
            attend(layer, query, query, query, mask.to(DEVICE), **options)
    apart = window & (torch.arange(9)[:, None] < 4).eq(torch.arange(9) < 4)
    assert attend(layer, query, query, query, apart[None, None].to(DEVICE), **options)[0].shape[1] == 9
    keys = torch.randn(1, 4, 12, head_dim, device=DEVICE)
    with pytest.raises(NotImplementedError, match="would see one another"):
        attend(layer, query, keys, keys, everything.expand(1, 1, 9, 12), **options)


@pytest.mark.parametrize("by", ["lengths", "positions"])
@pytest.mark.parametrize(
    "config",
    [MODELS["llama"], MODELS["mistral"], MODELS["gemma2"], GPT_OSS],
    ids=lambda config: config.model_type,
)
def test_training(config: PreTrainedConfig, by: str) -> None:
    """With lengths, positions do not restart, and no mask has the lengths."""
    ours, eager = pair(AutoModelForCausalLM, config)
    ids, _ = prompt(length=24, batch=2)
    ends = torch.tensor([0, 13, 14, 24, 26, 43, 48], dtype=torch.int32)
    given = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    if by == "positions":
        given = {"position_ids": positions(2).to(DEVICE)}
    with counted_launches() as launches:
        mine = ours.train()(ids.to(DEVICE), use_cache=False, **given).logits.flatten(0, 1)
        mine.square().mean().backward()
    assert launches["fattn_prefill"] == LAYERS
    theirs = one_by_one(eager, ids, ends.diff().tolist(), use_cache=False)
    theirs.square().mean().backward()
    assert (mine.cpu() - theirs).abs().max() < TOLERANCE
    assert_same_gradients(ours, eager)


def test_control_sequences_that_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison notices sequences that are taken for one."""
    ours, eager = pair(AutoModelForCausalLM, tiny("llama"))
    monkeypatch.setattr(masks, "write_packed", lambda ids, window: write_packed(0 * ids, window))
    ids, _ = prompt(length=24, batch=1)
    inputs = {"input_ids": ids, "position_ids": positions(1), "use_cache": False}
    mine, theirs = both_forward(ours, eager, **inputs)
    assert (mine - theirs).abs().max() > VISIBLE_ERROR


LENGTHS_OF_12 = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 5, 12], dtype=torch.int32))
BIDIRECTIONAL = tiny("llama", use_cache=False)
BIDIRECTIONAL.is_causal = False  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("config", "given"), [(BERT, LENGTHS_OF_12), (BIDIRECTIONAL, LENGTHS_OF_12), (BIDIRECTIONAL, {})]
)
def test_encoders(config: BertConfig | LlamaConfig, given: dict[str, Any]) -> None:
    """By lengths, or by positions if the model passes them on to its attention."""
    ids, _ = prompt(length=12, batch=1)
    ours, eager = pair(AutoModel, config)
    positions = torch.cat((torch.arange(5), torch.arange(7)))[None].to(DEVICE)
    with torch.no_grad():
        mine = ours(ids.to(DEVICE), position_ids=positions, **given)[0].cpu()
        theirs = one_by_one(eager, ids, [5, 7])
    assert (mine[0] - theirs).abs().max() < TOLERANCE


def test_encoders_with_a_window() -> None:
    """A layer's window comes as a mask, which does not separate them."""
    ours, _ = pair(AutoModel, MODERN_BERT)
    ids, _ = prompt(length=12, batch=1)
    with pytest.raises(NotImplementedError, match="would see one another; pass a 4D attention_mask"):
        ours(ids.to(DEVICE), **LENGTHS_OF_12)


VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 4,
    "out_hidden_size": 64,
    "patch_size": 8,
    "window_size": 32,
    "fullatt_block_indexes": [1],
}


def test_vision_tower(calls: list[Call]) -> None:
    """Three images: a call for each of them in every layer, and for each window; one, once the tower is
    told."""
    config = Qwen2_5_VLConfig(text_config={**COMMON, "layer_types": None}, vision_config=VISION)
    torch.manual_seed(0)
    make = Qwen2_5_VLForConditionalGeneration._from_config
    ours = make(copy.deepcopy(config), attn_implementation="fattn").eval()
    eager = make(copy.deepcopy(config), attn_implementation="eager").eval()
    eager.load_state_dict(ours.state_dict())
    grid = torch.tensor([[1, 4, 4], [1, 8, 4], [1, 6, 10]])
    patches = int(grid.prod(-1).sum())
    pixels = torch.randn(patches, 3 * 2 * 8 * 8, generator=torch.Generator().manual_seed(0))
    towers = ours.to(DEVICE).model.visual, eager.model.visual
    inputs = {"hidden_states": pixels, "grid_thw": grid}
    mine, theirs = both_forward(*towers, **inputs)
    assert (mine - theirs).abs().max() < TOLERANCE and len(calls) > 2 * 3
    calls.clear()
    use_packed(towers[0])
    with counted_launches() as launches:
        mine, _ = both_forward(*towers, **inputs)
    assert (mine - theirs).abs().max() < TOLERANCE
    assert [call.op for call in calls] == ["varlen_prefill"] * 2 and launches["fattn_prefill"] == 2
    assert not any(call["is_causal"] for call in calls)
