"""The formats of caches, from the package's table: a format that is added there is in every test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from torch_fattn.operators import kv_formats

T = TypeVar("T")

QUANTISED = tuple(kv_formats.KV_FORMATS)
GROUPED = tuple(name for name, kind in kv_formats.KV_FORMATS.items() if kind.group)
UNSCALED = tuple(f"{name}_unscaled" for name, kind in kv_formats.KV_FORMATS.items() if kind.may_lack_scales)
# Quantised formats, those that may lack scales once with and once without them.
FORMS = tuple(
    form for name in QUANTISED for form in (name, f"{name}_unscaled") if form in (*QUANTISED, *UNSCALED)
)
KV_FORMATS = ("float", *FORMS)  # "float" is the dtype of the query


def name_of(form: str) -> str:
    return form.removesuffix("_unscaled")


def columns(form: str, dim: int) -> int:
    """The stored numbers of a row of `dim` elements."""
    return dim if form in ("float", "auto") else kv_formats.KV_FORMATS[name_of(form)].columns(dim)


def has_row_scales(form: str) -> bool:
    return form in QUANTISED and form not in GROUPED


def known(facts: Mapping[str, T], form: str, file: str) -> T:
    """What a test knows of a format; `file` has the facts."""
    name = name_of(form)
    assert name in facts, f"{file} knows nothing of {name}; add it there"
    return facts[name]
