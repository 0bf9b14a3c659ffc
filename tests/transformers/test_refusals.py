"""What the kernels cannot express yet is refused with a sentence, never silently ignored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Gemma2Config, GptOssConfig, LlamaConfig

from tests.conftest import counted_launches
from tests.transformers.tiny_models import COMMON, DEVICE, pair, prompt
from torch_fattn.integrations.transformers import attend


def call(**options: Any) -> torch.Tensor:
    query, key = (torch.randn(1, heads, 4, 16, device=DEVICE) for heads in (4, 2))
    return attend(nn.Module(), query, key, key, options.pop("attention_mask", None), **options)[0]


@pytest.mark.parametrize("name", ["indices", "block_indices", "position_bias", "cu_seq_lens_q"])
def test_unknown_meaning(name: str) -> None:
    with counted_launches() as launches, pytest.raises(NotImplementedError, match=name):
        call(**{name: torch.zeros(1, dtype=torch.int32)})
    assert not any(launches.values())


def test_harmless_keywords_are_accepted() -> None:
    """The control of the test above: what models pass along without changing attention's meaning."""
    assert call(position_ids=torch.arange(4), use_cache=True, indices=None).shape == (1, 4, 4, 16)


def test_dropout() -> None:
    with pytest.raises(NotImplementedError, match=r"dropout 0\.1"):
        call(dropout=0.1)


def test_window_without_its_mask() -> None:
    with pytest.raises(NotImplementedError, match="sliding window of 2"):
        call(sliding_window=2)
    assert call(sliding_window=4).shape == (1, 4, 4, 16), "4 keys fit into a window of 4"


@pytest.mark.parametrize(
    ("config", "option"),
    [
        (Gemma2Config(**COMMON), "softcap"),
        (GptOssConfig(**COMMON, num_local_experts=2, num_experts_per_tok=1), "sinks"),
    ],
)
def test_models_that_need_more(config: Any, option: str) -> None:
    ours, _ = pair(AutoModelForCausalLM, config)
    ids, _ = prompt()
    with torch.no_grad(), pytest.raises(NotImplementedError, match=option):
        ours(ids.to(DEVICE))


def test_training_with_dropout() -> None:
    ours, _ = pair(AutoModelForCausalLM, LlamaConfig(**COMMON, attention_dropout=0.1))
    ids, _ = prompt()
    with pytest.raises(NotImplementedError, match="dropout"):
        ours.train()(ids.to(DEVICE))


def test_attention_weights_are_not_returned() -> None:
    with pytest.warns(UserWarning, match="eager"):
        call(output_attentions=True)
