"""Calls and GPUs for the kernels on tensor operations: problems that they take, layouts of cooperative
tensors, and what tensor_probe says of a layout."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.helpers import direct_launch, drawing
from tests.helpers.backward_problems import BackwardProblem
from tests.helpers.backward_problems import draw as draw_backwards
from tests.helpers.problems import DECODES, PACKED, Problem

OPS = ("prefill", "paged_prefill", "varlen_prefill", *DECODES)
DTYPES = (torch.float16, torch.bfloat16)
DIMS = (64, 72, 80, 96, 128, 192, 256)
LATENT, LATENT_VALUE = 576, 512  # of latent attention: no gradients; through threadgroup memory
STATES = ("registers", "threadgroup")
KERNEL, LATENT_KERNEL = KERNELS = ("fattn_prefill_tensor", "fattn_prefill_latent_tensor")
BACKWARD_KERNELS = ("fattn_backward_query_tensor", "fattn_backward_key_tensor")
Head = tuple[torch.dtype, int]
# Those of random problems: of every kind, and those of tests/mutation, so that few kernels are compiled. The
# tests of edges, products and self-tests have the others.
HEADS = (torch.float16, 64), (torch.bfloat16, 72), (torch.float16, 256), (torch.bfloat16, LATENT)
# Those in which all rows start on 16-byte boundaries.
ALIGNED = ("contiguous", "token_major", "expanded_batch", "expanded_heads")
LEAST_ROWS = 16  # of a dense call
LEAST_DECODE_ROWS = 24  # latent heads need LEAST_ROWS
MOST_DECODE_ROWS = 16  # of a head
# Query and key-value heads of decodes. With one query head to a key-value head, only latent heads have enough
# rows.
DECODE_GROUPS = ((4, 2), (6, 2), (4, 1), (14, 2), (8, 1), (16, 1))
# kTensorHeadFacts and the most elements of a lane (sizes.h).
HEAD_FACTS, MOST_SCORES, MOST_OUTPUTS, MOST_ROWS = 8, 32, 64, 2
ROOM = 2**16  # integers of a probe


def problems(seed: int, count: int = len(HEADS)) -> Iterator[Problem]:
    """Random problems, with the heads in turn, changed so that the kernels take them."""
    rng = random.Random(seed)
    drawn = drawing.draw(count, seed, ops=("prefill", *OPS), of=4)
    for problem, head in zip(drawn, itertools.cycle(HEADS), strict=False):
        yield _taken(problem, head, rng)


def backward_problem(seed: int, head: Head) -> BackwardProblem:
    """Likewise of a backward, with this head."""
    rng = random.Random(seed)
    (problem,) = draw_backwards(1, seed)
    forward = _taken(problem.forward, head, rng)
    return replace(problem, forward=forward, grad_layout=rng.choice(ALIGNED), out="remainder")


def _taken(problem: Problem, head: Head, rng: random.Random) -> Problem:
    dtype, dim = head
    if problem.op in DECODES:
        problem = _with_many_rows(problem, dim, rng)
    return replace(
        problem,
        dtype=dtype,
        head_dim=dim,
        value_dim=LATENT_VALUE if dim == LATENT else dim,
        layouts=tuple(rng.choice(ALIGNED) for _ in range(3)),  # type: ignore[arg-type]
        kv_format="float",
        value_in_key=problem.op in DECODES and dim == LATENT and rng.random() < 0.5,
        q_len=problem.q_len if problem.op in (*PACKED, *DECODES) else max(problem.q_len, LEAST_ROWS),
    )


def _with_many_rows(problem: Problem, dim: int, rng: random.Random) -> Problem:
    """A decode with enough rows for tensor operations."""
    least, groups = (
        (LEAST_ROWS, ((1, 1), *DECODE_GROUPS)) if dim == LATENT else (LEAST_DECODE_ROWS, DECODE_GROUPS)
    )
    q_heads, kv_heads = rng.choice(groups)
    q_len = rng.randint(-(-least * kv_heads // q_heads), MOST_DECODE_ROWS)
    return replace(problem, q_heads=q_heads, kv_heads=kv_heads, q_len=q_len)


def layouts(seed: int) -> tuple[str, ...]:
    """Twelve: that of M5, that of 8x8 blocks, and random ones of every compatibility."""
    rng = random.Random(seed)
    return ("m5", "blocks8", *(f"random:{rng.randrange(2**32) * 4 + i % 4}" for i in range(10)))


def plan_of(op: str, arguments: Mapping[str, Any], state: str) -> dict[str, Any]:
    return direct_launch.plan_of(op, arguments, family=10, tensor=state)


@dataclass(frozen=True)
class Probe:
    """What a GPU says of the cooperative tensors of a pipeline."""

    capacities: tuple[int, int, int]  # of scores, row reduction and output
    matches: tuple[bool, bool, bool]  # rows of scores and of output, scores as left operand
    scores: Tensor  # {column, row} of the valid elements
    output: Tensor

    @property
    def allows_registers(self) -> bool:
        scores, rows, output = self.capacities
        return all(self.matches) and scores <= MOST_SCORES and rows <= MOST_ROWS and output <= MOST_OUTPUTS

    def assert_each_once(self, keys: int, columns: int) -> None:
        """Every element of the scores and of the output is held once."""
        for elements, width in ((self.scores, keys), (self.output, columns)):
            numbers = elements[:, 1] * width + elements[:, 0]
            assert torch.equal(numbers.sort().values, torch.arange(16 * width, dtype=numbers.dtype))


def probe_step(prefill: Mapping[str, Any], *, registers: bool = True, room: int = ROOM) -> dict[str, Any]:
    """The pass of tensor_probe for the pipeline of this pass; `room` is that of its result."""
    return {
        "kernel": "fattn_tensor_probe",
        "source": "tensor_probe.metal",
        "macros": {**prefill["macros"], "FATTN_REGISTERS": str(int(registers))},
        "constants": {},
        "grid": [1, 1, 1],
        "threads": [32, 1, 1],
        "bindings": {"tensor_facts": direct_launch.SLOTS["out"], "params": direct_launch.SLOTS["params"]},
        "params_bytes": struct.pack("<q", room).hex(),
    }


def probe_of(facts: Tensor) -> Probe:
    """What tensor_probe wrote."""
    scores, rows, output, *matches = facts[:6].tolist()
    first, second = HEAD_FACTS, HEAD_FACTS + 64 * scores
    listed = [facts[a:b].reshape(-1, 2) for a, b in ((first, second), (second, second + 64 * output))]
    valid = [pairs[(pairs != -1).any(1)] for pairs in listed]
    return Probe((scores, rows, output), tuple(map(bool, matches)), *valid)  # type: ignore[arg-type]


def probe(prefill: Mapping[str, Any], tensor_layout: str) -> Probe:
    """Runs tensor_probe for the pipeline of this pass."""
    facts = torch.full((ROOM,), -7, dtype=torch.int32)
    step = probe_step(prefill)
    direct_launch.launch(step, {"tensor_facts": facts}, tensor_layout=tensor_layout)
    return probe_of(facts)
