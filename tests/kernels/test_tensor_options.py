"""Pipelines that the self-test of a size does not have: before its first use each runs a small problem with
the options of its call beside the simdgroup kernel, on a simulated M5. Steps of generation leave that to the
next call that may wait."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import needs_emulator
from tests.helpers.tensor_machines import BACKWARD, CALLS, PREFILL, SIMDGROUPS, TENSORS, Machines, Run, once

pytestmark = needs_emulator

SETUP = """
def randn(*shape, dtype=torch.float16):
    return torch.randn(*shape, device="mps", dtype=dtype)
def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32, device="mps")
def is_tensor(kernel):
    return kernel.endswith("_tensor")
def tensor_launches():
    torch.mps.synchronize()
    return sum(count for kernel, count in softmetal.launches().items() if is_tensor(kernel))

prefill, varlen = torch_fattn.prefill, torch_fattn.varlen_prefill
def paged(*operands):
    return torch_fattn.paged_prefill(*operands, is_causal=True)
query, key = randn(1, 2, 70, 64), randn(1, 2, 90, 64)
rows, keys, pool = randn(70, 2, 64), randn(90, 2, 64), randn(12, 16, 2, 64)
starts, key_starts, lengths = ints(0, 30, 70), ints(0, 40, 90), ints(40, 60)
tables = ints(*range(12)).view(2, 6)
pool24 = pool.reshape(8, 24, 2, 64)
mask = (torch.rand(70, 90) < 0.7).to("mps")
small = torch_fattn.mask_map(mask)

def backward(mask=None, grad_lse=None, **options):
    lse = randn(1, 2, 70, dtype=torch.float32) + 4.5
    return torch_fattn.prefill_backward(query, grad_lse, query, key, key, None, lse, mask, **options)[0]
def varlen_backward(**options):
    lse = randn(2, 70, dtype=torch.float32) + 4.5
    packed = (rows, keys, keys, None, lse, starts, key_starts, 70, 90)
    return torch_fattn.varlen_prefill_backward(rows, None, *packed, **options)[0]
"""
# The calls that the self-test of a size covers.
SETUPS = {
    PREFILL: SETUP
    + """
prefill(query, key, key)
prefill(query, key, key, is_causal=True)
prefill(*[randn(1, 2, 70, 96)] * 3)
""",
    BACKWARD: SETUP + "backward()\nbackward(is_causal=True)\n",
}
PREFILLS = {
    "parts, causal": "prefill(randn(1, 1, 20, 64), *[randn(1, 1, 1300, 64)] * 2, is_causal=True)",
    "parts, window": "prefill(randn(1, 1, 20, 64), *[randn(1, 1, 2300, 64)] * 2, is_causal=True, "
    "window_left=1200)",
    "heads of 80": "prefill(*[randn(1, 2, 70, 80)] * 3)",
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
BACKWARDS = {
    "bool mask": "backward(mask)",
    "float32 mask, causal": "backward(mask.float(), is_causal=True)",
    "float16 mask and map": "backward(mask.half().log(), mask_map=small)",
    "window and sink tokens": "backward(window_left=30, sink_tokens=3, is_causal=True)",
    "softcap": "backward(softcap=9.0)",
    "bfloat16 sinks, lse": "backward(None, randn(1, 2, 70, dtype=torch.float32), "
    "sinks=randn(2, dtype=torch.bfloat16))",
    "alibi, causal": "backward(alibi_slopes=randn(2, dtype=torch.float32), is_causal=True)",
    "packed": "varlen_backward()",
    "packed, causal": "varlen_backward(is_causal=True)",
}
PIPELINES = {PREFILL: PREFILLS, BACKWARD: BACKWARDS}


COUNTED = """
def pipelines():
    return sum(is_tensor(each.kernel) for each in torch_fattn.compiled_kernels())
for name, call in json.loads(CALLS).items():
    before, launched = pipelines(), tensor_launches()
    eval(call)
    first = tensor_launches()
    eval(call)
    found[name] = [pipelines() - before, first - launched, tensor_launches() - first]
"""


@pytest.mark.parametrize("call", CALLS)
def test_each_pipeline_is_tested_once(machines: Machines, tested: Path, call: str) -> None:
    """The small problem runs the very pipelines of the call: no other one is compiled."""
    calls = f"import json\nCALLS = {json.dumps(PIPELINES[call])!r}\n"
    run = machines.run(tested, Run([{"call": call}], python=SETUPS[call] + calls + COUNTED))
    assert run.state == "registers", run.why
    kernels = len(TENSORS[call])
    assert run.found == dict.fromkeys(PIPELINES[call], [kernels, 2 * kernels, kernels])


FAULTY = """
faulty = softmetal.Flip(slot=SLOT, bits=0x40004000, byte=64)  # two halfs of the result become large
with softmetal.fault(kernel=KERNEL, flip=faulty) as fault:
    found["result"] = eval(CALL).float().isfinite().all().item()
