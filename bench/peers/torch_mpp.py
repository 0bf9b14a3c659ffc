"""torch 2.15's attention on tensor operations, from MppAttention.h in its macOS wheel.

It is launched as Attention.mm does from macOS 26.2 on, for the layout of an M5. The wheel for Linux has no
such header: TORCH_MACOS_WHEEL names one of macOS.
    pip download torch==2.15.0 --no-deps --only-binary=:all: --platform macosx_14_0_arm64
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

from ..cases.calls import Call
from . import torch_metal
from .archives import unpack
from .launch import Launch, Pass

IMPL = "torch-mpp"
_HEADER = "ATen/native/mps/kernels/MppAttention.h"
_PARTS = ("torch/include/ATen/native/mps/", "torch/include/c10/metal/")
_DIMS = (64, 96, 128, 256)
_TILE_ROWS, _TILE_KEYS = 64, 32


@functools.cache
def include_folder() -> Path | None:
    wheel = os.environ.get("TORCH_MACOS_WHEEL")
    if not wheel:
        return None
    header = unpack("TORCH_MACOS_WHEEL", wheel, _PARTS, f"torch/include/{_HEADER}", "name one of torch 2.15")
    return Path(str(header).removesuffix(_HEADER))


def version() -> str:
    if include_folder() is None:
        return "not installed"
    found = re.search(r"torch-([\d.]+)", os.environ["TORCH_MACOS_WHEEL"])
    return found[1] if found else "unknown"


def launch(call: Call) -> Launch | None:
    """Returns None if torch runs this call otherwise, or if its header is missing."""
    from softmetal.testing.cuda import Pipeline

    include = include_folder()
    if include is None:
        return None
    call.refuse_features(IMPL)
    is_taken = call.q_len > 8 and call.head_dim in _DIMS and call.dtype != "float32"
    if not is_taken or torch_metal.needs_mask(call):
        return None
    name = (
        f"prefill_attention_mpp_a10_{call.dtype}_bq{_TILE_ROWS}_bk{_TILE_KEYS}_bd{call.head_dim}_wm4_wn1"
        f"_hm0_dc{int(call.hides_keys)}_mask{call.dtype}"
    )
    pipeline = Pipeline(
        source=torch_metal.SOURCE.format(header="MppAttention.h"),
        name="MppAttention.h",
        kernel=name,
        max_threads=128,
        include=(str(include),),
        aligned_runs=call.has_aligned_rows,
        std="metal4.0",
    )
    params = torch_metal.prefill_params(call, torch_metal.params_format(include / torch_metal.PREFILL_HEADER))
    arguments: dict[int, str | bytes] = {0: "query", 1: "key", 2: "value", 3: "out", 4: params, 5: bytes(32)}
    grid = (-(-call.q_len // _TILE_ROWS), call.q_heads, call.batch)
    note = f"{_TILE_ROWS} rows, {_TILE_KEYS} keys, 4 simdgroups"
    return Launch(IMPL, [Pass(pipeline, grid, (128, 1, 1), arguments)], note=note)
