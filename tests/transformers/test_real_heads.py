"""Models with the head sizes of their checkpoints (real_heads.py): prompt, images and sound included, every
attention layer runs through the operators, and logits and greedy tokens are those of eager attention: in
float32 within 2e-5 of the largest logit, or of 1."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList

from tests.conftest import counted_launches
from tests.transformers.calls import Call
from tests.transformers.real_heads import MODELS, Real
from tests.transformers.tiny_models import TOLERANCE, VISIBLE_ERROR, pair

NEW_TOKENS = 4
KERNELS = ("prefill", "prefill_wide", "decode", "decode_wide", "decode_vector")


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
    real = MODELS[name]()
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
    real = MODELS[name]()
    ours, eager = pair(real.auto_class, real.config)
    for op in ("prefill", "decode"):
        operator = getattr(torch.ops.fattn, op)

        def sharper(*arguments: Any, operator: Any = operator, **options: Any) -> Tensor:
            query, *others = arguments
            return operator(2.0 * query, *others, **options)

        monkeypatch.setattr(torch.ops.fattn, op, sharper)
    (_, mine), (_, theirs) = generate(ours, real), generate(eager, real)
    assert largest_error(mine[:1], theirs[:1]) > VISIBLE_ERROR
