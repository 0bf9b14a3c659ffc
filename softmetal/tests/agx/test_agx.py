"""Costs of kernels that can be told by hand. The compiler is optional (softmetal/agx/build.py)."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from softmetal.__main__ import main
from softmetal.agx import build, ir, listing, scheduler
from softmetal.agx.compile import THREADS_BY_REGISTERS, compiled, cost_of, resident_threads
from softmetal.agx.translate import to_ir
from softmetal.testing.agx import AgxError, Cost, Kernel, NotBuiltError, compile_kernel

FILE = Path(__file__).parent / "kernels.metal"
built = pytest.mark.skipif(not build.is_built(), reason=str(NotBuiltError()))


def cost(kernel: str, live: int = 8, threads: int = 128, **options: Any) -> Cost:
    given = Kernel(FILE.read_text(), kernel, (threads, 1, 1), {"LIVE": str(live)}, **options)
    return compile_kernel(given)


# ---- registers

# Values of two halves that take four halves less than a row of the table has, and one value more.
LIVE = [(most - 4) // 2 + more for most in THREADS_BY_REGISTERS for more in (0, 1) if most + 2 * more <= 256]


@built
@pytest.mark.parametrize("live", LIVE)
def test_registers_are_the_values_that_live_and_their_addresses(live: int) -> None:
    result = cost("keep", live)
    assert (result.needed, result.spills, result.fills) == (2 * live + 4, 0, 0)
    least = min(count for count in THREADS_BY_REGISTERS if result.given <= count)
    assert result.threads_by_registers == THREADS_BY_REGISTERS[least]
    assert result.kinds["float"] == live - 1 and result.kinds["device_load"] == live


@built
def test_a_kernel_that_wants_more_registers_than_there_are_spills() -> None:
    result = cost("keep", 160)
    assert result.needed == 324 and result.given <= 256
    assert result.spills > 32 and result.fills > 32  # 64 of the 160 do not fit
    assert result.threads_by_registers == result.resident_threads == 384


@pytest.mark.parametrize(
    ("by_registers", "threads", "threadgroup_bytes", "resident"),
    [
        (512, 128, 0, 512),
        (448, 128, 0, 384),
        (448, 128, 20480, 384),
        (512, 128, 20481, 256),
        (384, 1024, 0, 1024),
    ],
)
def test_whole_threadgroups_are_resident(
    by_registers: int, threads: int, threadgroup_bytes: int, resident: int
) -> None:
    assert resident_threads(by_registers, threads, threadgroup_bytes) == resident


# ---- instructions


@built
def test_only_fast_math_deletes_a_product_with_zero() -> None:
    safe, fast = cost("add_zero", fast_math=False), cost("add_zero", fast_math=True)
    assert safe.kinds["float"] == 1 and safe.kinds["device_load"] == 2
    assert "float" not in fast.kinds and "device_load" not in fast.kinds


@built
def test_loops_and_their_products() -> None:
    kernel = Kernel(FILE.read_text(), "multiply", (128, 1, 1), constants={"wide": True})
    text = compiled(kernel)
    result = cost_of(text, kernel)
    assert [loop.depth for loop in result.loops] == [1, 2]
    assert result.hot == 1 and result.loops[0].simulated is None
    loop = result.loops[1]
    assert loop.kinds["product"] == 8 and loop.product_cycles == 8 * 18
    assert loop.loaded_bytes > 0 and loop.loaded_bytes % 2 == 0
    assert result.code_bytes > result.loops[0].code_bytes > loop.code_bytes > 8 * loop.kinds["product"]
    assert result.needed >= result.loops[0].needed >= loop.needed >= 2 * 8 * 2 + 2 * 4  # sums and factors
    band = result.cycles_per_product
    assert band is not None and 18 <= band.best <= band.likely <= band.worst
    assert cost_of(text, kernel, 0).loops[0].simulated is not None
    with pytest.raises(AgxError, match=r"there is no loop 2: 'multiply' has 2, from 0"):
        cost_of(text, kernel, 2)


@built
def test_a_function_constant_removes_code() -> None:
    assert cost("multiply", constants={"wide": False}).loops[1].kinds["product"] == 4


@built
def test_a_reduction_has_the_instructions_of_its_source() -> None:
    result = cost("row_sums", threads=256)
    needed = {
        "shuffle": 5,
        "barrier": 1,
        "local_store": 1,
        "local_load": 8,
        "device_load": 1,
        "device_store": 1,
    }
    assert {kind: result.kinds[kind] for kind in needed} == needed
    assert (result.threadgroup_bytes, result.given, result.code_bytes) == (32, 16, 354)


@built
def test_dynamic_threadgroup_memory_and_bfloat() -> None:
    result = cost("scratch", threadgroup_memory={1: 256})
    assert result.threadgroup_bytes == 256
    assert result.kinds["local_load"] == result.kinds["local_store"] == 1
    with pytest.raises(AgxError, match="give the size of the"):
        cost("scratch")


LAST_BUFFER = """
#include <metal_stdlib>
using namespace metal;
kernel void add_some(device float* out [[buffer(30)]], const device float* values [[buffer(29)]],
                     constant int& count [[buffer(28)]], uint own [[thread_position_in_grid]]) {
  float sum = 0;
#pragma clang loop unroll(disable)
  for (int i = 0; i < count; i++) {
    if (values[i] < 0) {
      continue;
    }
    sum += values[i + own];
  }
  out[own] = sum;
}
"""


@built
def test_the_last_buffers_and_a_loop_with_a_hint() -> None:
    """Metal has 31 buffers; Mesa's reader refuses the hint of a loop that continues early."""
    result = compile_kernel(Kernel(LAST_BUFFER, "add_some", (64, 1, 1)))
    assert len(result.loops) == 1
    assert (result.kinds["device_load"], result.kinds["device_store"]) == (2, 1)


