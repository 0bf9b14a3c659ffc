"""Metal kernels compiled and run from Objective-C++: results, errors, constants, macros, checks, counts."""

from __future__ import annotations

import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import softmetal

torch = pytest.importorskip("torch")

SOURCE = """
#include <metal_stdlib>
using namespace metal;
constant float first [[function_constant(0)]];
constant float second [[function_constant(7)]];
constant float second_or_three = is_function_constant_defined(second) ? second : 3.0f;
kernel void constants(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  y[i] = first + 10 * second_or_three;
}
#ifndef VALUE
#define VALUE 1
#endif
kernel void macros(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) { y[i] = VALUE; }
kernel void neighbours(device float* y [[buffer(0)]], threadgroup float* s [[threadgroup(0)]],
                       uint i [[thread_index_in_threadgroup]]) {
  s[i] = float(i);
#ifdef BARRIER
  threadgroup_barrier(mem_flags::mem_threadgroup);
#endif
  y[i] = s[(i + 33) % 64];
}
kernel void beyond(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) { y[i + 8] = 1; }
kernel void subnormal(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  y[i] = exp2(-140.0f + float(i));
}
kernel void copy(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                 uint i [[thread_position_in_grid]]) { y[i] = x[i]; }
"""


def run(
    kit: ModuleType,
    kernel: str,
    *buffers: Any,
    macros: dict[str, str] | None = None,
    threads: int = 8,
    **more: Any,
) -> Any:
    arguments = {"constants": [], "grid": [1, 1, 1], "threadgroup_bytes": 0, **more}
    options = arguments["constants"], arguments["grid"], [threads, 1, 1], arguments["threadgroup_bytes"]
    return kit.run(more.get("source", SOURCE), kernel, list(buffers), macros or {}, *options)


def neighbours(kit: ModuleType, *, barrier: bool) -> Any:
    y = torch.zeros(64, device="mps")
    macros = {"BARRIER": "1"} if barrier else {}
    return run(kit, "neighbours", y, macros=macros, threads=64, threadgroup_bytes=256)


VIEWS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda x: x,
    "storage offset": lambda x: x[4:],
    "empty": lambda x: x[:0],
    "scalar": lambda x: x[2, 2, 2],
}


@pytest.mark.parametrize("view", VIEWS)
def test_exact_result(kit: ModuleType, view: str) -> None:
    x = torch.randn(12, 5, 3)
    y = kit.scale(VIEWS[view](x.to("mps")))
    assert torch.equal(y.cpu(), VIEWS[view](x) * 2)


def test_facts(kit: ModuleType) -> None:
    facts = dict(line.split("=", 1) for line in kit.facts())
    assert facts.pop("name").startswith("Software Metal on ")
    assert facts.pop("system") == f"{platform.system()} {platform.release()}"
    assert facts == {
        "apple7": "1",
        "apple8": "1",
        "apple9": "0",
        "apple10": "0",
        "metal3": "1",
        "metal4": "1",
        "architecture": "applegpu_g14g",
        "threadgroup memory": "32768",
        "threads": "1024",
        "width": "32",
        "pipeline threads": "1024",
        "limited threads": "64",
        "static bytes": "28000",
        "functions": "add,big,limited",
    }


def test_function_constants(kit: ModuleType) -> None:
    y = torch.empty(8, device="mps")
    assert run(kit, "constants", y, constants=[0, 1.5, 7, 2.0]).tolist() == [21.5] * 8
    assert run(kit, "constants", y, constants=[0, 1.5]).tolist() == [31.5] * 8


@pytest.mark.parametrize("constants", [[], [7, 2.0]])
def test_missing_function_constant(kit: ModuleType, constants: list[float]) -> None:
    with pytest.raises(RuntimeError, match="'first'.*index 0"):
        run(kit, "constants", torch.empty(8, device="mps"), constants=constants)


def test_macros(kit: ModuleType) -> None:
    """The kernel uses no function constant, and is given none."""
    for macros, value in (({}, 1), ({"VALUE": "42"}, 42)):
        assert run(kit, "macros", torch.empty(8, device="mps"), macros=macros).tolist() == [value] * 8


