"""Models with the head sizes of their checkpoints, otherwise as small as they can be: few layers and heads,
a vocabulary of 64, images of a few patches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    AutoModelForSpeechSeq2Seq,
    Gemma3Config,
    Gemma4Config,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    WhisperConfig,
)

from tests.transformers.tiny_models import COMMON, VOCAB, WINDOW, prompt

PROMPT = 20  # more rows than decode takes
IMAGE, VIDEO, IMAGE_START, IMAGE_END = 60, 61, 62, 63

Heads = dict[tuple[str, int], int]  # calls, by operator and head dim


@dataclass(frozen=True)
class Real:
    auto_class: Any
    config: PreTrainedConfig
    first: Heads  # of the prompt
    step: Heads  # of each token after that
    inputs: Callable[[], dict[str, Tensor]]


def text(heads: int, kv_heads: int, head_dim: int, **fields: Any) -> dict[str, Any]:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    return {**COMMON, **sizes, **fields}


def local_and_global(count: int = 2) -> dict[str, Any]:
    kinds = ["sliding_attention"] * (count - 1) + ["full_attention"]
    return {"sliding_window": WINDOW, "layer_types": kinds, "num_hidden_layers": count}


def with_image(tokens: int, types: str, **image: Tensor) -> dict[str, Tensor]:
    """A prompt whose 4th token begins an image of so many tokens; `types` marks them."""
    ids = prompt(PROMPT + tokens, batch=1)[0] % IMAGE
    ids[0, 3], ids[0, 4 : 4 + tokens], ids[0, 4 + tokens] = IMAGE_START, IMAGE, IMAGE_END
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        types: (ids == IMAGE).to(torch.int32),
        **image,
    }


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def qwen_image(patch: int, height: int, width: int) -> dict[str, Tensor]:
    """Patches of 3 channels and 2 frames, of which four make a token."""
    return with_image(
        height * width // 4,
        "mm_token_type_ids",
        pixel_values=random(height * width, 3 * 2 * patch * patch),
        image_grid_thw=torch.tensor([[1, height, width]]),
    )


QWEN_TOKENS: dict[str, int] = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": IMAGE_START,
    "vision_end_token_id": IMAGE_END,
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0}


def gemma3() -> Real:
    """Local and global layers, and SigLIP's heads of 72: 16 patches, pooled to 4 tokens."""
    vision = {
        "hidden_size": 144,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "image_size": 56,
        "patch_size": 14,
    }
    config = Gemma3Config(
        text_config=text(2, 1, 256) | local_and_global(),
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=IMAGE_START,
        eoi_token_index=IMAGE_END,
        **{name: COMMON[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
    )
    return Real(
        AutoModelForImageTextToText,
        config,
        {("prefill", 256): 2, ("prefill", 72): 2},
        {("decode", 256): 2},
        lambda: with_image(4, "token_type_ids", pixel_values=random(1, 3, 56, 56)),
    )


def gemma4() -> Real:
    """Local heads of 256, global ones of 512, and a vision tower of 64: 9 patches to a token."""
    vision = {
        "hidden_size": 128,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_hidden_layers": 2,
        "patch_size": 4,
        "position_embedding_size": 16,
    }
    per_layer = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
    config = Gemma4Config(
        text_config=text(2, 1, 256, global_head_dim=512, **per_layer) | local_and_global(),
        vision_config=vision,
        image_token_id=IMAGE,
        boi_token_id=IMAGE_START,
        eoi_token_id=IMAGE_END,
        video_token_id=VIDEO,
        audio_token_id=VIDEO - 1 - 1,
        **{name: COMMON[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
    )
    y, x = torch.meshgrid(torch.arange(6), torch.arange(6), indexing="ij")
    places = torch.stack([x, y], dim=-1).flatten(0, 1)[None]
    return Real(
        AutoModelForImageTextToText,
        config,
        {("decode", 256): 1, ("decode", 512): 1, ("prefill", 64): 2},
        {("decode", 256): 1, ("decode", 512): 1},
        lambda: with_image(
            4, "mm_token_type_ids", pixel_values=random(1, 36, 48).sigmoid(), image_position_ids=places
        ),
    )


def whisper() -> Real:
    """An encoder of 30 frames' positions, and a decoder that begins with one token and attends to it."""
    config = WhisperConfig(
        **{name: COMMON[name] for name in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")},
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=8,
        max_source_positions=30,
        max_target_positions=32,
        decoder_start_token_id=1,
        begin_suppress_tokens=None,
    )
    return Real(
        AutoModelForSpeechSeq2Seq,
        config,
        {("prefill", 64): 2, ("decode", 64): 4},
        {("decode", 64): 4},
        lambda: {"input_features": random(2, 8, 60)},
    )


TOWER = {"depth": 2, "num_heads": 2, "intermediate_size": 64}


def qwen2_5_vl() -> Real:
    """Heads of 128. The first layer of the vision tower, of 80, has two windows, of 64 patches and 32."""
    rope = {"rope_parameters": MROPE | {"mrope_section": [16, 24, 24]}}
    vision = {"hidden_size": 160, "out_hidden_size": 256, "fullatt_block_indexes": [1]}
    sizes = text(2, 1, 128, hidden_size=256, **rope)
    return Real(
        AutoModelForImageTextToText,
        Qwen2_5_VLConfig(text_config=sizes, vision_config=TOWER | vision, **QWEN_TOKENS),
        {("decode", 128): 2, ("prefill", 80): 3},
        {("decode", 128): 2},
        lambda: qwen_image(14, 8, 12),
    )


MODELS: dict[str, Callable[[], Real]] = {
    model.__name__: model for model in (gemma3, gemma4, whisper, qwen2_5_vl)
}
