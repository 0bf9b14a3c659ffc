"""Every check finds its fault, names the fault and its lines, and is silent on the corrected kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from softmetal.simt import KernelError, Library

ALL = "race,bounds,uninit"

SOURCE = """#include <metal_stdlib>
using namespace metal;
#define INDEX uint l [[thread_index_in_threadgroup]]
#define GROUP uint g [[threadgroup_position_in_grid]]

// A value through threadgroup memory, past a barrier or none.
#define EXCHANGE(name, barrier, other)                                                               \\
  kernel void name(device float* o [[buffer(0)]], INDEX) {                                           \\
    threadgroup float a[64];                                                                         \\
    a[l] = l;                                                                                        \\
    barrier;                                                                                         \\
    o[l] = a[other];                                                                                 \\
  }
EXCHANGE(exchange, threadgroup_barrier(mem_flags::mem_threadgroup), 63 - l)
EXCHANGE(exchange_without_barrier, , (l + 63) % 64)
EXCHANGE(exchange_with_device_barrier, threadgroup_barrier(mem_flags::mem_device), 63 - l)
EXCHANGE(simdgroup_exchange, simdgroup_barrier(mem_flags::mem_threadgroup), l ^ 1)
EXCHANGE(simdgroup_exchange_too_far, simdgroup_barrier(mem_flags::mem_threadgroup), l ^ 32)
EXCHANGE(simdgroup_exchange_unordered, simdgroup_barrier(mem_flags::mem_none), l ^ 1)
#define OVERWRITE(name, barrier)                                                                     \\
  kernel void name(device float* o [[buffer(0)]], INDEX) {                                           \\
    threadgroup float a[64];                                                                         \\
    a[l] = l;                                                                                        \\
    threadgroup_barrier(mem_flags::mem_threadgroup);                                                 \\
    float x = a[63 - l];                                                                             \\
    barrier;                                                                                         \\
    a[l] = x;                                                                                        \\
    o[l] = x;                                                                                        \\
  }
OVERWRITE(overwrite, )
OVERWRITE(overwrite_in_phases, threadgroup_barrier(mem_flags::mem_threadgroup))
kernel void read_by_turns(device float* o [[buffer(0)]], INDEX) {
  threadgroup float a[32];
  if (l == 0) a[0] = 1;
  simdgroup_barrier(mem_flags::mem_threadgroup);
  float x = l == 1 ? a[0] : 0;
  simdgroup_barrier(mem_flags::mem_threadgroup);
  x += l == 2 ? a[0] : 0;
  if (l == 2) a[0] = 3;
  o[l] = x;
}
#define DEVICE_EXCHANGE(name, memory)                                                                \\
  kernel void name(device float* o [[buffer(0)]], INDEX) {                                           \\
    o[l] = l;                                                                                        \\
    threadgroup_barrier(mem_flags::memory);                                                          \\
    o[64 + l] = o[63 - l];                                                                           \\
  }
DEVICE_EXCHANGE(device_exchange, mem_device)
DEVICE_EXCHANGE(device_exchange_wrong_flags, mem_threadgroup)
kernel void own_part(device float* o [[buffer(0)]], INDEX, GROUP) { o[g * 64 + l] = l; }
kernel void other_group(device float* o [[buffer(0)]], INDEX, GROUP) { o[l] = g; }
kernel void read_of_other_group(device float* o [[buffer(0)]], INDEX, GROUP) {
  float x = o[l];
  o[g == 0 ? 64 + l : l] = x + 1;
}
kernel void same_value(device float* o [[buffer(0)]], INDEX) {
  threadgroup float a[1];
  a[0] = 3;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  o[l] = a[0];
}
kernel void other_value(device float* o [[buffer(0)]], INDEX) {
  threadgroup float a[1];
  a[0] = l < 63 ? 3 : 4;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  o[l] = a[0];
}
kernel void bytes(device uchar* o [[buffer(0)]], INDEX) { o[l] = l; }
kernel void half_of_a_word(device half* o [[buffer(0)]], device uint* p [[buffer(1)]], INDEX) {
  if (l == 0) p[0] = 1;
  if (l == 1) o[1] = 2;
}

