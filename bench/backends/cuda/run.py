"""Checks every result of the compiled kernels on an NVIDIA GPU. `python -m bench --backend cuda` also times.

    python -m bench cuda-check --folder bench/_cuda
    compute-sanitizer --tool racecheck python -m bench cuda-check --small --reference cpu

Needs torch with CUDA, softmetal (its sources in PYTHONPATH will do) and the folder that build.py wrote; no
compiler, no network, no torch_fattn.
"""

from __future__ import annotations

import json
import struct
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from softmetal.testing.cuda import Arguments, Kernel

from ...cases.arguments import Parser
from ...cases.buffers import TOLERANCE, errors, reset
from ...cases.buffers import make as make_buffers
from ...cases.calls import Call
from . import FOLDER

REPEATS = 25
CHOICE_REPEATS = 5  # of each variant; the fastest is timed again
ENOUGH_MS = 500.0  # of replays; a fifth of the repeats is enough from here on
# Rotates sets of inputs: between two uses of a set, this many bytes, several times the L2, are read.
# MOST_SETS of the smallest calls are three times the L2 of an H200.
ROTATION_BYTES = 512 << 20
MOST_SETS = 160


class Runner:
    """Launches the rows of a manifest."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
        for row in (*self.manifest["rows"], *self.manifest["refused"]):
            row["call"] = Call(**{**row["call"], "lengths": tuple(row["call"]["lengths"])})
        self._kernels: dict[str, Kernel] = {}

    def kernel(self, cubin: str) -> Kernel:
        if cubin not in self._kernels:
            self._kernels[cubin] = Kernel(self.folder / cubin)
        return self._kernels[cubin]

    def prepare(
        self, variant: dict[str, Any], buffers: dict[str, torch.Tensor], only: int | None = None
    ) -> Callable[[], None]:
        """Returns a function that enqueues a variant of a row over these buffers, or one of its passes."""
        launches = []
        for one in variant["passes"] if only is None else [variant["passes"][only]]:
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
    return make_buffers(row["call"], names, row["scratch"], "cuda", seed)


def _value(argument: dict[str, str], buffers: dict[str, torch.Tensor]) -> int | bytes:
    if "bytes" in argument:
        return bytes.fromhex(argument["bytes"])
    return buffers[argument["buffer"]].data_ptr()


# ---- timing -----------------------------------------------------------------------------------------------


def time_graph(enqueues: Sequence[Callable[[], None]], repeats: int = REPEATS) -> list[float]:
    """Returns milliseconds per call, one value for each replay of a graph of all calls."""
    enqueues[0]()  # loads the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for enqueue in enqueues:
            enqueue()
    times: list[float] = []
    while len(times) < repeats + 3 and (sum(times) < ENOUGH_MS or len(times) < repeats // 5 + 3):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return [time / len(enqueues) for time in times[3:]]


def measure_ceilings(runner: Runner) -> dict[str, float]:
    """Measures reading in GB/s, and 8x8 products from registers, with a new B each, in TFLOP/s.

    The fastest of several passes is used, and reading is measured last and longest: a GPU takes a while to
    reach its clocks, and a low ceiling would flatter every rate.
    """
    cubins = runner.manifest["ceilings"]
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    rounds, threads, groups = 4096, 256, processors * 8
    out = torch.empty(groups * threads, device="cuda")
    arguments = {0: out.data_ptr(), 1: struct.pack("I", rounds), 2: struct.pack("f", 1e-3)}
    enqueue = _enqueue(runner.kernel(cubins["products"]), groups, threads, arguments)
    flops = groups * threads / 32 * rounds * 16 * 1024
    products = flops / min(time_graph([enqueue])) / 1e9
    source = torch.randn(1 << 31, device="cuda")
    arguments = {0: source.data_ptr(), 1: out.data_ptr(), 2: struct.pack("Q", source.numel() // 4)}
    enqueue = _enqueue(runner.kernel(cubins["reading"]), groups, threads, arguments)
    read = source.numel() * 4 / min(time_graph([enqueue], 8 * REPEATS)) / 1e6
    return {"read": read, "products": products}


def _enqueue(kernel: Kernel, groups: int, threads: int, values: dict[int, Any]) -> Callable[[], None]:
    arguments = Arguments(values)
    return lambda: kernel.launch(
        (groups, 1, 1), (threads, 1, 1), arguments, torch.cuda.current_stream().cuda_stream
    )


def time_row(
    runner: Runner, row: dict[str, Any], first: dict[str, torch.Tensor]
) -> tuple[list[float], dict[str, Any]]:
    """Returns the times of the fastest variant, and its note. Each pass of a backward is timed alone too."""
    storages = [one.untyped_storage() for one in first.values()]  # a value may be columns of its key
    size = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    sets = [first] + [make(row, 100 + i) for i in range(min(MOST_SETS, ROTATION_BYTES // size))]
    plans = [([runner.prepare(plan, buffers) for buffers in sets], plan) for plan in row["variants"]]
    enqueues, fastest = min(plans, key=lambda one: median(time_graph(one[0], CHOICE_REPEATS)))
    times = time_graph(enqueues)
    found: dict[str, Any] = {"note": str(fastest["note"])}
    if row["call"].is_backward:
        found["passes_ms"] = [
            median(time_graph([runner.prepare(fastest, buffers, one) for buffers in sets]))
            for one in range(len(fastest["passes"]))
        ]
    return times, found


# ---- the run ----------------------------------------------------------------------------------------------


def run_row(runner: Runner, row: dict[str, Any], device: str) -> tuple[dict[str, torch.Tensor], float, float]:
    """Runs every variant once; returns the buffers and the largest errors."""
    buffers = make(row, 1)
    measured = []
    for variant in row["variants"]:
        reset(buffers)
        runner.prepare(variant, buffers)()
        torch.cuda.synchronize()
        measured.append(errors(row["call"], buffers, row["out_rows_first"], device))
    largest, relative = (max(column) for column in zip(*measured, strict=True))
    return buffers, largest, relative


def machine() -> dict[str, str]:
    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0].strip()
    return {
        "name": properties.name,
        "kind": "NVIDIA GPU running the Metal sources translated to CUDA; not an Apple GPU",
        "driver": driver,
    }


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="python -m bench cuda-check", description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--small", action="store_true", help="the small shapes only")
    parser.add_argument(
        "--reference", choices=("cuda", "cpu"), default="cuda", help="where float64 is computed"
    )
    parser.add_argument("--only", default="", help="rows whose call or implementation contains this")
    arguments = parser.parse_args(argv)
    if not (arguments.folder / "manifest.json").is_file():
        parser.refuse(
            f"--folder {str(arguments.folder)!r} contains no manifest.json; copy the "
            "folder that `python -m bench cuda-build` wrote to this machine"
        )
    runner = Runner(arguments.folder)
    wrong = checked = 0
    for row in runner.manifest["rows"]:
        title = f"{row['call'].op} {row['call']}"
        is_chosen = arguments.only in f"{title} {row['impl']}"
        if not is_chosen or (arguments.small and row["purpose"] != "check"):
            continue
        _, _, relative = run_row(runner, row, arguments.reference)
        right = relative < TOLERANCE[row["call"].dtype]
        checked += 1
        wrong += not right
        print(f"{title:52} {row['impl']:12} error {relative:.1e}{'' if right else ' WRONG'}", flush=True)
    print(f"{wrong} wrong of {checked}")
    return 1 if wrong else 0
