"""Threads that call the ops at once, and streams: from torch 2.14 on each thread may have its own, and the
ops must encode on that one."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_fattn
from tests.conftest import counted_launches, decodes, needs_emulator
from tests.helpers import problems
from tests.helpers.accuracy import assert_close
from tests.helpers.problems import Problem
from torch_fattn.runtime import versions

HAS_STREAMS = versions.minor(torch.__version__) >= (2, 14)
needs_streams = pytest.mark.skipif(
    not HAS_STREAMS, reason="up to torch 2.13 there is one stream for all threads"
)

LENGTHS: dict[str, dict[str, Any]] = {
    "prefill": {"q_len": 37, "kv_len": 70, "causality": "bottom_right"},
    "decode": {"q_len": 2, "kv_len": 500, "seq_lens": (431, 77)},
    "paged_decode": {"q_len": 1, "kv_len": 320, "seq_lens": (300, 9), "block_size": 16},
}


def results(case: problems.Case, arguments: dict[str, Any]) -> list[Tensor]:
    return list(getattr(torch.ops.fattn, case.problem.op)(**arguments))


def in_a_thread(case: problems.Case, barrier: threading.Barrier, own: bool) -> tuple[int, list[Tensor]]:
    """Copies, calls and reads back on one stream, while the other threads do the same."""
    with torch.Stream(device="mps") if own else contextlib.nullcontext():
        barrier.wait()
        arguments, _ = case.arguments("mps")
        first = [t.cpu() for t in results(case, arguments)]
        for _ in range(10):
            again = results(case, arguments)
            assert all(torch.equal(a, b.cpu()) for a, b in zip(first, again, strict=True))
        return torch.accelerator.current_stream().stream_id, first


@pytest.mark.parametrize(("own", "dim"), [(True, 48), (False, 56)], ids=["own_stream", "same_stream"])
def test_threads_at_once(own: bool, dim: int) -> None:
    """The first calls also compile, in a race with the others': no other test has these head sizes first."""
    cases = []
    for seed, op in enumerate(("prefill", "decode", "paged_decode", "prefill")):
        sizes: dict[str, Any] = {"head_dim": dim, "value_dim": 48} | LENGTHS[op]
        cases.append(problems.build(Problem(seed, op, torch.float16, 2, 4, 2, **sizes)))
    barrier = threading.Barrier(len(cases))
    with counted_launches() as launches, ThreadPoolExecutor(len(cases)) as pool:
        found = list(pool.map(lambda case: in_a_thread(case, barrier, own), cases))
    assert launches["fattn_prefill"] == 2 * 11 and decodes(launches) == 2 * 11
    for case, (_, (out, lse)) in zip(cases, found, strict=True):
        assert_close(case, out, lse)
    streams = {stream for stream, _ in found}
    separate = own and HAS_STREAMS
    assert len(streams) == (len(cases) if separate else 1)
    assert (0 in streams) != separate


@needs_streams
def test_a_result_goes_from_stream_to_stream() -> None:
    """The second stream waits for an event of the first, and reads its result."""
    query, key = torch.randn(1, 2, 40, 64), torch.randn(1, 2, 90, 64)
    first, second = torch.Stream(device="mps"), torch.Stream(device="mps")
    assert first.stream_id != second.stream_id
    on_device = [t.to("mps") for t in (query, key)]
    torch.accelerator.synchronize()
    with first:
        inner = torch_fattn.prefill(on_device[0], on_device[1], on_device[1])
        done = first.record_event()
    with second:
        done.wait(second)
        outer = torch_fattn.prefill(inner, on_device[1], on_device[1])
        second.synchronize()
    expected = query
    for _ in range(2):
        expected = torch.nn.functional.scaled_dot_product_attention(expected.double(), *(key.double(),) * 2)
    torch.testing.assert_close(outer.cpu().double(), expected, atol=1e-5, rtol=1e-5)


@needs_streams
@needs_emulator
def test_work_is_encoded_on_the_stream_of_the_thread() -> None:
    """Seen from the stream's own command buffer: the default stream has nothing to commit."""
    import softmetal

    query = torch.randn(1, 1, 16, 64).to("mps")
    torch.mps.synchronize()
    with softmetal.record() as launched, torch.Stream(device="mps"):
        assert torch.accelerator.current_stream().stream_id != 0
        torch_fattn.prefill(query, query, query)
    assert [launch["kernel"] for launch in launched] == ["fattn_prefill"]
    assert torch.accelerator.current_stream().stream_id == 0
