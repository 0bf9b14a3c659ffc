"""The kernels on tensor operations assume no layout of cooperative tensors: their text has no arithmetic on
lanes, and tensor_probe shows whether every element of a tile is held once."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch

from tests.conftest import needs_emulator
from tests.helpers import tensor_kernels
from tests.helpers.tensor_kernels import Probe

FOLDER = Path(__file__).resolve().parents[2] / "csrc" / "kernels"
FILES = {path.name: path for path in sorted(FOLDER.glob("*/*tensor*"))}
# What lanes are counted for: rows of threadgroup memory and of the tile, look-ups, one lane that writes.
ALLOWED = {
    "prefill_tensor.metal": {
        "const ushort thread_index = thread_in_group(simdgroup_index, lane);",
        "tile.at.lane = lane;",
    },
    "prefill_latent_tensor.metal": {
        "void find(thread const PrefillTile& tile, int first_key, ushort lane) thread {",
        "row = thread_index / kRowLanes;",
        "key = thread_index % kRowLanes * kLaneScores;",
        "keys.look_up(table, first_key, lane);",
        "exist = keys.exist(table, lane);",
        "const ushort thread_index = thread_in_group(simdgroup_index, lane);",
        "tile.at.lane = lane;",
        "step.find(tile, first_key, lane);",
    },
    "tensor_probe.metal": {
        "inline long list_elements(thread Tensor& held, device int* facts, long place, long most, "
        "ushort lane) {",
        "const long here = place + lane * count + 2 * i;",
        "ushort lane [[thread_index_in_simdgroup]]) {",
        "if (lane == 0) {",
        "const long place = list_elements(scores, facts, kTensorHeadFacts, params.max_facts, lane);",
        "list_elements(output, facts, place, params.max_facts, lane);",
    },
    "tensor_step.h": {
        "keys.look_up(table, key, tile.at.lane);",
        "exist = keys.exist(table, tile.at.lane);",
    },
    "tensor_staging.h": {
        "if (tile.at.lane == 0) {",
        "const int row = tile.at.lane;",
    },
    "backward_query_tensor.metal": {
        "if (tile.at.lane < kTensorRows) {",
        "if (tile.at.lane < kTensorRows && own_row().exists) {",
        "states[tile.at.lane] = float4(lse, 0.0f, 0.0f, 0.0f);",
        "const float lse = states[tile.at.lane][0];",
        "states[tile.at.lane] = float4(lse, has_grad ? delta - grad_lse[place()] : delta, inverse, 0.0f);",
        "const float4 state = states[tile.at.lane];",
        "QueryRow own_row() const thread { return tile.own_row(tile.at.lane); }",
        "const ushort thread_index = thread_in_group(simdgroup_index, lane);",
        "tile.at.lane = lane;",
        "const float weights = row_sum_of(weight_sums, lane);",
        "rows.store_sums(weights, row_sum_of(grad_sums, lane));",
        "const float slope_grad = fc_alibi ? row_sum_of(slope_sums, lane) : 0.0f;",
    },
    "backward_key_tensor.metal": {
        "const ushort thread_index = thread_in_group(simdgroup_index, lane);",
        "tile = packed_key_tile(cu_seqlens_q, cu_seqlens_k, forward, group, lane);",
        "cells.look_up(map, tile, head.head, row, forward, lane);",
        "const bool all_count = simd_all(lane >= kStepRows || step.rows[lane].state.lse != INFINITY);",
    },
    "tensor_gradients.h": {
        "inline float row_sum_of(thread Scores& scores, ushort lane) {",
        "own = lane == row ? sum : own;",
    },
    "tensor_threadgroup.h": {
        "row = tile.at.lane / kRowLanes;",
        "half_row = tile.at.lane % kRowLanes;",
    },
}
# Lanes, or threads from which lanes are computed.
LANE = re.compile(r"\blane\b|\bthread_index\s*[%/&]")
# The elements of cooperative tensors by their own numbers, which mean nothing.
ELEMENT = re.compile(r"\b(?:scores|reduced|output|held|weight_grads|\w+_sums)\[(?!i\]|j\])")


def code_of(name: str) -> list[str]:
    """The lines of a file, without comments."""
    return [re.sub(r"\s*//.*", "", line).strip() for line in FILES[name].read_text().splitlines()]


def layouts_assumed(name: str, lines: list[str]) -> list[str]:
    """The lines that tell elements of cooperative tensors, or lanes, from others."""
    allowed = ALLOWED.get(name, set())
    return [line for line in lines if ELEMENT.search(line) or (LANE.search(line) and line not in allowed)]


@pytest.mark.host_only
@pytest.mark.parametrize("name", FILES)
def test_no_arithmetic_on_lanes(name: str) -> None:
    assert layouts_assumed(name, code_of(name)) == []


@pytest.mark.host_only
def test_every_allowed_line_is_there() -> None:
    assert {name: allowed - set(code_of(name)) for name, allowed in ALLOWED.items()} == dict.fromkeys(
        ALLOWED, set()
    )


@pytest.mark.host_only
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("prefill_tensor.metal", "const int key = first_key + ((lane >> 2 & 2) | (lane & 1)) * 4 + i % 4;"),
        ("tensor_registers.h", "scores[2 * i] = 0.0f;"),
        ("tensor_gradients.h", "weight_grads[i ^ 1] = 0.0f;"),
        ("prefill_latent_tensor.metal", "const int column = thread_index % 32 / 4 * 2;"),
        ("tensor_threadgroup.h", "largest = fmax(largest, output[lane]);"),
    ],
)
def test_a_layout_is_noticed(name: str, line: str) -> None:
    """The controls."""
    assert layouts_assumed(name, [*code_of(name), line]) == [line]


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
    keys, columns = (32, dim) if dim <= 128 else (16, 128 if dim > 256 else dim // 2)
    for elements, width in ((found.scores, keys), (found.output, columns)):
        numbers = elements[:, 1] * width + elements[:, 0]
        assert torch.equal(numbers.sort().values, torch.arange(16 * width, dtype=numbers.dtype))


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
