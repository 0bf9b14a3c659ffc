"""Counters are exact on kernels that can be counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from softmetal.simt import Library

SOURCE = """#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;
#define INDEX uint l [[thread_index_in_threadgroup]], uint g [[threadgroup_position_in_grid]]

kernel void operations(device float* o [[buffer(0)]], INDEX) {
  simdgroup_float8x8 a(1.0f), c(0.0f);
  for (int i = 0; i < 5; i++)
    simdgroup_multiply_accumulate(c, a, a, c);
  float x = c.thread_elements()[0];
  for (int i = 0; i < 3; i++)
    x += simd_sum(x) + simd_shuffle_xor(x, 1) + simd_shuffle_down(x, 2);
  threadgroup_barrier(mem_flags::mem_none);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = 0; i < 4; i++)
    simdgroup_barrier(mem_flags::mem_none);
  o[g * 96 + l] = exp2(x);
}

kernel void traffic(device float* o [[buffer(0)]], const device half4* q [[buffer(1)]],
                    const device uchar* mask [[buffer(2)]], constant float2& scale [[buffer(3)]],
                    threadgroup float* shared [[threadgroup(0)]], INDEX) {
  half4 v = q[g * 96 + l];
  shared[l] = mask[l] ? float(v.x + v.w) * scale.y : 0;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float sum = 0;
  for (uint i = 0; i < 8; i++)
    sum += shared[(l + i) % 96];
  o[g * 96 + l] = sum;
}

kernel void fragments(device float* o [[buffer(0)]], const device float* q [[buffer(1)]], INDEX) {
  threadgroup float tile[64];
  simdgroup_float8x8 a, b;
  simdgroup_load(a, q);
  simdgroup_store(a, tile);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_load(b, tile, 8, 0, true);
  simdgroup_store(b, o);
}
"""


@pytest.fixture(scope="module")
def library() -> Library:
    return Library(SOURCE)


@pytest.mark.parametrize("checks", ["", "bytes", "race"])
@pytest.mark.parametrize("order", ["forward", "reverse", "random:5"])
def test_operations(library: Library, checks: str, order: str) -> None:
    pipeline = library.pipeline("operations")
    counters = pipeline.run(
        [np.zeros(96 * 7, np.float32)], (7, 1, 1), (96, 1, 1), checks=checks, order=order, os_threads=2
    )
    groups, simdgroups, threads = 7, 7 * 3, 7 * 96
    assert counters["products"] == 5 * simdgroups
    assert counters["simd_reductions"] == 3 * simdgroups
    assert counters["shuffles"] == 6 * simdgroups
    assert counters["threadgroup_barriers"] == 2 * groups
    assert counters["simdgroup_barriers"] == 4 * simdgroups
    assert counters["exps"] == threads
    assert counters["threadgroups"] == groups


def test_bytes(library: Library) -> None:
    out, q = np.zeros(96 * 7, np.float32), np.ones(96 * 7 * 4, np.float16)
    mask, scale = np.ones(96, np.uint8), np.array([0, 2], np.float32).tobytes()
    counters = library.pipeline("traffic").run(
        [out, q, mask, scale], (7, 1, 1), (96, 1, 1), threadgroup_memory={0: 96 * 4}, checks="bytes"
    )
    threads = 7 * 96
    assert (out == 32).all()
    # A thread reads a half4 and a byte, then 8 floats of threadgroup memory.
    assert counters["bytes_read"]["device"] == threads * (8 + 1)
    assert counters["bytes_written"]["device"] == threads * 4
    assert counters["device_loads"] == 2 * threads and counters["device_stores"] == threads
    assert counters["bytes_read"]["threadgroup"] == threads * 8 * 4
    assert counters["bytes_written"]["threadgroup"] == threads * 4
    assert counters["threadgroup_loads"] == threads * 8 and counters["threadgroup_stores"] == threads
    assert counters["bytes_read"]["constant"] in (threads * 4, threads * 8)  # scale.y or all of scale
    assert counters["bytes_written"]["constant"] == 0


def test_distinct_bytes(library: Library) -> None:
    """A byte counts once per threadgroup that reads it, for all its threads and slots."""
    out, q = np.zeros(96 * 7, np.float32), np.full(96 * 7 * 8, 0x3C, np.uint8)
    scale = np.array([0, 2], np.float32).tobytes()

    def run(mask: np.ndarray, checks: str) -> dict[int, int]:
        arguments = [out, q, mask, scale]
        pipeline = library.pipeline("traffic")
        counters = pipeline.run(
            arguments, (7, 1, 1), (96, 1, 1), threadgroup_memory={0: 96 * 4}, checks=checks
        )
        return counters["buffers_distinct"]

    assert run(np.ones(96, np.uint8), "bytes") == {}
    counted = run(np.ones(96, np.uint8), "distinct")
    assert counted[1] == 7 * 96 * 8 and counted[2] == 7 * 96 and 0 not in counted
    assert counted[3] in (7 * 4, 7 * 8)
    # If the mask is the first bytes of q, the first threadgroup reads them for q anyway.
    counted = run(q[:96], "distinct")
    assert counted[1] + counted[2] == 7 * 96 * 8 + 6 * 96


def test_bytes_of_simdgroup_loads_and_stores(library: Library) -> None:
    q, out = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    counters = library.pipeline("fragments").run([out, q], (1, 1, 1), (32, 1, 1), checks="race,bounds,uninit")
    assert (out.reshape(8, 8) == q.reshape(8, 8).T).all()
    for direction in ("bytes_read", "bytes_written"):
        assert counters[direction]["device"] == counters[direction]["threadgroup"] == 64 * 4


def test_fast_modules_count_no_bytes(library: Library) -> None:
    counters = library.pipeline("operations").run([np.zeros(96, np.float32)], (1, 1, 1), (96, 1, 1))
    assert counters["device_loads"] == counters["device_stores"] == 0
    assert counters["threadgroup_loads"] == counters["threadgroup_stores"] == 0
    assert not any(counters["bytes_read"].values()) and not any(counters["bytes_written"].values())
