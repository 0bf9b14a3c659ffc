"""Compiles a .metal source and runs its kernels on the SIMT runtime, without the Metal framework.

    library = Library("kernels.metal", defines={"D": 64})
    pipeline = library.pipeline("scale", constants={0: True})
    counters = pipeline.run([x, struct.pack("<f", 2.0)], grid=(4, 1, 1), threads=(128, 1, 1))

Buffers are numpy arrays, torch CPU tensors (device memory, in place), bytes (as setBytes) or None (unbound).
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from softmetal.msl.arithmetic import Arithmetic
from softmetal.msl.compile import CompileError, Program, compile_program
from softmetal.msl.language import DEFAULT
from softmetal.paths import RUNTIME_LIBRARY
from softmetal.settings import CHECKS, ORDERS, Settings, number_and_seed, uint32

_MAX_BUFFERS = 31
_SPACES = ("other", "device", "constant", "threadgroup")
_COUNTS = (
    "products",
    "simd_reductions",
    "shuffles",
    "threadgroup_barriers",
    "simdgroup_barriers",
    "exps",
    "threadgroups",
    "tensor_products",
    "device_loads",
    "device_stores",
    "threadgroup_loads",
    "threadgroup_stores",
)


class KernelError(RuntimeError):
    """A launch failed or a check found something; `findings` has a message for each."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.findings = text.split("\n")


# The structures of abi.h.
class _Uint3(ctypes.Structure):
    _fields_ = uint32("x", "y", "z")


class _Arguments(ctypes.Structure):
    _fields_ = [
        ("buffer", ctypes.c_void_p * _MAX_BUFFERS),
        ("buffer_length", ctypes.c_uint64 * _MAX_BUFFERS),
        ("threadgroup_length", ctypes.c_uint32 * _MAX_BUFFERS),
    ]


_UNSUPPORTED = 4  # SOFTMETAL_ARG_UNSUPPORTED


class _Argument(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), *uint32("kind", "index", "used")]


class _Kernel(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("entry", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        *uint32("argument_count", "max_threads", "threadgroup_bytes", "constant_count"),
        ("constants", ctypes.c_void_p),
    ]


class _FunctionConstant(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), *uint32("index", "type", "required")]


class _Table(ctypes.Structure):
    _fields_ = [
        *uint32("abi_version", "kernel_count"),
        ("kernels", ctypes.POINTER(_Kernel)),
        *uint32("checked", "function_constant_count"),
        ("function_constants", ctypes.POINTER(_FunctionConstant)),
    ]


class _Constant(ctypes.Structure):
    _fields_ = [("index", ctypes.c_uint32), ("bits", ctypes.c_uint64)]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.POINTER(_Kernel)),
        ("arguments", ctypes.POINTER(_Arguments)),
        ("grid", _Uint3),
        ("threads", _Uint3),
    ]


class _Counters(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in _COUNTS),
        ("bytes_read", ctypes.c_uint64 * len(_SPACES)),
        ("bytes_written", ctypes.c_uint64 * len(_SPACES)),
        ("buffers_read", ctypes.c_uint64 * _MAX_BUFFERS),
        ("buffers_written", ctypes.c_uint64 * _MAX_BUFFERS),
        ("buffers_distinct", ctypes.c_uint64 * _MAX_BUFFERS),
    ]


@cache
def _runtime() -> ctypes.CDLL:
    if not RUNTIME_LIBRARY.exists():
        raise RuntimeError(f"{RUNTIME_LIBRARY} is not built; run `python -m softmetal build`")
    library = ctypes.CDLL(str(RUNTIME_LIBRARY), mode=ctypes.RTLD_GLOBAL)
    library.softmetal_load.restype = ctypes.c_void_p
    library.softmetal_table.restype = ctypes.POINTER(_Table)
    library.softmetal_table.argtypes = [ctypes.c_void_p]
    library.softmetal_unload.argtypes = [ctypes.c_void_p]
    library.softmetal_current_settings.restype = ctypes.POINTER(Settings)
    return library


