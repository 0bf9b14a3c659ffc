"""`python -m softmetal build | config --env | doctor | agx FILE`."""

from __future__ import annotations

import shlex
import sys

from . import control, native
from .agx import build as agx_build
from .agx import command as agx_command
from .arguments import Parser, positive


def doctor() -> None:
    missing = ", ".join(native.missing_tools())
    print("tools:  ", f"{missing} not found; install {native.APT_PACKAGES}" if missing else "found")
    if not control.LIBRARY.exists():
        sys.exit("library: not built; run `python -m softmetal build`")
    facts = control.device_facts()
    print("library:", control.LIBRARY)
    print("device: ", facts["name"], f"({facts['cores']} GPU cores claimed, {facts['memory'] >> 20} MiB)")


def main(words: list[str] | None = None) -> None:
    parser = Parser(prog="python -m softmetal", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    build_parser = commands.add_parser("build", help="build the native libraries")
    build_parser.add_argument("-j", "--jobs", type=positive, help="parallel compilers (ninja's default)")
    build_parser.add_argument("--agx", action="store_true", help="build the tools of the command agx instead")
    config = commands.add_parser("config", help="how to build Objective-C++ extensions")
    config.add_argument("--env", action="store_true", required=True, help="print export lines for a shell")
    commands.add_parser("doctor", help="check tools, libraries and device")
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
    else:
        doctor()


if __name__ == "__main__":
    main()
