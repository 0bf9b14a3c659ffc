"""rms_norm; see __init__.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import torch_fattn
from tests.helpers.public_calls import heads
from tests.helpers.refusals import Refusal
from tests.helpers.wrong_calls import Arguments, valid
from torch_fattn import reference

VALID = valid("rms_norm", "cpu")


def _refused(words: str, wrong: Arguments, right: Arguments) -> Refusal:
    def call(room: Any, changes: Arguments) -> Callable[[], Tensor]:
        return lambda: room.rms_norm(**VALID | changes)

    return Refusal(words, call(torch_fattn, wrong), call(torch_fattn, right), call(reference, right))


HALF = {name: VALID[name].half() for name in ("x", "gate")} | {"norm": "float", "float32_out": True}
WEIGHT = VALID["weight"].bfloat16()
ROW = {"x": heads(1, 64), "gate": None}
REFUSALS = [
    _refused("pass rows [.., columns]", {"x": heads(1)[0], "weight": None, "gate": None}, ROW),
    _refused("convert weight with .to(x.dtype), or with .float()",
             HALF | {"weight": WEIGHT}, HALF | {"weight": WEIGHT.float()}),
    _refused("convert gate with .to(x.dtype)", {"gate": VALID["gate"].half()},
             {"gate": VALID["gate"].half().float()}),
    _refused("pass a gate for each element of x", {"gate": heads(5, 64)},
             {"gate": heads(5, 64).expand(3, 5, 64)}),
    _refused('pass "silu" or "sigmoid"', {"activation": "swish"}, {"activation": "silu"}),
    _refused('pass "rounded", "plus_one" or "float"', {"norm": "gemma"}, {"norm": "plus_one"}),
    _refused("pass that of the model's norms", {"eps": torch.nan}, {"eps": 0.0}),
]  # fmt: skip