def test_compile_error_names_the_line(kit: ModuleType) -> None:
    source = "#include <metal_stdlib>\nkernel void f() { x = 1; }\n"
    with pytest.raises(RuntimeError, match=r"library: .*program_source:2.*undeclared"):
        run(kit, "f", torch.empty(1, device="mps"), source=source)


def test_unknown_function(kit: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="function: .*no function named 'nope'"):
        run(kit, "nope", torch.empty(1, device="mps"), constants=[0, 1.0])


def test_unset_argument(kit: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="dispatch of 'copy': no buffer is set at index 1 for 'y'"):
        run(kit, "copy", torch.empty(8, device="mps"))


def test_fresh_buffers_are_nan(kit: ModuleType) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert torch.empty(1000, dtype=dtype, device="mps").isnan().all()


def test_overrun_faults_without_checks(kit: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="fault: kernel 'beyond'"):
        run(kit, "beyond", torch.empty(8, device="mps")).cpu()
    assert run(kit, "beyond", torch.zeros(16, device="mps")).tolist() == [0] * 8 + [1] * 8


@pytest.mark.parametrize("check", ["race", "uninit"])
def test_a_missing_barrier_is_found(kit: ModuleType, check: str) -> None:
    with pytest.raises(RuntimeError, match=rf"{check}\w*: kernel 'neighbours': .*program_source:\d+"):
        with softmetal.checks(**{check: True}):
            neighbours(kit, barrier=False)
    with softmetal.checks(**{check: True}):
        assert neighbours(kit, barrier=True)[0].item() == 33


def test_out_of_bounds_is_found(kit: ModuleType) -> None:
    y = torch.zeros(9, device="mps")  # the first thread is in bounds
    finding = "bounds: kernel 'beyond': write of 4 bytes at byte 36 of buffer 0 'y'"
    with pytest.raises(RuntimeError, match=finding):
        with softmetal.checks(bounds=True):
            run(kit, "beyond", y)
    with softmetal.checks(bounds=True):
        run(kit, "beyond", torch.zeros(16, device="mps"))


