"""Metal's API rules: each misuse is reported, and the corrected code is not."""

from __future__ import annotations

from types import ModuleType

import pytest

import softmetal

torch = pytest.importorskip("torch")

MISUSES = {
    "unset buffer": "no buffer is set at index 1 for 'y'",
    "unset threadgroup memory": "no threadgroup memory length is set at index 0",
    "no groups": "grid has a side of 0",
    "no threads": "threadsPerThreadgroup has a side of 0",
    "1025 threads": "1025 threads per threadgroup exceed .* 1024",
    "more threads than the attribute": "65 threads per threadgroup exceed .* 64",
    "offset out of range": "offset 128 is beyond the 128 bytes",
    "buffer offset out of range": "offset 500 is beyond the 128 bytes",
    "offset of an unset buffer": "no buffer is set at index 9",
    "setBytes 4097": "length 4097 at index 2 is not 1..4096",
    "setBytes 0": "length 0 at index 2 is not 1..4096",
    "index 31": "index 31 is above 30",
    "no buffer object": "is not an MTLBuffer of this device",
    "threadgroup memory of 100": "100 at index 0 is not a multiple of 16",
    "threadgroup memory of 64 KiB": "65536 exceeds the device's 32768",
    "static and dynamic threadgroup memory": r"36192 bytes of threadgroup memory \(28000 static\) exceed",
    "nil pipeline": "pipeline state is nil",
    "pop without push": "popDebugGroup without pushDebugGroup",
    "nested dispatch_sync": "would wait for itself",
    "second encoder": "already encoding to this command buffer",
    "commit with an open encoder": "encoder has not ended encoding",
    "encode after endEncoding": "used after endEncoding",
    "wait before commit": "command buffer not committed",
    "commit twice": "committed twice",
    "encoder after commit": "encoding to a command buffer that was committed",
    "encoder off the queue": "only be used in a block on the stream's dispatch queue",
    "kept encoder off the queue": "used outside a block on the stream's dispatch queue",
    "released without endEncoding": "released without endEncoding",
}


@pytest.mark.parametrize("what", MISUSES)
def test_misuse_is_reported_and_survived(kit: ModuleType, what: str) -> None:
    kit.misuse("nothing")
    torch.mps.synchronize()
    before = softmetal.live_objects()
    with pytest.raises(RuntimeError, match=f"Metal validation: .*{MISUSES[what]}"):
        kit.misuse(what)
        torch.mps.synchronize()
    torch.mps.synchronize()
    assert softmetal.live_objects() == before
    kit.misuse("nothing")
    torch.mps.synchronize()


@pytest.mark.parametrize("what", ["nothing", "no misuse of a command buffer"])
def test_control_is_silent(kit: ModuleType, what: str) -> None:
    kit.misuse(what)
    torch.mps.synchronize()
