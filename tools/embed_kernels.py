"""Turns csrc/kernels/*/*.metal into self-contained sources, which the extension embeds as strings.

Metal's run-time compiler gets one string and no include path. Every `#include "x.h"` is therefore replaced by
that file's text, once; `#include <...>` is left to the compiler. `#line` directives make its errors name the
original file and line.

    python tools/embed_kernels.py --output csrc/generated/kernel_sources.inc
    python tools/embed_kernels.py --print decode
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from pathlib import Path

KERNELS = Path(__file__).resolve().parent.parent / "csrc" / "kernels"
LOCAL_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"')
PRAGMA_ONCE = re.compile(r"^\s*#\s*pragma\s+once\b")
DELIMITER = "FATTN"
# Tuned tiles and compiled kernels are valid only for the same contents of these files.
DIGESTED = ("kernels/*/*", "plan/*", "metal/*")


def flatten(path: Path, seen: set[Path] | None = None) -> str:
    """Returns the text of a kernel or header with its local includes expanded."""
    seen = set() if seen is None else seen
    seen.add(path)
    out = [f'#line 1 "{path.name}"']
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        include = LOCAL_INCLUDE.match(line)
        if include is None:
            # Compilers warn about the pragma in a main file.
            out.append("" if PRAGMA_ONCE.match(line) else line)
            continue
        included = (path.parent / include.group(1)).resolve()
        if not included.is_file():
            raise FileNotFoundError(f'{path}:{number}: no file "{include.group(1)}"')
        if included not in seen:
            out.append(flatten(included, seen).rstrip("\n"))
        out.append(f'#line {number + 1} "{path.name}"')
    return "\n".join(out) + "\n"


def kernels() -> dict[str, Path]:
    """The file of each kernel, by name."""
    return {path.stem: path for path in sorted(KERNELS.glob("*/*.metal"), key=lambda path: path.name)}


def digest() -> str:
    """Returns a digest of kernels, planner and compile options."""
    sources = hashlib.sha256()
    for path in sorted(path for pattern in DIGESTED for path in KERNELS.parent.glob(pattern)):
        sources.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return sources.hexdigest()[:16]


def as_initializers() -> str:
    """Returns {name, source} initialisers for csrc/metal/pipelines.mm, and the digest of all sources."""
    entries = []
    for name, path in kernels().items():
        source = flatten(path)
        if f"){DELIMITER}" in source:
            raise ValueError(f"{name}.metal: contains the raw string delimiter )" + DELIMITER)
        entries.append(f'{{"{name}", R"{DELIMITER}({source}){DELIMITER}"}},\n')
    entries.append(f'{{"digest", "{digest()}"}},\n')
    return "// Written by tools/embed_kernels.py.\n" + "".join(entries)


def write_if_changed(path: Path, text: str) -> None:
    """Does not touch an up-to-date file, because a new time stamp would cause a recompile."""
    if path.is_file() and path.read_text() == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Flatten the Metal kernels into self-contained sources.")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--print", metavar="NAME", help="print one flattened kernel, e.g. decode")
    action.add_argument("--output", metavar="FILE", type=Path, help="write all kernels as C++ initialisers")
    arguments = parser.parse_args(argv)
    if arguments.output is not None:
        write_if_changed(arguments.output, as_initializers())
        return
    name = arguments.print.removesuffix(".metal")
    if name not in kernels():
        parser.error(f"no kernel {name!r} (there are: {', '.join(kernels())})")
    sys.stdout.write(flatten(kernels()[name]))


if __name__ == "__main__":
    main(sys.argv[1:])
