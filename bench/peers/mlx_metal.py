"""MLX 0.32.4's Metal attention, from the headers in the mlx-metal wheel.

It is launched as scaled_dot_product_attention.cpp does on a GPU without matrix units (M1 to M4). The headers
are those of an installed `mlx`, or of the wheel that MLX_METAL_WHEEL names:
    pip download mlx-metal==0.32.4 --no-deps --only-binary=:all: --platform macosx_14_0_arm64
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..cases.calls import METAL_TYPES, Call
from .archives import unpack
from .launch import Launch, Pass, partials

if TYPE_CHECKING:
    from softmetal.testing.cuda import Pipeline

IMPL = "mlx-metal"
VERSION = "0.32.4"
# MLX chooses passes and splits by the class of the chip: Ultra, Max, others; the largest first.
CHIP_CLASSES = "dsg"
_PARTS = ("mlx/include/mlx/backend/metal/", "mlx/include/mlx/version")
_HOW = f"name a wheel of mlx-metal {VERSION}, or unset it"
KERNELS = "mlx/backend/metal/kernels"
_VECTOR_DIMS = (64, 96, 128, 256)
_FULL_DIMS = (64, 72, 80, 96, 128)
# MLX has kernels for other head sizes, but composes most of their calls from other operations. Its kernels
# run causal square prefills of D=256 in 16 bits, and one row of D=512 in groups of 8.
_SQUARE_DIM, _SQUARE_FROM = 256, 2048  # rows
_ONE_ROW_DIM, _ONE_ROW_GROUP, _ONE_ROW_FROM = 512, 8, 1024  # keys
# (group size, head dim) -> query heads for which a simdgroup reads keys and values once, in the kernel that
# shares them. Registers and 32 KiB of threadgroup memory limit the number.
_HEADS_PER_READ = {(8, 64): 8, (8, 128): 4, (12, 128): 4, (16, 128): 2}
_SHARED_FROM = 8192  # keys


def launch(call: Call) -> Launch | None:
    """Returns None if MLX composes this call from other operations, or if its headers are missing."""
    if not is_known_version():
        return None
    call.refuse_features(IMPL)
    if call.q_len > 8:
        tiles = dict.fromkeys(_tile_keys(call, chip) for chip in CHIP_CLASSES) if _has_full(call) else {}
        launches = [full(call, 32, keys) for keys in tiles]
    else:
        chosen = dict.fromkeys(splits(call, chip) for chip in CHIP_CLASSES) if _has_vector(call) else {}
        launches = [_vector_in_two_passes(call, n) if n > 1 else _vector_in_one_pass(call) for n in chosen]
    if not launches:
        return None
    largest = max((one.scratch for one in launches), key=lambda scratch: sum(scratch.values()))
    first, *others = (replace(one, scratch=largest) for one in launches)
    return replace(first, alternatives=others)


def is_known_version() -> bool:
    """Whether there are headers; raises if they are of another version."""
    if include_folder() is None:
        return False
    if version() != VERSION:
        raise NotImplementedError(
            f"{IMPL}: the kernels of MLX {version()} are not launched as those of {VERSION}, which this "
            f"adapter knows; install mlx-metal=={VERSION}, or name its wheel in MLX_METAL_WHEEL"
        )
    return True


def _has_full(call: Call) -> bool:
    if call.is_causal and call.q_len > call.kv_len:
        return False
    if call.head_dim != _SQUARE_DIM:
        return call.head_dim in _FULL_DIMS
    rows = max(call.q_len, call.whole_rows)
    return call.causal and call.q_len == call.kv_len and rows >= _SQUARE_FROM and call.dtype != "float32"


def _has_vector(call: Call) -> bool:
    if call.q_len > call.kv_len or call.q_len * call.group_size > 32:
        return False
    if call.head_dim != _ONE_ROW_DIM:
        return call.head_dim in _VECTOR_DIMS
    return (call.q_len, call.group_size) == (1, _ONE_ROW_GROUP) and call.kv_len >= _ONE_ROW_FROM


def version() -> str:
    folder = include_folder()
    if folder is None:
        return "not installed"
    text = (folder / "mlx" / "version.h").read_text()
    return ".".join(re.findall(r"#define MLX_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", text))


@functools.cache
def include_folder() -> Path | None:
    spec = importlib.util.find_spec("mlx")
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (Path(place) / "include" / KERNELS).is_dir():
            return Path(place) / "include"
    wheel = os.environ.get("MLX_METAL_WHEEL")
    if not wheel:
        return None
    return unpack("MLX_METAL_WHEEL", wheel, _PARTS, "mlx/include", _HOW)


def _instantiation(header: str, host_name: str, kernel: str) -> str:
    """Returns the header with one instantiation of a kernel, and from MLX's utilities the type limits and a
    macro, as the rest needs Apple's compiler."""
    folder = include_folder()
    assert folder is not None
    utilities = (folder / KERNELS / "utils.h").read_text()
    begin = utilities.index("template <typename U>\nstruct Limits")
    end = utilities.index("template <>\nstruct Limits<bool>")
    text = (folder / KERNELS / header).read_text()
    included = f'#include "{KERNELS}/utils.h"\n'
    unroll = utilities[utilities.index("#define MLX_MTL_PRAGMA_UNROLL") :].partition("\n")[0] + "\n"
    return (
        "#include <metal_stdlib>\nusing namespace metal;\n"
        "typedef bfloat bfloat16_t;\ntypedef half float16_t;\n"
        f"{utilities[begin:end]}\n{text.replace(included, unroll)}\n"
        f'template [[host_name("{host_name}")]] [[kernel]] decltype({kernel}) {kernel};\n'
    )