found["hits"] = fault.hits
"""
# A kernel, the slot of a result, and its name.
OUT = "fattn_prefill_tensor", 3, "out"
GRAD_QUERY, GRAD_VALUE = (
    ("fattn_backward_query_tensor", 3, "grad_query"),
    ("fattn_backward_key_tensor", 29, "grad_value"),
)


@pytest.mark.parametrize(
    ("call", "name", "result"),
    [
        (PREFILL, "float16 mask and map", OUT),
        (PREFILL, "softcap, shared heads", OUT),
        (PREFILL, "packed", OUT),
        (PREFILL, "paged", OUT),
        (BACKWARD, "float16 mask and map", GRAD_VALUE),
        (BACKWARD, "softcap", GRAD_QUERY),
        (BACKWARD, "bfloat16 sinks, lse", GRAD_QUERY),
        (BACKWARD, "packed", GRAD_VALUE),
    ],
)
def test_a_single_wrong_pipeline(
    machines: Machines, tested: Path, call: str, name: str, result: tuple[str, int, str]
) -> None:
    kernel, slot, of = result
    named = f"CALL, KERNEL, SLOT = {(PIPELINES[call][name], kernel, slot)!r}\n"
    run = machines.run(tested, Run([{"call": call}], python=SETUPS[call] + named + FAULTY))
    assert run.found == {"result": True, "hits": 1}, "only the small problem"
    assert run.state == "off" and run.launches == once(SIMDGROUPS[call])
    assert run.why.startswith(f"in a small problem with the options of a call its {of} differs by")


# Steps of generation: decodes of 24 rows and more, and packed rows of one token.
STEPS = {
    "24 rows": "decode(draft[:, :, :6], roomy, roomy, lengths)",
    "56 rows": "decode(wide_draft, roomy, roomy, lengths)",
    "short cache": "decode(draft, cache, cache, lengths)",
    "full cache": "decode(draft, cache, cache)",
    "bool mask": "decode(draft, cache, cache, lengths, attn_mask=mask[:8])",
    "float32 mask": "decode(draft, cache, cache, lengths, attn_mask=mask[:8].float())",
    "tree": "decode(draft, cache, cache, lengths, tree_mask=tree)",
    "tree, 56 rows": "decode(wide_draft, cache, cache, lengths, tree_mask=tree[:7])",
    "window, sinks": "decode(draft, cache, cache, lengths, window_left=20, sink_tokens=3, sinks=sinks)",
    "window, parts": "decode(draft, roomy, roomy, window_left=700)",
    "softcap, alibi, parts": "decode(draft, roomy, roomy, softcap=9.0, alibi_slopes=sinks.abs())",
    "paged": "paged_decode(draft, pool, pool, tables, lengths)",
    "paged, tree": "paged_decode(draft, pool24, pool24, tables[:, :4], lengths, tree_mask=tree)",
    "packed": "paged(rows[:2], pool, pool, tables, lengths, ints(0, 1, 2), 1)",
}
OF_THE_SELF_TEST = ("24 rows", "56 rows")
WITH_STEPS = (
    SETUPS[PREFILL]
    + """
decode, paged_decode = torch_fattn.decode, torch_fattn.paged_decode
draft, cache, roomy = randn(2, 8, 8, 64), randn(2, 2, 90, 64), randn(2, 2, 900, 64)
wide_draft = randn(2, 16, 7, 64)
tree = torch.tensor([1, 3, 5, 11, 19, 37, 69, 0], device="mps")
sinks = randn(8, dtype=torch.float32)
"""
    + f"STEPS = {STEPS!r}\n"
)
RUN_TWICE = """
for name, call in STEPS.items():
    before = tensor_launches()
    first = eval(call)
    found[name] = [tensor_launches() - before]
    before = tensor_launches()
    prefill(query, key, key)  # runs what is left
    found[name].append(tensor_launches() - before - 1)
    before = tensor_launches()
    again = eval(call)
    found[name].append(tensor_launches() - before)
    found[name + " differs by"] = (first.float() - again.float()).abs().max().item()
"""


def test_steps_of_generation_leave_their_test(machines: Machines, tested: Path) -> None:
    """Their first call, the test in the next prefill, and the call after it, in launches."""
    run = machines.run(tested, Run(python=WITH_STEPS + RUN_TWICE))
    assert run.state == "registers", run.why
    for name in STEPS:
        assert run.found[name] == ([1, 0, 1] if name in OF_THE_SELF_TEST else [0, 1, 1]), name
        assert run.found[f"{name} differs by"] < 4e-3


EXPLAINED = """
def explained():
    plan = torch_fattn.explain("decode", draft, cache, cache, lengths, tree_mask=tree)
    return plan.passes[0]["kernel"], plan.data["tensor"]
