"""The parameters of other projects' tests of gradients, with shorter sequences, and by the rule of this one.

- FlashAttention, tests/test_flash_attn.py: head sizes from 32 to 256, shared heads, causal, local, ALiBi,
  softcap, odd lengths, dense and packed;
- MLX, python/tests/test_fast_sdpa.py: vector-Jacobian products under each kind of mask;
- PyTorch, test/test_transformers.py: gradients compared with those of the composite attention, a scale.

Head sizes that are not multiples of 8 are rounded up, as these projects pad them. Each has one dtype: that of
random problems, if they have this size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.conftest import counted_launches
from tests.helpers import backward_problems
from tests.helpers.backward_problems import BackwardProblem
from tests.helpers.gradient_accuracy import assert_gradients_close
from tests.helpers.problems import DTYPES, HEAD_DIMS, Problem

HEADS = {"mha": (6, 6), "mqa": (6, 1), "gqa": (6, 2)}


def problem(index: int, heads: tuple[int, int], dim: int, **fields: Any) -> BackwardProblem:
    which = HEAD_DIMS.index((dim, dim)) if (dim, dim) in HEAD_DIMS else dim // 8
    sizes: dict[str, Any] = {"op": "prefill", "batch": 2, "head_dim": dim, "value_dim": dim} | fields
    forward = Problem(index=index, dtype=DTYPES[which % 3], q_heads=heads[0], kv_heads=heads[1], **sizes)
    return BackwardProblem(index, forward, grad_lse=index % 3 == 0)


def flash_attention() -> Iterator[BackwardProblem]:
    """One problem for each head size and way of looking, dense and packed; the other parameters take
    turns."""
    dims = (32, 40, 64, 72, 96, 112, 128, 160, 192, 224, 256)
    lengths = itertools.cycle(((28, 51), (32, 55), (27, 53), (64, 33), (63, 64), (64, 63), (1, 47), (37, 1)))
    heads, numbers = itertools.cycle(HEADS.values()), itertools.count()
    for dim, way, op in itertools.product(dims, ("all", "causal", "local"), ("prefill", "varlen_prefill")):
        number, (q_len, kv_len) = next(numbers), next(lengths)
        fields: dict[str, Any] = {"q_len": q_len, "kv_len": kv_len}
        if way == "causal":
            fields["causality"] = "bottom_right"
        elif way == "local":
            fields |= {"window_left": number * 7 % kv_len, "window_right": number * 5 % kv_len}
        if op == "varlen_prefill":
            fields |= {"q_lens": (q_len, q_len // 3), "seq_lens": (kv_len // 2, kv_len), "spare_rows": 2}
        fields |= {"alibi_slopes": number % 4 == 1, "softcap": 30.0 if number % 5 == 2 else 0.0}
        yield problem(number, next(heads), dim, op=op, **fields)


def mlx() -> Iterator[BackwardProblem]:
    masks: dict[str, dict[str, Any]] = {
        "none": {},
        "causal": {"causality": "bottom_right"},
        "bool": {"mask": torch.bool},
        "additive": {"mask": torch.float32, "mask_broadcast": (True, True, False, False)},
        "sinks": {"sinks": True},
    }
    sizes = itertools.product((64, 128), masks.values(), ((8, 8), (8, 2)))
    for number, (dim, mask, heads) in enumerate(sizes, start=100):
        yield problem(number, heads, dim, q_len=32, kv_len=40, **mask)


def pytorch() -> Iterator[BackwardProblem]:
    dims = (8, 16, 24, 32, 64, 72, 96, 128, 160, 192, 208, 256)
    lengths = itertools.cycle(itertools.product((4, 43), (4, 43, 64)))
    for number, (dim, causal) in enumerate(itertools.product(dims, (False, True)), start=200):
        q_len, kv_len = next(lengths)
        fields: dict[str, Any] = {"causality": "top_left"} if causal else {}
        fields |= {"scale": 0.125 if number % 3 == 1 else None, "mask": None if causal else torch.bool}
        heads = (4, 4) if number % 4 < 2 else (4, 2)
        yield problem(number, heads, dim, q_len=q_len, kv_len=kv_len, **fields)


@pytest.mark.parametrize("problem", [*flash_attention(), *mlx(), *pytorch()], ids=str)
def test_gradients(problem: BackwardProblem, device: str) -> None:
    case = backward_problems.build(problem)
    arguments, _bases = case.arguments(device)
    with counted_launches() as launches:
        gradients = getattr(torch.ops.fattn, problem.op)(**arguments)
    assert bool(launches) == (device == "mps")
    assert_gradients_close(case, tuple(each.cpu() for each in gradients))
