"""The kernels as every version of the language that softmetal knows would read them: one pipeline of each
kernel for each row of the tuning tables, each cache format, and each number of chunks at once; a third of
them, by the day (`--third`). test_offline_compiler.py asks Apple's compiler the same. And what the headers
for NVIDIA GPUs and for Mesa's compiler must define, without nvcc and Mesa.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

pytest.importorskip("softmetal.testing", reason="the language is checked by softmetal, which is for Linux")

import softmetal
from softmetal.testing import compile_errors
from tests.helpers import problems, tensor_kernels
from tests.helpers.direct_launch import kernel_text
from tests.helpers.documents import ROOT
from tests.kernels.test_offline_compiler import (
    KERNELS,
    LANGUAGE,
    NEWER,
    TENSOR_LANGUAGE,
    Pipeline,
    pipelines,
    plans,
)

pytestmark = pytest.mark.host_only


@cache
def one_of_each() -> dict[tuple[str, str], Pipeline]:
    """(what it has, source) -> a pipeline."""
    found: dict[tuple[str, str], Pipeline] = {}
    for kernel, dtype in itertools.product(KERNELS, problems.DTYPES):
        for plan in plans(kernel, dtype):
            for launch in plan.passes:
                macros = tuple(f"{name}={value}" for name, value in launch["macros"].items())
                kinds = (macro for macro in macros if "KV_FORMAT" in macro or "CHUNKS" in macro)
                for has in (plan.data["tuning"], *kinds):
                    found.setdefault((has, launch["source"]), (launch["source"], macros))
    return found


def read_by(standard: str, found: Iterable[Pipeline]) -> Iterable[Pipeline]:
    """All by the newest version, and one of each source by others: what these refuse and the newest takes, a
    lambda, the oldest refuses, by which all other tests compile."""
    return found if standard == NEWER[-1] else {pipeline[0]: pipeline for pipeline in found}.values()


def refusals(source: str, macros: tuple[str, ...], standard: str) -> str:
    return compile_errors(source, macros, standard, name="kernel.metal")


@pytest.mark.rotating
@pytest.mark.parametrize("standard", [LANGUAGE, *NEWER])
def test_every_tuning_is_read(standard: str, pytestconfig: pytest.Config) -> None:
    found = one_of_each()
    assert {("FATTN_CHUNKS=4", "decode.metal"), ("FATTN_KV_FORMAT=3", "decode_vector.metal")} <= found.keys()
    third, every = pytestconfig.getoption("--third"), sorted({*found.values()})
    due = every if third == "all" else every[int(third) :: 3]
    for name, macros in read_by(standard, due):
        if "tensor" not in name or standard >= TENSOR_LANGUAGE:
            assert refusals(kernel_text(name), macros, standard) == "", macros


def others() -> Iterator[Pipeline]:
    """Every cache format, the shortest and the longest rows of logits, maps of masks, and some others."""
    found = [p for dtype in problems.DTYPES for p in pipelines("cache", dtype)]
    of_format = {next(m for m in macros if "KV_FORMAT" in m): (name, macros) for name, macros in found}
    assert len(of_format) == 4
    yield from of_format.values()
    for dtype in problems.DTYPES:
        shapes = pipelines("logits", dtype)
        yield from (shapes[0], shapes[-1])
    yield from set(pipelines("mask_map", torch.float16))
    yield from pipelines("rotary", torch.bfloat16)[::16]
    yield from pipelines("rms_norm", torch.bfloat16)[::12]
    yield from pipelines("gated_delta_rule", torch.bfloat16)[::6]
    yield from pipelines("causal_conv1d", torch.bfloat16)[::6]
    yield from pipelines("gated_delta_step", torch.bfloat16)[::6]


@pytest.mark.parametrize("standard", [LANGUAGE, *NEWER])
def test_the_other_kernels_are_read(standard: str) -> None:
    for name, macros in read_by(standard, others()):
        named = tuple(macro.removeprefix("-D") for macro in macros)
        assert refusals(kernel_text(name), named, standard) == "", (name, macros)


@cache
def tensor_pipelines(state: str) -> list[Pipeline]:
    """Kernels and probe for padded, narrow, wide and latent heads; the last have one variant."""
    kernels = ("prefill_tensor", "prefill_latent_tensor", "backward_tensor")
    found = [p for k in kernels for dtype in tensor_kernels.DTYPES for p in pipelines(k, dtype)]
    backwards = 2 * len(tensor_kernels.DIMS) * len(tensor_kernels.STATES)
    assert len(found) > (2 * backwards + 2) * len(tensor_kernels.DTYPES), "and those of decodes"
    requested = f"-DFATTN_REGISTERS={int(state == 'registers')}"
    heads = {f"-DFATTN_HEAD_DIM={dim}" for dim in (72, 128, 256, tensor_kernels.LATENT)}
    return [
        (name, tuple(macro.removeprefix("-D") for macro in macros))
        for name, macros in found
        if requested in macros and heads & set(macros)
    ]


@pytest.mark.parametrize("state", tensor_kernels.STATES)
@pytest.mark.parametrize("standard", [s for s in (LANGUAGE, *NEWER) if s >= TENSOR_LANGUAGE])
def test_tensor_kernels_are_read(standard: str, state: str) -> None:
    for name, macros in read_by(standard, tensor_pipelines(state)):
        assert refusals(kernel_text(name), macros, standard) == "", (name, macros)


def test_tensor_kernels_need_their_version() -> None:
    (name, macros), *_ = tensor_pipelines("registers")
    assert "tensor" in refusals(kernel_text(name), macros, LANGUAGE)


def test_versions_are_read_differently() -> None:
    source = "#include <metal_stdlib>\nstruct S { float x; float f() { thread float& r = x; return r; } };\n"
    source += "kernel void k(device float* y [[buffer(0)]]) { S s; s.x = 1; y[0] = s.f(); }\n"
    assert refusals(source, (), "metal4.0") == ""
    assert "from MSL 4.1 on" in refusals(source, (), "metal4.1")


def structs_of_fragments(text: str) -> dict[str, bool]:
    """For each struct with a member that holds fragments: whether its constructor is `thread`, which
    softmetal does not require."""
    structs = re.findall(r"^struct (\w+) \{\n(.*?)^\};", text, re.MULTILINE | re.DOTALL)
    member = re.compile(r"^  (?:OperandFragment|simdgroup_float8x8) \w+(?:\[.*\])?;", re.MULTILINE)
    return {name: f"  {name}() thread {{" in body for name, body in structs if member.search(body)}


def test_a_struct_of_fragments_is_made_in_thread() -> None:
    """From MSL 4.1 on an implicit constructor belongs to the generic address space, and that of a fragment
    may be `thread` only."""
    sources = ("prefill", "prefill_wide", "decode", "decode_wide", "decode_vector")
    found: dict[str, bool] = {}
    for source in (*sources, "backward_query", "backward_key"):
        found |= structs_of_fragments(kernel_text(source))
    forward = {"QueryRegisters", "AttentionState", "BlockProducts", "QueryColumns"}
    backward = {"OwnedRows", "ProductBlocks", "QueryGradient", "KeyGradients"}
    assert found == dict.fromkeys(forward | backward, True)
    assert structs_of_fragments("struct S {\n  OperandFragment f[2];\n};\n") == {"S": False}


def group_functions(text: str) -> set[str]:
    """The functions of simdgroups and threadgroups that it calls."""
    return set(re.findall(r"\b((?:simd|simdgroup|threadgroup)_\w+)\(", text))


def defined(header: str) -> set[str]:
    return set(re.findall(r"(?:SOFTMETAL_INLINE \w+ |\b(?:SOFTMETAL|AGX)_[A-Z]+\()(\w+)[(,]", header))


@pytest.mark.parametrize("translator", ["cuda", "agx"])
def test_headers_define_the_functions_of_groups(translator: str) -> None:
    called = group_functions("\n".join(path.read_text() for path in (ROOT / "csrc/kernels").glob("*/*")))
    assert {"simd_or", "simd_shuffle_xor", "simdgroup_multiply_accumulate", "threadgroup_barrier"} <= called
    sources = Path(softmetal.__file__).parent
    own, shared = (sources / translator / "include").iterdir(), (sources / "msl" / "common").iterdir()
    header = "\n".join(path.read_text() for path in (*own, *shared))
    assert called <= defined(header)
    without = re.sub(r"^.*\(simd_or, .*$", "", header, flags=re.MULTILINE)
    assert called - defined(without) == {"simd_or"}, "the control"
