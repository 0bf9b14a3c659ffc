"""Pipelines with options, which the self-test of a size does not have: at its first use each runs a small
problem with its options beside the simdgroup kernel, on a simulated M5."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import needs_emulator
from tests.helpers.tensor_machines import Machines, Run

pytestmark = needs_emulator

TENSOR, SIMDGROUP = "fattn_prefill_tensor", "fattn_prefill"

SETUP = """
def randn(*shape, dtype=torch.float16):
    return torch.randn(*shape, device="mps", dtype=dtype)
def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32, device="mps")
def tensor_launches():
    torch.mps.synchronize()
    return softmetal.launches().get("fattn_prefill_tensor", 0)

prefill, varlen, paged = torch_fattn.prefill, torch_fattn.varlen_prefill, torch_fattn.paged_prefill
query, key = randn(1, 2, 70, 64), randn(1, 2, 90, 64)
rows, keys, pool = randn(70, 2, 64), randn(90, 2, 64), randn(12, 16, 2, 64)
starts, key_starts, lengths = ints(0, 30, 70), ints(0, 40, 90), ints(40, 60)
tables = ints(*range(12)).view(2, 6)
pool24 = pool.reshape(8, 24, 2, 64)
mask = (torch.rand(70, 90) < 0.7).to("mps")
small = torch_fattn.mask_map(mask)
prefill(query, key, key)
prefill(query, key, key, is_causal=True)
"""
PIPELINES = {
    "bool mask": "prefill(query, key, key, mask)",
    "float32 mask, causal": "prefill(query, key, key, mask.float(), is_causal=True)",
    "float16 mask and map": "prefill(query, key, key, mask.half().log(), mask_map=small)",
    "window and sink tokens": "prefill(query, key, key, window_left=30, sink_tokens=3, is_causal=True)",
    "softcap, shared heads": "prefill(randn(1, 4, 33, 64), key[:, :1], key[:, :1], softcap=9.0)",
    "bfloat16 sinks": "prefill(query, key, key, sinks=randn(2, dtype=torch.bfloat16))",
    "alibi, causal": "prefill(query, key, key, alibi_slopes=randn(2, dtype=torch.float32), is_causal=True)",
    "parts": "prefill(randn(1, 1, 20, 64), randn(1, 1, 1300, 64), randn(1, 1, 1300, 64), softcap=3.0)",
    "packed": "varlen(rows, keys, keys, starts, key_starts, 70, 90)",
    "packed, causal": "varlen(rows, keys, keys, starts, key_starts, 70, 90, is_causal=True)",
    "paged": "paged(rows, pool, pool, tables, lengths, starts, 70)",
    "paged, blocks of 24": "paged(rows, pool24, pool24, tables[:, :4], lengths, starts, 70)",
}


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    started = Machines()
    yield started
    started.stop()


COUNTED = """
def pipelines():
    return sum(each.kernel == "fattn_prefill_tensor" for each in torch_fattn.compiled_kernels())
for name, call in json.loads(CALLS).items():
    before, launched = pipelines(), tensor_launches()
    eval(call)
    first = tensor_launches()
    eval(call)
    found[name] = [pipelines() - before, first - launched, tensor_launches() - first]
"""


def test_each_pipeline_is_tested_once(machines: Machines, tmp_path: Path) -> None:
    """The small problem runs the very pipeline of the call: no other one is compiled."""
    calls = f"import json\nCALLS = {json.dumps(PIPELINES)!r}\n"
    run = machines.run(tmp_path, Run(python=SETUP + calls + COUNTED))
    assert run.state == "registers", run.why
    assert run.found == dict.fromkeys(PIPELINES, [1, 2, 1])


FAULTY = """
faulty = softmetal.Flip(slot=3, bits=0x40004000, byte=64)  # two halfs of the result become large
with softmetal.fault(kernel="fattn_prefill_tensor", flip=faulty) as fault:
    found["result"] = eval(CALL).float().isfinite().all().item()
found["hits"] = fault.hits
"""


@pytest.mark.parametrize("name", ["float16 mask and map", "softcap, shared heads", "packed", "paged"])
def test_a_pipeline_that_is_wrong_alone(machines: Machines, tmp_path: Path, name: str) -> None:
    run = machines.run(tmp_path, Run(python=f"{SETUP}\nCALL = {PIPELINES[name]!r}\n{FAULTY}"))
    assert run.found == {"result": True, "hits": 1}, "only the small problem"
    assert run.state == "off" and run.launches == {SIMDGROUP: 1}
    assert run.why.startswith("in a small problem with the options of a call its out differs by")


DECODE_STEP = """
before = tensor_launches()
paged(rows[:2], pool, pool, tables, lengths, ints(0, 1, 2), 1)
found["launches"] = tensor_launches() - before
"""


def test_a_decode_step_does_not_wait(machines: Machines, tmp_path: Path) -> None:
    run = machines.run(tmp_path, Run(python=SETUP + DECODE_STEP))
    assert run.state == "registers" and run.found == {"launches": 1}
