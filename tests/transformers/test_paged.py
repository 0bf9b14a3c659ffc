"""Continuous batching over transformers' own cache gives the tokens of `paged|eager`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import torch_fattn
from tests.conftest import counted_launches, decodes
from tests.transformers.calls import Call
from tests.transformers.tiny_models import DEVICE, LAYERS, VOCAB, WINDOW, pair, tiny
from torch_fattn.integrations.transformers import NAME, PAGED_NAME, attend, attend_paged, paged, register
from torch_fattn.integrations.transformers.compat import BATCHES_BY_NAME
from torch_fattn.integrations.transformers.paged import InCache, PagedKeys

NEW_TOKENS = 20
BLOCK_SIZE = 8
BATCH_TOKENS = 32  # so that long prompts run in chunks, in one batch with single tokens of others
MODELS = {name: tiny(name) for name in ("llama", "mistral", "gpt_oss")}
MODELS["wide heads"] = tiny("gemma3", head_dim=256)
PROMPT_LENGTHS = [37, 3, 35, 1, 12]
SETTINGS = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


def tokens_of(model: PreTrainedModel, implementation: str, block_size: int = BLOCK_SIZE) -> list[list[int]]:
    """Both run on DEVICE: transformers pins memory for the CPU where there is another device."""
    model.to(DEVICE).set_attn_implementation(implementation)
    sizes = {"num_blocks": 64 * BLOCK_SIZE // block_size, "max_batch_tokens": BATCH_TOKENS}
    sizes["page_size" if BATCHES_BY_NAME else "block_size"] = block_size
    batching = ContinuousBatchingConfig(**sizes)
    results = model.generate_batch(
        inputs=prompts(), generation_config=SETTINGS, continuous_batching_config=batching, progress_bar=False
    )
    assert len(results) == len(PROMPT_LENGTHS)
    in_order = sorted(results.values(), key=lambda result: prompts().index(result.prompt_ids))
    assert all(result.error is None for result in in_order), in_order[0].error
    return [result.generated_tokens for result in in_order]


@pytest.mark.parametrize("block_size", [BLOCK_SIZE, 16])
@pytest.mark.parametrize("name", MODELS)
def test_generate_batch(name: str, block_size: int, calls: list[Call]) -> None:
    ours, eager = pair(AutoModelForCausalLM, MODELS[name])
    torch_fattn.reset_launch_counts()
    mine = tokens_of(ours, NAME, block_size)
    launches = torch_fattn.launch_counts()
    packed = [call for call in calls if call.op == "paged_prefill"]
    single = [call for call in calls if call.op == "paged_decode"]
    assert len(packed) + len(single) == len(calls) and packed and single
    kernel = "fattn_prefill_wide" if name == "wide heads" else "fattn_prefill"
    assert launches[kernel] == len(packed) and decodes(launches) == len(single)
    assert len(calls) % LAYERS == 0
    check_calls(name, calls, block_size)
    theirs = tokens_of(eager, "paged|eager", block_size)
    assert mine == theirs
    assert ours.config._attn_implementation == NAME, "as it was before"
    assert all(len(tokens) == NEW_TOKENS for tokens in mine)
    assert any(len(set(tokens)) > 3 for tokens in mine), "a model that repeats itself shows nothing"


@pytest.mark.skipif(BATCHES_BY_NAME, reason="the prefix is gone from this transformers")
def test_the_name_with_its_prefix() -> None:
    ours, eager = pair(AutoModelForCausalLM, MODELS["llama"])
    assert tokens_of(ours, PAGED_NAME) == tokens_of(eager, "paged|eager")


def test_odd_heads(calls: list[Call]) -> None:
    """Heads that are not multiples of 8 are padded, and the cache's keys are gathered."""
    ours, eager = pair(AutoModelForCausalLM, tiny("llama", head_dim=20))
    mine = tokens_of(ours, NAME)
    assert {call.op for call in calls} == {"paged_prefill", "paged_decode"}
    assert all(call["query"].shape[-1] == 24 and call["scale"] == 20**-0.5 for call in calls)
    assert mine == tokens_of(eager, "paged|eager")


