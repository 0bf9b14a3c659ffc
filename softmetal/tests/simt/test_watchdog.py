"""A kernel that does not end is stopped, and its line is reported; the process and later dispatches
continue."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from softmetal.simt import KernelError, Library

SOURCE = """#include <metal_stdlib>
using namespace metal;
#define INDEX uint l [[thread_index_in_threadgroup]]
#define KERNEL(NAME) kernel void NAME(device atomic_uint* o [[buffer(0)]], INDEX)

KERNEL(ends) {
  for (uint i = 0; i < 100; i++) atomic_fetch_add_explicit(o, 1u, memory_order_relaxed);
}
KERNEL(empty_loop) {
  if (l == 3)
    while (true) {}  // empty_loop
}
KERNEL(counts) {
  uint n = 0;
  while (n < 1) n += 2 * (simd_sum(1u) == 0);  // counts
  atomic_store_explicit(o, n, memory_order_relaxed);
}
KERNEL(spins) {
  while (atomic_load_explicit(o, memory_order_relaxed) == 0) {}  // spins
}
KERNEL(waits_for_a_lane) {
  if (l == 0)
    while (atomic_load_explicit(o, memory_order_relaxed) == 0) {}  // waits_for_a_lane
  simdgroup_barrier(mem_flags::mem_device);
  atomic_store_explicit(o, 1u, memory_order_relaxed);
}
KERNEL(barriers) { while (true) threadgroup_barrier(mem_flags::mem_device); }  // barriers
"""
SPINNING = ["empty_loop", "counts", "spins", "waits_for_a_lane", "barriers"]


@pytest.fixture(scope="module")
def library() -> Library:
    return Library(SOURCE)


def run(library: Library, name: str, groups: int = 1, **options: Any) -> int:
    out = np.zeros(1, np.uint32)
    library.pipeline(name).run([out], (groups, 1, 1), (64, 1, 1), watchdog=0.2, **options)
    return int(out[0])


@pytest.mark.parametrize("checks", ["", "race,bounds,uninit"], ids=["fast", "checked"])
@pytest.mark.parametrize("order", ["forward", "random:1"])
@pytest.mark.parametrize("name", SPINNING)
def test_an_endless_kernel_is_stopped(library: Library, name: str, order: str, checks: str) -> None:
    (line,) = (i for i, text in enumerate(SOURCE.split("\n"), 1) if f"// {name}" in text)
    start = time.process_time()
    with pytest.raises(KernelError) as caught:
        run(library, name, order=order, checks=checks)
    text = str(caught.value)
    assert text.startswith(f"watchdog: kernel '{name}': thread (")
    # A thread that waits for its simdgroup may be at the end of the kernel, which the compiler has merged.
    lines = {line, line + 2} if name == "counts" else {line}
    assert any(
        f" is at kernel.metal:{n}, and its threadgroup has not ended after 0.2 s" in text for n in lines
    )
    assert time.process_time() - start < 20
    assert run(library, "ends", order=order, checks=checks) == 6400


def test_every_threadgroup_has_its_own_time(library: Library) -> None:
    """Control: the whole dispatch may take longer than the limit of a threadgroup."""
    start = time.thread_time()
    groups = 100
    while time.thread_time() - start < 0.5:
        assert run(library, "ends", groups, os_threads=1) == 6400 * groups
        groups *= 4
