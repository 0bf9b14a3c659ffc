"""Registers `fattn` with transformers, and unregisters it.

GPT-Neo, Falcon, Bark and others choose an attention class from a table by the implementation's name. Their
attention never calls an attention function, and an unknown name raises a bare KeyError during construction.
`register` adds an entry to those tables that raises an error with advice, or, under `on_unsupported="sdpa"`,
is the class of "sdpa" or "eager".
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import transformers
from transformers import AttentionInterface, AttentionMaskInterface

from ...runtime import versions
from ...runtime.signatures import public
from ...runtime.warn import warn
from .attention import attend, attend_paged
from .compat import (
    append_tokens_in,
    around_each_call,
    entry,
    let_generate_make,
    let_models_update,
    restore,
    switch_batching,
)
from .fusion.layers import replace_updates
from .fusion.models import forward_of, runs_fused, want
from .masks import make_mask
from .paged import update_in_place
from .paged_cache import CACHE_NAME, cache_of
from .sharded import SHARDED_NAME, attend_sharded, make_sharded_mask
from .support import FLASH_NAME, NAME, PAGED_NAME, USE_ANOTHER
from .unsupported import OnUnsupported, choose, falls_back, warn_once

_ENTRIES: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (AttentionInterface, NAME, attend),
    (AttentionInterface, FLASH_NAME, attend),
    (AttentionInterface, PAGED_NAME, attend_paged),
    (AttentionInterface, SHARDED_NAME, attend_sharded),
    (AttentionMaskInterface, NAME, make_mask),
    (AttentionMaskInterface, FLASH_NAME, make_mask),
    (AttentionMaskInterface, SHARDED_NAME, make_sharded_mask),
)
# Modules with such tables. Some exist only in newer or older transformers.
_MODULES = (
    "bark.modeling_bark",
    "data2vec.modeling_data2vec_vision",
    "deepseek_ocr2.modeling_deepseek_ocr2",
    "falcon.modeling_falcon",
    "git.modeling_git",
    "gpt_neo.modeling_gpt_neo",
    "gptj.modeling_gptj",
    "sam.modeling_sam",
    "sam_hq.modeling_sam_hq",
    "superglue.modeling_superglue",
    "unlimited_ocr.modeling_unlimited_ocr",
)
_undo: list[Callable[[], None]] = []


@public("torch_fattn.integrations.transformers.register")
def register(on_unsupported: OnUnsupported = "error", *, fuse: bool = True) -> None:
    """Registers `attn_implementation="fattn"` with transformers. May be called again, to change an argument.

    Args:
        on_unsupported: the policy for layers that the kernels cannot run, and for models whose attention does
            not go through transformers' attention interface. "error": raise an error. "sdpa": run the layer
            with transformers' sdpa attention (with its model's eager attention if it has a soft cap or
            learned sinks, which sdpa ignores), run the model with its own attention, and warn once with the
            reason.
        fuse: whether models with this implementation also run norms, rotary embedding, cache writes and
            linear attention in fewer kernels; `report` shows where. Results may differ in a rounding.

    Raises ImportError if transformers is too old, and warns if it is newer than the supported versions.
    """
    version = transformers.__version__
    if (fault := versions.fault("transformers", version, versions.TRANSFORMERS)) is not None:
        if versions.minor(version) < versions.TRANSFORMERS[0]:
            raise ImportError(fault)
        warn(fault)
    choose(on_unsupported)
    want(fuse)
    if not _undo:
        _undo.append(around_each_call(forward_of))
        _undo.extend(replace_updates())
        _undo.append(append_tokens_in(runs_fused))
        for interface, name, _function in _ENTRIES:
            before = entry(interface, name)
            _undo.append(lambda i=interface, n=name, b=before: restore(i, n, b))  # type: ignore[misc]
        _undo.append(switch_batching(NAME, FLASH_NAME))
        _undo.append(let_models_update(FLASH_NAME, update_in_place))
        _undo.append(let_generate_make(CACHE_NAME, cache_of))
        for table in _tables():
            table[NAME] = _entry(table["eager"], table.get("sdpa", table["eager"]))
            _undo.append(lambda t=table: t.pop(NAME, None))  # type: ignore[misc]
    for interface, name, function in _ENTRIES:
        interface.register(name, function)


def unregister() -> None:
    """Restores transformers to its state before `register`. Before a model with this implementation runs
    again, give it another one: `model.set_attn_implementation("sdpa")`. May be called more than once."""
    while _undo:
        _undo.pop()()
    choose("error")
    want(False)


def _tables() -> Iterator[dict[str, Any]]:
    for name in _MODULES:
        try:
            module = importlib.import_module(f"transformers.models.{name}")
        except ImportError:
            continue
        for attribute, table in vars(module).items():
            if re.search(r"ATTENTION_CLASSES$", attribute) and isinstance(table, dict) and "eager" in table:
                yield table


def _entry(eager: type, other: type) -> Callable[..., Any]:
    why = "its model picks its attention from a table of classes and never calls an attention function"

    def build(*arguments: Any, **options: Any) -> Any:
        if not falls_back():
            raise NotImplementedError(f"fattn attention in {eager.__name__}: {why}; {USE_ANOTHER}")
        warn_once(eager.__name__, eager.__name__, f"{why}; {other.__name__} runs instead")
        return other(*arguments, **options)

    return build
