"""What transformers is told, and how it forgets."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import transformers
from transformers import AttentionInterface, AttentionMaskInterface

from ...runtime import versions
from ...runtime.signatures import public
from . import attention_classes, policy
from .attention import attend
from .compat import entry, restore, switch_batching
from .masks import make_mask
from .paged import attend_paged
from .policy import OnUnsupported
from .support import FLASH_NAME, NAME, PAGED_NAME

_ENTRIES: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (AttentionInterface, NAME, attend),
    (AttentionInterface, FLASH_NAME, attend),
    (AttentionInterface, PAGED_NAME, attend_paged),
    (AttentionMaskInterface, NAME, make_mask),
    (AttentionMaskInterface, FLASH_NAME, make_mask),
)
_undo: list[Callable[[], None]] = []


@public("torch_fattn.integrations.transformers.register")
def register(on_unsupported: OnUnsupported = "error") -> None:
    """Make `attn_implementation="fattn"` known to transformers. May be called again, with another policy too.

    Args:
        on_unsupported: what happens to a layer that the kernels cannot run, and to a model whose attention
            never goes through transformers' attention interface. "error": one sentence is raised. "sdpa":
            transformers' sdpa attention runs the layer (its model's eager attention, if it has a soft cap or
            learned sinks, which sdpa would drop), the model runs its own attention, and one warning says
            which and why.

    Raises ImportError where transformers is older than what this is made for; a newer one costs a warning.
    """
    version = transformers.__version__
    if (fault := versions.fault("transformers", version, versions.TRANSFORMERS)) is not None:
        if versions.minor(version) < versions.TRANSFORMERS[0]:
            raise ImportError(fault)
        warnings.warn(fault, stacklevel=3)
    policy.choose(on_unsupported)
    if not _undo:
        for interface, name, _function in _ENTRIES:
            before = entry(interface, name)
            _undo.append(lambda i=interface, n=name, b=before: restore(i, n, b))  # type: ignore[misc]
        _undo.append(switch_batching(NAME, FLASH_NAME))
        attention_classes.enter_name()
        _undo.append(attention_classes.remove_name)
    for interface, name, function in _ENTRIES:
        interface.register(name, function)


def unregister() -> None:
    """Put transformers back as it was before `register`. A model that still has the name must be given
    another one, `model.set_attn_implementation("sdpa")`, before it runs again. May be called more than
    once."""
    while _undo:
        _undo.pop()()
    policy.choose("error")
