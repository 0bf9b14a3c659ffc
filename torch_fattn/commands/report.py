"""`python -m torch_fattn doctor --report`: the registers that Metal's compiler gives the kernels."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import torch

from ..inspection.compiled import compiled_kernels
from ..inspection.plans import Explanation, explain
from ..inspection.warmup import warmup

_ATTENTION = "FATTN_ROW_FRAGMENTS"  # a macro of the kernels that read keys
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_COLUMNS = ("kernel", "dtype", "D", "tile", "threads", "most", "width", "bytes", "by hand")
_MEANING = """\
threads: of a threadgroup, as launched. most: maxTotalThreadsPerThreadgroup of the same kernel without the
limit that it declares. width: threadExecutionWidth. bytes: staticThreadgroupMemoryLength. by hand: half
registers per lane, as `explain` counts them. A core of M1 or M2 has room for 1024 threads with up to 104 half
registers per lane, 896 with 112, 832 with 128, 768 with 136, 704 with 144, 640 with 160, 576 with 184, 512
with 208, 448 with 232 and 384 with 256 (Mesa's table). Please report these lines: they show what fits."""


def calls() -> Iterator[tuple[str, dict[str, Any]]]:
    """Calls that use each row of this GPU's tuning table, without options, and the calls with the highest
    register pressure: two rows of 256 columns, and all chunks of a short cache at once."""
    for dtype, dim in product(_DTYPES, (64, 80, 96, 128, 256, 512)):
        yield "prefill", {"dtype": dtype, "heads": 8, "kv_len": 1024, "head_dim": dim}
    for dtype, dim in product(_DTYPES, (64, 128, 192, 256, 512)):
        yield "decode", {"dtype": dtype, "heads": 32, "kv_heads": 8, "kv_len": 4096, "head_dim": dim}
    for dtype in (torch.float16, torch.float32):
        yield "decode", {"dtype": dtype, "heads": 8, "kv_heads": 8, "kv_len": 4096, "head_dim": 128}
    yield "decode", {"heads": 16, "kv_heads": 8, "kv_len": 4096, "head_dim": 256}
    for heads in (8, 32):
        yield "decode", {"heads": heads, "kv_heads": 8, "kv_len": 300, "head_dim": 64}
    for kv_format, dim in (("int8", 64), ("int8", 128), ("int4", 96), ("int4", 128)):
        sizes = {"heads": 32, "kv_heads": 8, "kv_len": 4096, "head_dim": dim}
        yield "decode", {**sizes, "kv_format": kv_format}
    for dtype, dim in product(_DTYPES, (32, 64, 80, 96, 128, 256)):
        yield "prefill_backward", {"dtype": dtype, "heads": 8, "kv_len": 1024, "head_dim": dim}


def plans(device: Mapping[str, Any]) -> Iterator[Explanation]:
    """Plans of `calls` for the GPU with these arguments of `explain`."""
    for op, sizes in calls():
        yield explain(op, **sizes, **device)


def attention_of(plan: Explanation) -> list[dict[str, Any]]:
    """The attention passes: one, or two for a backward."""
    return [one for one in plan.passes if _ATTENTION in one["macros"]]


def lines(gpu: Mapping[str, Any]) -> Iterator[str]:
    """Compiles the kernels for this process's GPU, and reports the registers of each."""
    yield f"kernels as the compiler of {gpu['name']} sees them"
    if not gpu["name"].startswith("Apple "):
        yield "This is no Apple GPU, and the numbers say nothing about one."
    warmup(calls())
    device = {"device_name": gpu["name"], "family": gpu["family"], "cores": gpu["cores"]}
    chosen = zip(calls(), map(attention_of, plans(device)), strict=True)
    cells = (_cells(launch, sizes.get("kv_format")) for (_, sizes), launches in chosen for launch in launches)
    rows = dict.fromkeys([_COLUMNS, *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    yield _MEANING


def _cells(launch: Mapping[str, Any], kv_format: str | None) -> tuple[str, ...]:
    number = next(n for n, kernel in enumerate(compiled_kernels()) if kernel.is_launched_by(launch))
    (resources,) = json.loads(torch.ops.fattn._resources_without_limit([number]))
    macros = launch["macros"]
    tile = "r{FATTN_ROW_FRAGMENTS} k{FATTN_TILE_KEYS} s{FATTN_SIMDGROUPS}".format_map(macros)
    by_hand = launch.get("registers", {}).get("total", "")
    numbers = (resources[name] for name in ("max_threads", "execution_width", "static_bytes"))
    dtype = macros["FATTN_T"] + (f"/{kv_format}" if kv_format else "")
    cells = (dtype, macros["FATTN_HEAD_DIM"], tile, launch["threads"][0], *numbers, by_hand)
    return launch["kernel"], *map(str, cells)
