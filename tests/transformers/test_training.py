"""Training: gradients are eager's."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
    StaticCache,
    T5Config,
)

from tests.conftest import counted_launches
from tests.transformers.tiny_models import (
    BERT,
    DEVICE,
    LAYERS,
    TOLERANCE,
    VOCAB,
    assert_same_gradients,
    attention_launches,
    on_device,
    pair,
    prompt,
    tiny,
)
from torch_fattn.integrations.transformers import register

TRAINED = {name: tiny(name) for name in ("llama", "mistral", "gemma2", "gpt_oss")}


@pytest.fixture
def silent() -> Iterator[None]:
    """No layer falls back."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="fattn attention in")
        yield


def text(length: int = 20, padding: int = 3, **changes: Any) -> dict[str, Any]:
    """With labels, none of which a padding token should predict."""
    ids, mask = prompt(length=length, padding=padding)
    labels = ids.masked_fill(mask.roll(1, dims=1) == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "use_cache": False} | changes


def check_gradients(models: tuple[PreTrainedModel, PreTrainedModel], **inputs: Any) -> dict[str, int]:
    """Those of the loss, or, without labels, of the logits. Returns the launches of ours."""
    with counted_launches() as launches:
        for model in models:
            out = model(**on_device(inputs, model.device))
            loss = out.loss if "labels" in inputs else out.logits[-1].square().mean()
            loss.backward()
    assert_same_gradients(*models)
    return launches


@pytest.mark.parametrize("policy", ["error", "sdpa"])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("name", TRAINED)
def test_gradients(name: str, padding: int, policy: Any, silent: None) -> None:
    register(on_unsupported=policy)
    models = pair(AutoModelForCausalLM, TRAINED[name])
    for model in models:
        model.train()
    launches = check_gradients(models, **text(padding=padding, use_cache=True))
    assert launches["fattn_prefill"] == attention_launches(launches) == LAYERS


def test_checkpoints(silent: None) -> None:
    """Every layer is computed twice."""
    models = pair(AutoModelForCausalLM, TRAINED["llama"])
    for model in models:
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    assert check_gradients(models, **text())["fattn_prefill"] == 2 * LAYERS


@pytest.mark.parametrize("length", [1, 5, 16])
def test_few_rows(length: int, silent: None) -> None:
    """In eval mode. Without gradients they are decode's, which has no backward."""
    ids, mask = prompt(length=length, padding=length // 3)
    models = pair(AutoModelForCausalLM, TRAINED["gemma2"])
    launches = check_gradients(models, input_ids=ids, attention_mask=mask)
    assert launches["fattn_prefill"] == attention_launches(launches) == LAYERS


def test_an_encoder(silent: None) -> None:
    ids, mask = prompt(padding=3)
    models = pair(AutoModelForMaskedLM, BERT)
    launches = check_gradients(models, input_ids=ids, attention_mask=mask)
    assert launches["fattn_prefill"] == attention_launches(launches) == LAYERS


@pytest.mark.parametrize("rows", [3, 20])
def test_over_a_static_cache(rows: int, silent: None) -> None:
    """Only the device knows how many of its keys are filled."""
    ids, _ = prompt(length=rows)
    models = pair(AutoModelForCausalLM, TRAINED["mistral"])
    for model in models:
        cache = StaticCache(model.config, max_cache_len=30)
        model(ids.to(model.device), past_key_values=cache).logits.square().mean().backward()
    assert_same_gradients(*models)


T5 = T5Config(
    d_model=64, d_kv=16, d_ff=64, num_layers=LAYERS, num_heads=4, vocab_size=VOCAB, decoder_start_token_id=0,
    dropout_rate=0.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("auto_class", "config", "why"),
    [
        (AutoModelForSeq2SeqLM, T5, "a position bias requires grad"),  # T5 learns it
        (
            AutoModelForCausalLM,
            tiny("llama", head_dim=264),
            "heads of 264 are not implemented",
        ),
    ],
)
def test_what_trains_through_sdpa(auto_class: Any, config: PreTrainedConfig, why: str) -> None:
    ids, _ = prompt()
    with pytest.warns(UserWarning, match=f"{why}.*; sdpa attention runs instead"):
        check_gradients(pair(auto_class, config), input_ids=ids, labels=ids)


@pytest.mark.parametrize("policy", ["error", "sdpa"])
def test_compiled_training_and_inference(policy: Any) -> None:
    """One graph each, whatever the policy."""
    register(on_unsupported=policy)
    ours, eager = pair(AutoModelForCausalLM, tiny("llama"))
    ids = prompt()[0]
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    with counted_launches() as launches:
        for model in (ours.train(), eager.train()):
            run = compiled if model is ours else model
            run(ids.to(model.device), labels=ids.to(model.device), use_cache=False).loss.backward()
    assert launches["fattn_prefill"] == LAYERS
    assert_same_gradients(ours, eager)
    ours.eval()
    with torch.no_grad(), counted_launches() as launches:
        logits = compiled(ids.to(DEVICE), use_cache=False).logits.cpu()
        assert (logits - eager(ids).logits).abs().max() < TOLERANCE
    assert launches["fattn_prefill"] == LAYERS


def test_continuous_batching_does_not_train() -> None:
    """It writes keys and values to a cache, which does not support gradients."""
    from torch_fattn.integrations.transformers import attend_paged

    query = torch.randn(1, 4, 3, 16, device=DEVICE, requires_grad=True)
    with pytest.raises(
        NotImplementedError, match="continuous batching with gradients enabled has no backward"
    ):
        attend_paged(nn.Module().train(), query, query, query, None, cache=object())
