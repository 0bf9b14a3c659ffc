"""Measures calls on this machine, ours and the peers', and shows them as a table, JSON and a picture."""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..backends.backend import Backend
from ..backends.choose import BACKENDS, choose
from ..backends.record import Record, write
from ..cases.arguments import Parser, WrongArgumentError, output_file, picture_stem
from ..cases.calls import OPS, Call
from ..cases.shapes import SHAPES
from ..peers.launch import OURS
from . import table

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        calls = _chosen_calls(options)
        if options.picture and importlib.util.find_spec("matplotlib") is None:
            raise WrongArgumentError("--picture needs matplotlib, which is not installed; pip install it")
        backend = choose(options.backend)
        if options.picture and backend.name == "counts":
            raise WrongArgumentError("--picture draws times, and --backend counts has none; use --json")
        implementations = _chosen_implementations(backend, options.peers)
    except WrongArgumentError as refusal:
        parser.refuse(str(refusal))
    print(f"the bench of the source checkout {ROOT}", flush=True)
    record = measure(backend, calls, implementations)
    print(table.render(record))
    if options.json:
        write(record, options.json)
    if options.picture:
        from . import pictures

        for path in pictures.draw(record, options.picture):
            print(f"wrote {path}")
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="python -m bench",
        description="Times attention on an Apple or NVIDIA GPU, ours and the peers'; without a GPU, counts "
        "the work of the kernels.",
    )
    parser.add_argument("--op", action="append", choices=OPS, help="only this operator; may be repeated")
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=["standard"],
        choices=[*SHAPES, "all"],
        metavar="SET",
        help=f"sets of shapes: {', '.join(SHAPES)}, all; default: standard",
    )
    parser.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), help="of all calls; default: that of each call"
    )
    parser.add_argument(
        "--peers", nargs="*", metavar="PEER", help="implementations besides ours; default: all installed"
    )
    parser.add_argument("--backend", choices=BACKENDS, help="default: the best one for this machine")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the measurements to FILE")
    parser.add_argument(
        "--picture", type=picture_stem, metavar="STEM", help="draw times as STEM.png and STEM.svg"
    )
    return parser


def _chosen_calls(options: argparse.Namespace) -> list[Call]:
    names = SHAPES if "all" in options.shapes else options.shapes
    calls = [replace(call, dtype=options.dtype or call.dtype) for name in names for call in SHAPES[name]]
    chosen = [call for call in dict.fromkeys(calls) if not options.op or call.op in options.op]
    if not chosen:
        others = [name for name, known in SHAPES.items() if any(call.op in options.op for call in known)]
        raise WrongArgumentError(
            f"--op {' '.join(options.op)}: no such call in --shapes {' '.join(options.shapes)}; "
            f"choose from {', '.join(others)}"
        )
    return chosen


def _chosen_implementations(backend: Backend, peers: list[str] | None) -> list[str]:
    available = [impl for impl in backend.implementations() if impl != OURS]
    if peers is None:
        return [OURS, *available]
    unknown = sorted(set(peers) - set(available))
    if unknown:
        raise WrongArgumentError(
            f"--peers {' '.join(unknown)}: not on the backend {backend.name!r}, which has "
            f"{', '.join(available) or 'none'}; choose from these, or give --peers alone to measure only ours"
        )
    return [OURS, *dict.fromkeys(peers)]


def measure(backend: Backend, calls: list[Call], implementations: list[str]) -> Record:
    ceilings = backend.ceilings()
    rows: list[dict[str, Any]] = []
    for call in calls:
        for impl in implementations:
            _show(f"{len(rows)}/{len(calls) * len(implementations)}  {call.op} {call}: {impl}")
            rows.append(_row(backend, call, impl))
    _show("")
    return {
        "machine": backend.machine(),
        "backend": backend.name,
        "date": datetime.date.today().isoformat(),
        "versions": backend.versions(),
        "ceilings": ceilings,
        "rows": rows,
    }


def _show(progress: str) -> None:
    """Replaces the line on a terminal."""
    if sys.stderr.isatty():
        columns = shutil.get_terminal_size().columns
        print(f"\r\x1b[K{progress[: columns - 1]}", end="", file=sys.stderr, flush=True)


def _row(backend: Backend, call: Call, impl: str) -> dict[str, Any]:
    names = ("dtype", "batch", "q_heads", "kv_heads", "head_dim", "q_len", "kv_len", "causal", "options")
    row: dict[str, Any] = {"op": call.op, "impl": impl, "model": call.model, "call": str(call)}
    row |= {name: getattr(call, name) for name in names}
    try:
        row.update(backend.measure(call, impl))
    except NotImplementedError as refusal:
        row["refused"] = str(refusal).splitlines()[0]
    return row