def _take_text(pointer: ctypes.c_void_p) -> str:
    text = ctypes.string_at(pointer.value or 0).decode()
    ctypes.CDLL(None).free(pointer)
    return text


def _constant_bits(value: bool | int | float) -> int:
    packed = struct.pack("<f", value) if isinstance(value, float) else struct.pack("<q", value)
    return int.from_bytes(packed.ljust(8, b"\0"), "little")


class _Memory:
    """Address and length of a bound argument; keeps the argument alive."""

    def __init__(self, value: Any) -> None:
        self.owner = value
        if isinstance(value, bytes):
            self.owner = ctypes.create_string_buffer(value, len(value))
            self.address, self.length = ctypes.addressof(self.owner), len(value)
        elif hasattr(value, "data_ptr"):
            self.address = value.data_ptr()
            self.length = self._extent(value.shape, value.stride()) * value.element_size()
        else:
            strides = [s // value.itemsize for s in value.strides]
            self.address = value.ctypes.data
            self.length = self._extent(value.shape, strides) * value.itemsize

    @staticmethod
    def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
        if 0 in shape:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


class Library:
    """A .metal file, or source text if it contains a newline, compiled on demand in each mode.

    `include` lists folders of headers; `only` is a regular expression of the kernels to export; `cache`
    replaces the usual cache folder, and `std` is the version of the language, such as metal4.0.
    """

    def __init__(
        self,
        source: str | Path,
        defines: Mapping[str, object] | None = None,
        mode: str = "fast",
        include: Sequence[str | Path] = (),
        only: str | None = None,
        arithmetic: Arithmetic | None = None,
        cache: Path | None = None,
        std: str = DEFAULT,
    ) -> None:
        is_text = isinstance(source, str) and "\n" in source
        self._program = Program(
            source=str(source) if is_text else Path(source).read_text(),
            name="kernel.metal" if is_text else Path(source).name,
            macros=tuple(f"{name}={value}" for name, value in (defines or {}).items()),
            include=tuple(str(folder) for folder in include),
            only=only,
            arithmetic=arithmetic or Arithmetic(),
            std=std,
        )
        self._mode = mode
        self._cache = cache
        self._modules: dict[str, Path] = {}
        self.module(mode)

    def module(self, mode: str) -> Path:
        if mode not in self._modules:
            try:
                self._modules[mode] = compile_program(self._program, mode, self._cache)
            except CompileError as error:
                raise KernelError(str(error)) from error
        return self._modules[mode]

    def names(self) -> list[str]:
        loaded = _Loaded(self.module(self._mode), {})
        return list(loaded.kernels)

    def function_constants(self) -> dict[str, int]:
        """Indices of function constants, by name."""
        return _Loaded(self.module(self._mode), {}).function_constants

    def pipeline(self, name: str, constants: Mapping[int, bool | int | float] | None = None) -> Pipeline:
        return Pipeline(self, name, dict(constants or {}), self._mode)


class _Loaded:
    """A private copy of a compiled module."""

    def __init__(self, path: Path, constants: Mapping[int, bool | int | float]) -> None:
        self._runtime = _runtime()
        values = (_Constant * len(constants))()
        for slot, (index, value) in zip(values, constants.items(), strict=True):
            slot.index, slot.bits = index, _constant_bits(value)
        error = ctypes.c_void_p()
        self._handle = self._runtime.softmetal_load(
            str(path).encode(), values, ctypes.c_size_t(len(constants)), ctypes.byref(error)
        )
        if not self._handle:
            raise KernelError(_take_text(error))
        table = self._runtime.softmetal_table(self._handle).contents
        self.kernels = {table.kernels[i].name.decode(): table.kernels[i] for i in range(table.kernel_count)}
        constants_of_module = table.function_constants[: table.function_constant_count]
        self.function_constants = {one.name.decode(): one.index for one in constants_of_module}

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._runtime.softmetal_unload(self._handle)


class Pipeline:
    def __init__(
        self, library: Library, name: str, constants: Mapping[int, bool | int | float], mode: str
    ) -> None:
        self._library = library
        self._name = name
        self._constants = constants
        self._mode = mode
        self._loaded: dict[str, _Loaded] = {}
        self._kernel(mode)

    def _kernel(self, mode: str) -> _Kernel:
        if mode not in self._loaded:
            self._loaded[mode] = _Loaded(self._library.module(mode), self._constants)
        kernels = self._loaded[mode].kernels
        if self._name not in kernels:
            raise KernelError(f"no kernel '{self._name}' in the library; it has {', '.join(kernels)}")
        kernel = kernels[self._name]
        for argument in ctypes.cast(kernel.arguments, ctypes.POINTER(_Argument))[: kernel.argument_count]:
            if argument.kind == _UNSUPPORTED:
                raise KernelError(
                    f"kernel '{self._name}' takes '{argument.name.decode()}', a texture or a sampler, which "
                    "softmetal does not support; pass a buffer instead"
                )
        return kernel

    @property
    def static_threadgroup_bytes(self) -> int:
        """Bytes of threadgroup memory that the kernel declares, as staticThreadgroupMemoryLength."""
        return int(self._kernel(self._mode).threadgroup_bytes)

    def run(
        self,
        buffers: Sequence[Any],
        grid: Sequence[int],
        threads: Sequence[int],
        threadgroup_memory: Mapping[int, int] | None = None,
        order: str = "forward",
        checks: str | Iterable[str] = (),
        os_threads: int = 0,
        watchdog: float = 60,
        tensor_layout: str | None = None,
    ) -> dict[str, Any]:
        """Launches `grid` threadgroups of `threads` threads and returns the counters.

        `checks` (race, bounds, uninit, bytes, distinct) run the checked variant of the kernel.
        `order` is forward, reverse or random:SEED. `watchdog` limits the seconds of a threadgroup (0: no
        limit). `tensor_layout` is m5, blocks8 or random:SEED, by default as on the simulated GPU.
        """
        wanted = [c for c in checks.split(",") if c] if isinstance(checks, str) else list(checks)
        mask = sum(CHECKS[c] for c in set(wanted))
        arguments = _Arguments()
        memories = {i: _Memory(b) for i, b in enumerate(buffers) if b is not None}
        for i, memory in memories.items():
            arguments.buffer[i], arguments.buffer_length[i] = memory.address, memory.length
        for i, size in (threadgroup_memory or {}).items():
            arguments.threadgroup_length[i] = size
        kind, _, seed = order.partition(":")
        usual = _runtime().softmetal_current_settings().contents
        layout = (usual.tensor_layout, usual.tensor_seed)
        if tensor_layout is not None:
            layout = number_and_seed(tensor_layout)
        settings = Settings(os_threads, ORDERS[kind], int(seed or 0), mask, int(watchdog * 1000), *layout)
        kernel = self._kernel("checked" if mask else self._mode)
        launch = _Launch(ctypes.pointer(kernel), ctypes.pointer(arguments), _Uint3(*grid), _Uint3(*threads))
        counters, error = _Counters(), ctypes.c_void_p()
        failed = _runtime().softmetal_run(
            ctypes.byref(launch), ctypes.byref(settings), ctypes.byref(counters), ctypes.byref(error)
        )
        if failed:
            raise KernelError(_take_text(error))
        result: dict[str, Any] = {name: getattr(counters, name) for name in _COUNTS}
        result["bytes_read"] = dict(zip(_SPACES, counters.bytes_read, strict=True))
        result["bytes_written"] = dict(zip(_SPACES, counters.bytes_written, strict=True))
        result["buffers_read"] = {slot: n for slot, n in enumerate(counters.buffers_read) if n}
        result["buffers_written"] = {slot: n for slot, n in enumerate(counters.buffers_written) if n}
        result["buffers_distinct"] = {slot: n for slot, n in enumerate(counters.buffers_distinct) if n}
        return result
