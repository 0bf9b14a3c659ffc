"""The gauge for foreign kernels counts by kernel function, and says why one fails."""

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


def test_metal_4_is_put_aside(tmp_path: Path) -> None:
    header = "#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>\n"
    result = tried(tmp_path, header + GOOD)
    assert "Metal 4" in result.aside
    text = summary([result, tried(tmp_path, GOOD)])
    assert "1 of 1 kernel functions compile" in text
    assert "not counted: 1 source" in text


def test_command(tmp_path: Path) -> None:
    (tmp_path / "a.metal").write_text(PRELUDE + GOOD)
    (tmp_path / "b.metal").write_text(PRELUDE + GOOD.replace("= 1", "= none"))
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "softmetal", "corpus", str(tmp_path), "--json", str(report), "--verbose"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "1 of 2 kernel functions compile (50.0 %)" in done.stdout
    assert "b.metal:3: use of undeclared identifier 'none' [good]" in done.stdout
    rows = {row["path"]: row for row in json.loads(report.read_text())}
    assert (rows["a.metal"]["compiled"], rows["b.metal"]["compiled"]) == (1, 0)
    absent = subprocess.run([*command[:4], str(tmp_path / "absent")], capture_output=True, text=True)
    assert absent.returncode == 1
    assert "is no folder" in absent.stderr
