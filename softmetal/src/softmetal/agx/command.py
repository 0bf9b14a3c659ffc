"""`python -m softmetal agx FILE --kernel NAME`: prints the cost of a kernel on M1 and M2."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..arguments import Parser, positive
from .compile import HALF_REGISTERS, Cost, LoopCost, NotBuiltError, compiled, cost_of
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
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
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
    elif arguments.json:
        print(json.dumps(cost.as_dict(), indent=1))
    else:
        print("\n".join(describe(cost, kernel.fast_math)))


def describe(cost: Cost, fast_math: bool) -> Iterator[str]:
    spills = f"{cost.spills} spills, {cost.fills} fills" if cost.spills or cost.fills else "no spills"
    math = "fast" if fast_math else "safe"
    yield f"kernel     {cost.kernel}, {cost.threadgroup_threads} threads per threadgroup, {math} math"
    yield f"registers  needs {cost.needed} halves, has {cost.given} of {HALF_REGISTERS}: {spills}"
    yield (
        f"threads    {cost.resident_threads} resident on a core ({cost.threads_by_registers} by registers; "
        f"{cost.threadgroup_bytes} bytes of threadgroup memory)"
    )
    yield f"code       {cost.code_bytes} bytes, {cost.instructions} instructions: {_mix(cost.kinds)}"
    for number, loop in enumerate(cost.loops):
        yield from _describe_loop(number, loop)


def _describe_loop(number: int, loop: LoopCost) -> Iterator[str]:
    first, last = loop.blocks
    yield (
        f"loop {number:<5} depth {loop.depth}, blocks {first} to {last}, {loop.code_bytes} bytes, "
        f"needs {loop.needed} halves: {_mix(loop.kinds)}"
    )
    yield f"           issues {loop.product_cycles} cycles of products and {loop.other_cycles} others"
    if loop.simulated is not None:
        likely, best, worst = (loop.simulated.likely, loop.simulated.best, loop.simulated.worst)
        yield f"           simulated: {likely:.0f} cycles an iteration ({best:.0f} to {worst:.0f})"
        if products := loop.kinds.get("product"):
            numbers = f"{likely / products:.1f} ({best / products:.1f} to {worst / products:.1f})"
            yield f"           simulated: {numbers} cycles a product"
        for step in loop.steps:
            yield (
                f"           path: {step.products} products and {step.other_cycles} other cycles, "
                f"simulated: {step.simulated.likely:.0f}"
            )


def _mix(kinds: Mapping[str, int]) -> str:
    ordered = sorted(kinds.items(), key=lambda one: -one[1])
    return ", ".join(f"{count} {kind}" for kind, count in ordered)


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
