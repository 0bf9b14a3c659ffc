"""Pairs of tiny random models with equal weights: `fattn` on the device under test, `eager` on the CPU.

The two never share a config object: transformers writes the attention implementation into it, and a shared
config would make both models run the same implementation and every comparison read 0.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    ModernBertConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from tests.conftest import counted_launches, decodes

DEVICE = "mps"
LAYERS = 2
VOCAB = 64
# Weights of the usual initialisation are so small that a wrong attention hardly moves the logits.
WEIGHT_GAIN = 6.0
# float32 throughout: the worst logit error seen is about 1e-6; a lost mask or window costs more than 1e-2.
TOLERANCE = 2e-5
VISIBLE_ERROR = 1e-2

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": None,
}
WINDOW = 8  # shorter than the prompt
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "mistral": (MistralConfig, {"sliding_window": WINDOW}),
    "gemma2": (Gemma2Config, MIXED | {"attn_logit_softcapping": 0.5}),
    "gemma3": (Gemma3TextConfig, MIXED),
    "gpt_oss": (GptOssConfig, MIXED | EXPERTS),
}
CACHES = ["dynamic", "static"]
_OF_ENCODERS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
ENCODER = {name: COMMON[name] for name in _OF_ENCODERS}
BERT = BertConfig(**ENCODER)
# Every second layer attends to a local window, which reaches the kernels as a 4D mask.
MODERN_BERT = ModernBertConfig(**ENCODER, local_attention=6, global_attn_every_n_layers=2, pad_token_id=0)


def tiny(family: str, **changes: Any) -> PreTrainedConfig:
    config_class, own = FAMILIES[family]
    config: PreTrainedConfig = config_class(**COMMON | own | changes)
    return config


def pair(
    auto_class: Any, config: PreTrainedConfig, implementation: str = "fattn"
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The model with `fattn` on DEVICE and the same model with `eager` on the CPU."""
    torch.manual_seed(0)
    ours = auto_class.from_config(copy.deepcopy(config), attn_implementation=implementation).eval()
    with torch.no_grad():
        for name, weight in ours.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                weight.mul_(WEIGHT_GAIN / 2)
    eager = auto_class.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    eager.load_state_dict(ours.state_dict())
    return ours.to(DEVICE), eager


def prompt(length: int = 20, padding: int = 0, batch: int = 2) -> tuple[Tensor, Tensor]:
    """Random token ids, more than decode takes at once, and their attention mask; the first sequence begins
    with `padding` padding tokens."""
    ids = torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[0, :padding] = COMMON["pad_token_id"]
    mask[0, :padding] = 0
    return ids, mask


def generate(model: PreTrainedModel, ids: Tensor, mask: Tensor, new_tokens: int, **options: Any) -> Any:
    """Greedy generation of exactly `new_tokens` tokens with the logits of every step."""
    with torch.no_grad():
        return model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )


def largest_logit_error(ours: Any, eager: Any) -> float:
    steps = zip(ours.logits, eager.logits, strict=True)
    return max((mine.cpu() - theirs).abs().max().item() for mine, theirs in steps)


def same_as_eager(
    config: PreTrainedConfig,
    new_tokens: int,
    *,
    cache: str = "dynamic",
    padding: int = 0,
    **options: Any,
) -> dict[str, int]:
    """Checks tokens and logits of a generation, and returns its launches. `options` are for `fattn` alone."""
    ours, eager = pair(AutoModelForCausalLM, config)
    ids, mask = prompt(padding=padding)
    cached = {} if cache == "dynamic" else {"cache_implementation": cache}
    with counted_launches() as launches:
        mine = generate(ours, ids, mask, new_tokens, **cached, **options)
    theirs = generate(eager, ids, mask, new_tokens, **cached)
    assert largest_logit_error(mine, theirs) < TOLERANCE
    assert mine.sequences.tolist() == theirs.sequences.tolist()
    return launches


def assert_same_gradients(ours: PreTrainedModel, eager: PreTrainedModel) -> None:
    for (name, mine), theirs in zip(ours.named_parameters(), eager.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None and theirs.grad is not None:
            scale = theirs.grad.abs().max().clamp(min=1e-3)
            assert (mine.grad.cpu() - theirs.grad).abs().max() < 1e-4 * scale, name


def on_device(inputs: dict[str, Any], device: Any) -> dict[str, Any]:
    return {name: each.to(device) if isinstance(each, Tensor) else each for name, each in inputs.items()}


def both_forward(ours: PreTrainedModel, eager: PreTrainedModel, **inputs: Any) -> tuple[Tensor, Tensor]:
    """The first output of both models for the same inputs, on the CPU."""
    with torch.no_grad():
        return ours(**on_device(inputs, DEVICE))[0].cpu(), eager(**inputs)[0]


def attention_launches(launches: dict[str, int]) -> int:
    return decodes(launches) + sum(n for kernel, n in launches.items() if kernel.startswith("fattn_prefill"))