def test_a_window_of_one(calls: list[Call]) -> None:
    """Every token sees itself alone, which the cache of 5.17 takes for no window; the reference has no
    cache."""
    config = tiny("mistral", num_hidden_layers=1, sliding_window=1)
    ours, eager = pair(AutoModelForCausalLM, config)
    mine = tokens_of(ours, NAME)
    assert calls and all(call["window_left"] == 0 for call in calls)
    check_against_eager(eager, mine)


TOO_WIDE = {name: tiny(name, head_dim=584) for name in ("mistral", "gemma2", "gpt_oss")}


@pytest.mark.filterwarnings("always:fattn attention in")
@pytest.mark.parametrize("name", TOO_WIDE)
def test_calls_that_the_kernels_cannot_run(name: str, recwarn: pytest.WarningsRecorder) -> None:
    """Under that policy other attention runs it, here too; the reference is plain eager attention, since
    `paged|eager` drops soft caps."""
    register(on_unsupported="sdpa")
    ours, eager = pair(AutoModelForCausalLM, TOO_WIDE[name])
    with counted_launches() as launches:
        mine = tokens_of(ours, NAME)
    assert not any(kernel.startswith(("fattn_prefill", "fattn_decode")) for kernel in launches)
    check_against_eager(eager, mine)
    (sentence,) = [str(one.message) for one in recwarn if "fattn attention in" in str(one.message)]
    instead = "sdpa" if name == "mistral" else "eager"
    assert "layer 0: " in sentence and "584" in sentence
    assert f"{instead} attention runs instead" in sentence


def test_control_what_the_kernels_cannot_run_is_an_error() -> None:
    ours, _ = pair(AutoModelForCausalLM, TOO_WIDE["mistral"])
    with pytest.raises(AssertionError, match="MistralAttention: .*584.*; use attn_implementation="):
        tokens_of(ours, NAME)


def check_against_eager(eager: PreTrainedModel, mine: list[list[int]]) -> None:
    """Each token equals that of eager attention without a cache, given the tokens before it."""
    for prompt_ids, tokens in zip(prompts(), mine, strict=True):
        with torch.no_grad():
            logits = eager(torch.tensor([prompt_ids + tokens]), use_cache=False).logits[0]
        assert logits[len(prompt_ids) - 1 : -1].argmax(-1).tolist() == tokens
    assert any(len(set(tokens)) > 3 for tokens in mine)


def check_calls(name: str, calls: list[Call], block_size: int) -> None:
    for index, call in enumerate(calls):
        sliding = name == "mistral" or (name in ("gpt_oss", "wide heads") and index % LAYERS == 0)
        assert call["window_left"] == (WINDOW - 1 if sliding else -1)
        assert (call["sinks"] is not None) == (name == "gpt_oss")
        if call.op == "paged_decode":
            assert call["key_cache"].shape[1] == (1 if sliding else block_size)
            assert call["key_cache"].shape[:2].numel() > 64 * BLOCK_SIZE, "the cache's own memory"


