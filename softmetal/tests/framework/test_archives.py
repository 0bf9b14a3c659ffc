"""Binary archives: hits and misses, and files that are refused."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

import softmetal

pytest.importorskip("torch")

UNEXPECTED, INVALID, INTERNAL = (f"{code} of MTLBinaryArchiveDomain" for code in (2, 1, 4))
STEPS = {
    "new": "ok",
    "empty to a file": UNEXPECTED,
    "add without a function": UNEXPECTED,
    "miss": UNEXPECTED,
    "no archive": UNEXPECTED,
    "miss that may compile": "ok",
    "add": "ok",
    "hit": "ok",
    "another constant": UNEXPECTED,
    "to a file": "ok",
    "to nowhere": INTERNAL,
    "from nowhere": INVALID,
    "from the file": "ok",
    "hit of the file": "ok",
}


def test_hits_misses_and_files(kit: ModuleType, tmp_path: Path) -> None:
    kit.archives(str(tmp_path / "first"))
    before = softmetal.live_objects()
    steps = dict(line.split("=") for line in kit.archives(str(tmp_path / "archive")))
    assert steps == STEPS
    assert softmetal.live_objects() == before


def test_broken_files_are_refused(kit: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "archive"
    kit.archives(str(path))
    whole = path.read_bytes()
    assert kit.open_archive(str(path)) == "ok"
    for broken in (b"", whole[: len(whole) // 2], whole[:-2], whole + b"x", whole[1:], b"text\n"):
        path.write_bytes(broken)
        assert kit.open_archive(str(path)) == INVALID
    path.write_bytes(whole)
    assert kit.open_archive(str(path)) == "ok"
