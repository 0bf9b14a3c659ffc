"""Checks the layers of a package and prints its rooms, their floors, and the arrows between them.

    python tools/rooms.py                      # check every package in FLOORS
    python tools/rooms.py bench torch_fattn    # print and check these

A house is a package. A room is a folder or a file at its root; a C++ source and its header are one room. A
floor is a layer. An arrow is an import (also inside a function) or a quoted `#include`. Violations are arrows
to the same or a higher floor, cycles of files, and rooms without a floor. Prints one line for each and exits
with 1.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The rooms of each floor, lowest first and separated by spaces. Rooms on one floor do not use each other.
FLOORS: dict[str, tuple[str, ...]] = {
    "bench": ("cases", "peers", "backends", "models", "report", "__main__"),
    "csrc": ("kernels", "plan", "describe metal", "fallback launch", "selftest", "ops", "dropin"),
    "torch_fattn": (
        "runtime",
        "operators",
        "reference caches distributed patterns",
        "linear_attention",
        "integrations",
        "flash_attn inspection",
        "tuning",
        "__init__ commands",
        "__main__",
    ),
}
CPP_ENDINGS = {".cpp", ".h", ".mm", ".metal"}
INCLUDE = re.compile(r'^\s*#\s*(?:include|import)\s+"([^"]+)"', re.MULTILINE)

Arrows = dict[str, set[str]]  # each file or room, and the ones that it uses


def files_of(house: Path) -> list[Path]:
    """Returns Python and C++ sources as paths in the house."""
    endings = CPP_ENDINGS | {".py"}
    found = (path.relative_to(house) for path in sorted(house.rglob("*")) if path.suffix in endings)
    return [path for path in found if "generated" not in path.parts]


def room_of(file: Path) -> str:
    return file.parts[0] if len(file.parts) > 1 else file.stem


def arrows_of_files(house: Path) -> Arrows:
    files = files_of(house)
    return {
        str(file): {str(used) for used in _used(house, file) if used in files and used != file}
        for file in files
    }


def arrows_of_rooms(files: Mapping[str, Iterable[str]]) -> Arrows:
    rooms: Arrows = {}
    for file, used in files.items():
        room = room_of(Path(file))
        rooms.setdefault(room, set()).update(room_of(Path(one)) for one in used)
    used_rooms = set().union(*rooms.values())
    return {
        room: used - {room}
        for room, used in rooms.items()
        if used or room in used_rooms or room != "__init__"
    }


def _used(house: Path, file: Path) -> Iterator[Path]:
    text = (house / file).read_text(encoding="utf-8")
    if file.suffix == ".py":
        for names in _imported(ast.parse(text), (house.name, *file.parent.parts)):
            found = (_module(house, name) for name in names)
            if (module := next(filter(None, found), None)) is not None:
                yield module
        return
    for name in INCLUDE.findall(text):
        for folder in ((house / file).parent, house, house.parent):
            path = (folder / name).resolve()
            if path.is_file() and path.is_relative_to(house.resolve()):
                yield path.relative_to(house.resolve())
                break


def _imported(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Yields the full name of each imported module; an imported name is a module, or of the module before."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (tuple(alias.name.split(".")),)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            for alias in node.names:
                yield (*base, alias.name), base
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            if node.args and isinstance(name := getattr(node.args[0], "value", None), str):
                yield (tuple(name.split(".")),)


def _module(house: Path, name: tuple[str, ...]) -> Path | None:
    """Returns the file of a module in the house."""
    if name[0] != house.name:
        return None
    path = Path(*name[1:])
    files = [path / "__init__.py", *([path.with_suffix(".py")] if name[1:] else [])]
    return next((file for file in files if (house / file).is_file()), None)


def cycle(arrows: Mapping[str, Iterable[str]]) -> list[str]:
    """Returns one cycle of arrows, or an empty list."""
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def drawing(name: str, arrows: Mapping[str, set[str]], floors: Mapping[str, int]) -> Iterator[str]:
    count = sum(map(len, arrows.values()))
    floor_of = {room: floors.get(room, 0) for room in arrows}
    yield f"{name}: {len(arrows)} rooms on {len(set(floor_of.values()))} floors, {count} arrows"
    for room in sorted(arrows, key=lambda room: (-floor_of[room], room)):
        used = ", ".join(sorted(arrows[room]))
        yield f"  {floor_of[room]}  {room:{max(map(len, arrows))}}  {used}".rstrip()


def floors_in_order(order: Sequence[str]) -> dict[str, int]:
    return {room: floor for floor, rooms in enumerate(order) for room in rooms.split()}


def violations(name: str, files: Arrows, order: Sequence[str]) -> Iterator[str]:
    """Yields the violations; `order` lists the rooms as FLOORS does."""
    floors = floors_in_order(order)
    for room in sorted(arrows_of_rooms(files).keys() - floors):
        yield f"{name}/{room} has no floor: add it to FLOORS in tools/rooms.py"
    for file, used in sorted(files.items()):
        for other in sorted(used):
            room, below = room_of(Path(file)), room_of(Path(other))
            if room != below and floors.get(room, 0) <= floors.get(below, -1):
                yield f"{name}/{file} uses {name}/{other}, whose room is not on a lower floor"
    if names := cycle(files):
        yield f"{name}: a cycle of files: {' -> '.join(names)}"


def check(houses: Iterable[str] = FLOORS) -> list[str]:
    return [line for name in houses for line in violations(name, arrows_of_files(ROOT / name), FLOORS[name])]


def main(names: list[str]) -> int:
    for name in names:
        arrows = arrows_of_rooms(arrows_of_files(ROOT / name))
        print("\n".join(drawing(name, arrows, floors_in_order(FLOORS[name]))))
    found = check(names or FLOORS)
    print("\n".join(found) if found else "rooms: ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
