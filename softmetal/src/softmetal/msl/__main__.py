"""python -m softmetal.msl compile: the compiler's command line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .arithmetic import FUNCTIONS, MATH_MODES, Arithmetic
from .compile import MODES, CompileError, Program, compile_program
from .language import DEFAULT, LANGUAGES
from .server import serve


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m softmetal.msl", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    compiler = commands.add_parser(
        "compile", help="translate and compile an MSL program; prints the shared object's path"
    )
    compiler.add_argument("--source", required=True, help="the .metal file, or - for standard input")
    compiler.add_argument("--out", type=Path, help="folder of the result (default: the cache)")
    compiler.add_argument("--mode", choices=MODES, default="fast")
    compiler.add_argument("--std", choices=LANGUAGES, default=DEFAULT, help="version of the language")
    compiler.add_argument("--define", action="append", default=[], metavar="NAME=VALUE")
    compiler.add_argument("--include", action="append", default=[], metavar="FOLDER")
    compiler.add_argument("--only", metavar="REGEX", help="export only the kernels whose host name matches")
    compiler.add_argument(
        "--math-mode", choices=MATH_MODES, default="fast", help="assumptions of the compiler (fast)"
    )
    compiler.add_argument(
        "--math-functions",
        choices=FUNCTIONS,
        default="fast",
        help="functions without a namespace (fast)",
    )
    compiler.add_argument("--name", help="name of the source in messages (default: the file's name)")
    server = commands.add_parser("serve", help="compile for other processes until standard input closes")
    server.add_argument("socket", type=Path)
    arguments = parser.parse_args(argv)
    if arguments.command == "serve":
        return serve(arguments.socket, main)
    from_stdin = arguments.source == "-"
    if not from_stdin and not Path(arguments.source).is_file():
        parser.error(f"--source {arguments.source!r} is not a file; name one, or - for standard input")
    program = Program(
        source=sys.stdin.read() if from_stdin else Path(arguments.source).read_text(),
        name=arguments.name or ("program_source" if from_stdin else Path(arguments.source).name),
        macros=tuple(arguments.define),
        include=tuple(arguments.include),
        std=arguments.std,
        only=arguments.only,
        arithmetic=Arithmetic(arguments.math_mode, arguments.math_functions),
    )
    try:
        print(compile_program(program, arguments.mode, arguments.out))
    except (CompileError, OSError) as error:  # OSError: a cache that cannot be written
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
