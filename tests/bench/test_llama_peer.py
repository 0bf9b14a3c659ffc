"""llama.cpp's kernels in bench/peers: launched as llama.cpp does, right, and within their memory."""

from __future__ import annotations

import struct

import pytest

pytest.importorskip("softmetal.testing", reason="the peers run on softmetal, which is for Linux")

from bench.backends import counting
from bench.cases import buffers
from bench.cases.calls import Call
from bench.peers import llama_metal, llama_prefill, llama_source, registry
from bench.peers.launch import Launch
from softmetal.testing import KernelError
from tests.conftest import needs_emulator

pytestmark = pytest.mark.host_only

# One and several simdgroups, keys side by side and not, partial last blocks, several rows, masks, dtypes.
VECTOR = [
    Call("decode", 1, 1, 64, 1, 77),
    Call("decode", 1, 1, 96, 3, 300),
    Call("decode", 1, 1, 128, 3, 4200),
    Call("decode", 1, 1, 256, 1, 1100, dtype="bfloat16"),
    Call("decode", 2, 2, 128, 1, 300, batch=3, lengths=(300, 7, 129)),
    Call("decode", 2, 1, 64, 2, 2100, kv_format="int8"),
]
# Whole and partial last steps of keys and tiles of rows, heads that fill no 64 columns, four and eight
# simdgroups, a row that its vector kernel has not.
TILES = [
    *(
        Call("prefill", 2, 1, head_dim, 40, 100, causal=causal)
        for head_dim in (64, 128, 256)
        for causal in (False, True)
    ),
    Call("prefill", 2, 1, 128, 40, 128, causal=True, batch=2),
    Call("prefill", 2, 1, 80, 44, 100, causal=True),
    Call("prefill", 1, 1, 72, 44, 64),
    Call("prefill", 1, 1, 512, 24, 100, causal=True),
    Call("prefill", 1, 1, 128, 40, 100, causal=True, dtype="bfloat16"),
    Call("decode", 2, 1, 80, 1, 130),
]
# Outputs are summed up in float16 in its kernel for bfloat16.
LARGEST_ERROR = {"float16": 2e-6, "bfloat16": 2e-3}


@pytest.fixture(autouse=True)
def needs_llama() -> None:
    if llama_source.folder() is None:
        pytest.skip("LLAMA_CPP_SDIST names no archive of llama-cpp-python")


def launched(call: Call) -> Launch:
    return registry.launch(llama_metal, call)


def run(call: Call, launch: Launch, checks: str = "") -> float:
    """The largest error."""
    operands = buffers.make(call, launch.buffers, launch.scratch, "cpu", seed=0)
    counting.run_on_harness(launch, operands, checks)
    return buffers.errors(call, operands, launch.out_rows_first, "cpu")[0]


def kernels(launch: Launch) -> list[str]:
    return [step.pipeline.kernel.removeprefix("kernel_flash_attn_ext") for step in launch.passes]


# ---- the vector kernel ------------------------------------------------------------------------------------


@needs_emulator
@pytest.mark.parametrize("call", VECTOR, ids=str)
def test_the_vector_kernel_computes_attention(call: Call) -> None:
    first = launched(call)
    assert kernels(first)[-1] == "_vec_reduce" and (kernels(first)[0] == "_pad") == (call.kv_len % 32 != 0)
    for launch in (first, *first.alternatives):
        assert run(call, launch, "race,bounds") < (1e-3 if call.kv_format else LARGEST_ERROR[call.dtype])


@needs_emulator
@pytest.mark.parametrize("place", range(2))
def test_each_added_barrier_is_necessary(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [one for i, one in enumerate(llama_metal._BEFORE) if i != place]
    monkeypatch.setattr(llama_metal, "_BEFORE", left)
    with pytest.raises(KernelError, match="race: kernel 'kernel_flash_attn_ext_vec"):
        for call in VECTOR[:3]:
            run(call, launched(call), "race")


@needs_emulator
def test_llamas_own_threadgroup_memory_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a simdgroup takes several keys side by side, here 4 of D=96: zeros go 256 bytes too far."""
    call = Call("decode", 1, 1, 96, 1, 300)
    given = launched(call).passes[-2].pipeline.threadgroup_memory[0]
    monkeypatch.setattr(llama_metal._Vector, "_overrun_bytes", 0)
    own = launched(call)
    assert given == own.passes[-2].pipeline.threadgroup_memory[0] + 256
    with pytest.raises(KernelError, match=rf"bounds: .*write of 16 bytes.*which has {given - 256} bytes"):
        run(call, own, "bounds")


# ---- the tiles of prefill ---------------------------------------------------------------------------------


@needs_emulator
@pytest.mark.parametrize("call", TILES, ids=str)
def test_the_tiles_compute_attention(call: Call) -> None:
    launch = launched(call)
    suffix = f"_{'bf16' if call.dtype == 'bfloat16' else 'f16'}_dk{call.head_dim}_dv{call.head_dim}"
    before = ["_pad"] if call.kv_len % 64 else []
    assert kernels(launch) == [*before, *(["_blk"] if call.causal else []), suffix]
    assert run(call, launch, "race,bounds") < LARGEST_ERROR[call.dtype]


# ---- the launch rule --------------------------------------------------------------------------------------


def test_kernel_arguments_have_the_offsets_of_the_header() -> None:
    fields = llama_prefill.Operands(Call("prefill", 4, 2, 64, 40, 100, batch=3, causal=True), 64).fields()
    blocks = (40, 100, 40, 1, 3, 200, 8000, 8000)
    assert llama_source.kargs("flash_attn_ext_blk", fields) == struct.pack("5i4x3Q", *blocks)
    query, key = (256, 256 * 40, 256 * 40 * 4), (128, 12800, 25600)
    head = (40, 4, 3, *query, 100, 2, 3, 64, *key, 64, *key, 40, 1, 3, 200, 8000, 8000, 4, 40, 3)
    packed = llama_source.kargs("flash_attn_ext", fields)
    assert packed == struct.pack("3i4x3Q4i3Qi4x3Q3i4x3Q3i4fif4x", *head, 0.125, 0.0, 1.0, 1.0, 4, 0.0)
    del fields["nb31"]
    with pytest.raises(AssertionError, match="nb31"):
        llama_source.kargs("flash_attn_ext", fields)
