"""Models that choose an attention class from a table by the implementation's name: GPT-Neo, Falcon, Bark.

Their attention never calls an attention function, and an unknown name raises a bare KeyError while the model
is built. This module adds the name to those tables: with an entry that raises an error with advice, or, under
`on_unsupported="sdpa"`, with the class of "sdpa" or "eager".
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from .support import NAME, USE_ANOTHER
from .unsupported import falls_back, warn_once

# Some exist only in newer or older transformers.
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


def enter_name() -> None:
    for table in _tables():
        table[NAME] = _entry(table["eager"], table.get("sdpa", table["eager"]))


def remove_name() -> None:
    for table in _tables():
        table.pop(NAME, None)


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
