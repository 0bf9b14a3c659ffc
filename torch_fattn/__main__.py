"""`python -m torch_fattn doctor | explain | demo | tune | bench`.

Exit status: 0 success, 1 a check failed, 2 a wrong argument.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from . import __version__, built_for_torch
from .commands import explain, tune
from .commands.arguments import ArgumentError, Parser, whole
from .operators import DTYPES
from .runtime.settings import check_settings

MOST_TOKENS = 1_000_000  # more positions than any model has


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        status = _run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `| head` closed the pipe; leave nothing to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def _run(arguments: list[str]) -> int:
    parser, commands = _parsers()
    if not {"-h", "--help", "--version"} & {*arguments}:
        try:
            check_settings(asker="")
        except ValueError as refusal:
            parser.refuse(str(refusal))
    if arguments[:1] == ["bench"]:
        return _bench(arguments[1:])
    options, unknown = parser.parse_known_args(arguments)
    if unknown:  # argparse would name the program, whose --help lists only the commands
        commands[options.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    if options.command == "doctor":
        from .commands import doctor

        return doctor.main(options.report)
    if options.command == "explain":
        return explain.run(commands["explain"], options)
    try:
        if options.command == "tune":
            return tune.run(options)
        from .commands import demo

        return demo.main(options.model, options.dtype, options.new_tokens)
    except ArgumentError as refusal:
        commands[options.command].refuse(str(refusal))


def _parsers() -> tuple[Parser, dict[str, Parser]]:
    parser = Parser(prog="python -m torch_fattn", description="Attention for PyTorch on Apple GPUs.")
    parser.add_argument(
        "--version", action="version", version=f"torch_fattn {__version__}, built for torch {built_for_torch}"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser(
        "doctor", help="versions, device and a self-test; exit status 1 if something is wrong"
    )
    doctor.add_argument(
        "--report", action="store_true", help="print what Metal's compiler gives the kernels; takes a minute"
    )

    demo = commands.add_parser(
        "demo", help="a transformers model generates on the GPU, checked against eager attention"
    )
    demo.add_argument(
        "--model", metavar="PATH", help="a checkpoint on this machine; default: a small random Llama"
    )
    demo.add_argument("--dtype", choices=DTYPES, default="float32")
    demo.add_argument("--new-tokens", type=whole(1, MOST_TOKENS), default=48, metavar="N")

    plan = commands.add_parser("explain", help="how a call of these shapes would run on a GPU")
    explain.add_arguments(plan)

    tuner = commands.add_parser(
        "tune", help="times tile sizes on this GPU, in 3 minutes, and keeps what is faster for the planner"
    )
    tune.add_arguments(tuner)

    commands.add_parser(
        "bench", add_help=False, help="times, or counts, beside the peers; needs the source checkout"
    )
    return parser, {"demo": demo, "doctor": doctor, "explain": plan, "tune": tuner}


def _bench(arguments: list[str]) -> int:
    """Runs the bench of the checkout that contains this package. A wheel has no bench."""
    checkout = Path(__file__).resolve().parent.parent
    if not (checkout / "pyproject.toml").exists() or not (checkout / "bench" / "__main__.py").exists():
        print(
            "torch_fattn bench: the bench is part of the source checkout, not of the wheel; clone the "
            "repository, install it with `pip install --no-build-isolation -e .` and run this again.",
            file=sys.stderr,
        )
        return 1
    sys.path.insert(0, str(checkout))
    return int(importlib.import_module("bench.__main__").main(arguments))


if __name__ == "__main__":
    sys.exit(main())
