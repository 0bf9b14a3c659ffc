"""Launches cubins through the CUDA driver. Needs the driver and a current context (torch makes one), but no
compiler."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache
from pathlib import Path

# include/binding.h: an argument structure of this many slots.
SLOTS = 31
SLOT_BYTES = 512


class LaunchError(Exception):
    """The CUDA driver refused a call."""


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise LaunchError(f"{what}: {text.value.decode() if text.value else status}")


class Arguments:
    """The arguments of a launch: device addresses and bytes, by buffer index."""

    def __init__(self, values: Mapping[int, int | bytes]) -> None:
        self._storage = ctypes.create_string_buffer(SLOTS * SLOT_BYTES)
        for slot, value in values.items():
            data = value if isinstance(value, bytes) else value.to_bytes(8, "little")
            if not 0 <= slot < SLOTS or len(data) > SLOT_BYTES:
                raise LaunchError(
                    f"buffer index {slot} with {len(data)} bytes: indices are 0 to {SLOTS - 1}, "
                    f"bytes at most {SLOT_BYTES}"
                )
            ctypes.memmove(ctypes.addressof(self._storage) + slot * SLOT_BYTES, data, len(data))
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._storage))

    @property
    def pointers(self) -> ctypes.Array[ctypes.c_void_p]:
        return self._pointers


class Kernel:
    """A loaded cubin."""

    def __init__(self, cubin: Path) -> None:
        self._image = cubin.read_bytes()
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        driver = _driver()
        _check(driver.cuModuleLoadData(ctypes.byref(self._module), self._image), f"loading {cubin.name}")
        status = driver.cuModuleGetFunction(ctypes.byref(self._function), self._module, b"softmetal_kernel")
        _check(status, f"finding the kernel of {cubin.name}")
        self.name = cubin.name

    def launch(
        self,
        grid: tuple[int, int, int],
        threads: tuple[int, int, int],
        arguments: Arguments,
        stream: int,
    ) -> None:
        """Enqueues on a CUDA stream (torch.cuda.current_stream().cuda_stream)."""
        status = _driver().cuLaunchKernel(
            self._function, *grid, *threads, 0, ctypes.c_void_p(stream), arguments.pointers, None
        )
        _check(status, f"launching {self.name} with grid {grid} and threads {threads}")
