"""The compile driver: command line, cache, and Metal programs that nobody here wrote."""

from __future__ import annotations

import importlib.util
import math
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from softmetal.msl.compile import Program, compile_program
from softmetal.simt.harness import Library

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


def test_concurrent_compiles_of_one_program(tmp_path: Path) -> None:
    program = Program(SOURCE, macros=("VALUE=3",))
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: compile_program(program, "fast", tmp_path), range(4)))
    assert len(set(paths)) == 1 and [p.name for p in tmp_path.iterdir()] == [paths[0].name]


# ---- the attention kernels that torch's wheel carries as headers --------------------------------------------------------------

TORCH_HEADERS = Path(importlib.util.find_spec("torch").origin).parent / "include"  # type: ignore[union-attr, arg-type]
PREFILL = """
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
#include <c10/metal/utils.h>
using namespace metal;
#include <ATen/native/mps/kernels/PrefillAttention.h>
"""
DECODE = """
#include <metal_stdlib>
#include <metal_simdgroup>
using namespace metal;
#include <c10/metal/common.h>
#include <ATen/native/mps/kernels/DecodeAttention.h>
"""
DTYPES = [("float32", "float", 2e-6), ("float16", "half", 2e-3), ("bfloat16", "bfloat", 2e-2)]


def attention_problem(dtype: str, heads: int, kv_heads: int, q_len: int, kv_len: int, dim: int):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    q = torch.randn(1, heads, q_len, dim).to(kind)
    k = torch.randn(1, kv_heads, kv_len, dim).to(kind)
    v = torch.randn(1, kv_heads, kv_len, dim).to(kind)
    reference = torch.nn.functional.scaled_dot_product_attention(
        q.float(), *(x.float().repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    )
    return q, k, v, torch.full_like(q, math.nan), reference


@pytest.mark.parametrize(("dtype", "name", "tolerance"), DTYPES)
def test_torch_prefill_attention(dtype: str, name: str, tolerance: float) -> None:
    q, k, v, out, reference = attention_problem(dtype, 4, 2, 77, 93, 64)
    kernel = f"prefill_attention_{dtype}_bq32_bk32_bd64_wm4_wn1_hm0_dc0_mask{dtype}"
    library = Library(PREFILL, include=[TORCH_HEADERS], only=kernel[: kernel.index("_wm")] + ".*_hm0_dc0")
    strides = [s for x in (q, k, v, out) for s in x.stride()[:3]]
    params = struct.pack("<6i2f12i", 1, 4, 64, 77, 93, 2, 64**-0.5, 1.0, *strides)
    (full_name,) = library.names()
    library.pipeline(full_name).run([q, k, v, out, params, bytes(16)], grid=(3, 4, 1), threads=(32, 4, 1))
    assert (out.float() - reference).abs().max() < tolerance


@pytest.mark.parametrize(("dtype", "name", "tolerance"), DTYPES)
def test_torch_decode_attention(dtype: str, name: str, tolerance: float) -> None:
    q, k, v, out, reference = attention_problem(dtype, 4, 2, 1, 93, 64)
    kernel = f"sdpa_vector_{name}_64_64_masknone"
    library = Library(DECODE, include=[TORCH_HEADERS], only=f"^{kernel}$")

    def four(dimension: int, last: int) -> bytes:
        return struct.pack("<4I", *(x.stride(dimension) for x in (q, k, v)), last)

    buffers = [q, k, v, out, struct.pack("<I", 2), struct.pack("<I", 93), four(1, 0), four(2, 0),
               struct.pack("<f", 64**-0.5), None, bytes(16), four(0, 4)]  # fmt: skip
    library.pipeline(kernel).run(buffers, grid=(4, 1, 1), threads=(1024, 1, 1))
    assert (out.float() - reference).abs().max() < tolerance
