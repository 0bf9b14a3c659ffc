"""Linear attention; see __init__.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torch_fattn
from tests.helpers.public_calls import heads
from tests.helpers.refusals import Refusal
from tests.helpers.wrong_calls import Arguments, valid
from torch_fattn import reference

RULE, STEP = (valid(op, "cpu") for op in ("gated_delta_rule", "gated_delta_step"))
TOKENS = ("query", "key", "value", "g", "beta")
PACKED = {name: RULE[name].flatten(0, 1)[None] for name in TOKENS}
NARROW = {name: RULE[name][..., :12] for name in ("query", "key")} | {"state": torch.zeros(2, 4, 12, 24)}
LONG = {name: RULE[name][:1, :1].expand(-1, 2**20 + 1, *RULE[name].shape[2:]) for name in TOKENS}
ENDS = {"cu_seqlens": torch.tensor([0, 3, 6]).int()}
PLAIN: Arguments = dict.fromkeys(("A_log", "dt_bias", "state", "slots"))
CHANNELS = {"g": heads(2, 3, 4, 16), "dt_bias": heads(4, 16)}


def _call(room: Any, op: str, changes: Arguments) -> Callable[[], Tensor]:
    """On a state of its own."""
    state = {name: each.clone() for name, each in changes.items() if name == "state" and each is not None}
    return lambda: getattr(room, op)(**valid(op, "cpu") | changes | state)


def _refused(words: str, wrong: Arguments, right: Arguments, op: str = "gated_delta_rule") -> Refusal:
    return Refusal(
        words, _call(torch_fattn, op, wrong), _call(torch_fattn, op, right), _call(reference, op, right)
    )


def _heads(count: int) -> Arguments:
    heads = {name: RULE[name][:, :, :count] for name in ("value", "beta")}
    return PLAIN | heads | {"g": -RULE["g"][:, :, :count].abs()}


def _gradient() -> None:
    query = RULE["query"].clone().requires_grad_()
    torch_fattn.gated_delta_rule(**RULE | {"query": query}).sum().backward()


def _states_in_one(gap: int) -> Arguments:
    """Both states in one memory, the second `gap` elements after the first."""
    memory = torch.zeros(gap + 2 * 4 * 16 * 24)
    conv_state = memory[: 160 * 3].view(1, 160, 3)
    return {
        "conv_state": conv_state,
        "state": memory[gap : gap + 4 * 16 * 24].view(1, 4, 16, 24),
        "slots": torch.tensor([0, -1]).int(),
        "conv_state_out": None,
    }


step = partial(_refused, op="gated_delta_step")
conv = partial(_refused, op="causal_conv1d")
REFUSALS = [
    _refused("pass the slots of the sequences, or a state for each",
             {"slots": None, "state": torch.zeros(3, 4, 16, 24)},
             {"slots": None, "state": torch.zeros(2, 4, 16, 24)}),
    _refused("pass the tokens of all sequences as one batch, and where each of them begins and ends",
             ENDS, PACKED | ENDS),
    _refused("pass one, or leave it out", {"state": None}, {"state": None, "slots": None}),
    _refused("pass the state of each sequence, or -1 to skip it", {"slots": torch.zeros(3).int()},
             {"slots": torch.tensor([-1, 1]).int()}),
    _refused("convert it with .bool()", {"has_initial_state": torch.ones(2)},
             {"has_initial_state": torch.ones(2).bool()}),
    _refused("pass a bool for each sequence", {"has_initial_state": torch.ones(1).bool()},
             {"has_initial_state": torch.tensor([True, False])}),
    _refused("pass a key for each query", {"key": RULE["key"][:, :, :1]}, {}),
    _refused("pass one for each token and value head, or for each channel too", {"g": RULE["g"][:, :2]}, {}),
    _refused("pass one for each token and value head", {"beta": RULE["beta"][..., None]}, {}),
    _refused("pass that of the model's layer, viewed in this shape", {"dt_bias": RULE["dt_bias"][None]}, {}),
    _refused("convert it with .float()", {"state": RULE["state"].half()}, {"state": RULE["state"].clone()}),
    _refused("allocate a matrix for each value head", {"state": RULE["state"].mT},
             {"state": RULE["state"].clone()}),
    _refused("pass both, or neither", {"A_log": None}, PLAIN | {"g": -RULE["g"].abs()}),
    Refusal("use the model's own functions for this layer", _call(torch_fattn, "gated_delta_rule", NARROW)),
    _refused("pass a multiple of them", _heads(3), _heads(2)),
    _refused("pass query and key for each value head", CHANNELS,
             CHANNELS | {n: RULE[n].repeat_interleave(2, 2) for n in ("query", "key")}),
    _refused("leave it out for 1 / sqrt(head_dim)", {"scale": 1e39}, {}),
    Refusal("pass the tokens in pieces of a multiple of 8, each with the state of the last one",
            _call(torch_fattn, "gated_delta_rule", LONG | PLAIN)),
    Refusal("use the model's own layer where one is needed", _gradient),
    step("pass a gate for each value", {"z": STEP["z"][:, :, :2]}, {}),
    step("pass a number for each column of a value", {"norm_weight": heads(16)}, {"norm_weight": heads(24)}),
    Refusal("allocate separate memory for each",
            lambda: torch_fattn.gated_delta_step(**STEP | _states_in_one(0)),
            lambda: torch_fattn.gated_delta_step(**STEP | _states_in_one(160 * 3)),
            lambda: reference.gated_delta_step(**STEP | _states_in_one(160 * 3))),
    step("allocate it with torch.empty_like(conv_state)",
         {"conv_state_out": STEP["conv_state"][..., :-1]}, {}),
    step("allocate separate memory for each",
         dict.fromkeys(("conv_state", "conv_state_out"), STEP["conv_state"]), {}),
    Refusal("pass the heads in parts", lambda: torch_fattn.explain("gated_delta_step", heads=2**20)),
    conv("use F.conv1d for this layer", {"weight": heads(96, 1)}, {}),
    conv("pass a number for each channel", {"bias": heads(95)}, {"bias": heads(96)}),
    conv('pass "none" or "silu"', {"activation": "relu"}, {"activation": "silu"}),
]  # fmt: skip
