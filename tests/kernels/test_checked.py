"""The second pass: small shapes of every op under the checks for races, bounds and uninitialised reads.

In three orders of the threads, everything must be silent, and right. That the checks are loud when they
should be is shown in test_mutants.py.
"""

from __future__ import annotations

import pytest
import torch

from tests.conftest import Checked, needs_emulator
from tests.helpers import problems
from tests.helpers.accuracy import assert_close
from tests.helpers.problems import Problem

pytestmark = needs_emulator

ORDERS = (("forward", 0), ("reverse", 0), ("random", 1))


def small(index: int, op: str, dtype: torch.dtype, **fields: object) -> Problem:
    sizes: dict[str, object] = {"batch": 1, "q_heads": 4, "kv_heads": 2, "head_dim": 40, "value_dim": 24}
    return Problem(index=index, op=op, dtype=dtype, **{**sizes, **fields})  # type: ignore[arg-type]


f32, f16, bf16 = problems.DTYPES
PROBLEMS = [
    small(0, "prefill", f32, q_len=37, kv_len=43, layouts=("offset", "padded_rows", "token_major")),
    small(1, "prefill", f16, q_len=33, kv_len=70, causality="bottom_right", head_dim=64, value_dim=64),
    small(2, "prefill", bf16, q_len=9, kv_len=21, mask=torch.bool, mask_layout="padded_rows"),
    small(3, "prefill", f16, q_len=41, kv_len=11, causality="offset", q_offset=2, mask=torch.float32),
    small(4, "prefill", f32, q_len=8, kv_len=16, head_dim=8, value_dim=128, q_heads=1, kv_heads=1),
    small(5, "decode", f32, q_len=1, kv_len=75, seq_lens=(50,), layouts=("offset", "padded_rows", "offset")),
    small(6, "decode", f16, q_len=5, kv_len=64, batch=3, seq_lens=(64, 0, 3), q_heads=8),
    small(7, "decode", bf16, q_len=2, kv_len=530, seq_lens=(513,), head_dim=64, value_dim=64),
    small(8, "decode", f16, q_len=1, kv_len=40, mask=torch.bool, mask_broadcast=(True, True, True, False)),
    small(9, "paged_decode", f32, q_len=3, kv_len=48, batch=2, seq_lens=(37, 48), block_size=16),
    small(10, "paged_decode", f16, q_len=1, kv_len=20, seq_lens=(13,), block_size=1, mask=torch.float16),
    small(11, "paged_decode", bf16, q_len=8, kv_len=512, seq_lens=(301,), block_size=256,
          head_major_pool=True),
    small(14, "prefill", f16, q_len=41, kv_len=170, causality="bottom_right", head_dim=64, window_left=70,
          sink_tokens=40, sinks=True),
    small(15, "prefill", bf16, q_len=30, kv_len=60, window_right=4, sink_tokens=9, alibi_slopes=True),
    small(16, "paged_prefill", f16, q_len=40, kv_len=96, batch=3, q_lens=(40, 1, 9), seq_lens=(96, 37, 4),
          block_size=16, causality="bottom_right", spare_rows=3, head_dim=64),
    small(17, "paged_prefill", f32, q_len=20, kv_len=60, batch=2, q_lens=(20, 3), seq_lens=(55, 60),
          block_size=5, window_left=20, softcap=3.0, head_major_pool=True),
    small(12, "decode", f16, q_len=3, kv_len=600, seq_lens=(590,), window_left=70, sink_tokens=9, sinks=True),
    small(13, "paged_decode", bf16, q_len=9, kv_len=48, batch=2, seq_lens=(45, 7), block_size=8, tree="each",
          alibi_slopes=True, softcap=3.0),
]  # fmt: skip


@pytest.mark.parametrize(("order", "seed"), ORDERS)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_no_finding(problem: Problem, order: str, seed: int, checked: Checked) -> None:
    case = problems.build(problem)
    arguments, _ = case.arguments("mps")
    with checked(order=order, seed=seed):
        out, lse = getattr(torch.ops.fattn, problem.op)(**arguments)
        out, lse = out.cpu(), lse.cpu()
    assert_close(case, out, lse)


@pytest.mark.parametrize(("order", "seed"), ORDERS)
def test_merge(order: str, seed: int, checked: Checked) -> None:
    outs, lses = torch.randn(3, 1, 2, 5, 24), torch.randn(3, 1, 2, 5)
    exact, _ = torch.ops.fattn.merge(outs, lses)
    with checked(order=order, seed=seed):
        out = torch.ops.fattn.merge(outs.to("mps"), lses.to("mps"))[0].cpu()
    assert torch.allclose(out, exact, atol=1e-6)
