"""`python -m torch_fattn bench`: one table for the machine at hand, with the peers beside us."""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..backends.backend import Backend
from ..backends.choose import BACKENDS, choose
from ..cases.arguments import Parser, WrongArgumentError, output_file, picture_stem
from ..cases.calls import OPS, SHAPES, Call
from ..peers.launch import OURS
from . import table

# By its file: where an NVIDIA GPU is timed, torch_fattn need not be built.
_PROGRESS = Path(__file__).resolve().parents[2] / "torch_fattn" / "_progress.py"
Progress = runpy.run_path(str(_PROGRESS))["Progress"]


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        calls = _chosen_calls(options)
        if options.picture and importlib.util.find_spec("matplotlib") is None:
            raise WrongArgumentError("--picture needs matplotlib, which is not installed; pip install it")
        backend = choose(options.backend)
        implementations = _chosen_implementations(backend, options.peers)
    except WrongArgumentError as refusal:
        parser.refuse(str(refusal))
    record = measure(backend, calls, implementations)
    print(table.render(record))
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    if options.picture:
        from . import pictures

        for path in pictures.draw(record, options.picture):
            print(f"wrote {path}")
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="python -m torch_fattn bench",
        description="Times attention on an Apple or NVIDIA GPU beside its peers; without a GPU, counts what "
        "the kernels do.",
    )
    parser.add_argument("--op", action="append", choices=OPS, help="only this op; may be given several times")
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=["standard"],
        choices=[*SHAPES, "all"],
        metavar="SET",
        help=f"sets of shapes: {', '.join(SHAPES)}, all; default: standard",
    )
    parser.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), help="of all calls; default: their own"
    )
    parser.add_argument(
        "--peers", nargs="*", metavar="PEER", help="implementations beside ours; default: all that are there"
    )
    parser.add_argument("--backend", choices=BACKENDS, help="default: the best that this machine has")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write everything that was measured")
    parser.add_argument("--picture", type=picture_stem, metavar="STEM", help="write STEM.png and STEM.svg")
    return parser


def _chosen_calls(options: argparse.Namespace) -> list[Call]:
    names = SHAPES if "all" in options.shapes else options.shapes
    calls = [replace(call, dtype=options.dtype or call.dtype) for name in names for call in SHAPES[name]]
    chosen = [call for call in dict.fromkeys(calls) if not options.op or call.op in options.op]
    if not chosen:
        others = [name for name, known in SHAPES.items() if any(call.op in options.op for call in known)]
        raise WrongArgumentError(
            f"--op {' '.join(options.op)}: no such call in --shapes {' '.join(options.shapes)}; "
            f"there is in {', '.join(others)}"
        )
    return chosen


def _chosen_implementations(backend: Backend, peers: list[str] | None) -> list[str]:
    there = [impl for impl in backend.implementations() if impl != OURS]
    if peers is None:
        return [OURS, *there]
    unknown = sorted(set(peers) - set(there))
    if unknown:
        raise WrongArgumentError(
            f"--peers {' '.join(unknown)}: not on the backend {backend.name!r}, which has "
            f"{', '.join(there) or 'none'}; give those, or none after --peers for ours alone"
        )
    return [OURS, *dict.fromkeys(peers)]


def measure(backend: Backend, calls: list[Call], implementations: list[str]) -> dict[str, Any]:
    """The record that --json writes."""
    machine = backend.machine()
    rows: list[dict[str, Any]] = []
    with Progress(len(calls) * len(implementations)) as progress:
        ceilings = backend.ceilings()
        for call in calls:
            for impl in implementations:
                progress.step(f"{call.op} {call}: {impl}")
                rows.append(_row(backend, call, impl, machine))
    return {
        "machine": machine,
        "backend": backend.name,
        "date": datetime.date.today().isoformat(),
        "versions": backend.versions(),
        "ceilings": ceilings,
        "rows": rows,
    }


def _row(backend: Backend, call: Call, impl: str, machine: str) -> dict[str, Any]:
    row: dict[str, Any] = {
        "op": call.op,
        "impl": impl,
        "model": call.model,
        "call": str(call),
        "dtype": call.dtype,
        "batch": call.batch,
        "q_heads": call.q_heads,
        "kv_heads": call.kv_heads,
        "head_dim": call.head_dim,
        "q_len": call.q_len,
        "kv_len": call.kv_len,
        "causal": call.causal,
        "options": call.options,
        "machine": machine,
    }
    try:
        row.update(backend.measure(call, impl))
    except NotImplementedError as refusal:
        row["refused"] = str(refusal).splitlines()[0]
    return row
