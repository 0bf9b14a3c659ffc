"""Checks every result of the compiled kernels on an NVIDIA GPU, then times them.

    python -m bench cuda-run --folder bench/_cuda --json results.json
    compute-sanitizer --tool racecheck python -m bench cuda-run --check-only --reference cpu

Needs torch with CUDA and the folder that build.py wrote; no compiler, no network, no torch_fattn.
"""

from __future__ import annotations

import datetime
import json
import math
import struct
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from softmetal.testing.cuda import Arguments, Kernel

from ...cases.arguments import Parser, output_file, positive
from ...cases.buffers import OUTPUTS, TOLERANCE, errors
from ...cases.buffers import make as make_buffers
from .. import record
from . import FOLDER

REPEATS = 25
# Rotates sets of inputs: between two uses of a set, this many bytes, several times the L2, are read.
# MOST_SETS of the smallest calls are three times the L2 of an H200.
ROTATION_BYTES = 512 << 20
MOST_SETS = 160


class Runner:
    """Launches the rows of a manifest."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
        self._kernels: dict[str, Kernel] = {}

    def kernel(self, cubin: str) -> Kernel:
        if cubin not in self._kernels:
            self._kernels[cubin] = Kernel(self.folder / cubin)
        return self._kernels[cubin]

    def prepare(self, variant: dict[str, Any], buffers: dict[str, torch.Tensor]) -> Callable[[], None]:
        """Returns a function that enqueues a variant of a row over these buffers."""
        launches = []
        for one in variant["passes"]:
            values = {int(slot): _value(argument, buffers) for slot, argument in one["arguments"].items()}
            launches.append(
                (self.kernel(one["cubin"]), tuple(one["grid"]), tuple(one["threads"]), Arguments(values))
            )

        def enqueue() -> None:
            stream = torch.cuda.current_stream().cuda_stream
            for kernel, grid, threads, arguments in launches:
                kernel.launch(grid, threads, arguments, stream)

        return enqueue


def make(row: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    arguments = [argument for one in row["variants"][0]["passes"] for argument in one["arguments"].values()]
    names = {argument["buffer"] for argument in arguments if "buffer" in argument}
    return make_buffers(row["case"], names, row["scratch"], "cuda", seed)


def _value(argument: dict[str, str], buffers: dict[str, torch.Tensor]) -> int | bytes:
    if "bytes" in argument:
        return bytes.fromhex(argument["bytes"])
    return buffers[argument["buffer"]].data_ptr()


# ---- timing -----------------------------------------------------------------------------------------------


def time_graph(enqueues: Sequence[Callable[[], None]], repeats: int) -> list[float]:
    """Returns milliseconds per call, one value for each replay of a graph of all calls."""
    for enqueue in enqueues:
        enqueue()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for enqueue in enqueues:
            enqueue()
    times = []
    for _ in range(repeats + 3):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / len(enqueues))
    return times[3:]


def measure_ceilings(runner: Runner, repeats: int) -> dict[str, Any]:
    """Measures reading in GB/s, and 8x8 products from registers in TFLOP/s: with a new B each, with four
    products per B, and with half operands.

    The fastest of several passes is used, and reading is measured last and longest: a GPU takes a while to
    reach its clocks, and a low ceiling would flatter every rate.
    """
    cubins = runner.manifest["ceilings"]
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    ceilings: dict[str, Any] = {}
    rounds, threads, groups = 4096, 256, processors * 8
    out = torch.empty(groups * threads, device="cuda")
    for name in ("products", "products_b_reused", "products_half"):
        arguments = {0: out.data_ptr(), 1: struct.pack("I", rounds), 2: struct.pack("f", 1e-3)}
        enqueue = _enqueue(runner.kernel(cubins[name]), groups, threads, arguments)
        flops = groups * threads / 32 * rounds * 16 * 1024
        ceilings[f"{name}_tflops"] = flops / min(time_graph([enqueue], repeats)) / 1e9
    source = torch.randn(1 << 31, device="cuda")
    arguments = {0: source.data_ptr(), 1: out.data_ptr(), 2: struct.pack("Q", source.numel() // 4)}
    enqueue = _enqueue(runner.kernel(cubins["reading"]), groups, threads, arguments)
    ceilings["read_gbs"] = source.numel() * 4 / min(time_graph([enqueue], 8 * repeats)) / 1e6
    return ceilings


def _enqueue(kernel: Kernel, groups: int, threads: int, values: dict[int, Any]) -> Callable[[], None]:
    arguments = Arguments(values)
    return lambda: kernel.launch(
        (groups, 1, 1), (threads, 1, 1), arguments, torch.cuda.current_stream().cuda_stream
    )


def time_row(
    runner: Runner, row: dict[str, Any], first: dict[str, torch.Tensor], repeats: int
) -> tuple[list[float], str]:
    """Returns the times and the note of the fastest variant."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in first.values())
    sets = [first] + [make(row, 100 + i) for i in range(min(MOST_SETS, ROTATION_BYTES // size))]
    timed = [
        (time_graph([runner.prepare(variant, buffers) for buffers in sets], repeats), str(variant["note"]))
        for variant in row["variants"]
    ]
    return min(timed, key=lambda one: median(one[0]))


# ---- the run ----------------------------------------------------------------------------------------------


def run_row(runner: Runner, row: dict[str, Any], device: str) -> tuple[dict[str, torch.Tensor], float, float]:
    """Runs every variant once; returns the buffers and the largest errors."""
    buffers = make(row, 1)
    measured = []
    for variant in row["variants"]:
        for name in OUTPUTS & buffers.keys():
            buffers[name].fill_(math.nan)
        runner.prepare(variant, buffers)()
        torch.cuda.synchronize()
        measured.append(errors(row["case"], buffers, row["out_rows_first"], device))
    largest, relative = (max(column) for column in zip(*measured, strict=True))
    return buffers, largest, relative


def title(row: dict[str, Any]) -> str:
    case = row["case"]
    heads = f"{case['q_heads']}/{case['kv_heads']} D{case['head_dim']}"
    shape = f"B{case['batch']} {heads} L{case['q_len']} N{case['kv_len']}"
    words = [case["op"], shape, case["dtype"], case["kv_format"]]
    words += ["causal"] if case["causal"] else []
    words += [f"{sum(case['lengths'])} keys"] if case["lengths"] else []
    return " ".join(word for word in words if word)


def result(
    row: dict[str, Any], times: list[float], note: str, largest: float, ceilings: dict[str, Any]
) -> dict[str, Any]:
    case, milliseconds = row["case"], median(times)
    if case["op"] != "prefill":
        rate, unit, ceiling = case["least_bytes"] / milliseconds / 1e6, "GB/s", ceilings["read_gbs"]
    else:
        rate, unit, ceiling = case["flops"] / milliseconds / 1e9, "TFLOP/s", ceilings["products_tflops"]
    shape = {
        name: case[name] for name in ("batch", "q_heads", "kv_heads", "head_dim", "q_len", "kv_len", "causal")
    }
    return {
        "op": case["op"],
        "impl": row["impl"],
        "dtype": case["dtype"],
        **shape,
        "options": {name: case[name] for name in ("block_size", "kv_format", "lengths") if case[name]},
        "launch": note,
        "ms_median": milliseconds,
        "ms_min": min(times),
        "ms_max": max(times),
        "rate": rate,
        "rate_unit": unit,
        "ceiling_fraction": rate / ceiling,
        "max_error": largest,
    }


def machine() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm", "--format=csv,noheader"]
    smi = subprocess.run(query, capture_output=True, text=True).stdout.strip().split("\n")[0].split(", ")
    return {
        "name": properties.name,
        "kind": "NVIDIA GPU running the Metal sources translated to CUDA; not an Apple GPU",
        "multiprocessors": properties.multi_processor_count,
        "driver": smi[0],
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="python -m bench cuda-run", description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--json", type=output_file)
    parser.add_argument("--check-only", action="store_true", help="no timing; the small shapes only")
    parser.add_argument(
        "--reference", choices=("cuda", "cpu"), default="cuda", help="where float64 is computed"
    )
    parser.add_argument("--only", default="", help="rows whose title or implementation contains this")
    parser.add_argument("--repeats", type=positive, default=REPEATS)
    arguments = parser.parse_args(argv)
    if not (arguments.folder / "manifest.json").is_file():
        parser.refuse(
            f"--folder {str(arguments.folder)!r} contains no manifest.json; copy the "
            "folder that `python -m bench cuda-build` wrote to this machine"
        )
    runner = Runner(arguments.folder)
    rows = [row for row in runner.manifest["rows"] if arguments.only in f"{title(row)} {row['impl']}"]
    refused = [row for row in runner.manifest["refused"] if arguments.only in f"{title(row)} {row['impl']}"]
    wrong = 0
    ceilings: dict[str, Any] = {}
    if not arguments.check_only:
        ceilings = measure_ceilings(runner, arguments.repeats)
        print("ceilings: " + ", ".join(f"{name} {value:.1f}" for name, value in ceilings.items()), flush=True)
    results = []
    for row in rows:
        if arguments.check_only and row["purpose"] != "check":
            continue
        buffers, largest, relative = run_row(runner, row, arguments.reference)
        right = relative < TOLERANCE[row["case"]["dtype"]]
        wrong += not right
        line = f"{title(row):52} {row['impl']:12} error {relative:.1e}{'' if right else ' WRONG'}"
        if row["purpose"] == "time" and right and not arguments.check_only:
            times, note = time_row(runner, row, buffers, arguments.repeats)
            results.append(result(row, times, note, largest, ceilings))
            one = results[-1]
            line += (
                f"  {one['ms_median']:9.4f} ms ({one['ms_min']:.4f} - {one['ms_max']:.4f})"
                f"  {one['rate']:8.1f} {one['rate_unit']:7} {100 * one['ceiling_fraction']:5.1f} %"
            )
            if row["case"]["lengths"]:
                line += f"  {1 / one['ceiling_fraction']:.2f} times the time of its bytes"
        print(line, flush=True)
        del buffers
    for row in refused:
        print(f"{title(row):52} {row['impl']:12} refused: {row['why']}")
    if arguments.json:
        versions = {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            **runner.manifest.get("versions", {}),
        }
        document = {"machine": machine(), "versions": versions, "ceilings": ceilings, "rows": results}
        record.write(document, arguments.json)
    print(f"{wrong} wrong of {len(rows)}")
    return 1 if wrong else 0
