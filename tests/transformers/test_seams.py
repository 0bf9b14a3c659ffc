"""Where transformers calls this package, and where this package calls it: names, arguments and order.

A new version of transformers that moves one of these fails its test, which says what has to follow.
"""

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
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    masking_utils,
)
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.generation import configuration_utils
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from transformers.generation.continuous_batching.input_outputs import PagedAttentionArgs
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerationMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tests.transformers.tiny_models import COMMON
from torch_fattn.integrations.transformers import register, unregister
from torch_fattn.integrations.transformers.compat import BATCHES_BY_NAME, CACHE, and_parts, packed_parts

pytestmark = pytest.mark.host_only
IDS = torch.zeros(1, 1, dtype=torch.long)
# Arguments in brackets are those of some versions.
SIGNATURES = {
    masking_utils.sdpa_mask: "batch_size q_length kv_length q_offset kv_offset mask_function attention_mask "
    "local_size allow_is_causal_skip allow_is_bidirectional_skip [allow_torch_fix] use_vmap device kwargs",
    sdpa_attention_forward: "module query key value attention_mask dropout scaling is_causal position_bias "
    "[cache] kwargs",
    Cache.update: "self key_states value_states layer_idx args kwargs",
    GenerationMixin._prepare_cache_for_generation: "self generation_config model_kwargs generation_mode "
    "batch_size max_cache_length",
    GenerationMixin._update_model_kwargs_for_generation: "self outputs model_kwargs is_encoder_decoder "
    "num_new_tokens",
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


def test_mask_functions() -> None:
    """They are taken apart by the names of what they close over."""
    sliding = masking_utils.sliding_window_causal_mask_function(1)
    of_sequence = masking_utils.packed_sequence_mask_function(IDS)
    closures = [f.__code__.co_freevars for f in (sliding, and_parts(sliding)[0], of_sequence)]
    assert closures == [("mask_functions",), ("sliding_window",), ("packed_sequence_mask",)]
    assert packed_parts(masking_utils.and_masks(sliding, of_sequence)) == (sliding, IDS)


def test_caches_and_generate() -> None:
    methods = {"get_mask_sizes", "get_max_length", "get_seq_length", "lazy_initialization", "update"}
    assert CacheLayerMixin.__abstractmethods__ == methods
    assert CACHE in GenerateDecoderOnlyOutput.__annotations__
    assert isinstance(configuration_utils.ALL_CACHE_IMPLEMENTATIONS, tuple)
    assert GenerationConfig().is_assistant is None


def test_models_and_configs() -> None:
    names = ("_supports_sdpa", "_supports_flash_attn", "_supports_attention_backend", "_is_stateful")
    assert [getattr(PreTrainedModel, name) for name in names] == [False] * 4
    assert PreTrainedConfig.sub_configs == {} and PreTrainedConfig()._attn_implementation is None


def test_arguments_of_continuous_batching() -> None:
    longest = "length" if BATCHES_BY_NAME else "seqlen"
    assert {*PagedAttentionArgs.__annotations__} - {"is_causal"} == {
        *(
            "input_ids",
            "attention_mask",
            "position_ids",
            "use_cache",
            "logits_indices",
            "cache",
            "block_table",
        ),
        *("cu_seq_lens_q", "cu_seq_lens_k", f"max_{longest}_q", f"max_{longest}_k"),
        *("write_index", "read_index", "logits_processor_args"),
    }


@pytest.mark.skipif(not BATCHES_BY_NAME, reason="5.17 has no allocators")
def test_allocators_of_batching() -> None:
    from transformers.generation.continuous_batching.cache_allocators import SlidingAttentionCacheAllocator

    assert SlidingAttentionCacheAllocator.layer_type == "sliding_attention"
    update = inspect.signature(SlidingAttentionCacheAllocator.update).parameters
    assert [*update] == ["self", "key_states", "value_states", "layer_idx", "read_index", "write_index"]
    bases = SlidingAttentionCacheAllocator.__mro__
    functions = (f for base in bases for f in vars(base).values() if inspect.isfunction(f))
    stored = {name for function in functions for name in function.__code__.co_names}
    assert {"index", "tokens_per_page", "sliding_window", "_kv_token_views"} <= stored


def test_serve() -> None:
    pytest.importorskip("fastapi")
    from transformers.cli.serving import model_manager, utils

    assert [*inspect.signature(model_manager.ModelManager._validate_args).parameters] == ["self"]
    assert "attn_implementation" in inspect.signature(model_manager.ModelManager).parameters
    assert [*inspect.signature(utils.GenerationState.shutdown).parameters] == ["self"]


def test_control_a_seam_that_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIGNATURES, Cache.crop, SIGNATURES[Cache.update])
    with pytest.raises(AssertionError, match="has moved"):
        test_signatures(Cache.crop)
    monkeypatch.setattr(RecordingCache, "update", DynamicCache.update)
    with pytest.raises((AssertionError, TypeError)):
        test_a_forward()
