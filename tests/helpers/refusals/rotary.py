"""rotary, rotary_write and rms_norm; see __init__.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import torch_fattn
from tests.helpers import rotary_problems
from tests.helpers.public_calls import heads
from tests.helpers.refusals import Refusal
from tests.helpers.wrong_calls import Arguments, valid
from torch_fattn import reference

ROTARY, WRITE = (rotary_problems.valid(op, "cpu") for op in ("rotary", "rotary_write"))
ROWS, TABLES, NORM = ("query", "key"), ("cos", "sin"), heads(64)
ANGLES = dict(zip(TABLES, (f(heads(1, 3, 32)).repeat(1, 1, 2) for f in (torch.cos, torch.sin)), strict=True))
NORMED: Arguments = valid("rms_norm", "cpu")
BLOCKS: Arguments = {f"{n}_cache": WRITE[f"{n}_cache"][:2] for n in ("key", "value")} | {"slot_mapping": None}
LARGER = BLOCKS | {f"{n}_cache": torch.zeros(2, 9, 2, d) for n, d in (("key", 64), ("value", 40))}
APART = {
    "value": WRITE["key"],
    **dict(zip(("key_cache", "value_cache"), torch.zeros(4, 2, 2, 2, 64).unbind(2), strict=True)),
}


def _halves(*names: str) -> Arguments:
    return {name: ROTARY[name].half() for name in names}


def _columns(count: int, *names: str) -> Arguments:
    return {name: ROTARY[name][..., :count] for name in names}


def _refused(words: str, wrong: Arguments, right: Arguments, checked: bool = False) -> Refusal:
    """The first result of the first operator that has these arguments."""
    op, valid = next((op, valid) for op, valid in CALLS.items() if _names(op) >= wrong.keys())

    def call(room: Any, changes: Arguments) -> Callable[[], Tensor]:
        return lambda: [*_results(getattr(room, op)(**valid | changes))][0]

    return Refusal(words, call(torch_fattn, wrong), call(torch_fattn, right), call(reference, right), checked)


def _names(op: str) -> set[str]:
    return {each.name for each in getattr(torch.ops.fattn, op).default._schema.arguments}


def _results(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def _by_hand(query: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As models do it."""
    x, y = query.chunk(2, -1)
    return query * cos[:, None] + torch.cat((-y, x), -1) * sin[:, None]


def _gradient(rotate: Callable[..., Tensor]) -> Tensor:
    """The gradient of the sum of squares, which a rotation keeps."""
    query = ROTARY["query"].clone().requires_grad_()
    rotate(query, **ANGLES).square().sum().backward()
    assert query.grad is not None
    return query.grad


CALLS = {"rotary": ROTARY, "rotary_write": WRITE, "rms_norm": NORMED}
REFUSALS = [
    Refusal("use the model's own functions for this layer",
            lambda: torch_fattn.rotary(**_columns(18, *ROWS, *TABLES)),
            lambda: _by_hand(**_columns(18, "query", *TABLES)),
            lambda: reference.rotary(**_columns(18, *ROWS, *TABLES))[0]),
    Refusal("use the model's own rotary embedding and norms where one is needed",
            lambda: _gradient(lambda query, **tables: torch_fattn.rotary(query, query, **tables)[0]),
            lambda: _gradient(_by_hand), lambda: 2 * ROTARY["query"]),
    _refused("pass the columns that are rotated", _columns(9, *TABLES), _columns(8, *TABLES)),
    _refused("pass one from 0 to 0, or tables of fewer columns", {"rotary_offset": 32},
             {"rotary_offset": 32} | _columns(32, *TABLES)),
    _refused("pass that of the model's norms", {"query_norm": NORM, "eps": -1.0},
             {"query_norm": NORM, "eps": 1e-5}),
    _refused("convert cos with .to(query.dtype), or with .float()", _halves(*TABLES),
             {name: each.float() for name, each in _halves(*TABLES).items()}),
    _refused("convert sin with .to(cos.dtype)", _halves(*ROWS, "cos"), _halves(*ROWS, *TABLES)),
    _refused("pass the rows of the tables at the positions of the tokens",
             {name: ROTARY[name].repeat(1, 2, 1) for name in TABLES}, {}),
    _refused("pass a table of that many columns, or of half as many", {"rotary_dim": 32}, {"rotary_dim": 64}),
    _refused('pass "halves", "pairs" or "pairs_to_halves"', {"style": "neox"}, {"style": "halves"}),
    _refused('pass "rounded", "plus_one" or "float"', {"norm": "gemma"}, {"norm": "plus_one"}),
    _refused("pass the number of tokens that the cache holds", LARGER | {"start": -1}, LARGER | {"start": 0}),
    _refused("pass larger caches", BLOCKS, LARGER),
    *(_refused("pass the number of tokens that each sequence holds, or larger caches",
               LARGER | {"starts": torch.tensor([0, start])}, LARGER | {"starts": torch.tensor([0, 6])},
               checked=True)
      for start in (-1, 7)),
    _refused("pass a slot for each token", {"slot_mapping": WRITE["slot_mapping"].mT}, APART),
    _refused("pass one of them", {"start": 2, "slot_mapping": WRITE["slot_mapping"]}, APART),
    _refused("pass one, or a cache of a block per sequence", {"slot_mapping": None}, LARGER),
    _refused("pass the number of tokens that each sequence holds", LARGER | {"starts": torch.zeros(3).int()},
             LARGER | {"starts": torch.zeros(2).int()}),
    *(_refused("pass separate memory for each, or use torch_fattn.rotary and torch_fattn.cache_write",
               APART | {"key_cache": pool, "value_cache": other}, APART)
      for pool, other in ((WRITE["key_cache"],) * 2, (WRITE["key_cache"][:3], WRITE["key_cache"][1:]))),
    _refused("pass rows [.., columns]", {"x": heads(1)[0], "weight": None, "gate": None}, {}),
    _refused("convert gate with .to(x.dtype)", {"gate": NORMED["gate"].half()}, {}),
    _refused("pass a gate for each element of x", {"gate": heads(5, 64)},
             {"gate": heads(5, 64).expand(3, 5, 64)}),
    _refused('pass "silu" or "sigmoid"', {"activation": "swish"}, {"activation": "sigmoid"}),
]  # fmt: skip
