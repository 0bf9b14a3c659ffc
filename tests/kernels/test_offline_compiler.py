"""Every pipeline that the planner can ask for through Apple's offline compiler, as the version of the
language that we name and as newer ones. It needs no GPU; it needs Xcode, and from Xcode 26 on a further
download.

Where it is missing the tests are skipped with the reason; FATTN_REQUIRE_METAL_COMPILER names the versions for
which that is a failure. A runner of CI compiles a sample, other pipelines for each commit.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_fattn
from tests.golden.calls import on_meta
from tests.helpers import (
    cache_problems,
    linear_problems,
    problems,
    rms_norm_problems,
    rotary_problems,
    tensor_kernels,
)
from tests.helpers.cache_problems import WriteProblem
from tests.helpers.direct_launch import INTERFACE, kernel_text
from tests.helpers.problems import Problem
from tests.helpers.tuning_rows import TUNING, rows, used
from torch_fattn.operators import LINEAR
from torch_fattn.operators.kv_formats import KV_FORMATS

pytestmark = pytest.mark.host_only

METAL = ("xcrun", "-sdk", "macosx", "metal")
LANGUAGE = "metal3.1"  # the version in csrc/metal/pipelines.mm
NEWER = ("metal3.2", "metal4.0", "metal4.1")
KERNELS = (
    *("prefill", "prefill_wide", "decode", "decode_wide", "decode_vector"),
    *("merge", "cache", "rotary", "rms_norm", "logits", "mask_map", *LINEAR),
    *("backward_query", "backward_key", "backward_head"),
    *("prefill_tensor", "prefill_latent_tensor", "backward_tensor"),
)
# The version of the kernels on tensor operations, and of the libraries that have them.
TENSOR_LANGUAGE = "metal4.0"
VERSIONS = [
    (standard, kernel)
    for standard, kernel in itertools.product((LANGUAGE, *NEWER), KERNELS)
    if "tensor" not in kernel or standard >= TENSOR_LANGUAGE
]
FAMILIES = range(7, 12)
HEAD_DIMS = [(dim, dim) for dim in range(8, 129, 8)] + [(128, 8), (8, 128), (72, 64), (64, 80)]
VECTOR_HEAD_DIMS = [*HEAD_DIMS, *((dim, dim) for dim in range(136, 257, 40)), (192, 128), (256, 256)]
WIDE_HEAD_DIMS = [(dim, dim) for dim in range(136, 577, 40)] + [(192, 128), (256, 256), (512, 512), (24, 328)]
BACKWARD_HEAD_DIMS = [*HEAD_DIMS, (136, 136), (192, 128), (200, 256), (256, 256)]
LATENT_HEAD_DIMS = [(576, 512), (64, 40)]  # the value is the first columns of the key

SAMPLE = 12  # pipelines of a kernel, dtype and version

# Over quantised caches of each format: by kernel, problems whose dtype and format are exchanged.
f32 = torch.float32
PACKED: dict[str, Any] = {"q_lens": (40,), "seq_lens": (100,), "block_size": 16}
QUANTISED = {
    "prefill": [
        Problem(0, "paged_prefill", f32, 1, 8, 2, 40, 1024, *d, **PACKED) for d in ((64, 64), (96, 128))
    ],
    "prefill_wide": [
        Problem(0, "paged_prefill", f32, 1, 8, 2, 40, 1024, *d, **PACKED) for d in ((192, 160), (576, 512))
    ],
    "decode": [
        *(Problem(0, "decode", f32, 1, 8, 2, 1, 1024, dim, dim) for dim in (64, 96, 128)),
        Problem(0, "decode", f32, 1, 24, 8, 1, 500, 64, 64),
    ],
    "decode_vector": [
        Problem(0, "decode", f32, 1, 8, kv_heads, 1, 500, *dims)
        for kv_heads, dims in itertools.product((8, 4), ((64, 64), (96, 160), (256, 256)))
    ],
    "decode_wide": [
        Problem(0, "decode", f32, 1, 8, 2, 1, 1024, 192, 160),
        *(Problem(0, "decode", f32, 1, heads, 1, 1, 1024, 576, 512, value_in_key=True) for heads in (8, 32)),
    ],
}

# Short caches, of which a threadgroup has all chunks if there are few cores: by kernel, query heads of eight
# key-value heads.
SHORT = {"decode": (24,), "decode_vector": (8, 16)}
SHORT_HEAD_DIMS = [(8, 8), (64, 64), (72, 64), (96, 96), (128, 128)]

FORMAT_NUMBERS = [str(kind["number"]) for kind in INTERFACE["kv_formats"].values()]

Pipeline = tuple[str, tuple[str, ...]]  # source, macros as -DNAME=VALUE


def plans(kernel: str, dtype: torch.dtype) -> Iterator[torch_fattn.Explanation]:
    if kernel == "merge":
        for parts, family in itertools.product((2, 9, 33), FAMILIES):
            outs = torch.empty(parts, 1, 2, 3, 64, dtype=dtype, device="meta")
            lses = torch.empty(parts, 1, 2, 3, device="meta")
            yield torch_fattn.explain("merge", outs, lses, family=family)
        return
    if kernel == "cache":
        yield from _cache_plans(dtype)
        return
    if kernel == "rotary":
        for problem in rotary_problems.draw(192)[:64]:
            problem.dtype = dtype
            arguments, _ = rotary_problems.build(problem).arguments("meta")
            yield torch_fattn.explain("rotary_write", **arguments, family=7, cores=8)
        return
    if kernel == "rms_norm":
        for norm in rms_norm_problems.draw(72)[::2]:
            norm.dtype = dtype
            operands, options = rms_norm_problems.build(norm)
            operands = {name: each.of(each.base).to("meta") for name, each in operands.items()}
            yield torch_fattn.explain("rms_norm", **operands, **options, family=7, cores=8)
        return
    if kernel in LINEAR:
        for linear in linear_problems.draw(kernel, 36)[::2]:
            linear.dtype = dtype
            arguments, _ = linear_problems.build(linear).arguments("meta")
            yield torch_fattn.explain(kernel, **arguments, family=7, cores=8)
        return
    if "tensor" in kernel:
        if dtype in tensor_kernels.DTYPES:
            dims = (tensor_kernels.LATENT,) if kernel == "prefill_latent_tensor" else tensor_kernels.DIMS
            for dim, state in itertools.product(dims, tensor_kernels.STATES):
                on_gpu: dict[str, Any] = {"family": 10, "cores": 10, "tensor": state}
                rows = torch.empty(1, 2, 64, dim, dtype=dtype, device="meta")
                if kernel.startswith("prefill"):
                    value = rows[..., : tensor_kernels.LATENT_VALUE]
                    yield torch_fattn.explain("prefill", rows, rows, value, **on_gpu)
                    for heads in (2, 4, 8):  # tiles of 16, 32 and 64 rows
                        drafts = torch.empty(1, heads, 16, dim, dtype=dtype, device="meta")
                        yield torch_fattn.explain("decode", drafts, rows, value, **on_gpu)
                else:
                    lse = torch.empty(1, 2, 64, device="meta")
                    operands = (rows, None, rows, rows, rows, rows, lse)
                    yield torch_fattn.explain("prefill_backward", *operands, out_remainder=rows, **on_gpu)
        return
    if kernel == "mask_map":
        yield torch_fattn.explain("mask_map", torch.empty(3, 3, dtype=dtype, device="meta"))
        return
    if kernel == "logits":
        for columns in (100, 200, *(2**n for n in range(9, 15))):
            x = torch.empty(3, columns, dtype=dtype, device="meta")
            yield torch_fattn.explain("softmax", x)
            yield torch_fattn.explain("softcap", x, 30.0)
        return
    if kernel.startswith("backward"):
        yield from _backward_plans(dtype)
        return
    # One row group, two and four; keys for one part and for several.
    op = kernel.split("_")[0]
    sizes = ((512, 1024),) if op == "prefill" else itertools.product((1, 3, 8), (1024, 2**16))
    dims = {
        "decode_wide": WIDE_HEAD_DIMS + LATENT_HEAD_DIMS,
        "prefill_wide": WIDE_HEAD_DIMS,
        "decode_vector": VECTOR_HEAD_DIMS,
    }.get(kernel, HEAD_DIMS)
    kv_heads = 2
    if kernel == "decode_vector":  # one row, and two
        sizes, kv_heads = itertools.product((1, 2), (1024, 2**16)), 8
    for (q_len, kv_len), (dim, value_dim), family in itertools.product(sizes, dims, FAMILIES):
        problem = Problem(0, op, dtype, 1, 8, kv_heads, q_len, kv_len, dim, value_dim)
        problem = replace(problem, value_in_key=(dim, value_dim) in LATENT_HEAD_DIMS)
        yield torch_fattn.explain(op, **on_meta(problem), family=family, cores=80)
    for heads, dims, family in itertools.product(SHORT.get(kernel, ()), SHORT_HEAD_DIMS, FAMILIES):
        arguments = on_meta(Problem(0, "decode", dtype, 1, heads, 8, 1, 500, *dims))
        yield torch_fattn.explain("decode", **arguments, family=family, cores=8)
    for kv_format in KV_FORMATS:
        for problem in QUANTISED.get(kernel, ()):
            quantised = replace(problem, dtype=dtype, kv_format=kv_format)
            arguments = on_meta(quantised)
            for family, cores in itertools.product(FAMILIES, (8, 80)):
                yield torch_fattn.explain(problem.op, **arguments, family=family, cores=cores)


def _backward_plans(dtype: torch.dtype) -> Iterator[torch_fattn.Explanation]:
    for (dim, value_dim), family, cores in itertools.product(BACKWARD_HEAD_DIMS, FAMILIES, (8, 80)):
        rows = [
            torch.empty(1, 4, 70, n, dtype=dtype, device="meta") for n in (value_dim, dim, dim, value_dim)
        ]
        grad_out, query, key, value = rows
        lse, numbers = torch.empty(1, 4, 70, device="meta"), torch.empty(4, dtype=dtype, device="meta")
        yield torch_fattn.explain(
            "prefill_backward",
            grad_out,
            lse,
            query,
            key,
            value,
            grad_out.float(),
            lse,
            sinks=numbers,
            alibi_slopes=numbers,
            family=family,
            cores=cores,
        )


def _cache_plans(dtype: torch.dtype) -> Iterator[torch_fattn.Explanation]:
    for kv_format, long_slots in itertools.product(("float", *KV_FORMATS), (False, True)):
        for dims in ((64, 64), (576, 512)) if kv_format == "int4" else ((8, 40), (128, 128), (576, 512)):
            problem = WriteProblem(0, kv_format, dtype, 3, 2, *dims, 4, 16, long_slots=long_slots)
            arguments, _ = cache_problems.build(problem).arguments("meta")
            yield torch_fattn.explain("cache_write", **arguments, family=7, cores=8)


@cache
def pipelines(kernel: str, dtype: torch.dtype) -> list[Pipeline]:
    launches = [launch for plan in plans(kernel, dtype) for launch in plan.passes]
    if kernel in ("prefill_tensor", "prefill_latent_tensor"):
        launches += [launch | {"source": "tensor_probe.metal"} for launch in launches]
    return sorted(
        {
            (launch["source"], tuple(f"-D{name}={value}" for name, value in launch["macros"].items()))
            for launch in launches
        }
    )


@cache
def why_not(standard: str) -> str | None:
    """Why `metal -std=standard` cannot compile an empty file; empty if it can."""
    command = [*METAL, f"-std={standard}", "-x", "metal", "-c", os.devnull, "-o", os.devnull]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return "xcrun does not exist: Apple's offline Metal compiler is part of Xcode"
    if done.returncode == 0:
        return None
    message = (done.stderr.strip().splitlines() or ["nothing"])[0]
    return (
        f"`{' '.join(METAL)} -std={standard}` does not compile (the command-line tools alone have no Metal "
        f"compiler; with Xcode 26 run xcodebuild -downloadComponent MetalToolchain): {message}"
    )


def commit() -> int:
    """The commit that CI tests; else 0."""
    return int(os.environ.get("GITHUB_SHA", "0")[:8], 16)


def sample(found: list[Pipeline]) -> list[Pipeline]:
    """In CI, SAMPLE of them at most: a commit whose number is one higher has the next ones."""
    step = -(-len(found) // SAMPLE) if commit() else 1
    return found[commit() % step :: step]


def need_compiler(standard: str) -> None:
    reason = why_not(standard)
    if reason is None:
        return
    if standard in os.environ.get("FATTN_REQUIRE_METAL_COMPILER", "").split():
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.mark.parametrize("dtype", problems.DTYPES, ids=problems.SHORT.get)
@pytest.mark.parametrize(("standard", "kernel"), VERSIONS)
def test_compiles(standard: str, kernel: str, dtype: torch.dtype, tmp_path: Path) -> None:
    need_compiler(standard)
    for name, macros in sample(pipelines(kernel, dtype)):
        source = tmp_path / name
        if not source.exists():
            source.write_text(kernel_text(name))
        command = [*METAL, f"-std={standard}", "-c", str(source), "-o", os.devnull, *macros]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{macros}\n{done.stderr}"


def test_nothing_is_left_out() -> None:
    """Every row of the tuning tables, every head dim, and each kernel's own choices."""
    every = [plan for k in KERNELS for dtype in problems.DTYPES for plan in plans(k, dtype)]
    launches = {(launch["kernel"], plan.data["tuning"]) for plan in every for launch in plan.passes}
    expected = rows(TUNING.read_text())
    assert len(expected) > 50 and expected <= {used(*each) for each in launches}
    compiled = {
        macro for kernel in KERNELS for d in problems.DTYPES for p in pipelines(kernel, d) for macro in p[1]
    }
    for dim in range(8, 129, 8):
        assert {f"-DFATTN_HEAD_DIM={dim}", f"-DFATTN_VALUE_DIM={dim}"} <= compiled
    assert {f"-DFATTN_ROW_FRAGMENTS={n}" for n in (1, 2)} <= compiled
    wide = {macro for d in problems.DTYPES for p in pipelines("decode_wide", d) for macro in p[1]}
    assert {f"-DFATTN_ROW_GROUPS={n}" for n in (1, 2, 4)} <= wide
    assert {f"-DFATTN_SIMDGROUPS={n}" for n in (4, 8, 16)} <= wide
    assert {f"-DFATTN_VALUE_IN_KEY={n}" for n in ("true", "false")} <= wide
    for kernel, dtype in itertools.product(("decode", "decode_vector"), problems.DTYPES):
        text = {" ".join(macros) for name, macros in pipelines(kernel, dtype) if name == f"{kernel}.metal"}
        found = {(re.findall(r"FATTN_KV_FORMAT=(\d)", one)[0], "FATTN_CHUNKS=4" in one) for one in text}
        assert found == set(itertools.product(FORMAT_NUMBERS, (False, True))), (kernel, dtype)
    merges = {macros for _, macros in pipelines("merge", torch.float16)}
    assert len(merges) == 2  # numbers of simdgroups
    logits = {macros for _, macros in pipelines("logits", torch.float16)}
    assert len(logits) == 8  # vectors that a thread holds, and simdgroups that share a row
