"""What transformers 5.17 and 5.23 do differently, and the little that no public name of theirs reaches."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.generation.continuous_batching import continuous_api
from transformers.masking_utils import packed_sequence_mask_function, sliding_window_causal_mask_function

MaskFunction = Callable[..., Any]
_OF_ONE_TOKEN = torch.zeros(1, 1, dtype=torch.long)


def and_parts(mask_function: MaskFunction) -> tuple[MaskFunction, ...]:
    """What `and_masks` put together; empty for what it did not make."""
    if not made_like(mask_function, sliding_window_causal_mask_function(1)):
        return ()
    return tuple(closed_over(mask_function, "mask_functions"))


def made_like(mask_function: MaskFunction, other: MaskFunction) -> bool:
    """Whether the same lines of transformers made both."""
    code = getattr(mask_function, "__code__", None)
    return code is not None and code is getattr(other, "__code__", None)


def packed_parts(mask_function: MaskFunction) -> tuple[MaskFunction, Tensor] | None:
    """The function of one sequence and the numbers `[B, L]` of the sequences that tokens belong to, where
    transformers has found packed sequences. 5.17 adds the condition that both be of one sequence behind the
    function; later versions put it before, and let the function count from the beginning of each."""
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

    group: int  # its place in the lists of indices
    kind: str  # its key in the dicts of lengths
    pools: tuple[Tensor, Tensor] | None  # [slots, Hkv, D], where the indices point to; None: out of reach
    block_size: int  # of the slots of one request that follow each other
    window: int | None


def paged_layer(cache: Any, layer: int) -> PagedLayer:
    """The cache of 5.17 has one pool for each place of a layer in its group; a sliding layer goes round in
    it. Later there is an allocator for each kind of layer, which shows the pages of full layers alone."""
    if hasattr(cache, "layer_to_allocator"):
        allocator = cache.layer_to_allocator[layer]
        pools = None
        if allocator.supports_block_table:
            pools = tuple(pages.flatten(0, 1) for pages in allocator.get_cache_for_block_table(layer))
        window = None if allocator.layer_type == "full_attention" else allocator.sliding_window
        return PagedLayer(allocator.index, allocator.layer_type, pools, allocator.tokens_per_page, window)
    group, place = cache.layer_index_to_group_indices[layer]
    pools = cache.key_cache[place], cache.value_cache[place]
    window = cache.sliding_windows[layer]
    if window == 1:  # its word for none
        return PagedLayer(group, "full_attention", pools, cache.block_size, None)
    return PagedLayer(group, "sliding_attention", pools, 1, window)


def update_paged(
    cache: Any, layer: int, key: Tensor, value: Tensor, keywords: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The keys and values of all requests, `[keys, Hkv, D]`, the new ones of which are written. 5.17 takes
    the indices; later the keywords as they are, which it changes to what concerns the layer."""
    arguments = {"key_states": key, "value_states": value, "layer_idx": layer}
    if hasattr(cache, "layer_to_allocator"):
        key, value = cache.update(**arguments, kwargs=dict(keywords))
        return key[0].transpose(0, 1), value[0].transpose(0, 1)
    indices = {name: keywords[name] for name in ("read_index", "write_index")}
    updated: tuple[Tensor, Tensor] = cache.update(**arguments, **indices)
    return updated


# `generate_batch` of 5.23 takes an implementation for flash attention, which it hands the lengths and its
# cache, by its name alone; 5.17 puts "paged|" before any other name. A name with "flash" in it cannot be
# chosen through `set_attn_implementation`, which then looks for a package or a kernel of that name.
BATCHES_BY_NAME = "auto_switch_to_flash" in (
    inspect.signature(continuous_api.ContinuousBatchingManager.switch_to_cb_friendly_attn).parameters
)


def switch_batching(name: str, flash_name: str) -> Callable[[], None]:
    """Lets `generate_batch` run a model of the implementation `name` as `flash_name`, and back when it ends.
    Returns what undoes this."""
    manager: Any = continuous_api.ContinuousBatchingManager
    if not BATCHES_BY_NAME:
        return lambda: None
    switch = manager.switch_to_cb_friendly_attn

    def switch_or_rename(self: Any, model: Any, *arguments: Any, **options: Any) -> None:
        if model.config._attn_implementation != name:
            return switch(self, model, *arguments, **options)
        model.config._attn_implementation = flash_name
        self._original_attn_impl = name  # which `stop` sets again

    manager.switch_to_cb_friendly_attn = switch_or_rename

    def undo() -> None:
        if manager.switch_to_cb_friendly_attn is switch_or_rename:
            manager.switch_to_cb_friendly_attn = switch

    return undo


def entry(interface: Any, name: str) -> Any:
    """What is registered under a name, or None."""
    return interface._global_mapping.get(name)


def restore(interface: Any, name: str, before: Any) -> None:
    """Their `register` has no counterpart."""
    if before is None:
        interface._global_mapping.pop(name, None)
    else:
        interface.register(name, before)


def let_serve_take(name: str) -> None:
    """`transformers serve` knows the names of its own implementations alone."""
    from transformers.cli.serving import model_manager

    class ModelManager(model_manager.ModelManager):
        def _validate_args(self) -> None:
            given, self.attn_implementation = self.attn_implementation, None
            super()._validate_args()
            self.attn_implementation = given
            if given != name:
                super()._validate_args()

    model_manager.ModelManager = ModelManager  # type: ignore[misc]
