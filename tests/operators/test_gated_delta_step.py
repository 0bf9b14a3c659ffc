"""gated_delta_step: the bits of calls of one token, and the states in place."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_fattn
from tests.conftest import needs_emulator
from tests.helpers import linear_problems
from tests.helpers.linear_problems import STATES
from tests.helpers.tensors import same_bits

call_of = partial(linear_problems.call_of, "gated_delta_step")


def step(arguments: dict[str, Any]) -> Tensor:
    return torch_fattn.gated_delta_step(**arguments)


def part(arguments: dict[str, Any], of: slice, dim: int = 1) -> dict[str, Any]:
    """Some of the tokens, with the same states; or some of the sequences, with theirs."""
    names = ("query", "key", "value", "z", "a", "b", *STATES[: 2 * (dim == 0)])
    return arguments | {name: arguments[name].narrow(dim, of.start, of.stop - of.start) for name in names}


def copied(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same call with states of its own."""
    return arguments | {name: arguments[name].clone() for name in STATES}


def states_of(arguments: dict[str, Any]) -> list[Tensor]:
    return [arguments[name] for name in STATES]


SHAPES = pytest.mark.parametrize(
    "shape",
    [
        {"dims": (64, 64), "group": 4, "channel_decay": False},  # two heads at a time
        {"dims": (64, 256), "group": 2, "channel_decay": False},  # in rounds
        {"dims": (128, 128), "group": 1, "channel_decay": True},
    ],
    ids=str,
)


@SHAPES
def test_tokens_at_once_have_the_bits_of_calls_of_one(shape: dict[str, Any]) -> None:
    """Drafts, too: without writes both states stay, and a call with counts accepts some of the tokens."""
    arguments = call_of("mps", **shape)
    at_once, one_by_one, drafts = copied(arguments), copied(arguments), copied(arguments)
    out = step(at_once)
    outs, states = [], []
    for t in range(6):
        outs.append(step(part(one_by_one, slice(t, t + 1))))
        states.append([state.clone() for state in states_of(one_by_one)])
    assert same_bits(torch.cat(outs, 1), out) and same_bits(states_of(one_by_one), states_of(at_once))

    drafted = step(drafts | {"writes_state": False})
    assert same_bits(drafted, out) and same_bits(states_of(drafts), states_of(arguments))
    counts = torch.tensor([2, 5], dtype=torch.int32, device="mps")
    accepted = step(drafts | {"counts": counts})
    for n, count in enumerate((2, 5)):
        assert same_bits(accepted[n, :count], out[n, :count]) and not accepted[n, count:].any()
        assert same_bits([state[n] for state in states_of(drafts)], [state[n] for state in states[count - 1]])


@SHAPES
def test_a_sequence_depends_on_itself(shape: dict[str, Any]) -> None:
    """Its bits, too; and a NaN stays in it."""
    arguments = call_of("mps", batch=3, **shape)
    together = copied(arguments)
    out = step(together)
    for n in range(3):
        alone = part(copied(arguments), slice(n, n + 1), dim=0)
        assert same_bits(step(alone), out[n : n + 1])
        assert same_bits(states_of(alone), [state[n : n + 1] for state in states_of(together)])
    spoiled = copied(arguments)
    spoiled["value"][1, 2, 0, 5] = torch.nan
    assert same_bits((again := step(spoiled))[[0, 2]], out[[0, 2]]) and again[1].isnan().any()


def test_slots_and_counts_out_of_range(device: str) -> None:
    """A slot that the pool lacks skips its sequence: the result is 0, and no state moves."""
    arguments = call_of(device, batch=3)
    before = copied(arguments)
    for skipped in (-1, 3, 2**31 - 1, -(2**31)):
        slots = {"slots": torch.tensor([skipped] * 3, dtype=torch.int32, device=device)}
        without_states = {name: arguments[name][:0] for name in STATES}
        assert not step(arguments | slots).any() and not step(arguments | slots | without_states).any()
        assert same_bits(states_of(arguments), states_of(before))
    counts = torch.tensor([-5, 0, 1000], dtype=torch.int32, device=device)  # 0, 0 and T
    out = step(arguments | {"counts": counts})
    assert same_bits(out[2], step(before)[2]) and not out[:2].any()


@needs_emulator
@pytest.mark.parametrize("length", [1, 16])
@SHAPES
def test_states_are_read_and_written_once(shape: dict[str, Any], length: int) -> None:
    import softmetal

    for writes in (True, False):
        arguments = call_of("mps", length=length, writes_state=writes, **shape)
        with softmetal.checks(count_bytes=True), softmetal.record() as launches:
            step(arguments)
        [launch] = launches
        slot = str(torch_fattn.explain("gated_delta_step", **arguments).passes[0]["bindings"]["state"])
        size = 4 * arguments["state"].numel()
        assert launch["buffers_read"][slot] == size
        assert launch["buffers_written"].get(slot, 0) == size * writes


@pytest.mark.host_only
@pytest.mark.parametrize(
    ("sizes", "changes", "threads", "groups"),
    [
        ((16, 32, 128, 128), {}, 512, 16),  # Qwen3-Next: a threadgroup for each key head
        ((16, 32, 128, 128), {"moves": True}, 512, 32),  # or for each value head, which leave its state
        ((16, 32, 128, 128), {"writes_state": False}, 512, 32),
        ((16, 48, 64, 64), {}, 256, 16),
        ((4, 16, 32, 32), {}, 512, 4),  # value heads side by side
        ((2, 4, 256, 256), {}, 512, 2),
        ((2, 2, 64, 200), {}, 416, 2),  # rounds of 104 columns, the last of 96
    ],
)
def test_threads(sizes: tuple[int, ...], changes: dict[str, Any], threads: int, groups: int) -> None:
    key_heads, value_heads, dim, value_dim = sizes
    shape = {"dims": (dim, value_dim), "key_heads": key_heads, "group": value_heads // key_heads}
    arguments = call_of("meta", **shape, channel_decay=False, **changes)
    [launch] = torch_fattn.explain("gated_delta_step", **arguments, family=7, cores=8).passes
    assert (launch["threads"], launch["grid"]) == ([threads, 1, 1], [groups, 2, 1])
