"""The planner: what must hold for every plan, and refusals. test_golden.py compares whole plans, options of
scores among them, and the results of random problems show which are missing."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

import torch_fattn
from tests.conftest import counted_launches, needs_emulator
from tests.golden.calls import GOLDEN_CALLS, M1, M2_MAX, plan_of
from tests.helpers import drawing, problems
from tests.helpers.problems import Problem
from tests.helpers.processes import run_python
from tests.helpers.wrong_calls import refusal
from torch_fattn.operators import OPERATORS

MAX_THREADGROUP_BYTES = 32768

f16, bf16 = torch.float16, torch.bfloat16


# ---- what holds for every plan


def chunks_of(p: Problem, span: dict[str, int], length: int) -> int:
    """How many chunks a sequence has (csrc/kernels/common/schedule.h)."""
    begin = 0 if p.window_left < 0 else min(max(length - p.q_len - p.window_left, 0), length)
    sinks = range(min(p.sink_tokens, begin))  # none without a window
    units = -(-(length - begin + len(sinks)) // span["chunk_unit"])
    few = min(-(-units // span["few_chunks"]), 512 // span["chunk_unit"])
    keys = max(max(-(-units // span["max_chunks"]), few) * span["chunk_unit"], span["min_chunk"])
    return max(1, len({key // keys for keys_of in (sinks, range(begin, length)) for key in keys_of}))


def check_decode(p: Problem, plan: dict[str, Any]) -> None:
    """There are parts, and scratch memory for them, for the chunks of a sequence of any length."""
    launch, *merges = plan["passes"]
    macros, span = launch["macros"], launch["params"]["span"]
    parts = int(macros.get("FATTN_CHUNKS", 1)) * int(macros.get("FATTN_CHUNK_ROUNDS", 1))
    if merges:
        parts = merges[0]["params"]["parts"]
    assert max(chunks_of(p, span, length) for length in range(p.kv_len + 1)) <= parts
    rows = p.batch * p.q_heads * p.q_len
    assert plan["scratch_bytes"] == (parts * rows * (p.value_dim + 4) * 4 if merges else 0)


@pytest.mark.host_only
@pytest.mark.parametrize("device", [M1, M2_MAX], ids=["M1", "M2_Max"])
@pytest.mark.parametrize("problem", drawing.draw(150, seed=3), ids=str)
def test_properties(problem: Problem, device: dict[str, Any]) -> None:
    plan = plan_of(problem, **device)
    assert plan["device"]["name"] == device["device_name"] and plan["tuning"]
    for launch in plan["passes"]:
        assert all(n >= 1 for n in launch["grid"])
        threads = launch["threads"]
        simdgroups = int(launch["macros"]["FATTN_SIMDGROUPS"]) * int(launch["macros"].get("FATTN_CHUNKS", 1))
        assert threads[1:] == [1, 1] and threads[0] == 32 * simdgroups <= 1024
        assert launch["threadgroup_bytes"] <= MAX_THREADGROUP_BYTES
    if problem.is_decode and problem.q_len <= 16:
        check_decode(problem, plan)


ONE_LAUNCH = [
    Problem(13, "decode", bf16, 4, 16, 2, 2, 480, 96, 80, sinks=True),
    Problem(14, "decode", f16, 2, 3, 3, 1, 700, 40, 24),
]
NO_SHARED_ROWS = Problem(12, "decode", f16, 1, 8, 1, 4, 40, 64, 64)  # a simdgroup for each group of rows


@needs_emulator
@pytest.mark.parametrize("problem", [*drawing.draw(12, seed=5), NO_SHARED_ROWS, *ONE_LAUNCH], ids=str)
def test_the_plan_is_launched(problem: Problem) -> None:
    """Kernels, grids, and threadgroup memory as the compiled pipelines have it."""
    import softmetal

    arguments, _ = problems.build(problem).arguments("mps")
    plan = torch_fattn.explain(problem.op, **arguments)
    with softmetal.record() as launched:
        getattr(torch_fattn, problem.op)(**arguments)
    facts = ("kernel", "grid", "threads", "threadgroup_bytes")
    ours = [launch for launch in launched if launch["kernel"].startswith("fattn_")]
    assert [[launch[fact] for fact in facts] for launch in ours] == [
        [launch[fact] for fact in facts] for launch in plan.passes
    ]


@pytest.mark.host_only
def test_cuts_do_not_depend_on_the_capacity() -> None:
    """The cuts between keys decide the rounding: the same sequence gives the same bits in any cache."""
    problem = GOLDEN_CALLS["decode_long"][0]
    spans = []
    for kv_len, batch in ((problem.kv_len, 1), (2 * problem.kv_len, 1), (10**6, 7)):
        decode, merge = plan_of(replace(problem, kv_len=kv_len, batch=batch, seq_lens=None))["passes"]
        spans.append({**decode["params"]["span"], "capacity": 0, "merge": merge["threads"]})
    assert spans[0] == spans[1] == spans[2]


@pytest.mark.host_only
@pytest.mark.parametrize(("chunks", "vectors"), [(2**32 - 8, True), (2**32 - 7, False)])
def test_vector_loads_count_chunks_in_32_bits(chunks: int, vectors: bool) -> None:
    """Chunks of 16 bytes from the start of an operand: here eight, and so many before them."""
    query = torch.empty(1, 1, 2, 64, dtype=f16, device="meta")
    keys = torch.empty_strided((1, 1, 2, 64), (64, 64, 8 * chunks, 1), dtype=f16, device="meta")
    (launch,) = torch_fattn.explain("prefill", query, keys, keys, **M1).passes
    assert launch["constants"]["vector_loads"] == vectors


ALL_CHUNKS = "one: a threadgroup has all chunks of a sequence"
TOO_LONG = "two: a sequence may be too long for one threadgroup"
MANY_CHUNKS = "two: a sequence may have more chunks than a threadgroup"
MUCH_WORK = "two: there is work for more than one launch"
LATE = "two: a threadgroup would read longer than a launch takes"


@pytest.mark.host_only
@pytest.mark.parametrize(
    ("launches", "device", "dtype", "sizes", "options"),
    [
        ("one: a sequence has one chunk", M1, f16, (1, 8, 8, 1, 128, 64, 64), {}),
        (ALL_CHUNKS, M1, f16, (1, 8, 8, 1, 129, 64, 64), {}),
        (ALL_CHUNKS, M1, f16, (2, 32, 8, 1, 1024, 128, 128), {}),
        (TOO_LONG, M1, f16, (2, 32, 8, 1, 1025, 128, 128), {}),
        (MUCH_WORK, M1, f16, (3, 32, 8, 1, 1024, 128, 128), {}),
        (ALL_CHUNKS, M2_MAX, f16, (4, 32, 8, 1, 256, 128, 128), {}),
        (MANY_CHUNKS, M2_MAX, f16, (4, 32, 8, 1, 257, 128, 128), {}),
        # 38 cores: eight threadgroups leave 30 idle, and would read 640 more keys than their share of 1,024.
        (LATE, M2_MAX, f16, (1, 8, 8, 1, 1024, 64, 64), {}),
        (ALL_CHUNKS, M2_MAX, f16, (1, 8, 8, 1, 1024, 64, 64), {"kv_format": "int8"}),
        # By lanes, eight chunks in two rounds.
        (ALL_CHUNKS, M2_MAX, f16, (4, 16, 8, 1, 512, 64, 64), {}),
        (MANY_CHUNKS, M2_MAX, f16, (4, 16, 8, 1, 513, 64, 64), {}),
        # A window bounds what is read.
        (ALL_CHUNKS, M2_MAX, f16, (1, 64, 8, 1, 8192, 64, 64), {"window_left": 127}),
        (MANY_CHUNKS, M2_MAX, f16, (1, 64, 8, 1, 8192, 64, 64), {"window_left": 1023}),
        (
            "two: the chunks of a sequence do not fit in a threadgroup",
            M1, torch.float32, (2, 128, 8, 1, 512, 128, 128), {},
        ),
        (
            "two: the simdgroups of a threadgroup have no rows in common",
            M1, f16, (1, 8, 1, 4, 1024, 64, 64), {},
        ),
    ],
)  # fmt: skip
def test_one_launch_or_two(
    launches: str, device: dict[str, Any], dtype: torch.dtype, sizes: tuple[int, ...], options: dict[str, Any]
) -> None:
    problem = Problem(0, "decode", dtype, *sizes, **options)  # type: ignore[arg-type]
    assert plan_of(problem, **device)["launches"] == launches


@pytest.mark.host_only
def test_a_window_bounds_the_parts() -> None:
    """A window of 1,024 keys in a cache of 131,072 is in 17 chunks of 64 at most, sink tokens in one."""
    problem = Problem(0, "decode", f16, 1, 32, 8, 1, 131072, 128, 128, window_left=1023, sink_tokens=4)
    assert plan_of(problem, cores=76)["passes"][1]["params"]["parts"] == 18
    assert plan_of(replace(problem, window_left=-1), cores=76)["passes"][1]["params"]["parts"] == 28


@pytest.mark.host_only
def test_an_unknown_number_of_cores() -> None:
    """A virtual machine reports 0 cores: planned as for the smallest GPU."""
    for name, (problem, _) in GOLDEN_CALLS.items():
        unknown, smallest = plan_of(problem, cores=0), plan_of(problem, **M1)
        assert unknown["device"]["cores"] == 0
        assert unknown["passes"] == smallest["passes"], name


@pytest.mark.host_only
@pytest.mark.parametrize("family", [1, 5, 6])
@pytest.mark.parametrize("op", OPERATORS)
def test_gpus_without_simdgroup_matrices(op: str, family: int) -> None:
    words = "simdgroup matrices", "family 7 (M1)", "F.scaled_dot_product_attention"
    sizes = {"heads": 4, "kv_heads": 2, "kv_len": 32, "head_dim": 64} if op != "merge" else {}
    with refusal(f"fattn.{op}", NotImplementedError, "Apple Paravirtual device", f"family {family}", *words):
        torch_fattn.explain(op, **sizes, device_name="Apple Paravirtual device", family=family, cores=0)
    assert torch_fattn.explain(op, **sizes, family=7, cores=0).passes


@needs_emulator
@pytest.mark.parametrize("family", [5, 7])
def test_on_such_a_gpu(family: int) -> None:
    """Every operator refuses; the tests are skipped with that message, and every command prints it."""
    environment = {**os.environ, "SOFTMETAL_GPU_FAMILY": str(family), "SOFTMETAL_GPU_CORES": "0"}

    def run(*arguments: str) -> str:
        done = run_python(arguments, env=environment, timeout=300)
        return done.stdout + done.stderr

    call = "q = torch.ones(1, 1, 1, 8, device='mps'); print(torch_fattn.prefill(q, q, q).shape)"
    called = run("-c", f"import torch, torch_fattn; {call}")
    tested = run(
        "-m", "pytest", "-q", "-rs", "tests/refusals/test_bad_input.py", "-k", "test_the_control_works"
    )
    refusal = "is of Apple family 5 and the kernels need simdgroup matrices"
    for output in (called, tested):
        assert (refusal in output) == (family == 5), output
    assert ("passed" in tested) == (family == 7)
    if family == 5:
        for command in (["tune", "--anyway", "--dry-run"], ["demo"], ["doctor"]):
            message = run("-m", "torch_fattn", *command)
            assert refusal in message and "use a Mac with an M1 or newer" in message, message
            assert "on the CPU" not in message and "No problems found." not in message, message


@pytest.mark.host_only
@pytest.mark.parametrize("empty", ["batch", "q_heads", "q_len"])
def test_empty_results_have_no_passes(empty: str) -> None:
    sizes: dict[str, Any] = {"batch": 2, "q_heads": 4, "q_len": 3} | {empty: 0}
    kv_heads = 2 if sizes["q_heads"] else 0
    problem = Problem(0, "prefill", f16, kv_heads=kv_heads, kv_len=9, head_dim=64, value_dim=64, **sizes)
    assert plan_of(problem)["passes"] == []


# ---- explain


def test_explain_is_the_same_on_every_device_and_launches_nothing() -> None:
    case = problems.build(drawing.draw(1, seed=4)[0])
    plans = []
    with counted_launches() as launches:
        for device in ("cpu", "mps"):
            plans.append(torch_fattn.explain(case.problem.op, **case.arguments(device)[0], **M1).json)
    assert plans[0] == plans[1] and launches == {}
    named = torch_fattn.explain("decode", **M1 | {"device_name": 'a "GPU\\"'}).data["device"]["name"]
    assert named == 'a "GPU\\"', "as JSON"


@pytest.mark.host_only
@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"q_len": 2**30 + 1}, ValueError, "length 1073741825"),
        ({"kv_len": 2**30 + 1}, ValueError, "length 1073741825"),
        ({"batch": 2**30 + 1}, ValueError, "batch 1073741825"),
        ({"q_heads": 2**31, "kv_heads": 2}, ValueError, "head count 2147483648"),
        ({"batch": 2**20, "q_heads": 2**11}, ValueError, "8.58993e.09 rows, more than 4294967295"),
        ({"head_dim": 584, "value_dim": 584}, NotImplementedError, "584"),
    ],
)
def test_limits(fields: dict[str, Any], error: type[Exception], words: str) -> None:
    problem = Problem(0, "prefill", f16, 1, 2, 2, 4, 8, 64, 64)
    with pytest.raises(error, match=words):
        plan_of(replace(problem, **fields))


@pytest.mark.host_only
def test_largest_sizes_plan() -> None:
    """Lengths and strides past 2^32 elements are planned, in 64 bits."""
    problem = Problem(0, "decode", f16, 64, 32, 8, 1, 2**20, 128, 128, seq_lens=(5,) * 64)
    params = plan_of(problem)["passes"][0]["params"]
    assert params["key"]["batch"] * 63 > 2**32
    assert params["key"] == {"batch": 8 * 2**20 * 128, "head": 2**20 * 128, "row": 128}
