"""Models whose attention is not causal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModel, BertConfig, LlamaConfig, ModernBertConfig

from tests.conftest import counted_launches
from tests.transformers.tiny_models import (
    COMMON,
    DEVICE,
    LAYERS,
    TOLERANCE,
    VISIBLE_ERROR,
    both_forward,
    pair,
    prompt,
)

PADDINGS = [0, 3]
BERT = BertConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4
)
# Every second layer attends to a local window, which reaches the kernels as a 4D mask.
MODERN_BERT = ModernBertConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    local_attention=6,
    global_attn_every_n_layers=2,
    pad_token_id=0,
)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("config", [BERT, MODERN_BERT], ids=["bert", "modernbert"])
def test_encoder(config: BertConfig | ModernBertConfig, padding: int) -> None:
    ours, eager = pair(AutoModel, config)
    ids, mask = prompt(padding=padding)
    with counted_launches() as launches:
        mine, theirs = both_forward(ours, eager, input_ids=ids, attention_mask=mask)
    real = mask.bool()
    assert (mine - theirs)[real].abs().max() < TOLERANCE
    assert launches["fattn_prefill"] == LAYERS


@pytest.mark.parametrize("padding", PADDINGS)
def test_is_causal_argument_overrides_the_layer(padding: int) -> None:
    """A decoder run bidirectionally, as embedding models are; with causal attention the result is another."""
    ours, eager = pair(AutoModel, LlamaConfig(**COMMON))
    ids, mask = prompt(padding=padding)
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    mine, theirs = both_forward(ours, eager, **inputs, is_causal=False)
    causal, _ = both_forward(ours, eager, **inputs)
    real = mask.bool()
    assert (mine - theirs)[real].abs().max() < TOLERANCE
    assert (mine - causal)[real].abs().max() > VISIBLE_ERROR


LENGTHS = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 5, 12], dtype=torch.int32))
BIDIRECTIONAL = LlamaConfig(**COMMON, use_cache=False)
BIDIRECTIONAL.is_causal = False  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("config", "given"), [(BERT, LENGTHS), (BIDIRECTIONAL, LENGTHS), (BIDIRECTIONAL, {})]
)
def test_packed_sequences(config: BertConfig | LlamaConfig, given: dict[str, Any]) -> None:
    """By lengths, or by positions if the model passes them on to its attention."""
    ids, _ = prompt(length=12, batch=1)
    ours, eager = pair(AutoModel, config)
    positions = torch.cat((torch.arange(5), torch.arange(7)))[None].to(DEVICE)
    with torch.no_grad():
        mine = ours(ids.to(DEVICE), position_ids=positions, **given)[0].cpu()
        theirs = torch.cat([eager(piece)[0] for piece in ids.split([5, 7], 1)], 1)
    assert (mine - theirs).abs().max() < TOLERANCE


def test_packed_sequences_in_a_window() -> None:
    """A layer's window comes as a mask, which does not separate them."""
    ours, _ = pair(AutoModel, MODERN_BERT)
    ids, _ = prompt(length=12, batch=1)
    with pytest.raises(NotImplementedError, match="would see one another; pass a 4D attention_mask"):
        ours(ids.to(DEVICE), **LENGTHS)