def pipeline_of(
    call: Call, header: str, kernel: str, threads: int, constants: dict[str, bool | int | float]
) -> Pipeline:
    from softmetal.testing.cuda import Pipeline

    name = kernel.split("<")[0]
    return Pipeline(
        source=_instantiation(header, name, kernel),
        name=Path(header).name,
        kernel=name,
        max_threads=threads,
        constants=constants,
        include=(str(include_folder()),),
        widened_from=METAL_TYPES[call.dtype],
        aligned_runs=call.has_aligned_rows,
    )


def _vector_constants(call: Call) -> dict[str, bool | int | float]:
    off = dict.fromkeys(("has_mask", "query_transposed", "bool_mask", "float_mask", "has_sinks"), False)
    return {**off, "do_causal": call.hides_keys}


def _strides(call: Call) -> list[bytes]:
    """Packs head and sequence strides of the key, then of the value."""
    head, row = struct.pack("Q", call.kv_len * call.head_dim), struct.pack("Q", call.head_dim)
    return [head, row, head, row]


def _vector_in_one_pass(call: Call) -> Launch:
    kernel = f"sdpa_vector<{METAL_TYPES[call.dtype]}, {call.head_dim}, {call.head_dim}>"
    pipeline = pipeline_of(call, "sdpa_vector.h", kernel, 1024, _vector_constants(call))
    shape = [struct.pack("i", call.group_size), struct.pack("i", call.kv_len), *_strides(call)]
    shape.append(struct.pack("f", call.scale))
    arguments: dict[int, str | bytes] = {0: "query", 1: "key", 2: "value", 3: "out"}
    arguments |= dict(enumerate(shape, start=4))
    grid = (call.batch * call.q_heads, call.q_len, 1)
    return Launch(IMPL, [Pass(pipeline, grid, (1024, 1, 1), arguments)], note="1 pass")


def splits(call: Call, chip: str) -> int:
    """Returns the number of splits; 1: a single pass."""
    simdgroups, keys = call.group_size * call.q_len, call.kv_len
    if keys < (1024 if chip in "ds" else 4096) or (chip not in "ds" and call.group_size == 1):
        return 1
    if chip == "s":
        if keys <= 1024 or simdgroups <= 4:
            return 64
        return next(splits for bound, splits in _SPLITS_BELOW if keys <= bound)
    if chip == "d":
        if simdgroups <= 2:
            return 256 if keys > 8192 else 128
        if simdgroups >= 6 and keys >= 16384:
            return 512 if keys < 65536 else 1024
        return 128
    return 64 if simdgroups >= 4 else 32


_SPLITS_BELOW = ((8192, 128), (32768, 256), (65536, 512), (1 << 62, 1024))


