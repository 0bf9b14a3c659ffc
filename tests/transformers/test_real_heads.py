"""Models with the head sizes of their checkpoints, otherwise as small as they can be: prompt, images and
sound included, every attention layer runs through the operators, and logits and greedy tokens are those of
eager attention: in float32 within 2e-5 of the largest logit, or of 1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    AutoModelForSpeechSeq2Seq,
    Gemma3Config,
    LogitsProcessorList,
    PreTrainedConfig,
    WhisperConfig,
)

from tests.conftest import counted_launches
from tests.transformers.calls import Call
from tests.transformers.tiny_models import COMMON, MIXED, TOLERANCE, VISIBLE_ERROR, pair, prompt

NEW_TOKENS = 4
KERNELS = ("prefill", "prefill_wide", "decode", "decode_wide", "decode_vector")
IMAGE, IMAGE_START, IMAGE_END = 61, 62, 63
TOKENS = {name: COMMON[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")}

Heads = dict[tuple[str, int], int]  # calls, by operator and head dim


@dataclass(frozen=True)
class Real:
    auto_class: Any
    config: PreTrainedConfig
    first: Heads  # of the prompt
    step: Heads  # of each token after that
    inputs: Callable[[], dict[str, Tensor]]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def with_image() -> dict[str, Tensor]:
    """A prompt of more rows than decode takes, whose 4th token begins an image of four."""
    ids = prompt(24, batch=1)[0] % IMAGE
    ids[0, 3], ids[0, 4:8], ids[0, 8] = IMAGE_START, IMAGE, IMAGE_END
    types = (ids == IMAGE).to(torch.int32)
    return {"input_ids": ids, "token_type_ids": types, "pixel_values": random(1, 3, 56, 56)}


# Local and global layers, and SigLIP's heads of 72: 16 patches, pooled to 4 tokens.
VISION = {"hidden_size": 144, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
GEMMA3 = Gemma3Config(
    text_config=COMMON | MIXED | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256},
    vision_config=VISION | {"image_size": 56, "patch_size": 14},
    mm_tokens_per_image=4,
    image_token_index=IMAGE,
    boi_token_index=IMAGE_START,
    eoi_token_index=IMAGE_END,
    **TOKENS,
)
# An encoder of 30 frames' positions, and a decoder that begins with one token and attends to it.
WHISPER = WhisperConfig(
    vocab_size=COMMON["vocab_size"],
    d_model=128,
    **{f"{part}_{name}": n for part in ("encoder", "decoder")
       for name, n in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 64))},
    num_mel_bins=8,
    max_source_positions=30,
    max_target_positions=32,
    decoder_start_token_id=1,
    begin_suppress_tokens=None,
    **TOKENS,
)  # fmt: skip
MODELS = {
    "gemma3": Real(
        AutoModelForImageTextToText,
        GEMMA3,
        {("prefill", 256): 2, ("prefill", 72): 2},
        {("decode", 256): 2},
        with_image,
    ),
    "whisper": Real(
        AutoModelForSpeechSeq2Seq,
        WHISPER,
        {("prefill", 64): 2, ("decode", 64): 4},
        {("decode", 64): 4},
        lambda: {"input_features": random(2, 8, 60)},
    ),
}


def generate(model: Any, real: Real) -> tuple[Tensor, list[Tensor]]:
    """Greedy tokens, and the logits of every step, which a processor of logits is shown: on "mps" generate of
    transformers 5.17 fails to return those of an encoder with a decoder."""
    inputs = {name: tensor.to(model.device) for name, tensor in real.inputs().items()}
    logits: list[Tensor] = []

    def remember(_tokens: Tensor, scores: Tensor) -> Tensor:
        logits.append(scores.cpu().clone())
        return scores

    with torch.no_grad():
        tokens = model.generate(
            **inputs,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            logits_processor=LogitsProcessorList([remember]),
        )
    return tokens.cpu(), logits[:NEW_TOKENS]


def largest_error(mine: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(mine, theirs, strict=True))


def heads_of(calls: list[Call]) -> dict[tuple[str, int], int]:
    for call in calls:
        assert call["query"].shape[-1] == call["key"].shape[-1] == call["value"].shape[-1]
    return dict(Counter((call.op, int(call["query"].shape[-1])) for call in calls))


@pytest.mark.parametrize("name", MODELS)
def test_generate(name: str, calls: list[Call]) -> None:
    real = MODELS[name]
    ours, eager = pair(real.auto_class, real.config)
    with counted_launches() as launches:
        tokens, mine = generate(ours, real)
    eager_tokens, theirs = generate(eager, real)
    first = sum(real.first.values())
    assert heads_of(calls[:first]) == real.first
    each = sum(real.step.values())
    steps = [calls[at : at + each] for at in range(first, len(calls), each)]
    assert [heads_of(step) for step in steps] == [real.step] * (NEW_TOKENS - 1)
    assert sum(launches.get(f"fattn_{kernel}", 0) for kernel in KERNELS) == len(calls)
    assert len(mine) == len(theirs) == NEW_TOKENS
    assert largest_error(mine, theirs) < TOLERANCE * max(1.0, *(float(x.abs().max()) for x in theirs))
    assert torch.equal(tokens, eager_tokens)


@pytest.mark.parametrize("name", MODELS)
def test_control_other_weights_of_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: doubled scores change the logits visibly in every model."""
    real = MODELS[name]
    ours, eager = pair(real.auto_class, real.config)
    for op in ("prefill", "decode"):
        operator = getattr(torch.ops.fattn, op)

        def sharper(*arguments: Any, operator: Any = operator, **options: Any) -> Tensor:
            query, *others = arguments
            return operator(2.0 * query, *others, **options)

        monkeypatch.setattr(torch.ops.fattn, op, sharper)
    (_, mine), (_, theirs) = generate(ours, real), generate(eager, real)
    assert largest_error(mine[:1], theirs[:1]) > VISIBLE_ERROR
