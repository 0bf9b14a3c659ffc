"""The compile driver: command line, cache, and third-party Metal programs."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from softmetal.msl import compile as compile_module
from softmetal.msl.compile import (
    PASSES,
    RULES,
    SIMT_PASSES,
    CompileError,
    Program,
    compile_program,
    toolchain_version,
)
from softmetal.msl.preprocess import CLANG, preprocess
from softmetal.msl.translate import translate
from softmetal.simt.harness import _Loaded

SOURCE = "#include <metal_stdlib>\nkernel void k(device float* x [[buffer(0)]]) { x[0] = VALUE; }\n"


def run_command(*arguments: str, source: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "softmetal.msl", "compile", *arguments]
    return subprocess.run(command, input=source, capture_output=True, text=True)


def test_command_line(tmp_path: Path) -> None:
    file = tmp_path / "one.metal"
    file.write_text(SOURCE)
    good = run_command("--source", str(file), "--out", str(tmp_path), "--define", "VALUE=1")
    assert good.returncode == 0 and Path(good.stdout.strip()).parent == tmp_path
    bad = run_command("--source", str(file), "--out", str(tmp_path))
    assert bad.returncode == 1 and bad.stdout == ""
    assert bad.stderr.startswith("one.metal:2: error: use of undeclared identifier 'VALUE'")


def rejection(source: str, folder: Path) -> str:
    with pytest.raises(CompileError) as caught:
        compile_program(Program(source, name="test.metal"), "fast", folder)
    return str(caught.value)


def test_line_directives_name_the_place(tmp_path: Path) -> None:
    assert rejection('#line 41 "tile.h"\n\nconstant int x = y;\n', tmp_path).startswith("tile.h:42: error:")


def test_host_library_does_not_show_in_messages(tmp_path: Path) -> None:
    source = "#include <metal_stdlib>\nusing namespace metal;\n"
    source += "kernel void k(device float3* x) { x[0] = float3(1.0f, 2.0f); }"
    message = rejection(source, tmp_path)
    assert "test.metal:3" in message and "vectors.h" not in message


def test_package_does_not_import_torch() -> None:
    code = "import sys, softmetal.msl.compile; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_cache_is_keyed_by_content(tmp_path: Path) -> None:
    def path(value: str, mode: str = "fast") -> Path:
        return compile_program(Program(SOURCE, macros=(f"VALUE={value}",)), mode, tmp_path)

    first = path("1")
    written = first.stat().st_mtime_ns
    assert path("1") == first and first.stat().st_mtime_ns == written
    assert len({first, path("2"), path("1", "checked")}) == 3


@pytest.mark.parametrize("part", ["rules", "clang"])
def test_cache_is_keyed_by_the_compiler(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_program(Program(SOURCE, macros=("VALUE=1",)), "fast", tmp_path)
    if part == "rules":
        newer = tmp_path / RULES.name
        newer.write_bytes(RULES.read_bytes() + b"built again")
        monkeypatch.setattr(compile_module, "RULES", newer)
    else:
        newer = tmp_path / CLANG
        newer.write_text(f'#!/bin/sh\nexec {shutil.which(CLANG)} "$@"\n')
        newer.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    toolchain_version.cache_clear()
    assert compile_program(Program(SOURCE, macros=("VALUE=1",)), "fast", tmp_path) != first
    monkeypatch.undo()
    toolchain_version.cache_clear()
    assert compile_program(Program(SOURCE, macros=("VALUE=1",)), "fast", tmp_path) == first


@pytest.mark.parametrize("kind", ["so", "pch"])
@pytest.mark.parametrize(
    "damage", [lambda good: good[:-1000], lambda good: b"", lambda good: good[:-1] + b"?"]
)
def test_a_broken_file_is_made_again(
    kind: str, damage: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOFTMETAL_CACHE", str(tmp_path))
    program = Program(SOURCE, macros=("VALUE=4",))
    module = compile_program(program, "fast")
    (broken,) = tmp_path.glob(f"*.{kind}")
    size = broken.stat().st_size
    broken.write_bytes(damage(broken.read_bytes()))
    if kind == "pch":
        module.unlink()
    assert compile_program(program, "fast") == module
    assert _Loaded(module, {}).kernels
    assert broken.stat().st_size == size and compile_module._is_whole(broken)


def test_concurrent_compiles_of_one_program(tmp_path: Path) -> None:
    program = Program(SOURCE, macros=("VALUE=3",))
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: compile_program(program, "fast", tmp_path), range(4)))
    assert len(set(paths)) == 1 and [p.name for p in tmp_path.iterdir()] == [paths[0].name]


@pytest.mark.parametrize("mode", ["fast", "checked"])
def test_headers_of_torch(mode: str, tmp_path: Path) -> None:
    """The radix sort; simt/test_torch_kernels.py runs the merge sort."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None and torch.origin is not None
    headers = ("c10/metal/common.h", "c10/metal/utils.h", "ATen/native/mps/kernels/SortMerge.h",
               "ATen/native/mps/kernels/SortRadix.h")  # fmt: skip
    source = "#include <metal_stdlib>\nusing namespace metal;\n"
    source += "".join(f"#include <{header}>\n" for header in headers)
    include = (str(Path(torch.origin).parent / "include"),)
    path = compile_program(
        Program(source, include=include, only=r"^radix_.*_float_8bit(_mb4)?$"), mode, tmp_path
    )
    assert len(_Loaded(path, {}).kernels) == 6


def test_plugins_are_the_same_in_every_folder() -> None:
    """They are part of every kernel's key in the cache, which several checkouts share."""
    here = str(RULES.parent.parent).encode()
    assert not [path.name for path in (RULES, PASSES, SIMT_PASSES) if here in path.read_bytes()]
    assert here in (RULES.parent / "libsoftmetal.so").read_bytes()  # not part of a key


def test_loops_are_unrolled_without_checks_only() -> None:
    """With checks, arrays are not kept in registers. Line numbers do not change."""
    source = (
        "kernel void k(device int* a) {\n"
        '  _Pragma("clang loop unroll(full)")\n'
        "  for (int i = 0; i < 4; i++) a[i] = i;\n"
        "#pragma clang loop vectorize(disable)\n"
        "  for (int i = 0; i < 4; i++) a[i] = i;\n"
        "}\n"
    )
    preprocessed = preprocess(source, "loops")
    fast, checked = (translate(preprocessed, checked=checked).cpp for checked in (False, True))
    assert "loop unroll(full)" in fast and "loop unroll(disable)" not in fast
    assert "loop unroll(full)" not in checked and "loop unroll(disable)" in checked
    assert "loop vectorize(disable)" in checked
    assert fast.count("\n") == checked.count("\n")
