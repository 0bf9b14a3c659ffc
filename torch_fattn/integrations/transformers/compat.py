"""Differences between transformers 5.17, 5.23 and 5.24, and all uses of their private names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, masking_utils
from transformers.generation import configuration_utils
from transformers.generation import utils as generation_utils
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.masking_utils import packed_sequence_mask_function, sliding_window_causal_mask_function

MaskFunction = Callable[..., Any]
# The keyword of a model's cache. 5.24 renamed it to "cache" and warns about the old name. From 5.24 on,
# models also update the cache of continuous batching; before, attention functions did.
CACHE = (
    "cache"
    if "cache" in inspect.signature(masking_utils.create_causal_mask).parameters
    else "past_key_values"
)
_OF_ONE_TOKEN = torch.zeros(1, 1, dtype=torch.long)


def and_parts(mask_function: MaskFunction) -> tuple[MaskFunction, ...]:
    """The functions that `and_masks` combined; empty for other functions."""
    if not made_like(mask_function, sliding_window_causal_mask_function(1)):
        return ()
    return tuple(closed_over(mask_function, "mask_functions"))


def made_like(mask_function: MaskFunction, other: MaskFunction) -> bool:
    """Whether both functions come from the same source lines of transformers."""
    code = getattr(mask_function, "__code__", None)
    return code is not None and code is getattr(other, "__code__", None)


def packed_parts(mask_function: MaskFunction) -> tuple[MaskFunction, Tensor] | None:
    """The mask function of one sequence and the tokens' sequence ids `[B, L]`, if transformers found packed
    sequences. 5.17 and 5.24 add the condition on sequence ids after the function, 5.23 before it; in 5.23 and
    5.24 the function counts from the start of each sequence."""
    for_ids = packed_sequence_mask_function(_OF_ONE_TOKEN)
    parts = and_parts(mask_function)
    if len(parts) != 2:
        return None
    of_sequence, of_one = parts if made_like(parts[0], for_ids) else parts[::-1]
    if not made_like(of_sequence, for_ids):
        return None
    remap = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
    if remap is not None and made_like(of_one, remap(for_ids, _OF_ONE_TOKEN)):
        of_one = closed_over(of_one, "mask_function")
    return of_one, closed_over(of_sequence, "packed_sequence_mask")


def closed_over(function: Any, name: str) -> Any:
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


class PagedLayer(NamedTuple):
    """A layer of the cache of continuous batching."""

    group: int  # its position in the lists of indices
    kind: str  # its key in the dicts of lengths
    pools: tuple[Tensor, Tensor]  # [slots, Hkv, D], indexed by the indices
    block_size: int  # number of consecutive slots of one request
    window: int | None


def paged_layer(cache: Any, layer: int) -> PagedLayer:
    """Finds the layer in transformers' cache, in which a sliding layer has a ring of slots. In 5.17 there is
    one pool for each position of a layer in its group. Later versions have an allocator for each kind of
    layer, and views of one memory; that of the values is shorter by a page."""
    if hasattr(cache, "layer_to_allocator"):
        allocator = cache.layer_to_allocator[layer]
        keys, values = allocator._kv_token_views[layer]
        pools = keys[: values.shape[0]], values
        if allocator.layer_type == "full_attention":
            return PagedLayer(allocator.index, "full_attention", pools, allocator.tokens_per_page, None)
        return PagedLayer(allocator.index, allocator.layer_type, pools, 1, allocator.sliding_window)
    group, place = cache.layer_index_to_group_indices[layer]
    pools = cache.key_cache[place], cache.value_cache[place]
    window = cache.sliding_windows[layer]
    if window == 1:  # it means no window
        return PagedLayer(group, "full_attention", pools, cache.block_size, None)
    return PagedLayer(group, "sliding_attention", pools, 1, window)


def update_paged(
    cache: Any, layer: int, key: Tensor, value: Tensor, keywords: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Writes the new keys and values and returns those of all requests, `[keys, Hkv, D]`. The cache does this
    in 5.17, the layer's allocator in later versions."""
    indices = {name: keywords[name] for name in ("read_index", "write_index")}
    if hasattr(cache, "layer_to_allocator"):
        allocator = cache.layer_to_allocator[layer]
        of_layer = {name: of_all[allocator.index] for name, of_all in indices.items()}
        new = (states[0].transpose(0, 1) for states in (key, value))
        updated: tuple[Tensor, Tensor] = allocator.update(*new, layer, **of_layer)
        return updated
    updated = cache.update(key_states=key, value_states=value, layer_idx=layer, **indices)
    return updated


