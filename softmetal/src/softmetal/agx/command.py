"""`python -m softmetal agx FILE --kernel NAME`: prints the cost of a kernel on M1 and M2, as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ..arguments import Parser, positive
from .compile import NotBuiltError, compiled, cost_of
from .translate import AgxError, Kernel

Number = bool | int | float
_WORDS = {"true": True, "false": False}


def add_arguments(parser: Parser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="a .metal file")
    parser.add_argument("--kernel", required=True, metavar="NAME", help="the host name of a kernel function")
    parser.add_argument(
        "--threads",
        type=_size,
        default=(256, 1, 1),
        metavar="X[xY[xZ]]",
        help="threads per threadgroup (256)",
    )
    parser.add_argument("--define", action="append", default=[], metavar="NAME=VALUE", help="a macro")
    parser.add_argument("--include", action="append", default=[], metavar="DIR", help="of headers")
    parser.add_argument(
        "--constant",
        action="append",
        default=[],
        type=_constant,
        metavar="NAME=VALUE",
        help="a function constant",
    )
    parser.add_argument(
        "--threadgroup-memory",
        action="append",
        default=[],
        type=_memory,
        metavar="N=BYTES",
        help="the size of a [[threadgroup(N)]] argument",
    )
    parser.add_argument("--safe-math", action="store_true", help="as with -fno-fast-math")
    parser.add_argument("--loop", type=int, metavar="N", help="simulate this loop, not the hottest one")
    parser.add_argument("--listing", action="store_true", help="print what Mesa prints: the machine code")


def run(arguments: argparse.Namespace) -> None:
    if not arguments.file.is_file():
        sys.exit(f"softmetal: {str(arguments.file)!r} is not a file; name a .metal file.")
    kernel = Kernel(
        source=arguments.file.read_text(),
        kernel=arguments.kernel,
        threads=arguments.threads,
        macros=dict(_definition(text) for text in arguments.define),
        constants=dict(arguments.constant),
        threadgroup_memory=dict(arguments.threadgroup_memory),
        include=(str(arguments.file.parent), *arguments.include),
        fast_math=not arguments.safe_math,
        name=arguments.file.name,
    )
    try:
        text = compiled(kernel)
        cost = cost_of(text, kernel, arguments.loop)
    except (AgxError, NotBuiltError) as error:
        sys.exit(f"softmetal: {error}")
    if arguments.listing:
        print(text)
    else:
        print(json.dumps(cost.as_dict(), indent=1))


def _size(text: str) -> tuple[int, int, int]:
    numbers = [positive(word) for word in text.split("x")]
    if len(numbers) > 3:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; give X, XxY or XxYxZ")
    x, y, z = [*numbers, 1, 1][:3]
    if x * y * z > 1024:
        raise argparse.ArgumentTypeError(f"{text!r} is more than 1024 threads; give fewer")
    return x, y, z


def _definition(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value or "1"


def _constant(text: str) -> tuple[str, Number]:
    name, _, value = text.partition("=")
    try:
        return name, _WORDS[value] if value in _WORDS else float(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} has no number, true or false after a '='; give NAME=VALUE"
        ) from error


def _memory(text: str) -> tuple[int, int]:
    index, _, size = text.partition("=")
    if not index.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} does not begin with a number; give N=BYTES")
    return int(index), positive(size)
