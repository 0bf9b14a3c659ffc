"""Generation through the kernels gives eager's tokens and logits, whatever the cache and the padding."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AttentionMaskInterface,
    AutoModelForCausalLM,
    DynamicCache,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
)
from transformers.masking_utils import causal_mask_function

from tests.conftest import counted_launches, decodes
from tests.transformers.tiny_models import (
    COMMON,
    DEVICE,
    LAYERS,
    TOLERANCE,
    VISIBLE_ERROR,
    both_forward,
    generate,
    largest_logit_error,
    pair,
    prompt,
)
from torch_fattn.integrations.transformers import NAME, make_mask

NEW_TOKENS = 6
WINDOW = 8
CACHES = [None, "static"]
PADDINGS = [0, 3]


def options_of(cache: str | None) -> dict[str, str]:
    return {"cache_implementation": cache} if cache else {}


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("cache", CACHES)
def test_llama(cache: str | None, padding: int) -> None:
    ours, eager = pair(AutoModelForCausalLM, LlamaConfig(**COMMON))
    ids, mask = prompt(padding=padding)
    with counted_launches() as launches:
        mine = generate(ours, ids, mask, NEW_TOKENS, **options_of(cache))
    theirs = generate(eager, ids, mask, NEW_TOKENS, **options_of(cache))
    assert largest_logit_error(mine, theirs) < TOLERANCE
    assert mine.sequences.tolist() == theirs.sequences.tolist()
    assert launches["fattn_prefill"] == LAYERS
    assert decodes(launches) == LAYERS * (NEW_TOKENS - 1)


def test_a_tokenizer() -> None:
    """`generate` takes one, for stop strings, and hands it on to every layer."""
    ours, eager = pair(AutoModelForCausalLM, LlamaConfig(**COMMON))
    ids, mask = prompt()
    with counted_launches() as launches:
        mine = generate(ours, ids, mask, NEW_TOKENS, tokenizer=object())
    assert mine.sequences.tolist() == generate(eager, ids, mask, NEW_TOKENS).sequences.tolist()
    assert launches["fattn_prefill"] == LAYERS


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("config_class", [MistralConfig, Gemma3TextConfig])
def test_sliding_window(config_class: type, cache: str | None, padding: int) -> None:
    """The window of 8 is shorter than the prompt of 20. Gemma 3 mixes windowed with full layers."""
    ours, eager = pair(AutoModelForCausalLM, config_class(**COMMON, sliding_window=WINDOW))
    ids, mask = prompt(padding=padding)
    with counted_launches() as launches:
        mine = generate(ours, ids, mask, NEW_TOKENS, **options_of(cache))
    theirs = generate(eager, ids, mask, NEW_TOKENS, **options_of(cache))
    assert largest_logit_error(mine, theirs) < TOLERANCE
    assert launches["fattn_prefill"] == LAYERS
    assert decodes(launches) == LAYERS * (NEW_TOKENS - 1)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("chunk", [3, 20])
def test_continuation_on_a_cache(chunk: int, padding: int) -> None:
    """Several tokens after a cached prefix: 3 are decode's (causal inside the chunk), 20 are prefill's at an
    offset."""
    ours, eager = pair(AutoModelForCausalLM, LlamaConfig(**COMMON))
    ids, mask = prompt(length=10 + chunk, padding=padding)
    last_logits = []
    for model in (ours, eager):
        on_device = ids.to(model.device), mask.to(model.device)
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(on_device[0][:, :10], attention_mask=on_device[1][:, :10], past_key_values=cache)
            with counted_launches() as launches:
                output = model(on_device[0][:, 10:], attention_mask=on_device[1], past_key_values=cache)
        if model is ours:
            assert (decodes(launches) if chunk == 3 else launches["fattn_prefill"]) == LAYERS
        last_logits.append(output.logits.cpu())
    assert (last_logits[0] - last_logits[1]).abs().max() < TOLERANCE


def test_packed_sequences() -> None:
    """Positions that restart make transformers build a block-diagonal 4D mask."""
    ours, eager = pair(AutoModelForCausalLM, LlamaConfig(**COMMON))
    ids, _ = prompt(length=12, batch=1)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    mine, theirs = both_forward(ours, eager, input_ids=ids, position_ids=positions, use_cache=False)
    assert (mine - theirs).abs().max() < TOLERANCE


def test_control_padding_ignored() -> None:
    """The comparison notices a lost padding mask."""
    ours, eager = pair(AutoModelForCausalLM, LlamaConfig(**COMMON))
    AttentionMaskInterface.register(NAME, lambda **_: None)
    ids, mask = prompt(padding=3)
    mine, theirs = (generate(model, ids, mask, 1) for model in (ours, eager))
    assert largest_logit_error(mine, theirs) > VISIBLE_ERROR


def test_control_window_ignored() -> None:
    """The comparison notices a lost sliding window."""
    ours, eager = pair(AutoModelForCausalLM, MistralConfig(**COMMON, sliding_window=WINDOW))

    def without_window(**arguments: object) -> torch.Tensor | None:
        causal_4d = {"mask_function": causal_mask_function, "allow_is_causal_skip": False}
        return make_mask(**{**arguments, **causal_4d})  # type: ignore[arg-type]

    AttentionMaskInterface.register(NAME, without_window)
    ids, mask = prompt()
    mine, theirs = (generate(model, ids, mask, 1) for model in (ours, eager))
    assert largest_logit_error(mine, theirs) > VISIBLE_ERROR


@pytest.mark.parametrize("grad", [False, True])
def test_compile(grad: bool) -> None:
    """The whole model is one graph, in grad mode too; only running its backward is refused."""
    ours, eager = pair(AutoModelForCausalLM, LlamaConfig(**COMMON))
    ids, _ = prompt()
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    with torch.set_grad_enabled(grad):
        mine = compiled(ids.to(DEVICE), use_cache=False).logits
        theirs = eager(ids, use_cache=False).logits
    assert (mine.detach().cpu() - theirs.detach()).abs().max() < TOLERANCE
    assert mine.requires_grad == grad
    if grad:
        with pytest.raises(RuntimeError, match="scaled_dot_product_attention"):
            mine.sum().backward()
