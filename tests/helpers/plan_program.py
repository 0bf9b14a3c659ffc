"""Programs compiled with csrc/plan and the gate of the self-test alone, without torch and Metal."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

COMPILER = os.environ.get("CXX") or shutil.which("clang++") or shutil.which("clang++-19") or "c++"


class PlanProgram:
    """Keeps its objects in a folder: a program that differs in one source is compiled in part."""

    def __init__(self, csrc: Path, main: Path, folder: Path) -> None:
        self._csrc, self._folder = csrc, folder
        self._command = [*COMPILER.split(), "-std=c++20", "-Wall", "-Werror", "-I", str(csrc)]
        self._precompile()
        sources = [main, csrc / "selftest" / "gate.cpp", *sorted((csrc / "plan").glob("*.cpp"))]
        self._objects = {
            source.name: self._compile(source, folder / f"{source.stem}.o") for source in sources
        }

    def _precompile(self) -> None:
        """All headers once, which take most of the time."""
        headers = self._folder / "headers.h"
        plan = self._csrc / "plan"
        standard = {
            name for path in plan.iterdir() for name in re.findall(r"#include (<\w+>)", path.read_text())
        }
        own = (f'"plan/{path.name}"' for path in sorted(plan.glob("*.h")))
        headers.write_text("".join(f"#include {name}\n" for name in [*sorted(standard), *own]))
        self._run("-x", "c++-header", str(headers), "-o", f"{headers}.gch")  # clang takes this name too
        self._command += ["-include", str(headers)]

    def _compile(self, source: Path, target: Path) -> Path:
        self._run("-c", str(source), "-o", str(target))
        return target

    def _run(self, *arguments: str) -> None:
        subprocess.run([*self._command, *arguments], check=True)

    def link(self, *changed: Path) -> Path:
        """The program, with these sources in place of those of the same name."""
        objects = dict(self._objects)
        for source in changed:
            objects[source.name] = self._compile(source, self._folder / f"changed_{source.stem}.o")
        program = self._folder / "program"
        subprocess.run([*COMPILER.split(), *map(str, objects.values()), "-o", str(program)], check=True)
        return program