def test_a_library_is_compiled_as_it_runs(
    kit: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variant with or without checks is compiled as needed; both only if both run."""
    monkeypatch.setenv("SOFTMETAL_CACHE", str(tmp_path))
    neighbours(kit, barrier=False)
    torch.mps.synchronize()
    assert len(list(tmp_path.glob("*.so"))) == 1
    with softmetal.checks(race=True):
        neighbours(kit, barrier=True)
    assert len(list(tmp_path.glob("*.so"))) == 2
    with pytest.raises(RuntimeError, match="race: kernel 'neighbours'"), softmetal.checks(race=True):
        neighbours(kit, barrier=False)
    assert len(list(tmp_path.glob("*.so"))) == 3


def test_a_library_that_was_compiled_without_checks_gets_them(kit: ModuleType) -> None:
    """A library compiled with checks also runs without them: `scale` has one pipeline for all its calls."""
    x = torch.ones(64, device="mps")
    for counted in (False, True, False):
        with softmetal.checks(count_bytes=counted), softmetal.record() as launches:
            assert kit.scale(x).tolist() == [2.0] * 64
        assert (launches[0]["counters"]["bytes_read"]["device"] > 0) == counted


def test_order_of_threads(kit: ModuleType) -> None:
    results = {}
    for order in ("forward", "reverse", "random"):
        with softmetal.checks(order=order, seed=3):
            results[order] = neighbours(kit, barrier=False).nan_to_num(-1).tolist()
    assert results["forward"] != results["reverse"]
    with pytest.raises(ValueError, match="use one of forward, reverse, random"):
        with softmetal.checks(order="sideways"):
            pass


def test_failure_is_raised_once(kit: ModuleType) -> None:
    run(kit, "beyond", torch.empty(8, device="mps"))
    with pytest.raises(RuntimeError, match="Metal command buffer failed"):
        torch.mps.synchronize()
    torch.mps.synchronize()


def test_record_and_counts(kit: ModuleType) -> None:
    softmetal.reset_counters()
    with softmetal.record() as launches:
        neighbours(kit, barrier=True)
        with softmetal.record() as inner:
            kit.scale(torch.zeros(130, device="mps"))
    assert [launch["kernel"] for launch in launches] == ["neighbours", "scale"]
    assert [launch["kernel"] for launch in inner] == ["scale"]
    assert launches[0]["grid"] == [1, 1, 1] and launches[0]["threads"] == [64, 1, 1]
    assert launches[0]["threadgroup_bytes"] == 256
    assert launches[0]["counters"]["threadgroup_barriers"] == 1
    assert launches[1]["grid"] == [3, 1, 1]
    assert softmetal.launches() == {"neighbours": 1, "scale": 1}
    assert softmetal.counters()["threadgroups"] == 4


def test_no_object_is_left_behind(kit: ModuleType) -> None:
    kit.scale(torch.zeros(8, device="mps"))
    before = softmetal.live_objects()
    for _ in range(200):
        kit.scale(torch.zeros(8, device="mps"))
    run(kit, "macros", torch.empty(8, device="mps"))
    assert softmetal.live_objects() == before
    kept = torch.zeros(8, device="mps")  # control: a live buffer is counted
    assert softmetal.live_objects()["MTLBuffer"] == before.get("MTLBuffer", 0) + 1
    del kept


def test_threads_at_once(kit: ModuleType) -> None:
    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(200):
            x = torch.randn(3000, generator=generator)
            assert torch.equal((kit.scale(x.to("mps")) + 1).cpu(), x * 2 + 1), f"thread {seed}"

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


@pytest.mark.parametrize(
    ("math", "flushes"),
    [
        (None, True),  # fast functions are the default
        ("safe mode", True),  # and stay fast in every mode
        ("precise functions", False),
        ("fast math off", False),
        ("fast math off and on", True),
    ],
)
def test_math_options_choose_the_functions(kit: ModuleType, math: str | None, flushes: bool) -> None:
    y = torch.ones(8, device="mps")
    run(kit, "subnormal", y, macros={"KIT_MATH": math} if math else {})
    exact = 2.0 ** (torch.arange(8).double() - 140)
    assert torch.equal(y.cpu().double(), torch.zeros(8).double() if flushes else exact)


def test_a_math_mode_that_does_not_exist_is_misuse(kit: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="mathMode 7"):
        run(kit, "subnormal", torch.ones(8, device="mps"), macros={"KIT_MATH": "no mode"})


VERSION = """
#include <metal_stdlib>
kernel void version(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  y[i] = __METAL_VERSION__;
}
"""


@pytest.mark.parametrize(("language", "version"), [("3.1", 310), ("3.2", 320), ("4.0", 400), (None, 320)])
def test_the_language_is_the_one_of_the_options(kit: ModuleType, language: str | None, version: int) -> None:
    y = torch.zeros(8, device="mps")
    run(kit, "version", y, source=VERSION, macros={"KIT_LANGUAGE": language} if language else {})
    assert y[0].item() == version


def test_lambdas_need_the_language_that_has_them(kit: ModuleType) -> None:
    source = VERSION.replace("__METAL_VERSION__", "[](float x) { return x; }(3)")
    y = torch.zeros(8, device="mps")
    run(kit, "version", y, source=source, macros={"KIT_LANGUAGE": "3.2"})
    assert y[0].item() == 3
    with pytest.raises(RuntimeError, match="Metal before 3.2 has no lambda"):
        run(kit, "version", y, source=source, macros={"KIT_LANGUAGE": "3.1"})


def test_peak_memory() -> None:
    """Buffers that live at one time count, above those from before."""
    kept = torch.ones(1000, device="mps")
    with softmetal.peak_memory() as peak:
        for _ in range(3):
            torch.empty(500, device="mps")
        both = [torch.empty(100, device="mps") for _ in range(2)]
    assert peak.bytes == 4 * 500 and len(both) == 2 and kept.numel() == 1000
    with softmetal.peak_memory() as peak:
        more = torch.empty(300, device="mps"), torch.empty(400, device="mps")
    assert peak.bytes == 4 * 700 and len(more) == 2
