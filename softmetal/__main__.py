"""`python -m softmetal build | config --env | doctor | corpus DIR`."""

from __future__ import annotations

import argparse
import compileall
import os
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from . import control
from .arguments import Parser, positive
from .msl import corpus

ROOT = Path(__file__).resolve().parent
CLANG = "clang++-19"
OBJC_FLAGS = [
    "-fobjc-runtime=gcc",
    "-fblocks",
    "-fconstant-string-class=NSConstantString",
    "-D_NATIVE_OBJC_EXCEPTIONS",
    "-DGNUSTEP",
    "-DGNUSTEP_BASE_LIBRARY=1",
    "-DGNU_RUNTIME=1",
]
APT_PACKAGES = (
    "clang-19 libclang-19-dev libclang-rt-19-dev llvm-19 llvm-19-dev libobjc-12-dev libblocksruntime-dev "
    "libgnustep-base-dev cmake ninja-build"
)


def _torch_folder() -> Path:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit("softmetal: torch is not installed in this environment; install torch first.")
    return Path(spec.origin).parent


def _gcc_objc_include() -> Path:
    found = sorted(Path("/usr/lib/gcc").glob("*/*/include/objc/objc.h"))
    if not found:
        sys.exit(f"softmetal: <objc/objc.h> is missing; install {APT_PACKAGES}.")
    return found[-1].parent.parent


def build(jobs: int | None) -> None:
    for tool in ("cmake", "ninja", CLANG):
        if shutil.which(tool) is None:
            sys.exit(f"softmetal: {tool} is missing; install {APT_PACKAGES}.")
    folder = control.BUILD_FOLDER / "cmake"
    configure = ["cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja"]
    configure += [f"-DCMAKE_CXX_COMPILER={shutil.which(CLANG)}", f"-DTORCH_DIR={_torch_folder()}"]
    for command in (configure, ["ninja", "-C", str(folder), *([f"-j{jobs}"] if jobs else [])]):
        done = subprocess.run(command, stdout=subprocess.DEVNULL if command is configure else None)
        if done.returncode != 0:
            sys.exit(
                f"softmetal: {command[0]} failed, as it says above; if this folder was moved or copied, "
                f"delete {folder} and build again."
            )
    # Every program that is compiled starts an interpreter: one that may not write byte code finds it here.
    compileall.compile_dir(ROOT, maxlevels=1, quiet=1)


def environment() -> dict[str, str]:
    """What setuptools and torch.utils.cpp_extension need to build Objective-C++ for Metal, as on a Mac."""
    includes = [f"-I{ROOT / 'framework' / 'include'}", "-isystem/usr/include/GNUstep"]
    includes += [f"-isystem{_gcc_objc_include()}"]
    built = control.BUILD_FOLDER
    libraries = [str(built / "objcxx_personality.o"), f"-L{built}", f"-Wl,-rpath,{built}"]
    libraries += ["-lsoftmetal", "-lgnustep-base", "-lobjc", "-lBlocksRuntime"]
    return {
        "CXX": CLANG,
        "CC": CLANG.replace("++", ""),
        "CPPFLAGS": shlex.join(OBJC_FLAGS + includes),
        "LDFLAGS": shlex.join(libraries),
    }


def doctor() -> None:
    missing = [tool for tool in ("cmake", "ninja", CLANG) if shutil.which(tool) is None]
    print("tools:  ", f"missing {', '.join(missing)}; install {APT_PACKAGES}" if missing else "all there")
    if not control.LIBRARY.exists():
        sys.exit("library: not built; run `python -m softmetal build`")
    facts = control.device_facts()
    print("library:", control.LIBRARY)
    print("device: ", facts["name"], f"({facts['cores']} GPU cores claimed, {facts['memory'] >> 20} MiB)")


def folder_of_sources(text: str) -> Path:
    folder = Path(text)
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no folder; name one that holds Metal sources")
    if next(folder.rglob("*.metal"), None) is None:
        raise argparse.ArgumentTypeError(f"{text!r} holds no .metal file; name a folder that does")
    return folder


def new_file(text: str) -> Path:
    """Found out before the work whose result goes there."""
    file = Path(text)
    if file.is_dir() or not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no file in an existing folder; name one")
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
    config = commands.add_parser("config", help="how to build Objective-C++ extensions")
    config.add_argument("--env", action="store_true", required=True, help="print export lines for a shell")
    commands.add_parser("doctor", help="say what is here")
    gauge = commands.add_parser(
        "corpus", help="count the kernel functions below a folder that compile", description=corpus.__doc__
    )
    gauge.add_argument("folder", type=folder_of_sources, metavar="DIR")
    gauge.add_argument("-j", "--jobs", type=positive, default=os.cpu_count(), help="processes (one per core)")
    gauge.add_argument("--seconds", type=positive, default=300, help="limit for one source (%(default)s)")
    gauge.add_argument("--json", type=new_file, metavar="FILE", help="write every source's result")
    gauge.add_argument("--verbose", action="store_true", help="print every source with its errors")
    arguments = parser.parse_args(words)
    if arguments.command == "build":
        build(arguments.jobs)
    elif arguments.command == "config":
        for name, value in environment().items():
            print(f"export {name}={shlex.quote(value)}")
    elif arguments.command == "corpus":
        try_corpus(arguments)
    else:
        doctor()


if __name__ == "__main__":
    main()