kernel void past_the_end(device float* o [[buffer(0)]], INDEX) { o[l + 4] = 1; }
kernel void before_the_start(const device float* q [[buffer(1)]], device float* o [[buffer(0)]], INDEX) {
  o[l] = q[int(l) - 1];
}
kernel void neighbour(device float* o [[buffer(0)]], INDEX) {
  threadgroup float a[64];
  threadgroup float b[64];
  a[l] = 1;
  b[l] = 2;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  o[l] = a[l + 64] + b[l];
}
kernel void argument_neighbour(device float* o [[buffer(0)]], threadgroup float* a [[threadgroup(0)]],
                               threadgroup float* b [[threadgroup(1)]], INDEX) {
  a[l] = b[l] = 1;
  o[l] = a[l + 1] + b[l];
}
kernel void unbound(device float* o [[buffer(0)]], device float* p [[buffer(1)]], INDEX) { o[l] = p[l]; }
kernel void aligned(device float* o [[buffer(0)]], const device float4* q [[buffer(1)]], INDEX) {
  o[l] = q[l].x;
}
kernel void misaligned(device float* o [[buffer(0)]], const device float* q [[buffer(1)]], INDEX) {
  float4 v = ((const device float4*)(q + 1))[l];
  o[l] = v.x + v.w;
}
kernel void misaligned_component(device float* o [[buffer(0)]], const device float* q [[buffer(1)]], INDEX) {
  o[l] = ((const device float4*)(q + 1))[l].zw.y;
}
kernel void packed(device float* o [[buffer(0)]], const device packed_float4* q [[buffer(1)]], INDEX) {
  packed_float4 v = q[l];
  o[l] = v.x + v.w + q[l][l % 4];
}
kernel void writes_read_only(const device float* q [[buffer(0)]], INDEX) { ((device float*)q)[l] = 1; }
struct Block {
  float x[8];
};
kernel void struct_copy(device float* o [[buffer(0)]], const device Block* q [[buffer(1)]], INDEX) {
  Block b = q[l];
  o[l] = b.x[l % 8];
}

