"""MSL to CUDA C++: the translated text, and that nvcc compiles it without extra memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from softmetal.cuda.compile import CompileError, Pipeline, compile_pipeline, translated

PRELUDE = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;\n"

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")


def program(text: str, kernel: str = "f", **options: object) -> Pipeline:
    return Pipeline(PRELUDE + text, kernel, 64, **options)  # type: ignore[arg-type]


def flat(text: str) -> str:
    return " ".join(text.split())


def resources(pipeline: Pipeline, folder: Path) -> dict[str, int]:
    cubin = folder / compile_pipeline(pipeline, folder)
    assert cubin.stat().st_size > 0
    found: dict[str, int] = json.loads(cubin.with_suffix(".json").read_text())
    return found


CONSTANTS = """
constant uint fc_scale [[function_constant(3)]];
constant bool fc_negate [[function_constant(4)]];
constant bool fc_both = fc_negate && fc_scale > 1;
kernel void f(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  out[i] = is_function_constant_defined(fc_scale) ? float(fc_scale) : 7.0;
  if (fc_both) out[i] = -out[i];
}
"""


def test_function_constants_become_compile_time_constants() -> None:
    text = flat(translated(program(CONSTANTS, constants={"fc_scale": 3, "fc_negate": True})))
    assert "static constexpr uint fc_scale = 3" in text
    assert "static constexpr bool fc_negate = true" in text
    assert "static constexpr bool fc_both =" in text
    assert "out[i] = true ?" in text


def test_an_undefined_function_constant_is_known_to_be() -> None:
    assert "out[i] = false ?" in flat(translated(program(CONSTANTS, constants={"fc_negate": True})))


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        (program(CONSTANTS, constants={"fc_sacle": 1}), "no function constant 'fc_sacle'"),
        (program(CONSTANTS, kernel="g"), "no kernel 'g'"),
        (
            program("kernel void f(threadgroup float* x [[threadgroup(0)]]) {}"),
            r"x: error: the size of this \[\[threadgroup\(0\)\]\] argument is unknown",
        ),
    ],
    ids=["constant", "kernel", "threadgroup argument"],
)
def test_messages_of_refusals(pipeline: Pipeline, message: str) -> None:
    with pytest.raises(CompileError, match=message):
        translated(pipeline)


OVERLOADS = """
inline float first(const device float* p) { return p[0]; }
inline float first(const threadgroup float* p) { return p[0]; }
kernel void f(device float* out [[buffer(0)]], const device float* in [[buffer(1)]],
              uint i [[thread_position_in_grid]]) {
  threadgroup float tile[64];
  tile[i] = in[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = first(tile) + first(in);
}
"""


def test_overloads_by_address_space_become_one() -> None:
    text = translated(program(OVERLOADS))
    assert text.count("float first(") == 1
    assert "__shared__ float tile[64]" in text
    assert "__shared__ __align__(16) float tile[64]" in translated(program(OVERLOADS, aligned_runs=True))


def test_overloads_that_differ_stay() -> None:
    text = translated(
        program(
            OVERLOADS.replace("threadgroup float* p) { return p[0]", "threadgroup float* p) { return p[1]")
        )
    )
    assert text.count("float first(") == 2


RUN = """
kernel void f(device float* out [[buffer(0)]], const device half* in [[buffer(1)]],
              constant uint& stride [[buffer(2)]],
              uint i [[thread_position_in_grid]]) {
  constexpr int N = 8;
  float sum = 0;
  for (int j = 0; j < N; j++) sum += in[i * stride + j];
  out[i] = sum;
}
"""


def test_runs_are_declared_only_where_promised() -> None:
    assert "softmetal::run<(N)>(in + (i * stride" in translated(program(RUN, aligned_runs=True))
    assert "softmetal::run" not in translated(program(RUN))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("const device half* in", "device half* in"),  # may be written
        ("constexpr int N = 8", "int N = stride"),  # no constant length
        ("j < N; j++", "j < N; j += 2"),  # not neighbours
        ("i * stride + j]", "j * stride + i]"),
    ],
)
def test_other_loops_are_no_runs(old: str, new: str) -> None:
    text = RUN.replace(old, new)
    assert text != RUN
    assert "softmetal::run" not in translated(program(text, aligned_runs=True))


RUN_OF_ANY = """
template <typename P>
inline float sum(P p, int at) {
  constexpr int N = 4;
  float total = 0;
  for (short j = 0; j < N; j++) total += p[at + j];
  return total;
}
kernel void f(device float* out [[buffer(0)]], const device half* in [[buffer(1)]],
              uint i [[thread_position_in_grid]]) {
  threadgroup float own[256];
  for (int j = 0; j < 4; ++j) own[i * 4 + j] = in[i * 4 + j];
  out[i] = sum(in, i * 4) + sum(own, i * 4);
}
"""


def test_runs_of_pointers_of_any_type(tmp_path: Path) -> None:
    pipeline = program(RUN_OF_ANY, aligned_runs=True)
    assert "total += ::softmetal::run_of_any<(N)>(p + (at ))[ j]" in flat(translated(pipeline))
    assert "run_of_any" not in translated(program(RUN_OF_ANY))
    called = RUN_OF_ANY.replace("p[at + j]", "p[at + place(j)]").replace(
        "template", "inline short place(short j) { return j; }\ntemplate", 1
    )
    assert "(p + (at ))[ place(j)]" in flat(translated(program(called, aligned_runs=True)))
    if shutil.which("nvcc"):
        for text in (RUN_OF_ANY, called):
            assert resources(program(text, aligned_runs=True), tmp_path)["stack_bytes"] == 0


MEMBERS = """
struct Table {
  const device int* blocks;
};
struct Found {
  int blocks[4];
};
kernel void f(device int* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  Found found;
  int sum = 0;
  for (int k = 0; k < 4; k++) sum += blocks[k];
  out[i] = sum;
}
"""


def test_an_array_that_shadows_a_pointer_is_no_run() -> None:
    control = MEMBERS.replace("int blocks[4]", "int others[4]")
    assert "softmetal::run<(4)>(blocks)" in translated(program(control, aligned_runs=True))
    for text in (MEMBERS, MEMBERS.replace("int blocks[4]", "int others[2] = {}, one, blocks[4]")):
        assert "softmetal::run" not in translated(program(text, aligned_runs=True))


@needs_nvcc
def test_nvcc_takes_overloads_constants_and_runs(tmp_path: Path) -> None:
    for text, options in (
        (OVERLOADS, {}),
        (CONSTANTS, {"constants": {"fc_scale": 2}}),
        (RUN, {"aligned_runs": True}),
    ):
        assert resources(program(text, **options), tmp_path)["stack_bytes"] == 0


PRODUCTS = """
kernel void f(device float* out [[buffer(0)]], const device half* in [[buffer(1)]],
              ushort lane [[thread_index_in_simdgroup]]) {
  simdgroup_float8x8 a, b, sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  simdgroup_half8x8 h;
  simdgroup_load(h, in, 8);
  a.thread_elements()[0] = in[lane];
  a.thread_elements()[1] = in[lane + 32];
  b.thread_elements()[0] = in[lane + 64];
  b.thread_elements()[1] = in[lane + 96];
  simdgroup_multiply_accumulate(sum, a, b, sum);
  simdgroup_multiply_accumulate(sum, a, h, sum);
  simdgroup_multiply_accumulate(sum, h, h, sum);
  simdgroup_store(sum, out, 8);
}
"""


@needs_nvcc
@pytest.mark.parametrize(
    ("widened_from", "aligned_runs"), [("float", True), ("half", False), ("bfloat", True)]
)
def test_products_of_every_type_compile(widened_from: str, aligned_runs: bool, tmp_path: Path) -> None:
    pipeline = program(PRODUCTS, widened_from=widened_from, aligned_runs=aligned_runs)
    assert resources(pipeline, tmp_path)["spill_bytes"] == 0


FILLED = """
template <int N>
inline float filled(uint i) {
  float x[N] = { [0 ... N-1] = 2.0f };
  return x[i % N];
}
kernel void f(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) { out[i] = filled<4>(i); }
"""


def test_an_array_that_is_filled_from_end_to_end_is_filled_by_a_loop(tmp_path: Path) -> None:
    assert "float x[N]; for (float& each : x) each = 2.0f;" in flat(translated(program(FILLED)))
    part = FILLED.replace("0 ... N-1", "1 ... N-1")
    assert "for (float& each" not in translated(program(part))
    if shutil.which("nvcc"):
        resources(program(FILLED), tmp_path)
        with pytest.raises(CompileError, match="designator"):
            resources(program(part), tmp_path)


MATRICES = """
kernel void f(device float4x4* out [[buffer(0)]], const device half4x4* in [[buffer(1)]],
              device float* products [[buffer(2)]], device half4* halves [[buffer(3)]],
              device bfloat4* bfloats [[buffer(4)]], uint i [[thread_position_in_grid]]) {
  halves[i + 64] = (half4)bfloats[i];
  bfloats[i + 64] = (bfloat4)halves[i];
  float4x4 x = (float4x4)in[i];
  x[1] = exp(x[0]) + precise::tanh(x[2]);
  out[i] = x;
  simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8>(1.0f);
  simdgroup_store(sum, products, 8, 0, true);
}
"""


@needs_nvcc
def test_matrices_and_vectors_are_converted_and_functions_take_vectors(tmp_path: Path) -> None:
    assert resources(program(MATRICES), tmp_path)["stack_bytes"] == 0


THREADGROUP_ARGUMENTS = """
constant constexpr uint second = 1 + 1;
kernel void f(constant uint& count, device float* out, threadgroup half* a [[threadgroup(0)]],
              threadgroup float4* b [[threadgroup(second)]], uint i [[thread_position_in_grid]]) {
  a[i] = half(count);
  b[i] = float4(out[i]);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = float(a[63 - i]) + b[63 - i].x;
}
"""


@needs_nvcc
def test_threadgroup_arguments_have_the_bytes_that_are_given(tmp_path: Path) -> None:
    """Pointers without an attribute get the remaining buffer indices, as in Metal."""
    pipeline = program(THREADGROUP_ARGUMENTS, threadgroup_memory={0: 128, 2: 1024})
    assert "ThreadgroupArgument<(second), " in translated(pipeline)
    assert resources(pipeline, tmp_path)["shared_bytes"] == 128 + 1024
    with pytest.raises(CompileError, match="threadgroup_memory names no bytes"):
        compile_pipeline(program(THREADGROUP_ARGUMENTS, threadgroup_memory={0: 128}), tmp_path)


TEMPLATE_KERNEL = """
template <typename T4, void (*convert)(device const T4*, thread float4&)>
kernel void g(device const T4* in [[buffer(0)]], device float4* out [[buffer(1)]],
              uint i [[thread_position_in_grid]]) {
  float4 x;
  convert(in + i, x);
  out[i] = x;
}
template <typename T4>
void widen(device const T4* in, thread float4& x) { x = float4(*in); }
typedef decltype(g<half4, widen>) kernel_type;
template [[host_name("f")]] kernel kernel_type g<INSTANCE, widen>;
"""


@needs_nvcc
@pytest.mark.parametrize("element", ["half4", "bfloat4", "packed_char4", "packed_uchar4", "packed_float4"])
def test_template_kernels_take_vectors_and_functions(element: str, tmp_path: Path) -> None:
    pipeline = program(TEMPLATE_KERNEL.replace("INSTANCE", element))
    assert resources(pipeline, tmp_path)["stack_bytes"] == 0


def test_registers_are_planned_for_the_threadgroups_that_are_asked_for() -> None:
    assert "__launch_bounds__(64) softmetal_kernel" in flat(translated(program(RUN)))
    assert "__launch_bounds__(64, 2) softmetal_kernel" in flat(translated(program(RUN, min_groups=2)))


@needs_nvcc
def test_errors_of_nvcc_name_the_metal_line(tmp_path: Path) -> None:
    wrong = PRELUDE + "kernel void f(device float* out [[buffer(0)]]) {\n  out[0] = missing;\n}\n"
    with pytest.raises(CompileError, match=r"own\.metal\(5\): error: identifier \"missing\""):
        compile_pipeline(Pipeline(wrong, "f", 32, name="own.metal"), tmp_path)
