"""The results of the sweep (sweep.py): families.txt, one table for all tested versions of transformers.

A line has a kind, the versions, a verdict, the families that have it, and the reason if there is one. Where
two versions differ, each has its own lines. A verdict names its cases in brackets if other cases of the
family have a better one. It is "runs under sdpa" if a refused family matches under
`register(on_unsupported="sdpa")`.
"""

from __future__ import annotations

import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from torch_fattn import _versions

FILE = Path(__file__).with_name("families.txt")
HEAD = "kind | transformers | verdict | families | why"
WIDTH = 70  # of the families of a line
VERDICTS = ("matches", "refuses", "not used", "not built", "differs", "fails")
_VERDICT = re.compile(r"([a-z ]+?)(?: \((.*)\))?(, runs under sdpa)?")

# {"transformers": version, "families": {kind: {name: {"verdict", "only", "why"}}},
#  "under_sdpa": {kind: [name]}}
Document = dict[str, Any]


class Row(NamedTuple):
    kind: str
    versions: str
    verdict: str
    only: str
    under_sdpa: bool
    why: str


def all_recorded() -> list[Document]:
    """The results of each version, the oldest first."""
    return read(FILE.read_text())


def recorded(version: str) -> Document | None:
    """The results of this version, if it was tested."""
    return next((found for found in all_recorded() if found["transformers"] == version), None)


def record(found: Document) -> None:
    """Puts a document in place of that of its minor version; keeps the oldest and newest supported ones."""
    minors = {_versions.minor(other["transformers"]): other for other in [*all_recorded(), found]}
    FILE.write_text(text_of(minors[minor] for minor in _versions.TRANSFORMERS if minor in minors))


def read(text: str) -> list[Document]:
    head, *lines = text.splitlines()
    if head != HEAD:
        raise ValueError(f"{FILE.name} begins with {head!r}, not with {HEAD!r}")
    documents: dict[str, Document] = {}
    for line in lines:
        kind, versions, cell, families, *why = line.split(" | ", 4)
        if not (match := _VERDICT.fullmatch(cell)):
            raise ValueError(f"{FILE.name} has a verdict {cell!r}")
        verdict, only, under_sdpa = match.groups()
        found = {"verdict": verdict, "only": only, "why": why[0] if why else ""}
        for version in versions.split():
            document = documents.setdefault(
                version, {"transformers": version, "families": {}, "under_sdpa": {}}
            )
            group = document["families"].setdefault(kind, {})
            group |= {
                name: {word: message for word, message in found.items() if message}
                for name in families.split()
            }
            document["under_sdpa"].setdefault(kind, []).extend(families.split() if under_sdpa else [])
    for document in documents.values():
        for kind, group in document["families"].items():
            document["families"][kind] = dict(sorted(group.items()))
            document["under_sdpa"][kind].sort()
    return _oldest_first(documents.values())


def text_of(documents: Iterable[Document]) -> str:
    documents = _oldest_first(documents)
    kinds = list(documents[-1]["families"])
    versions: dict[tuple[str, Row], list[str]] = defaultdict(list)
    for document in documents:
        for kind, group in document["families"].items():
            for name, found in group.items():
                under_sdpa = name in document["under_sdpa"].get(kind, ())
                row = Row(kind, "", found["verdict"], found.get("only", ""), under_sdpa, found.get("why", ""))
                versions[name, row].append(document["transformers"])
    families: dict[Row, list[str]] = defaultdict(list)
    for (name, row), having in versions.items():
        families[row._replace(versions=" ".join(having))].append(name)

    def place(row: Row) -> tuple[Any, ...]:
        where = kinds.index(row.kind), VERDICTS.index(row.verdict), row.only, row.under_sdpa
        return *where, -len(row.versions), row.versions, min(families[row])

    lines = [HEAD]
    for row in sorted(families, key=place):
        cases, under_sdpa = (
            f" ({row.only})" if row.only else "",
            ", runs under sdpa" if row.under_sdpa else "",
        )
        for names in textwrap.wrap(" ".join(sorted(families[row])), WIDTH, break_on_hyphens=False):
            cells = [row.kind, row.versions, f"{row.verdict}{cases}{under_sdpa}", names, row.why]
            lines.append(" | ".join(cell for cell in cells if cell))
    return "\n".join(lines) + "\n"


def _oldest_first(documents: Iterable[Document]) -> list[Document]:
    return sorted(documents, key=lambda document: _versions.minor(document["transformers"]))
