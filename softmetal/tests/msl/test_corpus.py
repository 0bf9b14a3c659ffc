"""`softmetal corpus` counts kernel functions in foreign sources, and reports why one fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from softmetal.msl.corpus import Result, summary, try_source

PRELUDE = "#include <metal_stdlib>\nusing namespace metal;\n"
GOOD = "kernel void good(device float* x) { x[0] = 1; }\n"


def tried(folder: Path, source: str) -> Result:
    path = folder / "a.metal"
    path.write_text(PRELUDE + source)
    return try_source(path, folder, 60)


BROKEN = {
    "in its body": (GOOD + "kernel void bad(device float* x) { x[0] = nothing; }\n", 1, "'nothing'"),
    "in a template of which it is an instance": (
        "template <typename T> kernel void bad(device T* x) { x[0] = T::none; }\n"
        'template [[host_name("b")]] kernel void bad<float>(device float*);\n' + GOOD,
        1,
        "'float'",
    ),
    "in a function that it calls": (
        "float helper() { return nothing; }\nkernel void bad(device float* x) { x[0] = helper(); }\n" + GOOD,
        1,
        "'nothing'",
    ),
    "for the translator": (GOOD + "kernel void bad(device double* x) { x[0] = 1; }\n", 1, "no double"),
    "nowhere": (GOOD + "kernel void also_good(device int* x) { x[0] = 1; }\n", 2, None),
}


@pytest.mark.parametrize("where", BROKEN)
def test_one_kernel_fails_alone(where: str, tmp_path: Path) -> None:
    source, compiled, cause = BROKEN[where]
    result = tried(tmp_path, source)
    assert (result.kernels, result.compiled) == (2, compiled)
    if cause is None:
        assert not result.failures
    else:
        (failure,) = result.failures
        assert failure.kernels == ["bad"]
        assert cause in failure.cause


def test_headers_are_found_below_the_folder(tmp_path: Path) -> None:
    (tmp_path / "far/kernels").mkdir(parents=True)
    (tmp_path / "far/kernels/one.h").write_text("constant float one = 1;\n")
    source = '#include "kernels/one.h"\nkernel void k(device float* x) { x[0] = one; }\n'
    assert tried(tmp_path, source).compiled == 1
    missing = tried(tmp_path, source.replace("one.h", "two.h"))
    assert (missing.kernels, missing.compiled) == (1, 0)
    assert "kernels/two.h" in missing.failures[0].cause


TENSORS = """
kernel void tensors(device half* a, device float* c) {
  tensor<device half, dextents<int, 2>, tensor_inline> A(a, dextents<int, 2>(16, 16));
  tensor<device float, dextents<int, 2>, tensor_inline> C(c, dextents<int, 2>(16, 16));
  mpp::tensor_ops::matmul2d<mpp::tensor_ops::matmul2d_descriptor(16, 16, 16), execution_simdgroup> multiply;
  multiply.run(A, A, C);
}
"""


@pytest.mark.parametrize("guard", [False, True])
def test_sources_with_tensors_are_of_4_0(guard: bool, tmp_path: Path) -> None:
    header = "#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>\n"
    whole = header + TENSORS
    source = f"#if defined(__HAVE_TENSOR__)\n{whole}#endif\n" if guard else whole
    result = tried(tmp_path, source + GOOD)
    assert (result.kernels, result.compiled) == (2, 2)
    text = summary([result, tried(tmp_path, TENSORS + GOOD)])
    assert "3 of 4 kernel functions compile" in text
    assert "in 2 sources; 1 of them whole" in text


def test_command(tmp_path: Path) -> None:
    (tmp_path / "a.metal").write_text(PRELUDE + GOOD)
    (tmp_path / "b.metal").write_text(PRELUDE + GOOD.replace("= 1", "= none"))
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "softmetal", "corpus", str(tmp_path), "--json", str(report), "--verbose"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "1 of 2 kernel functions compile (50.0 %)" in done.stdout
    assert "b.metal:3: 'none' is declared nowhere" in done.stdout
    rows = {row["path"]: row for row in json.loads(report.read_text())}
    assert (rows["a.metal"]["compiled"], rows["b.metal"]["compiled"]) == (1, 0)
    absent = subprocess.run([*command[:4], str(tmp_path / "absent")], capture_output=True, text=True)
    assert absent.returncode == 2
    assert "is not a folder" in absent.stderr


HOSTS = {
    "a macro": ("kernel void bad(device ftype* x) { x[0] = 1; }\n", "'ftype' is declared nowhere: a macro"),
    "a prelude": ("kernel void bad(device float* x) { x[0] = helper(1); }\n", "'helper' is declared nowhere"),
}


@pytest.mark.parametrize("what", HOSTS)
def test_names_that_hosts_define_are_a_cause(what: str, tmp_path: Path) -> None:
    source, cause = HOSTS[what]
    (failure,) = tried(tmp_path, source + GOOD).failures
    assert failure.kernels == ["bad"]
    assert cause in failure.cause


def test_names_without_their_namespace_are_a_cause(tmp_path: Path) -> None:
    path = tmp_path / "a.metal"
    source = "#include <metal_stdlib>\nkernel void k(device float* x) { x[0] = simd_sum(x[1]); }\n"
    path.write_text(source)
    assert "using namespace metal" in try_source(path, tmp_path, 60).failures[0].cause
    path.write_text(source.replace("simd_sum", "metal::simd_sum"))
    assert try_source(path, tmp_path, 60).compiled == 1


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "latin-1"])
def test_encodings(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "a.metal"
    path.write_bytes(f"// \xe9\n{PRELUDE}{GOOD}".encode(encoding))
    assert try_source(path, tmp_path, 60).compiled == 1


def test_files_without_a_program(tmp_path: Path) -> None:
    path = tmp_path / "a.metal"
    for text in ("", "\x00\x01}}}{{{(((", "kernel void k(", "template <template <", "#if 1\n", "operator"):
        path.write_text(text)
        assert try_source(path, tmp_path, 60).compiled == 0


def test_sources_of_3_2(tmp_path: Path) -> None:
    log = '#include <metal_logging>\nkernel void log(device float* x) { os_log_default.log("x"); }\n'
    assert tried(tmp_path, log + GOOD).compiled == 2
    assert tried(tmp_path, log.replace("os_log", "other") + GOOD).compiled == 1
