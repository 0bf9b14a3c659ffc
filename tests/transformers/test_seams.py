"""Where transformers calls this package, and where this package calls it: arguments and order. What a new
version of transformers adds would go unnoticed; what it takes away fails other tests, too."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    masking_utils,
)
from transformers.cache_utils import Cache
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from transformers.generation.utils import GenerationMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tests.transformers.tiny_models import COMMON
from torch_fattn.integrations.transformers import register, unregister
from torch_fattn.integrations.transformers.compat import BATCHES_BY_NAME, CACHE

pytestmark = pytest.mark.host_only
# Arguments in brackets are those of some versions.
SIGNATURES = {
    masking_utils.sdpa_mask: "batch_size q_length kv_length q_offset kv_offset mask_function attention_mask "
    "local_size allow_is_causal_skip allow_is_bidirectional_skip [allow_torch_fix] use_vmap device kwargs",
    sdpa_attention_forward: "module query key value attention_mask dropout scaling is_causal position_bias "
    "[cache] kwargs",
    Cache.update: "self key_states value_states layer_idx args kwargs",
    GenerationMixin._prepare_cache_for_generation: "self generation_config model_kwargs generation_mode "
    "batch_size max_cache_length",
    ContinuousBatchingManager.switch_to_cb_friendly_attn: "self model [auto_switch_to_flash]",
    PagedAttentionCache.update: "self key_states value_states layer_idx "
    + ("kwargs" if BATCHES_BY_NAME else "read_index write_index"),
}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """transformers as it is."""
    unregister()
    yield
    register()


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__qualname__)
def test_signatures(function: Any) -> None:
    found = [*inspect.signature(function).parameters]
    wanted = [each for each in SIGNATURES[function].split() if each[0] != "[" or each.strip("[]") in found]
    assert found == [each.strip("[]") for each in wanted], "transformers has moved it"


class RecordingCache(DynamicCache):
    events: list[str]

    def update(self, *arguments: Any, **keywords: Any) -> Any:
        self.events.append(f"update {len(arguments)} {' '.join(keywords)}".strip())
        return super().update(*arguments, **keywords)


def test_a_forward() -> None:
    """The mask, and in each layer the cache and then the attention function."""
    events: list[str] = []

    def mask(**keywords: Any) -> None:
        events.append(f"mask {' '.join(sorted(keywords))}")

    def attention(module: Any, query: Any, *operands: Any, **keywords: Any) -> Any:
        events.append(f"attention {1 + len(operands)} {' '.join(sorted(keywords))}")
        return query.transpose(1, 2), None

    AttentionInterface.register("recording", attention)
    AttentionMaskInterface.register("recording", mask)
    try:
        model = AutoModelForCausalLM.from_config(LlamaConfig(**COMMON), attn_implementation="recording")
        RecordingCache.events = events
        with torch.no_grad():
            model(torch.ones(1, 3, dtype=torch.long), **{CACHE: RecordingCache(config=model.config)})
    finally:
        AttentionInterface._global_mapping.pop("recording")
        AttentionMaskInterface._global_mapping.pop("recording")
    update = "update 3 kwargs" if CACHE == "cache" else "update 3"
    assert events == [
        "mask allow_is_causal_skip attention_mask batch_size config device dtype kv_length kv_offset "
        "mask_function q_length q_offset use_vmap",
        *(update, "attention 4 dropout position_ids scaling use_cache") * 2,
    ]


def test_control_a_seam_that_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIGNATURES, Cache.crop, SIGNATURES[Cache.update])
    with pytest.raises(AssertionError, match="has moved"):
        test_signatures(Cache.crop)
    monkeypatch.setattr(RecordingCache, "update", DynamicCache.update)
    with pytest.raises((AssertionError, TypeError)):
        test_a_forward()
