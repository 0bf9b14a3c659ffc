"""What transformers 5.17 and 5.23 do differently, and the little that no public name of theirs reaches."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

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
    return tuple(mask_function.__closure__[0].cell_contents)  # type: ignore[attr-defined]


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
        of_one = _closed_over(of_one, "mask_function")
    return of_one, _closed_over(of_sequence, "packed_sequence_mask")


def _closed_over(function: Any, name: str) -> Any:
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


def takes_indices(cache: Any) -> bool:
    """Whether the cache of continuous batching wants the indices of a call (5.17), and not the keywords as they
    are, from which later ones pick what concerns the layer."""
    return "read_index" in inspect.signature(cache.update).parameters


# `generate_batch` of 5.23 takes an implementation for flash attention, which it hands the lengths and its cache,
# by its name alone; 5.17 puts "paged|" before any other name. A name with "flash" in it cannot be chosen through
# `set_attn_implementation`, which then looks for a package or a kernel of that name.
BATCHES_BY_NAME = "auto_switch_to_flash" in (
    inspect.signature(continuous_api.ContinuousBatchingManager.switch_to_cb_friendly_attn).parameters
)


def switch_batching(name: str, flash_name: str) -> Callable[[], None]:
    """Lets `generate_batch` run a model of the implementation `name` as `flash_name`, and back when it ends.
    Returns what undoes this."""
    manager = continuous_api.ContinuousBatchingManager
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
