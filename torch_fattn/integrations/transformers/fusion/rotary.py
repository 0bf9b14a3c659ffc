"""The rotary functions of model files, `apply_rotary_pos_emb(q, k, cos, sin)`, as `torch_fattn.rotary`.

Random numbers show which form a function has: the one in which the operator returns the same bits. The old
function runs for calls that the operator does not take: gradients, autocast, torch.compile, another layout.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import running
from .deferred import Deferred, HeadNorm, Rotation, is_head_dim, plain
from .functions import Functions

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_STYLES = ("halves", "pairs", "pairs_to_halves")
_PROBED_HEAD_DIM = 16


class Table(NamedTuple):
    """How a function reads cos and sin."""

    what: str
    read: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # returns those of the operator
    widen: Callable[[Tensor], Tensor]  # makes a table for the function from one of half the rotated columns


def _mirrored(table: Tensor) -> Tensor:
    return torch.cat((table, table.flip(-1)), -1)  # whose halves differ


_TABLES = (
    Table("a column per number", lambda cos, sin: (cos, sin), _mirrored),
    Table("the first half", lambda cos, sin: (cos.chunk(2, -1)[0], sin.chunk(2, -1)[0]), _mirrored),
    Table("a column per pair", lambda cos, sin: (cos, sin), lambda t: t),
    Table("each column twice", lambda c, s: (c[..., ::2], s[..., ::2]), lambda t: t.repeat_interleave(2, -1)),
    Table("the other way round", lambda cos, sin: (cos, -sin), _mirrored),
)


class Form(NamedTuple):
    style: str
    table: Table
    width: int  # rotated columns for one of the table
    is_partial: bool = False  # heads may be wider than the tables
    is_float: bool = False  # products are in float32 for any tables
    takes_float: bool = False  # tables in float32, of heads in 16 bits

    def __str__(self) -> str:
        parts = [self.style, self.table.what]
        parts += ["or part of a head"] * self.is_partial + ["products in float32"] * self.is_float
        return ", ".join(parts)

    def operands(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.table.read(cos, sin)
        return (cos.float(), sin.float()) if self.is_float else (cos, sin)

    def columns(self, cos: Tensor) -> int:
        """How many columns of a head are rotated."""
        return cos.shape[-1] * self.width


def _replacing(function: Callable[..., Any], form: Form) -> Callable[..., Any]:
    @functools.wraps(function)
    def rotate(*arguments: Any, **options: Any) -> Any:
        tables = running.tables()
        if tables is not None and len(arguments) == 4 and options in ({}, {"unsqueeze_dim": 1}):
            if _takes(form, *arguments):
                return _deferred(form, tables, *arguments)
        return function(*arguments, **options)

    return rotate


def _takes(form: Form, query: Any, key: Any, cos: Any, sin: Any) -> bool:
    """Whether the operator computes what the function does."""
    for heads in (query, key):
        if type(heads) not in (Tensor, Deferred) or heads.ndim != 4 or heads.dtype not in _DTYPES:
            return False
        if torch.is_grad_enabled() and heads.requires_grad:
            return False
    if type(cos) is not Tensor or type(sin) is not Tensor or cos.ndim != 3 or cos.shape != sin.shape:
        return False
    batch, _, length, head_dim = query.shape
    columns = form.columns(cos)
    return (
        key.dtype is query.dtype
        and cos.dtype is sin.dtype
        and (cos.dtype is query.dtype or (cos.dtype is torch.float32 and form.takes_float))
        and query.device == key.device == cos.device == sin.device
        and (key.shape[0], *key.shape[2:]) == (batch, length, head_dim)
        and cos.shape[0] in (1, batch)
        and cos.shape[1] == length
        and is_head_dim(head_dim)
        and (columns == head_dim or (form.is_partial and columns < head_dim))
        and not torch.is_autocast_enabled(query.device.type)
    )


def _deferred(
    form: Form, tables: running.Tables, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Deferred, Deferred]:
    found = tables.get((id(cos), form))
    if found is None or found[1] is not sin:
        found = tables[id(cos), form] = (cos, sin, *form.operands(cos, sin))
    options: dict[str, Any] = {"style": form.style, "rotary_dim": form.columns(cos)}
    norms = getattr(query, "source", None), getattr(key, "source", None)
    if isinstance(norms[0], HeadNorm) and isinstance(norms[1], HeadNorm) and norms[0].joins(norms[1]):
        options |= norms[0].options | {"query_norm": norms[0].weight, "key_norm": norms[1].weight}
        query, key = norms[0].heads, norms[1].heads
    rotation = Rotation(plain(query), plain(key), *found[2:], **options)
    return Deferred.of(rotation, query), Deferred.of(rotation, key, 1)


def _form_of(function: Callable[..., Any]) -> Form | str:
    if list(inspect.signature(function).parameters)[2:4] != ["cos", "sin"]:
        return "it takes other arguments than query, key, cos and sin"
    for style, table, is_float in itertools.product(_STYLES, _TABLES, (False, True)):
        width = 2 // table.widen(torch.zeros(1, 1, device="cpu")).shape[-1]
        form = Form(style, table, width, is_float=is_float)
        if _has(function, form):
            is_partial = _has(function, form, columns=_PROBED_HEAD_DIM // 2)
            takes_float = _has(function, form, of_table=torch.float32)
            return form._replace(is_partial=is_partial, takes_float=takes_float)
    return "it computes something else than a rotation of halves or pairs"


def _has(
    function: Callable[..., Any],
    form: Form,
    columns: int = _PROBED_HEAD_DIM,
    of_table: torch.dtype = torch.bfloat16,
) -> bool:
    """Whether a function returns the bits of the operator, for that many rotated columns."""
    numbers = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=numbers, device="cpu")

    query, key = (random(2, heads, 3, _PROBED_HEAD_DIM).bfloat16() for heads in (4, 2))
    cos, sin = (form.table.widen(random(2, 3, columns // 2)).to(of_table) for _ in range(2))
    try:
        with torch.no_grad(), torch.device("cpu"):
            found = function(query, key, cos, sin)
    except Exception:  # it takes other shapes
        return False
    tables = form.operands(cos, sin)
    ours = torch.ops.fattn.rotary(query, key, *tables, style=form.style, rotary_dim=columns)
    return (
        isinstance(found, tuple)
        and len(found) == 2
        and all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(found, ours, strict=True))
    )


_functions: Functions[Form] = Functions(r"apply_.*rot", _form_of, _replacing)
fuse, restore = _functions.fuse, _functions.restore
