"""tools/rooms.py: the sources follow its rules, and violations are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import rooms

pytestmark = pytest.mark.host_only

TIDY = {
    "__init__.py": "",
    "plan.py": "import json\n",
    "metal/__init__.py": "",
    "metal/run.py": "from ..plan import Plan\nfrom . import encode\n",
    "metal/encode.py": "",
    "main.py": "def main():\n    from house.metal import run\n",
}
ORDER = ("plan", "metal", "main")


def build(house: Path, files: dict[str, str]) -> rooms.Arrows:
    for name, text in files.items():
        (house / name).parent.mkdir(parents=True, exist_ok=True)
        (house / name).write_text(text)
    return rooms.arrows_of_files(house)


def test_houses_of_the_repository() -> None:
    assert rooms.check() == []


@pytest.mark.parametrize(
    ("file", "text", "violation"),
    [
        ("plan.py", "from . import main", "house/main.py, whose room is not on a lower floor"),
        ("plan.py", "def f():\n    import house.metal.run", "house/plan.py uses house/metal/run.py"),
        ("plan.py", "if TYPE_CHECKING:\n    from . import main", "uses house/main.py"),
        ("plan.py", "import importlib\nimportlib.import_module('house.main')", "uses house/main.py"),
        ("metal/encode.py", "from .run import run", "a cycle of files: metal/"),
        ("attic.py", "", "house/attic has no floor"),
    ],
)
def test_a_house_in_disorder_is_refused(file: str, text: str, violation: str, tmp_path: Path) -> None:
    house = tmp_path / "house"
    assert list(rooms.violations("house", build(house, TIDY), ORDER)) == []
    found = list(rooms.violations("house", build(house, {file: text}), ORDER))
    assert len(found) >= 1 and violation in found[0]


def test_includes_are_arrows(tmp_path: Path) -> None:
    house = tmp_path / "csrc"
    sources = {
        "plan/plan.h": '#include <vector>\n#include "plan/device.h"\n',
        "plan/device.h": "",
        "ops.cpp": '#include "ops.h"\n#include "plan/plan.h"\n',
        "ops.h": "",
        "generated/kernels.inc": "",
    }
    files = build(house, sources)
    assert rooms.arrows_of_rooms(files) == {"ops": {"plan"}, "plan": set()}
    assert list(rooms.violations("csrc", files, ("plan", "ops"))) == []
    upward = build(house, {"plan/device.h": '#import "../ops.h"\n'})
    assert "csrc/plan/device.h uses csrc/ops.h" in next(rooms.violations("csrc", upward, ("plan", "ops")))
