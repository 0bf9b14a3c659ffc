"""`python -m softmetal build | config --env | doctor | corpus DIR | agx FILE`."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from . import control, native
from .agx import build as agx_build
from .agx import command as agx_command
from .arguments import Parser, positive
from .msl import corpus


def doctor() -> None:
    missing = ", ".join(native.missing_tools())
    print("tools:  ", f"{missing} not found; install {native.APT_PACKAGES}" if missing else "found")
    if not control.LIBRARY.exists():
        sys.exit("library: not built; run `python -m softmetal build`")
    facts = control.device_facts()
    print("library:", control.LIBRARY)
    print("device: ", facts["name"], f"({facts['cores']} GPU cores claimed, {facts['memory'] >> 20} MiB)")


def folder_of_sources(text: str) -> Path:
    folder = Path(text)
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder; name one that contains Metal sources")
    if next(folder.rglob("*.metal"), None) is None:
        raise argparse.ArgumentTypeError(f"{text!r} contains no .metal file; name a folder that does")
    return folder


def new_file(text: str) -> Path:
    """The type of an option that names an output file, checked before the work."""
    file = Path(text)
    if file.is_dir() or not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file in an existing folder; name one")
    return file


def try_corpus(arguments: argparse.Namespace) -> None:
    results = []
    try:
        for result in corpus.try_folder(arguments.folder.resolve(), arguments.jobs, arguments.seconds):
            results.append(result)
            if arguments.verbose:
                print(corpus.details(result), flush=True)
    except KeyboardInterrupt:
        print(f"interrupted after {len(results)} sources", file=sys.stderr)
    if arguments.json:
        arguments.json.write_text(corpus.as_json(results))
    print(corpus.summary(results))


def main(words: list[str] | None = None) -> None:
    parser = Parser(prog="python -m softmetal", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    build_parser = commands.add_parser("build", help="build the native libraries")
    build_parser.add_argument("-j", "--jobs", type=positive, help="parallel compilers (ninja's default)")
    build_parser.add_argument("--agx", action="store_true", help="build the tools of the command agx instead")
    config = commands.add_parser("config", help="how to build Objective-C++ extensions")
    config.add_argument("--env", action="store_true", required=True, help="print export lines for a shell")
    commands.add_parser("doctor", help="check tools, libraries and device")
    gauge = commands.add_parser(
        "corpus", help="count the kernel functions below a folder that compile", description=corpus.__doc__
    )
    gauge.add_argument("folder", type=folder_of_sources, metavar="DIR")
    gauge.add_argument("-j", "--jobs", type=positive, default=os.cpu_count(), help="processes (one per core)")
    gauge.add_argument("--seconds", type=positive, default=300, help="limit for one source (%(default)s)")
    gauge.add_argument("--json", type=new_file, metavar="FILE", help="write every source's result")
    gauge.add_argument("--verbose", action="store_true", help="print every source with its errors")
    agx = commands.add_parser(
        "agx", help="print the cost of a kernel on M1 and M2", description=agx_command.__doc__
    )
    agx_command.add_arguments(agx)
    arguments = parser.parse_args(words)
    if arguments.command == "build":
        (agx_build if arguments.agx else native).build(arguments.jobs)
    elif arguments.command == "agx":
        agx_command.run(arguments)
    elif arguments.command == "config":
        for name, value in native.environment().items():
            print(f"export {name}={shlex.quote(value)}")
    elif arguments.command == "corpus":
        try_corpus(arguments)
    else:
        doctor()


if __name__ == "__main__":
    main()
