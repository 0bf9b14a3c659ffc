"""Where transformers calls this package, and where this package calls it: names, arguments and order.

A new version of transformers that moves one of these fails its test, which says what has to follow.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
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
from transformers.generation.continuous_batching import continuous_api, input_outputs
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerationMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tests.transformers.tiny_models import COMMON
from torch_fattn.integrations.transformers.compat import BATCHES_BY_NAME, CACHE, and_parts, packed_parts

pytestmark = pytest.mark.host_only
UPDATES = CACHE == "cache"  # a model updates the cache of continuous batching
LONGEST = "length" if BATCHES_BY_NAME else "seqlen"


def names(function: Any) -> str:
    return " ".join(inspect.signature(function).parameters)


def closure(function: Any) -> str:
    return " ".join(function.__code__.co_freevars)


class RecordingCache(DynamicCache):
    events: list[str]

    def update(self, *arguments: Any, **keywords: Any) -> Any:
        self.events.append(f"update {len(arguments)} {' '.join(sorted(keywords))}".strip())
        return super().update(*arguments, **keywords)


def forward() -> list[str]:
    """What a forward calls, in order: the mask, and in each layer the cache and the attention function."""
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
    return events


def allocator() -> Any:
    from transformers.generation.continuous_batching.cache_allocators import SlidingAttentionCacheAllocator

    return SlidingAttentionCacheAllocator


def missing_in_allocators() -> set[str]:
    functions = (f for base in allocator().__mro__ for f in vars(base).values() if inspect.isfunction(f))
    known = {name for function in functions for name in function.__code__.co_names}
    return {"index", "tokens_per_page", "sliding_window", "_kv_token_views"} - known


of_sequence, ids = masking_utils.packed_sequence_mask_function, torch.zeros(1, 1, dtype=torch.long)
sliding = masking_utils.sliding_window_causal_mask_function(1)
SEAMS: dict[str, tuple[Callable[[], Any], Any]] = {
    "a forward": (
        forward,
        [
            "mask allow_is_causal_skip attention_mask batch_size config device dtype kv_length kv_offset "
            "mask_function q_length q_offset use_vmap",
            *(
                f"update 3{' kwargs' if UPDATES else ''}",
                "attention 4 dropout position_ids scaling use_cache",
            )
            * 2,
        ],
    ),
    "mask: sdpa_mask": (
        lambda: names(masking_utils.sdpa_mask).replace("allow_torch_fix ", ""),
        "batch_size q_length kv_length q_offset kv_offset mask_function attention_mask local_size "
        "allow_is_causal_skip allow_is_bidirectional_skip use_vmap device kwargs",
    ),
    "mask: and_masks": (lambda: closure(sliding), "mask_functions"),
    "mask: a window": (lambda: closure(and_parts(sliding)[0]), "sliding_window"),
    "mask: packed sequences": (lambda: closure(of_sequence(ids)), "packed_sequence_mask"),
    "mask: found packing": (
        lambda: packed_parts(masking_utils.and_masks(sliding, of_sequence(ids))),
        (sliding, ids),
    ),
    "fallback: sdpa": (
        lambda: names(sdpa_attention_forward).replace(" cache", ""),
        "module query key value attention_mask dropout scaling is_causal position_bias kwargs",
    ),
    "cache: update": (lambda: names(Cache.update), "self key_states value_states layer_idx args kwargs"),
    "cache: a layer": (
        lambda: " ".join(sorted(CacheLayerMixin.__abstractmethods__)),
        "get_mask_sizes get_max_length get_seq_length lazy_initialization update",
    ),
    "generate: its cache": (
        lambda: names(GenerationMixin._prepare_cache_for_generation),
        "self generation_config model_kwargs generation_mode batch_size max_cache_length",
    ),
    "generate: names of caches": (lambda: type(configuration_utils.ALL_CACHE_IMPLEMENTATIONS), tuple),
    "generate: a draft model": (lambda: GenerationConfig().is_assistant, None),
    "generate: the result": (lambda: CACHE in GenerateDecoderOnlyOutput.__annotations__, True),
    "batching: the implementation": (
        lambda: names(continuous_api.ContinuousBatchingManager.switch_to_cb_friendly_attn),
        f"self model{' auto_switch_to_flash' if BATCHES_BY_NAME else ''}",
    ),
    "batching: arguments of the model": (
        lambda: " ".join(input_outputs.PagedAttentionArgs.__annotations__),
        f"input_ids attention_mask position_ids cu_seq_lens_q cu_seq_lens_k max_{LONGEST}_q max_{LONGEST}_k "
        "write_index read_index logits_indices cache block_table logits_processor_args use_cache"
        + " is_causal"
        * BATCHES_BY_NAME,
    ),
    "batching: update": (
        lambda: names(PagedAttentionCache.update),
        f"self key_states value_states layer_idx {'kwargs' if BATCHES_BY_NAME else 'read_index write_index'}",
    ),
    "a model's declarations": (
        lambda: [
            getattr(PreTrainedModel, name)
            for name in (
                "_supports_sdpa",
                "_supports_flash_attn",
                "_supports_attention_backend",
                "_is_stateful",
            )
        ],
        [False] * 4,
    ),
    "a config": (lambda: (PreTrainedConfig.sub_configs, PreTrainedConfig()._attn_implementation), ({}, None)),
}
if BATCHES_BY_NAME:
    SEAMS |= {
        "batching: an allocator's update": (
            lambda: names(allocator().update),
            "self key_states value_states layer_idx read_index write_index",
        ),
        "batching: attributes of allocators": (missing_in_allocators, set()),
        "batching: kinds of layers": (lambda: allocator().layer_type, "sliding_attention"),
    }


@pytest.mark.parametrize("seam", SEAMS)
def test_seam(seam: str) -> None:
    found, wanted = SEAMS[seam]
    assert found() == wanted, f"transformers {transformers.__version__} moved a seam: {seam}"


def test_seams_of_serve() -> None:
    pytest.importorskip("fastapi")
    from transformers.cli.serving import model_manager, utils

    assert names(model_manager.ModelManager._validate_args) == "self"
    assert "attn_implementation" in inspect.signature(model_manager.ModelManager).parameters
    assert names(utils.GenerationState.shutdown) == "self"


def test_control_a_seam_that_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cache, "update", lambda self, key, value, layer: None)
    with pytest.raises(AssertionError, match="moved a seam: cache: update"):
        test_seam("cache: update")


def test_control_a_forward_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordingCache, "update", DynamicCache.update)
    with pytest.raises(AssertionError, match="moved a seam: a forward"):
        test_seam("a forward")
