"""Registers `fattn` with transformers, and unregisters it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from transformers import AttentionInterface, AttentionMaskInterface

from ...runtime import versions
from ...runtime.signatures import public
from ...runtime.warn import warn
from . import attention_classes, unsupported
from .attention import attend
from .compat import entry, let_generate_make, let_models_update, restore, switch_batching
from .masks import make_mask
from .paged import attend_paged, update_in_place
from .paged_cache import CACHE_NAME, cache_of
from .sharded import SHARDED_NAME, attend_sharded, make_sharded_mask
from .support import FLASH_NAME, NAME, PAGED_NAME
from .unsupported import OnUnsupported

_ENTRIES: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (AttentionInterface, NAME, attend),
    (AttentionInterface, FLASH_NAME, attend),
    (AttentionInterface, PAGED_NAME, attend_paged),
    (AttentionInterface, SHARDED_NAME, attend_sharded),
    (AttentionMaskInterface, NAME, make_mask),
    (AttentionMaskInterface, FLASH_NAME, make_mask),
    (AttentionMaskInterface, SHARDED_NAME, make_sharded_mask),
)
_undo: list[Callable[[], None]] = []


@public("torch_fattn.integrations.transformers.register")
def register(on_unsupported: OnUnsupported = "error") -> None:
    """Registers `attn_implementation="fattn"` with transformers. May be called again, also with another
    policy.

    Args:
        on_unsupported: the policy for layers that the kernels cannot run, and for models whose attention does
            not go through transformers' attention interface. "error": raise an error. "sdpa": run the layer
            with transformers' sdpa attention (with its model's eager attention if it has a soft cap or
            learned sinks, which sdpa ignores), run the model with its own attention, and warn once with the
            reason.

    Raises ImportError if transformers is older than the supported versions. A newer one causes a warning.
    """
    version = transformers.__version__
    if (fault := versions.fault("transformers", version, versions.TRANSFORMERS)) is not None:
        if versions.minor(version) < versions.TRANSFORMERS[0]:
            raise ImportError(fault)
        warn(fault)
    unsupported.choose(on_unsupported)
    if not _undo:
        for interface, name, _function in _ENTRIES:
            before = entry(interface, name)
            _undo.append(lambda i=interface, n=name, b=before: restore(i, n, b))  # type: ignore[misc]
        _undo.append(switch_batching(NAME, FLASH_NAME))
        _undo.append(let_models_update(FLASH_NAME, update_in_place))
        _undo.append(let_generate_make(CACHE_NAME, cache_of))
        attention_classes.enter_name()
        _undo.append(attention_classes.remove_name)
    for interface, name, function in _ENTRIES:
        interface.register(name, function)


def unregister() -> None:
    """Restores transformers to its state before `register`. Before a model with this implementation runs
    again, give it another one: `model.set_attn_implementation("sdpa")`. May be called more than once."""
    while _undo:
        _undo.pop()()
    unsupported.choose("error")