def heads_per_read(call: Call) -> int | None:
    """Returns the query heads for which keys and values are read once, or None if each head reads its own.
    MLX also requires that there is no mask and no sink; a Call has neither."""
    if call.q_len != 1 or call.kv_len < _SHARED_FROM:
        return None
    return _HEADS_PER_READ.get((call.group_size, call.head_dim))


def _vector_in_two_passes(call: Call, splits: int) -> Launch:
    element, d = METAL_TYPES[call.dtype], call.head_dim
    threads = (32, call.group_size, call.q_len)
    constants = {**_vector_constants(call), "blocks": splits}
    kernel = f"sdpa_vector_2pass_1<{element}, {d}, {d}>"
    if heads := heads_per_read(call):
        kernel = f"sdpa_vector_2pass_1_gqa<{element}, {d}, {d}, {call.group_size}, {heads}>"
    one = pipeline_of(call, "sdpa_vector.h", kernel, 32 * call.group_size * call.q_len, constants)
    two = pipeline_of(call, "sdpa_vector.h", f"sdpa_vector_2pass_2<{element}, {d}>", 1024, {})
    first: dict[int, str | bytes] = {0: "query", 1: "key", 2: "value", 3: "partials", 4: "sums", 5: "maxs"}
    first |= dict(
        enumerate([struct.pack("i", call.kv_len), *_strides(call), struct.pack("f", call.scale)], start=7)
    )
    second: dict[int, str | bytes] = {
        0: "partials",
        1: "sums",
        2: "maxs",
        3: "out",
        4: struct.pack("i", splits),
    }
    return Launch(
        IMPL,
        [
            Pass(one, (call.kv_heads, call.batch, splits), threads, first),
            Pass(two, (call.batch * call.q_heads, call.q_len, 1), (1024, 1, 1), second),
        ],
        scratch=partials(call, splits),
        note=f"2 passes, {splits} splits",
    )


def _tile_keys(call: Call, chip: str) -> int:
    return 32 if call.head_dim < 128 or (call.head_dim == _SQUARE_DIM and chip == "d") else 16


def full(call: Call, tile_rows: int, tile_keys: int, name: str = "attention") -> Launch:
    """The kernel for many rows: `attention`, or `attention_nax` on tensor operations."""
    d, element = call.head_dim, METAL_TYPES[call.dtype]
    halves = 2 if d == _SQUARE_DIM else 1  # simdgroups that share rows and split D
    constants: dict[str, bool | int | float] = {
        **dict.fromkeys(("has_mask", "has_sinks", "save_lse"), False),
        "align_Q": call.q_len % tile_rows == 0,
        "align_K": call.kv_len % tile_keys == 0,
        "do_causal": call.is_causal,
    }
    kernel = f"{name}<{element}, {tile_rows}, {tile_keys}, {d}, {d}, 4, {halves}, {element}, float>"
    pipeline = pipeline_of(call, f"steel/attn/kernels/steel_{name}.h", kernel, 128 * halves, constants)
    params = _full_params(call, tile_rows, tile_keys)
    arguments: dict[int, str | bytes] = {0: "query", 1: "key", 2: "value", 3: "out", 4: params}
    grid = (-(-call.q_len // tile_rows), call.q_heads, call.batch)
    note = f"{tile_rows} rows, {tile_keys} keys, {4 * halves} simdgroups"
    return Launch(IMPL, [Pass(pipeline, grid, (32, 4, halves), arguments)], out_rows_first=True, note=note)


def _full_params(call: Call, tile_rows: int, tile_keys: int) -> bytes:
    """Packs AttnParams."""
    d, h = call.head_dim, call.q_heads
    q, kv = call.q_len * d, call.kv_len * d
    return struct.pack(
        "6if7i12q",
        *(call.batch, h, d, call.q_len, call.kv_len, call.group_size, call.scale),
        *(-(-call.q_len // tile_rows), -(-call.kv_len // tile_keys)),
        *(call.q_len // tile_rows, call.kv_len // tile_keys),
        *(call.q_len % tile_rows, call.kv_len % tile_keys, call.kv_len - call.q_len),
        *(h * q, q, d, *[call.kv_heads * kv, kv, d] * 2, h * q, d, h * d),
    )
