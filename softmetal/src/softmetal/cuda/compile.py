"""Compiles pipelines to cubins: preprocess, translate, compile with nvcc. The folder can be copied to the
GPU's machine.

A pipeline's file is named by its content, so a rebuild compiles only changed pipelines.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from softmetal.msl.language import DEFAULT, LANGUAGES
from softmetal.msl.lexer import TranslationError
from softmetal.msl.preprocess import PreprocessorError, preprocess

from .translate import translate

INCLUDE = Path(__file__).parent / "include"
_SHARED_HEADERS = Path(__file__).parents[1] / "msl" / "common"
_RESOURCES = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_SHARED = re.compile(r"(\d+) bytes smem")


class CompileError(Exception):
    """The program cannot be translated, or nvcc refuses it."""


@dataclass(frozen=True)
class Pipeline:
    """A kernel of a program, specialised like a Metal pipeline."""

    source: str
    kernel: str  # its host name
    max_threads: int
    macros: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, bool | int | float] = field(default_factory=dict)
    threadgroup_memory: Mapping[int, int] = field(default_factory=dict)  # bytes of [[threadgroup(n)]]
    include: Sequence[str] = ()
    # The MSL type that float32 matrix operands were widened from: "half", "bfloat", or "float" for real
    # float32 operands, which cost three times as much (include/simdgroup_matrix.h).
    widened_from: str = "float"
    aligned_runs: bool = False  # the caller's promise about the data: see runs.py
    min_groups: int = 0  # threadgroups per multiprocessor for which ptxas allocates registers; 0: it chooses
    std: str = DEFAULT  # the language version; tensors need metal4.0
    name: str = "program_source"


@dataclass(frozen=True)
class Compiled:
    """Resources of a cubin, stored beside it as JSON."""

    kernel: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int


def translated(pipeline: Pipeline) -> str:
    try:
        macros = [f"{name}={value}" for name, value in pipeline.macros.items()]
        text = preprocess(
            pipeline.source, pipeline.name, macros, list(pipeline.include), LANGUAGES[pipeline.std]
        )
        return translate(
            text,
            pipeline.kernel,
            pipeline.constants,
            pipeline.max_threads,
            pipeline.aligned_runs,
            pipeline.threadgroup_memory,
            pipeline.min_groups,
        )
    except (TranslationError, PreprocessorError) as error:
        raise CompileError(str(error)) from error


def compile_pipeline(pipeline: Pipeline, folder: Path) -> str:
    """Compiles into `folder`; returns the cubin's name there."""
    text = translated(pipeline)
    flags = ["-arch=sm_90", "-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Xptxas", "-v"]
    flags += ["-diag-suppress=20012,20050,550,177,186,39,68,2361", f"-I{INCLUDE}"]
    if pipeline.widened_from != "float":
        flags.append(f"-DSOFTMETAL_WIDENED_FROM={pipeline.widened_from}")
    if pipeline.aligned_runs:
        flags.append("-DSOFTMETAL_ALIGNED_RUNS")
    digest = hashlib.sha256(" ".join(flags).replace(str(INCLUDE), "").encode())
    for header in sorted([*INCLUDE.glob("*.h"), *_SHARED_HEADERS.glob("*.h")]):
        digest.update(header.read_bytes())
    digest.update(text.encode())
    name = f"{re.sub(r'[^A-Za-z0-9_]', '_', pipeline.kernel)[:60]}-{digest.hexdigest()[:16]}"
    if not (folder / f"{name}.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        _run_nvcc(text, flags, folder, name, pipeline.kernel)
    return f"{name}.cubin"


def _run_nvcc(text: str, flags: list[str], folder: Path, name: str, kernel: str) -> None:
    with tempfile.TemporaryDirectory(dir=folder, prefix=".nvcc-") as scratch:
        source, cubin = Path(scratch) / "kernel.cu", Path(scratch) / "kernel.cubin"
        source.write_text(text)
        command = ["nvcc", *flags, "-cubin", "-o", str(cubin), str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise CompileError(f"nvcc refuses the translation of '{kernel}':\n{done.stderr or done.stdout}")
        os.replace(cubin, folder / f"{name}.cubin")
    compiled = _read_resources(kernel, done.stdout + done.stderr)
    (folder / f"{name}.json").write_text(json.dumps(compiled.__dict__, indent=1) + "\n")


def _read_resources(kernel: str, log: str) -> Compiled:
    registers, spills, shared = _RESOURCES.search(log), _SPILLS.search(log), _SHARED.search(log)
    if registers is None or spills is None:
        raise CompileError(f"nvcc printed no resources for '{kernel}':\n{log}")
    stack, stores, loads = (int(number) for number in spills.groups())
    return Compiled(
        kernel, int(registers.group(1)), int(shared.group(1)) if shared else 0, stack, stores + loads
    )


def compile_all(pipelines: Sequence[Pipeline], folder: Path) -> list[str]:
    """Returns the cubins' names, in order; each distinct pipeline is translated and compiled once."""
    distinct = {repr(pipeline): pipeline for pipeline in pipelines}
    # Translation is Python, and takes as long as nvcc on many cores if it is not in processes of its own.
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        compiled = pool.map(compile_pipeline, distinct.values(), itertools.repeat(folder))
        names = dict(zip(distinct, compiled, strict=True))
    return [names[repr(pipeline)] for pipeline in pipelines]
