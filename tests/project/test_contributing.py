"""CONTRIBUTING.md names the files, rooms and options that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import rooms

pytestmark = pytest.mark.host_only

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()


def table_of(header: str) -> list[str]:
    """What the rows of a table begin with."""
    table = GUIDE.split(f"| {header} |")[1].split("\n\n")[0]
    return re.findall(r"^\| `([\w./]+?)/?`", table, re.MULTILINE)


def test_the_files_that_it_names() -> None:
    named = set(re.findall(r"`((?:csrc|torch_fattn|tests|tools)/[\w./]*\w)`", GUIDE))
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("house", ["csrc", "torch_fattn"])
def test_the_rooms_of_a_house(house: str) -> None:
    """Highest first in csrc, lowest first in torch_fattn."""
    named = table_of(f"`{house}/`")
    floors = rooms.floors_in_order(rooms.FLOORS[house])
    numbers = [floors[room] for room in named]
    assert numbers == sorted(numbers, reverse=house == "csrc")
    assert {*named} == {*floors} - {"__init__", "__main__"}


# Where an option must be, beside its places in layers that only pass it on.
OF_AN_OPTION = (
    "csrc",
    "torch_fattn/operators",
    "torch_fattn/reference",
    "tests/helpers/problems.py",
    "docs/options.md",
)


def files_naming(word: str, *places: str) -> set[str]:
    paths = (
        path for place in places for path in (ROOT / place, *(ROOT / place).rglob("*")) if path.is_file()
    )
    sources = (path for path in paths if path.suffix in (".cpp", ".h", ".mm", ".metal", ".py", ".md"))
    sources = (path for path in sources if not path.stem.startswith("rotary"))  # have a flag of the same name
    found = (path for path in sources if re.search(rf"\b{word}\b", path.read_text()))
    return {str(path.relative_to(ROOT)) for path in found if path.name != "README.md"}


@pytest.mark.parametrize("option", ["sink_tokens", "alibi_slopes", "token_major_out"])
def test_the_files_of_an_option(option: str) -> None:
    listed = table_of(f"file of `{option}`")
    assert {*listed} == files_naming(option, *OF_AN_OPTION)
    (count,) = re.findall(rf"`{option}`[^:]*: (\d+) files", GUIDE)
    assert int(count) == len(listed)
