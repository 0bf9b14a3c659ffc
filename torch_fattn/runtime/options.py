"""The options of a function that takes `**options: Unpack[SomeOptions]`. Their names, types and documentation
are in that TypedDict, their defaults and their order in the schema of an operator."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch

from . import extension

__all__ = ["defaults_of", "expand_options", "hint", "with_defaults"]

_Options = TypeVar("_Options", bound=Mapping[str, Any])
_ARGS = re.compile(r"(?<=^Args:\n)(?: {4}.*\n| *\n(?= {4}))+", re.MULTILINE)
# Other libraries' names for options.
_MEANT = {"learnable_sink": "sinks", "s_aux": "sinks", "softmax_scale": "scale"}
_MEANT |= {"page_table": "block_tables", "seqused_k": "seq_lens", "mask": "attn_mask"}
_MEANT |= {"sinks": "learnable_sink", "return_lse": "return_attn_probs"}
_MEANT |= {"return_softmax_lse": "return_attn_probs"}
_DEFAULTS: dict[str, dict[str, Any]] = {}  # of each operator, filled on demand


def defaults_of(op: str) -> dict[str, Any]:
    """The defaults of an operator's arguments, in the order of its schema."""
    if op not in _DEFAULTS:
        extension.load()
        schema = getattr(torch.ops.fattn, op).default._schema
        _DEFAULTS[op] = {
            each.name: each.default_value for each in schema.arguments if each.has_default_value()
        }
    return _DEFAULTS[op]


def with_defaults(op: str, options: _Options) -> _Options:
    """Fills in the operator's defaults for missing options."""
    return cast("_Options", {**defaults_of(op), **options})


def hint(unknown: str, names: Sequence[str]) -> str:
    """A "did you mean" for an unknown argument name."""
    if unknown == "dim":
        return " (it is always the last one)"
    own = _MEANT.get(unknown, "")
    meant = [own] if own in names else get_close_matches(unknown, names, 1)
    return f" (did you mean {meant[0]}?)" if meant else ""


def expand_options(function: Callable[..., Any], options: str | Mapping[str, Any]) -> tuple[str, ...]:
    """Expands `**options` in a function's signature and documentation: the options of an operator, or those
    with these defaults. Returns their names."""
    *own, last = inspect.signature(function).parameters.values()
    typed = function.__globals__[str(last.annotation).removeprefix("Unpack[").removesuffix("]")]
    types = {name: getattr(each, "__forward_arg__", each) for name, each in typed.__annotations__.items()}
    defaults = defaults_of(options) if isinstance(options, str) else options
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=types[name])
        for name, default in defaults.items()
        if name in types
    ]
    shown = sorted((*own, *parameters), key=lambda each: each.name == "return_lse")
    signature = inspect.signature(function).replace(parameters=shown)
    function.__signature__ = signature  # type: ignore[attr-defined]
    names = tuple(each.name for each in parameters)
    if function.__doc__:
        texts = _documentation(typed.__module__)
        texts = {name: texts[name] for name in names if name in texts}
        function.__doc__ = _documented(inspect.cleandoc(function.__doc__), texts, [*signature.parameters])
    return names


@functools.cache
def _documentation(module: str) -> dict[str, str]:
    """The docstrings of the class fields of a module, which Python discards."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except OSError:  # installed without sources
        return {}
    fields = [pair for each in tree.body if isinstance(each, ast.ClassDef) for pair in pairwise(each.body)]
    return {
        field.target.id: inspect.cleandoc(ast.literal_eval(below.value))
        for field, below in fields
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr)
    }


def _documented(doc: str, texts: Mapping[str, str], order: list[str]) -> str:
    """Adds the texts to the documented arguments, in that order. Existing entries stay."""
    args = _ARGS.search(doc + "\n")
    entries = re.split(r"^ {4}(?=\w)", args[0], flags=re.MULTILINE)[1:] if args else []
    by_name = {name: each for each in entries for name in each.partition(":")[0].split(", ")}
    if args is None or "options" in by_name:  # an "options" entry refers to another function
        return doc
    for name, text in texts.items():
        lines = textwrap.indent(text, " " * 8).strip()
        by_name.setdefault(name, f"{name}: {lines}\n")
    listed = dict.fromkeys(by_name[name] for name in sorted(by_name, key=order.index))
    return f"{doc[: args.start()]}{''.join(f'    {each}' for each in listed)}{doc[args.end() :]}"