def test_a_counter_of_32_bits_stays_one() -> None:
    """LLVM widens counters to integers that the target has, and Apple's has no more than 32 bits."""
    text = to_ir(Kernel(LAST_BUFFER, "add_some", (64, 1, 1)))
    assert "phi i32" in text and "phi i64" not in text
    assert ", !llvm.loop" not in text


@built
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernel": "none"}, "the program has no kernel 'none'"),
        ({"kernel": "multiply", "constants": {"narrow": True}}, "no function constant 'narrow'"),
    ],
)
def test_errors(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(AgxError, match=message):
        cost(**changes)


def test_bfloat_arithmetic_is_in_float() -> None:
    text = ir.without_bfloat("  %3 = fmul contract bfloat %1, 0xR3F80\n  %4 = fneg bfloat %3\n")
    assert "bfloat" not in text and "0xR" not in text
    assert "fmul float" in text and "zext i16 16256 to i32" in text and "%4 = xor i16 %3, -32768" in text


def test_every_copy_is_a_move() -> None:
    kinds = [
        listing.Instruction(text).kind
        for text in (
            "r1 = bitop r2, #0, #a",
            "r1 = bitop r2, r3, #6",
            "r1 = bitop r1, r3, #6",
            "r2l = local_load r4l, #0, i16, x",
            "unheard_of r1",
        )
    ]
    assert kinds == ["move", "int", "move", "local_load", "control"]


# ---- the scheduler


def _products(count: int, chains: int) -> list[listing.Instruction]:
    """Products into `chains` sums in turn, with factors in registers of their own."""
    texts = (f"r{10 + 2 * (i % chains)}_r{11 + 2 * (i % chains)}" for i in range(count))
    return [
        listing.Instruction(f"{(sums := text.replace('_', ':'))} = simd_matrix_fmadd r2:r3, r4:r5, {sums}")
        for text in texts
    ]


@pytest.mark.parametrize(
    ("chains", "simdgroups", "cycles"),
    [(1, 1, 36), (2, 1, 18), (4, 1, 18), (1, 2, 18), (1, 4, 18)],
)
def test_products_wait_for_their_sum_or_for_the_scheduler(chains: int, simdgroups: int, cycles: int) -> None:
    band = scheduler.simulate(_products(16, chains), simdgroups)
    assert band.best == pytest.approx(16 * cycles, rel=0.08)
    assert band.worst == pytest.approx(16 * cycles, rel=0.08)


def test_more_simdgroups_hide_the_latency_of_memory() -> None:
    load = [
        listing.Instruction("r2 = device_load r6:r7, #0, i32, x"),
        listing.Instruction("wait 0"),
        *_products(4, 4),
    ]
    one, four = (scheduler.simulate(load, count).likely for count in (1, 4))
    assert one > 150 + 4 * 18 > 1.5 * four


def test_paths_of_a_loop() -> None:
    """A loop with a short and a long body, a condition, and an inner loop with a condition."""
    product, other = listing.Instruction("r0:r1 = simd_matrix_fmadd"), listing.Instruction("r2 = iadd r2, r2")
    sizes = {1: 0, 2: 3, 3: 1, 4: 5, 5: 0, 6: 0, 7: 9, 8: 0}
    targets = {1: [2, 3], 2: [5], 3: [4, 5], 4: [5], 5: [6], 6: [7, 8], 7: [8], 8: [6, 1]}
    blocks = [
        listing.Block(i, [product] * (2 if i in (2, 3) else 0) + [other] * sizes[i], targets[i])
        for i in sizes
    ]
    loop = listing.Loop(tuple(blocks), 1)
    paths = listing.steps(loop, within={6, 7, 8})
    assert [[block.index for block in path] for path in paths] == [[1, 3, 4, 5, 6, 8], [1, 2, 5, 6, 8]]
    assert 7 in [block.index for block in listing.steps(loop, within=set())[0]], (
        "the control: the longer side"
    )
    assert listing.steps(listing.Loop(tuple(blocks[5:]), 2), within=set())


def test_registers_of_an_operand() -> None:
    assert scheduler._halves("r1, r2l, r3h, r4:r5, r6l...r7h") == (2, 3, 4, 7, 8, 9, 10, 11, 12, 13, 14, 15)


def test_kinds_are_disjoint() -> None:
    opcodes = Counter(opcode for names in listing.KINDS.values() for opcode in names.split())
    assert set(opcodes.values()) == {1}


# ---- the command


@built
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(f"agx {FILE} --kernel multiply --threads 32x4 --constant wide=true --safe-math".split())
    found = json.loads(capsys.readouterr().out)
    assert found["threadgroup_threads"] == 128 and found["loops"][1]["product_cycles"] == 144
    main(f"agx {FILE} --kernel keep --define LIVE=30".split())
    assert json.loads(capsys.readouterr().out)["needed"] == 64


def test_the_command_needs_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SOFTMETAL_CACHE", str(tmp_path))
    with pytest.raises(SystemExit, match=r"is not built; run `python -m softmetal build --agx`"):
        main(["agx", str(FILE), "--kernel", "row_sums"])
    for words, message in (
        (["--threads", "64x64"], "'64x64' is more than 1024 threads; give fewer"),
        (["--constant", "wide"], "'wide' has no number, true or false after a '='; give NAME=VALUE"),
        (["--threadgroup-memory", "1"], "is not a positive whole number"),
    ):
        with pytest.raises(SystemExit):
            main(["agx", str(FILE), "--kernel", "row_sums", *words])
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit, match="'none.metal' is not a file"):
        main(["agx", "none.metal", "--kernel", "row_sums"])
