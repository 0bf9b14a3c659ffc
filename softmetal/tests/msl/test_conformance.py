"""Each program in the conformance catalogues is accepted, or rejected at its line, as its header says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from catalogue import ENTRIES, Entry, parse

from softmetal.msl.compile import CompileError, Program, compile_program

ACCEPTED = [entry for entry in ENTRIES if entry.verdict == "accepted"]
REJECTED = [entry for entry in ENTRIES if entry.verdict == "rejected"]
UNSURE = [entry for entry in REJECTED if entry.certainty == "unsure"]


@pytest.mark.parametrize("entry", REJECTED, ids=lambda entry: entry.name)
def test_rejected(entry: Entry, tmp_path: Path) -> None:
    with pytest.raises(CompileError) as caught:
        compile_program(entry.program, "fast", tmp_path)
    assert entry.has_error_where_marked(str(caught.value)), f"{entry.rule}\n{caught.value}"


@pytest.mark.parametrize("entry", ACCEPTED, ids=lambda entry: entry.name)
def test_accepted(entry: Entry, tmp_path: Path) -> None:
    assert compile_program(entry.program, "fast", tmp_path).exists(), entry.rule


@pytest.mark.parametrize("entry", UNSURE, ids=lambda entry: entry.name)
def test_unsure_is_accepted_by_default(entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOFTMETAL_REFUSE", raising=False)
    by_default = Program(entry.program.source, name=entry.program.name)
    assert by_default == replace(entry.program, refuse_unsure=False)
    assert compile_program(by_default, "fast", tmp_path).exists()
    monkeypatch.setenv("SOFTMETAL_REFUSE", "unsure")
    assert Program(entry.program.source, name=entry.program.name) == entry.program


def test_names_are_unique() -> None:
    names = [(entry.name, entry.verdict) for entry in ENTRIES]
    assert len(set(names)) == len(names)


GOOD = """// Topic.

// --- first | rejected (certain, metal3.2) | MSL 4 | A rule.
int x;  // error: no space
// --- first | accepted
constant int x = 1;
"""


def test_marked_lines_make_the_control() -> None:
    text = GOOD.replace(
        "// --- first | accepted\nconstant int x = 1;", "constant int x = 1;  // accepted\nint y;"
    )
    rejected, accepted = parse(text, "topic.metal")
    assert (rejected.verdict, rejected.error_line, accepted.verdict) == ("rejected", 4, "accepted")
    assert rejected.program.source.splitlines()[3:] == ["int x;  // error: no space", "", "int y;"]
    assert accepted.program.source.splitlines()[3:] == ["", "constant int x = 1;  // accepted", "int y;"]


def test_each_error_has_a_program() -> None:
    text = GOOD.replace("// --- first | accepted\n", "int y;  // error\n")
    first, second = parse(text, "topic.metal")
    assert (first.name, first.error_line) == ("topic/first", 4) and first.message == "no space"
    assert (second.name, second.error_line) == ("topic/first_2", 5)
    assert first.program.source.splitlines()[3:] == ["int x;  // error: no space", "", "constant int x = 1;"]
    assert second.program.source.splitlines()[3:] == ["", "int y;  // error", "constant int x = 1;"]


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("rejected (certain, metal3.2)", "rejected"),
        (" | MSL 4 | A rule.", ""),
        ("metal3.2", "metal9"),
        ("certain", "sure"),
        ("  // error: no space", ""),
        ("= 1;", "= 1;  // error"),
        ("first | accepted", "accepted"),
        ("int x;  // error: no space", "int x;  // accepted"),
    ],
)
def test_a_broken_catalogue_is_an_error(good: str, bad: str) -> None:
    assert good in GOOD
    with pytest.raises(ValueError, match=r"^topic.metal:\d+: "):
        parse(GOOD.replace(good, bad), "topic.metal")