kernel void uninitialised(device float* o [[buffer(0)]], INDEX) {
  threadgroup float a[64];
  if (l != 7) a[l] = l;
  o[l] = a[l];
}
"""


@pytest.fixture(scope="module")
def library() -> Library:
    return Library(SOURCE, mode="checked")


def launch(
    library: Library, name: str, buffers: list, checks: str = ALL, groups: int = 1, **options: Any
) -> dict:
    return library.pipeline(name).run(buffers, (groups, 1, 1), (64, 1, 1), checks=checks, **options)


def findings(library: Library, name: str, buffers: list, **options: Any) -> list[str]:
    with pytest.raises(KernelError) as caught:
        launch(library, name, buffers, **options)
    return caught.value.findings


def line_of(text: str) -> str:
    """Returns "kernel.metal:N" for the only line of the source with this text."""
    numbers = [i for i, line in enumerate(SOURCE.split("\n"), 1) if text in line]
    assert len(numbers) == 1, numbers
    return f"kernel.metal:{numbers[0]}"


def floats(count: int = 128) -> np.ndarray:
    return np.zeros(count, np.float32)


ORDERS = ["forward", "reverse", "random:3"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("exchange", 3),
        ("overwrite_in_phases", 1),
        ("simdgroup_exchange", 1),
        ("device_exchange", 1),
        ("own_part", 2),
        ("same_value", 2),
        ("bytes", 1),
    ],
)
def test_ordered_kernels_are_quiet(library: Library, name: str, groups: int, order: str) -> None:
    launch(library, name, [floats()], groups=groups, order=order)


def test_reads_that_a_simdgroup_barrier_orders_before_a_write(library: Library) -> None:
    out = floats(32)
    library.pipeline("read_by_turns").run([out], (1, 1, 1), (32, 1, 1), checks=ALL)
    assert out.tolist()[:3] == [0, 1, 1]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("name", "memory", "groups"),
    [
        ("exchange_without_barrier", "threadgroup array 'a'", 1),
        ("exchange_with_device_barrier", "threadgroup array 'a'", 1),
        ("overwrite", "threadgroup array 'a'", 1),
        ("simdgroup_exchange_too_far", "threadgroup array 'a'", 1),
        ("simdgroup_exchange_unordered", "threadgroup array 'a'", 1),
        ("device_exchange_wrong_flags", "buffer 0 'o'", 1),
        ("other_group", "buffer 0 'o'", 2),
        ("read_of_other_group", "buffer 0 'o'", 2),
        ("other_value", "threadgroup array 'a'", 1),
    ],
)
def test_races(library: Library, name: str, memory: str, groups: int, order: str) -> None:
    found = findings(library, name, [floats()], checks="race", groups=groups, order=order)
    assert all(
        f.startswith(f"race: kernel '{name}': ") and memory in f and " races with the " in f for f in found
    )


def test_a_race_names_both_places_and_threads(library: Library) -> None:
    (found,) = findings(library, "other_value", [floats()], checks="race")
    place = line_of("a[0] = l < 63 ? 3 : 4;")
    assert found == (
        f"race: kernel 'other_value': write of 4 bytes at byte 0 of threadgroup array 'a' at {place} "
        "by thread (63,0,0) of threadgroup (0,0,0) races with the write "
        f"at {place} by thread (62,0,0) of threadgroup (0,0,0)"
    )


def test_race_detection_is_exact_to_the_byte(library: Library) -> None:
    memory = np.zeros(4, np.uint32)
    launch(library, "half_of_a_word", [memory[1:], memory[:1]], checks="race")
    found = findings(library, "half_of_a_word", [memory[:1], memory[:1]], checks="race")
    assert "races with the write" in found[0]


def test_repeated_findings_are_reported_once(library: Library) -> None:
    found = findings(library, "exchange_without_barrier", [floats()], checks="race")
    assert len(found) == len(set(found)) <= 2


def test_bounds_of_buffers_are_exact(library: Library) -> None:
    """A store out of bounds does not happen."""
    launch(library, "past_the_end", [floats(68)])
    memory = floats(256)
    (found,) = findings(library, "past_the_end", [memory[:67]])
    assert not memory[67:].any()
    assert found == (
        "bounds: kernel 'past_the_end': write of 4 bytes at byte 268 of buffer 0 'o', which has 268 bytes at "
        f"{line_of('o[l + 4] = 1;')} by thread (63,0,0) of threadgroup (0,0,0)"
    )
    (found,) = findings(library, "before_the_start", [floats(64), memory[64:128]])
    assert "read of 4 bytes at byte -4 of buffer 1 'q', which has 256 bytes" in found


def test_bounds_between_threadgroup_arrays(library: Library) -> None:
    (found,) = findings(library, "neighbour", [floats()])
    assert "read of 4 bytes at byte 256 of threadgroup array 'a', which has 256 bytes" in found
    lengths = {0: 65 * 4, 1: 64 * 4}
    launch(library, "argument_neighbour", [floats()], checks="bounds", threadgroup_memory=lengths)
    lengths = {0: 64 * 4, 1: 64 * 4}
    (found,) = findings(
        library, "argument_neighbour", [floats()], checks="bounds", threadgroup_memory=lengths
    )
    assert "of threadgroup array '[[threadgroup(0)]]'" in found


def test_an_unbound_buffer(library: Library) -> None:
    launch(library, "unbound", [floats(), floats()])
    (found,) = findings(library, "unbound", [floats(), None])
    assert "through an unbound buffer" in found


def test_memory_bound_for_reading_only(library: Library) -> None:
    memory = floats(64)
    (found,) = findings(library, "writes_read_only", [memory])
    assert "write of 4 bytes at byte 0 of buffer 0 'q', which is read-only" in found and not memory.any()


def test_copies_of_structs_are_accesses(library: Library) -> None:
    launch(library, "struct_copy", [floats(64), floats(512)])
    (found,) = findings(library, "struct_copy", [floats(64), floats(511)])
    assert "of buffer 1 'q', which has 2044 bytes" in found
    counters = launch(library, "struct_copy", [floats(64), floats(512)])
    assert counters["bytes_read"]["device"] == 64 * 32


def test_alignment_of_vectors(library: Library) -> None:
    out = floats()
    launch(library, "aligned", [out, floats(256)])
    launch(library, "packed", [out, floats(257)[1:]])
    (found,) = findings(library, "misaligned", [out, floats(257)])
    assert found == (
        "misaligned: kernel 'misaligned': access to byte 4 of buffer 1 'q', as a type that is aligned to 16 "
        f"bytes at {line_of('float4 v = ((const device float4*)')} by thread (0,0,0) of threadgroup (0,0,0)"
    )


def test_alignment_of_a_vector_whose_component_is_read(library: Library) -> None:
    (found,) = findings(library, "misaligned_component", [floats(), floats(257)])
    assert "access to byte 4 of buffer 1 'q', as a type that is aligned to 16 bytes" in found
    assert line_of("((const device float4*)(q + 1))[l].zw.y") in found


def test_uninitialised_threadgroup_memory(library: Library) -> None:
    launch(library, "uninitialised", [floats()], checks="race,bounds")
    (found,) = findings(library, "uninitialised", [floats()], checks="uninit")
    assert found == (
        "uninitialised: kernel 'uninitialised': read of 4 bytes at byte 28 of threadgroup array 'a' at "
        f"{line_of('o[l] = a[l];')} by thread (7,0,0) of threadgroup (0,0,0)"
    )


def test_threadgroup_memory_is_nan_at_the_start_in_every_mode() -> None:
    out = floats()
    Library(SOURCE).pipeline("uninitialised").run([out], (1, 1, 1), (64, 1, 1))
    assert np.isnan(out[7]) and not np.isnan(np.delete(out[:64], 7)).any()


SLOTS = """#include <metal_stdlib>
using namespace metal;
kernel void slots(device float* a [[buffer(0)]], const device char* b [[buffer(1)]],
                  constant float& c [[buffer(2)]], device long* o [[buffer(3)]],
                  constant int& by [[buffer(4)]], constant bool& writes [[buffer(5)]]) {
  o[0] = (const device char*)a == b;
  o[1] = b - (const device char*)a;
  o[2] = c;
  o[4] = ulong(&c) == min(ulong(a), ulong(b));
  if (writes)
    a[by] = 1;
  else
    o[3] = ((const device float*)b)[by];
}
"""


@pytest.mark.parametrize("checks", ["", ALL, "bounds"])
@pytest.mark.parametrize("offset", [0, 16, -16])
def test_slots_of_one_buffer_have_its_addresses(offset: int, checks: str) -> None:
    """ggml binds the queries in place of absent sinks, and compares the pointers."""
    memory, out = np.arange(64, dtype=np.float32), np.zeros(5, np.int64)
    pipeline = Library(SLOTS).pipeline("slots")

    def slots(by: int, writes: bool) -> list[Any]:
        a, b = (memory[max(0, sign * offset) :] for sign in (-1, 1))
        return [a, b, memory, out, np.int32(by).tobytes(), np.bool_(writes).tobytes()]

    for writes in (False, True):
        pipeline.run(slots(7, writes), (1, 1, 1), (1, 1, 1), checks=checks)
        assert out[:3].tolist() == [offset == 0, 4 * offset, memory[0]] and out[4] == 1
    assert out[3] == max(0, offset) + 7
    if checks:
        for by, writes in ((64, False), (64, True), (-17, True)):
            with pytest.raises(
                KernelError, match=f"^bounds: .*{'write' if writes else 'read'} of 4 bytes at byte"
            ):
                pipeline.run(slots(by, writes), (1, 1, 1), (1, 1, 1), checks=checks)


def test_constant_memory_races_with_writes_to_its_buffer() -> None:
    pipeline = Library("""#include <metal_stdlib>
    kernel void k(device float* a [[buffer(0)]], constant float* c [[buffer(1)]],
                  device float* o [[buffer(2)]], uint i [[thread_position_in_threadgroup]]) {
      a[i] = i + 1;
      o[i] = c[(i + 1) % 64];
    }""").pipeline("k")
    memory, out = np.zeros(64, np.float32), floats(64)
    pipeline.run([memory, memory.copy(), out], (1, 1, 1), (64, 1, 1), checks="race")
    with pytest.raises(KernelError, match="^race: "):
        pipeline.run([memory, memory, out], (1, 1, 1), (64, 1, 1), checks="race")


def test_checks_need_the_callbacks_of_the_checked_mode() -> None:
    library = Library(SOURCE)
    pipeline = library.pipeline("exchange")
    library._modules["checked"] = library.module("fast")
    with pytest.raises(KernelError, match="compile it in checked mode"):
        pipeline.run([floats()], (1, 1, 1), (64, 1, 1), checks="race")
