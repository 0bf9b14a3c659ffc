"""`torch.mps.Stream` and its selectors, which the Linux wheel of torch 2.15 and later only declares."""

from __future__ import annotations

from typing import Any

import torch

_MPS = 13  # c10::DeviceType


class Stream(torch.Stream):
    """A stream of the pool, or the stream with this number."""

    def __new__(cls, stream_id: int | None = None, **_: Any) -> Stream:
        if stream_id is None:
            stream_id = torch.Stream(device="mps").stream_id
        return super().__new__(cls, stream_id=stream_id, device_index=0, device_type=_MPS)


def provide() -> None:
    vars(torch._C).update(
        _mps_getCurrentStream=lambda: torch.accelerator.current_stream("mps"),
        _mps_setStream=torch.accelerator.set_stream,
    )
    setattr(torch.mps, "Stream", Stream)  # noqa: B010
    vars(vars(torch.mps)["streams"])["Stream"] = Stream
