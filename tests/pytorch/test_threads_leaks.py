"""Two threads calling the ops at once, and a thousand calls that must leave nothing behind."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import EMULATED
from tests.helpers import problems
from tests.helpers.accuracy import assert_close
from tests.helpers.problems import Problem

CALLS_PER_THREAD = 20


def call(case: problems.Case, arguments: dict[str, Any]) -> list[Tensor]:
    return [t.cpu() for t in getattr(torch.ops.fattn, case.problem.op)(**arguments)]


@pytest.mark.parametrize("ops", [("prefill", "decode"), ("paged_decode", "paged_decode")])
def test_two_threads_at_once(ops: tuple[str, str]) -> None:
    """Each thread has its own tensors; its first call also compiles, in a race with the other's."""
    cases = []
    for index, op in enumerate(ops):
        lengths: dict[str, Any] = {"q_len": 19, "kv_len": 45, "causality": "bottom_right"}
        if op != "prefill":
            lengths = {"q_len": 3, "kv_len": 320, "seq_lens": (290, 17)}
        if op == "paged_decode":
            lengths |= {"block_size": 32}
        head_dim = 48 + 8 * index  # head sizes that no other test compiles first
        cases.append(
            problems.build(
                Problem(index, op, torch.float16, 2, 4, 2, head_dim=head_dim, value_dim=48, **lengths)
            )
        )

    def worker(case: problems.Case) -> list[Tensor]:
        arguments, _ = case.arguments("mps")
        first = call(case, arguments)
        for _ in range(CALLS_PER_THREAD - 1):
            assert all(torch.equal(a, b) for a, b in zip(first, call(case, arguments), strict=True))
        return first

    with ThreadPoolExecutor(len(cases)) as pool:
        results = list(pool.map(worker, cases))
    for case, (out, lse) in zip(cases, results, strict=True):
        assert_close(case, out, lse)


def resources() -> dict[str, int]:
    """The live objects on the device: Metal objects by class if they can be counted, else allocated bytes."""
    gc.collect()
    torch.mps.synchronize()
    if not EMULATED:
        return {"bytes": torch.mps.current_allocated_memory()}
    import softmetal

    return {name: count for name, count in softmetal.live_objects().items() if count}


def test_a_thousand_calls_leave_nothing_behind() -> None:
    query = torch.randn(1, 2, 1, 8).to("mps")
    key, pool = torch.randn(1, 1, 16, 8).to("mps"), torch.randn(2, 8, 1, 8).to("mps")
    table = torch.tensor([[1, 0]], dtype=torch.int32).to("mps")
    lengths = torch.tensor([11], dtype=torch.int32).to("mps")
    mask = torch.ones(16, dtype=torch.bool).to("mps")
    rows, values = torch.randn(2, 1, 8).to("mps"), torch.randn(2, 8, 1, 8).to("mps")
    slots = torch.tensor([3, -1]).to("mps")

    def calls() -> None:
        torch.ops.fattn.prefill(query, key, key, is_causal=True)
        torch.ops.fattn.decode(query, key, key, lengths, attn_mask=mask)
        torch.ops.fattn.paged_decode(query, pool, pool, table, lengths)
        torch.ops.fattn.merge(query[None], query[None, ..., 0].float())
        torch.ops.fattn.cache_write(rows, rows, pool, values, slots)
        with pytest.raises(ValueError):
            torch.ops.fattn.prefill(query[..., :4], key, key)

    calls()
    before = resources()
    for _ in range(250):
        calls()
    assert resources() == before
    kept = query.clone()
    assert resources() != before, "the control: a tensor that is kept is counted"
    del kept
