"""Runs MSL kernels, and evaluates expressions over arrays, one element per thread."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from softmetal.msl.arithmetic import Arithmetic
from softmetal.simt.harness import Library

PRELUDE = "#include <metal_stdlib>\nusing namespace metal;\n"
TYPES = {
    "bool": np.bool_, "char": np.int8, "uchar": np.uint8, "short": np.int16, "ushort": np.uint16,
    "int": np.int32, "uint": np.uint32, "long": np.int64, "ulong": np.uint64, "half": np.float16,
    "float": np.float32,
}  # fmt: skip
NAMES = {np.dtype(kind): name for name, kind in TYPES.items()}
PRECISE = Arithmetic(mode="safe", functions="precise")
UNWRITTEN = 99
WORST = replace(PRECISE, worst=True)


def run(
    body: str, *buffers: np.ndarray, grid: int = 1, threads: int = 1, kernel: str = "k", **options: Any
) -> None:
    library = Library(PRELUDE + body)
    library.pipeline(kernel).run(list(buffers), grid=(grid, 1, 1), threads=(threads, 1, 1), **options)


def check_kernel(
    body: str, expected: Any, *inputs: np.ndarray, kind: Any = np.float32, **options: Any
) -> None:
    """Compares what a kernel writes to its last buffer with these numbers."""
    wanted = np.array(expected, kind)
    out = np.full_like(wanted, UNWRITTEN)
    run(body, *inputs, out, **options)
    np.testing.assert_array_equal(out, wanted)


def evaluate(
    expressions: dict[str, str],
    arithmetic: Arithmetic = PRECISE,
    body: str = "",
    mode: str = "fast",
    **inputs: np.ndarray,
) -> dict[str, np.ndarray]:
    """Returns {expression: its values}. `expressions` has the type of each result, and `inputs` the arrays
    whose elements the expressions use.
    """
    count = len(next(iter(inputs.values())))
    kinds = list(dict.fromkeys(expressions.values()))  # a buffer of results for each: a kernel has only 31
    texts = {kind: [text for text, wanted in expressions.items() if wanted == kind] for kind in kinds}
    results: dict[str, np.ndarray] = {
        kind: np.zeros((len(texts[kind]), count), TYPES[kind]) for kind in kinds
    }
    parameters = [f"device const {NAMES[a.dtype]}* {name}_" for name, a in inputs.items()]
    parameters += [f"device {kind}* out_{kind}" for kind in kinds]
    lines = [f"  {NAMES[a.dtype]} {name} = {name}_[thread_index];" for name, a in inputs.items()]
    lines += [
        f"  out_{kind}[{row * count} + thread_index] = {kind}({text});"
        for kind in kinds
        for row, text in enumerate(texts[kind])
    ]
    kernel = f"kernel void k({', '.join(parameters)}, uint thread_index [[thread_position_in_grid]]) {{"
    source = "\n".join([PRELUDE, body, kernel, *lines, "}\n"])
    library = Library(source, mode=mode, arithmetic=arithmetic)
    arrays = [np.ascontiguousarray(a) for a in inputs.values()]
    library.pipeline("k").run([*arrays, *results.values()], grid=(count, 1, 1), threads=(1, 1, 1))
    return {text: results[kind][texts[kind].index(text)] for text, kind in expressions.items()}


def check(table: dict[str, Any], result: str = "float", body: str = "") -> None:
    """Compares scalar expressions with their values."""
    got = evaluate(dict.fromkeys(table, result), Arithmetic(), body, unused=np.zeros(1, np.int32))
    expected = np.array(list(table.values()), TYPES[result])
    np.testing.assert_array_equal([got[text][0] for text in table], expected, err_msg=str(list(table)))


def integers(kind: str, count: int = 200, seed: int = 0) -> np.ndarray:
    """Extremes, small numbers, single bits and random numbers of an integer type."""
    limits = np.iinfo(TYPES[kind])
    rng = np.random.default_rng(seed)
    edges = [limits.min, limits.min + 1, limits.max, limits.max - 1, 0, 1, 2, 3]
    edges += [-1, -2] if limits.min else []
    edges += [1 << bit for bit in range(limits.bits - 1)]
    random = rng.integers(
        limits.min, limits.max, max(0, count - len(edges)), endpoint=True, dtype=limits.dtype
    )
    return np.concatenate([np.array(edges, limits.dtype), random])


def pairs(values: np.ndarray, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """All pairs of the first 12 values, and pairs of the others with a shuffle of themselves."""
    first = values[:12]
    rest = values[12:]
    shuffled = np.random.default_rng(seed).permutation(values)[: len(rest)]
    return (np.concatenate([np.repeat(first, 12), rest]), np.concatenate([np.tile(first, 12), shuffled]))
