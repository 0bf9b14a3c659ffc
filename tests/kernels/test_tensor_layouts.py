"""tensor_probe shows whether every element of a tile is held once, and what goes with what in a layout of
cooperative tensors. The results of the kernels on tensor operations under random layouts:
tests/operators/test_tensor_prefill.py."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.conftest import needs_emulator
from tests.helpers import tensor_kernels
from tests.helpers.tensor_kernels import Probe


def probe(layout: str, dim: int, *, registers: bool = True) -> Probe:
    key = torch.empty(1, 1, 64, dim, dtype=torch.float16, device="meta")
    operands = key, key, key[..., :512]
    state = "registers" if registers else "threadgroup"
    plan = tensor_kernels.plan_of(
        "prefill", dict(zip(("query", "key", "value"), operands, strict=True)), state
    )
    return tensor_kernels.probe(plan["passes"][0], layout, registers=registers)


@needs_emulator
@pytest.mark.parametrize(
    ("dim", "registers"), [*itertools.product((64, 128, 256), (True, False)), (tensor_kernels.LATENT, False)]
)
@pytest.mark.parametrize("layout", tensor_kernels.layouts(0))
def test_every_element_is_held_once(layout: str, dim: int, registers: bool) -> None:
    found = probe(layout, dim, registers=registers)
    found.assert_each_once(*((32, dim) if dim <= 128 else (16, 128 if dim > 256 else dim // 2)))


@needs_emulator
@pytest.mark.parametrize(
    ("layout", "matches"),
    [
        ("m5", (True, True, True)),
        ("random:4", (False, False, False)),
        ("random:5", (True, True, False)),
        ("random:6", (True, True, True)),
    ],
)
def test_compatibilities_of_a_layout(layout: str, matches: tuple[bool, bool, bool]) -> None:
    assert probe(layout, 128).matches == matches
    assert probe(layout, 128, registers=False).matches[2] is False, "it names no cooperative operand"