found["before"] = explained()
eval(STEPS["tree"])
prefill(query, key, key)
found["after"] = explained()
"""


def test_explain_before_and_after_the_self_test(machines: Machines, tested: Path) -> None:
    run = machines.run(tested, Run(python=WITH_STEPS + EXPLAINED))
    kernel, tensor = run.found["before"]
    assert kernel == "fattn_decode_wide", "the value is in the key"
    assert tensor == "not tested yet with these options; the next prefill or warmup does it"
    assert run.found["after"] == [
        "fattn_prefill_tensor",
        "used; scores stay in registers: passed the self-test",
    ]


PART_OF_PACKED_ROWS = """
def part():
    before = tensor_launches()
    out, sums = torch.ops.fattn.paged_prefill.part(
        *(rows, pool, pool, tables, lengths, starts, 70), is_causal=True)
    return tensor_launches() - before
found["launches"] = [part()]
prefill(query, key, key)
found["launches"].append(part())
"""


def test_a_pipeline_outside_the_small_problems(machines: Machines, tested: Path) -> None:
    """It stays on simdgroup matrices, and the size on tensor operations."""
    run = machines.run(tested, Run(python=SETUPS[PREFILL] + PART_OF_PACKED_ROWS))
    assert run.found == {"launches": [0, 0]} and run.state == "registers"
    assert run.launches == once(TENSORS[PREFILL])


ONE_BLOCK = """
import resource
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
block = torch.zeros(1, 1 << 18, 1, 64, device="mps", dtype=torch.float16)
before = peak(), tensor_launches()
paged(rows, block, block, ints(0).view(1, 1), ints(90), ints(0, 70), 70)
found["kilobytes"], found["launches"] = peak() - before[0], tensor_launches() - before[1]
"""


def test_a_block_for_a_whole_sequence(machines: Machines, tested: Path) -> None:
    """The small problem has no memory for the rest of such blocks, which would be half a gigabyte."""
    run = machines.run(tested, Run(python=SETUPS[PREFILL] + ONE_BLOCK))
    assert run.state == "registers", run.why
    assert run.found["launches"] == 2 and run.found["kilobytes"] < 50_000


STEP_OF_A_FAULT = """
first = eval(STEPS[NAME])
faulty = softmetal.Flip(slot=3, bits=0x40004000, byte=64)
with softmetal.fault(kernel="fattn_prefill_tensor", flip=faulty) as fault:
    prefill(query, key, key, is_causal=True)
found["hits"] = fault.hits
before = tensor_launches()
found["same"] = torch.equal(eval(STEPS[NAME]), first)
found["launches"] = tensor_launches() - before
"""


@pytest.mark.parametrize("name", ["tree", "paged", "packed"])
def test_a_step_whose_pipeline_is_wrong(machines: Machines, tested: Path, name: str) -> None:
    """The prefill that meets the fault, and all that follow, run without tensor operations."""
    run = machines.run(tested, Run(python=WITH_STEPS + f"NAME = {name!r}\n" + STEP_OF_A_FAULT))
    assert run.found == {"hits": 1, "same": True, "launches": 0}
    assert run.state == "off" and run.launches == once(SIMDGROUPS[PREFILL])
    assert run.why.startswith("in a small problem with the options of a call its out differs by")


SLICED = """
before = tensor_launches()
torch_fattn.warmup("prefill", heads=8, head_dim=64, q_len=200_000, kv_len=200_000, is_causal=True)
found["launches"] = tensor_launches() - before
"""


def test_a_sliced_grid(machines: Machines, tested: Path) -> None:
    """The small problem has slices, too."""
    run = machines.run(tested, Run(calls=[], python=SETUPS[PREFILL] + SLICED))
    assert run.states["prefill float16 64"] == "registers" and run.found["launches"] > 1


WARMED_UP = """
torch_fattn.warmup("decode", draft, cache, cache, lengths, tree_mask=tree)
before = tensor_launches()
eval(STEPS["tree"])
found["launches"] = tensor_launches() - before
"""


def test_warmup_runs_the_tests_of_a_step(machines: Machines, tested: Path) -> None:
    setup = WITH_STEPS.replace(SETUPS[PREFILL], SETUP)
    run = machines.run(tested, Run(calls=[], python=setup + WARMED_UP))
    assert run.state == "registers" and run.found == {"launches": 1}