def replace_method(owner: Any, name: str, method: Any) -> Callable[[], None]:
    """Replaces a method. Returns a function that undoes this, unless the method was replaced again."""
    before = vars(owner).get(name)
    setattr(owner, name, method)

    def undo() -> None:
        if getattr(owner, name) is not method:
            return
        if before is None:
            delattr(owner, name)  # inherited again
        else:
            setattr(owner, name, before)

    return undo


def around_each_call(enter: Callable[[PreTrainedModel], AbstractContextManager[None]]) -> Callable[[], None]:
    """Runs each forward of a model inside `enter(model)`, except in graphs of torch.compile. Returns a
    function that undoes this."""

    before = vars(PreTrainedModel).get("__call__")

    def call(self: PreTrainedModel, *arguments: Any, **options: Any) -> Any:
        # Without one before: that of a mixin, or of nn.Module.
        run = super(PreTrainedModel, self).__call__ if before is None else functools.partial(before, self)
        if torch.compiler.is_compiling():
            return run(*arguments, **options)
        with enter(self):
            return run(*arguments, **options)

    return replace_method(PreTrainedModel, "__call__", call)


def let_models_update(name: str, update: Callable[..., tuple[Tensor, Tensor]]) -> Callable[[], None]:
    """From 5.24 on, a model updates the cache of continuous batching and passes all keys to its attention
    function. Makes the models of the implementation `name` call `update` instead. Returns a function that
    undoes this."""
    if CACHE != "cache":
        return lambda: None
    theirs: Any = PagedAttentionCache.update

    def update_by_name(
        self: Any, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        chosen = update if self.config._attn_implementation == name else theirs
        updated: tuple[Tensor, Tensor] = chosen(self, key_states, value_states, layer_idx, kwargs)
        return updated

    return replace_method(PagedAttentionCache, "update", update_by_name)


# `generate_batch` after 5.17 passes lengths and its cache only to an implementation with "flash" in its name;
# 5.17 prefixes other names with "paged|". `set_attn_implementation` does not accept a name with "flash" in
# it: it looks for a package or a kernel of that name.
BATCHES_BY_NAME = "auto_switch_to_flash" in (
    inspect.signature(continuous_api.ContinuousBatchingManager.switch_to_cb_friendly_attn).parameters
)


def switch_batching(name: str, flash_name: str) -> Callable[[], None]:
    """Makes `generate_batch` run a model of the implementation `name` as `flash_name`, and restore the name
    at the end. Returns a function that undoes this."""
    manager: Any = continuous_api.ContinuousBatchingManager
    if not BATCHES_BY_NAME:
        return lambda: None
    switch = manager.switch_to_cb_friendly_attn

    def switch_or_rename(self: Any, model: Any, *arguments: Any, **options: Any) -> None:
        if model.config._attn_implementation != name:
            return switch(self, model, *arguments, **options)
        model.config._attn_implementation = flash_name
        self._original_attn_impl = name  # `stop` restores this one

    return replace_method(manager, "switch_to_cb_friendly_attn", switch_or_rename)


def let_generate_make(name: str, make: Callable[[Any, int, int, dict[str, Any]], Any]) -> Callable[[], None]:
    """Makes `generate(cache_implementation=name)` use the cache that `make` returns for a config, a number of
    sequences, their maximum length and `cache_config`; transformers has no registry of caches. A draft model,
    whose length is unknown, gets a DynamicCache. Returns a function that undoes this."""
    mixin: Any = generation_utils.GenerationMixin
    names: Any = configuration_utils
    prepare, known = mixin._prepare_cache_for_generation, names.ALL_CACHE_IMPLEMENTATIONS
    signature = inspect.signature(prepare)

    def prepare_or_make(self: Any, *arguments: Any, **options: Any) -> Any:
        given = signature.bind(self, *arguments, **options).arguments
        wanted, model_kwargs = given["generation_config"], given["model_kwargs"]
        if wanted.cache_implementation == name and wanted.is_assistant:
            wanted.cache_implementation = None  # in this call's copy of the config
        has_one = model_kwargs.get(CACHE) is not None or wanted.use_cache is False
        if wanted.cache_implementation != name or has_one:
            return prepare(self, *arguments, **options)
        rows = max(wanted.num_beams, wanted.num_return_sequences) * given["batch_size"]
        settings = dict(wanted.cache_config or {})
        model_kwargs[CACHE] = make(self.config, rows, given["max_cache_length"] + 1, settings)

    put_back = replace_method(mixin, "_prepare_cache_for_generation", prepare_or_make)
    names.ALL_CACHE_IMPLEMENTATIONS = (*known, name)

    def undo() -> None:
        names.ALL_CACHE_IMPLEMENTATIONS = tuple(n for n in names.ALL_CACHE_IMPLEMENTATIONS if n != name)
        put_back()

    return undo


def append_tokens_in(runs_fused: Callable[[PreTrainedModel], bool]) -> Callable[[], None]:
    """The loop of `generate` appends a token's position, and a one to the padding, in six kernels. Makes it
    three for a model that `runs_fused`. Returns a function that undoes this."""
    mixin: Any = generation_utils.GenerationMixin
    update = mixin._update_model_kwargs_for_generation

    @functools.wraps(update)
    def update_or_append(
        self: Any,
        outputs: Any,
        model_kwargs: dict[str, Any],
        is_encoder_decoder: bool = False,
        num_new_tokens: int = 1,
    ) -> dict[str, Any]:
        appended = {}
        if not is_encoder_decoder and num_new_tokens == 1 and runs_fused(self):
            if (positions := model_kwargs.pop("position_ids", None)) is not None:
                appended["position_ids"] = torch.cat([positions, positions[..., -1:] + 1], dim=-1)
            if (mask := model_kwargs.pop("attention_mask", None)) is not None:
                appended["attention_mask"] = torch.nn.functional.pad(mask, (0, 1), value=1)
        updated: dict[str, Any] = update(self, outputs, model_kwargs, is_encoder_decoder, num_new_tokens)
        updated.update(appended)
        return updated

    return replace_method(mixin, "_update_model_kwargs_for_generation", update_or_append)


def entry(interface: Any, name: str) -> Any:
    """The function registered under a name, or None."""
    return interface._global_mapping.get(name)


def restore(interface: Any, name: str, before: Any) -> None:
    """Restores the previous function of a name, or removes the name, for which transformers lacks a
    method."""
    if before is None:
        interface._global_mapping.pop(name, None)
    else:
        interface.register(name, before)


def let_serve_take(name: str) -> None:
    """Adds the name to those that `transformers serve` accepts."""
    from transformers.cli.serving import model_manager

    class ModelManager(model_manager.ModelManager):
        def _validate_args(self) -> None:
            given, self.attn_implementation = self.attn_implementation, None
            super()._validate_args()
            self.attn_implementation = given
            if given != name:
                super()._validate_args()

    model_manager.ModelManager = ModelManager  # type: ignore[misc]


def let_serve_end() -> Callable[[], None]:
    """Returns a function that stops the threads of continuous batching. `transformers serve` leaves them
    running after an interrupt, and so never exits."""
    from transformers.cli.serving import utils

    made: list[Any] = []

    class GenerationState(utils.GenerationState):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    utils.GenerationState = GenerationState  # type: ignore[misc]

    def end() -> None:
        for state in made:
            state.shutdown()

    return end