MISTAKES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "tables of another request": (
        "_block_tables",
        lambda tables_of: lambda *arguments: tables_of(*arguments).roll(1, dims=0),
    ),
    "pools of another layer": ("paged_layer", lambda layer_of: lambda cache, _: layer_of(cache, 0)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_control_wrong_keys(name: str, mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens differ if keys are in the wrong place."""
    function, twin_of = MISTAKES[mistake]
    monkeypatch.setattr(paged, function, twin_of(getattr(paged, function)))
    ours, eager = pair(AutoModelForCausalLM, MODELS[name])
    assert tokens_of(ours, NAME) != tokens_of(eager, "paged|eager")


def test_control_gathered_keys(calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are right, but the operators do not read the cache's own memory."""
    monkeypatch.setattr(paged, "HEAD_STEP", 5)  # all heads are odd
    ours, eager = pair(AutoModelForCausalLM, MODELS["mistral"])
    assert tokens_of(ours, NAME) == tokens_of(eager, "paged|eager")
    with pytest.raises(AssertionError, match="the cache's own memory"):
        check_calls("mistral", calls, BLOCK_SIZE)


class Layer(nn.Module):
    layer_idx = 0
    is_causal = False  # as in some layers that are causal by their mask


def cumulative(lens: list[int]) -> Tensor:
    return torch.tensor([0, *lens], device=DEVICE).cumsum(0).to(torch.int32)


def in_cache(lens: list[int], window: int | None = None) -> tuple[InCache, InCache]:
    """Keys and values of requests of these lengths, in blocks of 4 that are not in order."""
    most = -(-max(lens) // 4)
    tables = torch.randperm(len(lens) * most, device=DEVICE).view(-1, most).to(torch.int32)
    pools = torch.randn(2, tables.numel(), 4, 2, 16, device=DEVICE).unbind()
    keys = PagedKeys(*pools, tables, cumulative(lens).diff(), sum(lens), window)
    return InCache.of(keys, keys.key_cache), InCache.of(keys, keys.value_cache)


def batch_of(new: list[int], lens: list[int]) -> dict[str, Any]:
    """What a model of 5.24 passes on, once its cache is updated."""
    return {
        "cu_seq_lens_q": cumulative(new),
        "cu_seq_lens_k": cumulative(lens),
        "max_length_q": max(new),
        "max_length_k": max(lens),
        "read_index": [torch.zeros(1)],
        "write_index": [torch.zeros(1)],
    }


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("past", "new"), [([5, 0, 11], [1, 9, 3]), ([5, 2, 11], [1, 1, 1])])
def test_a_model_that_updates_the_cache(
    past: list[int], new: list[int], window: int | None, changes: bool, calls: list[Call]
) -> None:
    """Its keys are read in place, unless it changes them."""
    torch.manual_seed(0)
    lens = [p + n for p, n in zip(past, new, strict=True)]
    key, value = in_cache(lens, window)
    given = (key, value.repeat(1, 1, 1, 1) * 2) if changes else (key, value)
    query = torch.randn(1, 4, sum(new), 16, device=DEVICE)
    out, _ = attend(Layer(), query, *given, None, scaling=0.3, sliding_window=window, **batch_of(new, lens))
    (call,) = calls
    assert (call["key_cache"] is key.cache) != changes
    rows, keys, values = (
        operand.cpu().split(sizes, dim=2)
        for operand, sizes in ((query, new), (key.gathered(), lens), (value.gathered() * (1 + changes), lens))
    )
    wanted = [
        torch_fattn.reference.prefill(
            *operands, is_causal=True, scale=0.3, window_left=-1 if window is None else window - 1
        )[0]
        for operands in zip(rows, keys, values, strict=True)
    ]
    assert (out.cpu().transpose(1, 2) - torch.cat(wanted, dim=2)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"write_index": None}, "no cache of continuous batching"),
        ({"block_table": torch.zeros(1)}, "block table"),
        ({"attention_mask": torch.zeros(1)}, "a mask came with"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"key": torch.zeros(1, 2, 3, 16), "cu_seq_lens_k": {"full_attention": [0, 3]}}, "its keys are not"),
        ({}, None),
    ],
)
def test_refusals(change: dict[str, Any], sentence: str | None) -> None:
    query = torch.randn(1, 2, 3, 16, device=DEVICE)
    key, value = in_cache([3])
    arguments = {"key": key, "value": value, "attention_mask": None, **batch_of([3], [3]), **change}
    arguments = {name: each for name, each in arguments.items() if name != "write_index" or each}
    if sentence is None:
        assert attend_paged(Layer(), query, **arguments)[0].shape == (1, 3, 2, 16)
        return
    with pytest.raises(NotImplementedError, match=f"{sentence}.*; (use attn_implementation=|call generate)"):
        attend_paged(Layer(), query, **arguments)
