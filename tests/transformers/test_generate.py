"""A model of transformers with arguments that are not attention's, and as one compiled graph. Generation with
every cache and padding is in test_native.py."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AttentionMaskInterface,
    AutoModelForCausalLM,
    LlamaConfig,
)

from tests.transformers.tiny_models import (
    COMMON,
    DEVICE,
    LAYERS,
    TOLERANCE,
    VISIBLE_ERROR,
    generate,
    largest_logit_error,
    pair,
    prompt,
    same_as_eager,
)
from torch_fattn.integrations.transformers import NAME


def test_a_tokenizer() -> None:
    """`generate` takes one, for stop strings, and hands it on to every layer."""
    assert same_as_eager(LlamaConfig(**COMMON), 6, tokenizer=object())["fattn_prefill"] == LAYERS


def test_control_padding_ignored() -> None:
    """The comparison notices a lost padding mask."""
    ours, eager = pair(AutoModelForCausalLM, LlamaConfig(**COMMON))
    AttentionMaskInterface.register(NAME, lambda **_: None)
    ids, mask = prompt(padding=3)
    mine, theirs = (generate(model, ids, mask, 1) for model in (ours, eager))
    assert largest_logit_error(mine, theirs) > VISIBLE_ERROR


@pytest.mark.parametrize("grad", [False, True])
def test_compile(grad: bool) -> None:
    """The whole model is one graph, in grad mode too."""
    ours, eager = pair(AutoModelForCausalLM, LlamaConfig(**COMMON))
    ids, _ = prompt()
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    with torch.set_grad_enabled(grad):
        mine = compiled(ids.to(DEVICE), use_cache=False).logits
        theirs = eager(ids, use_cache=False).logits
    assert (mine.detach().cpu() - theirs.detach()).abs().max() < TOLERANCE
    assert mine.requires_grad == grad
