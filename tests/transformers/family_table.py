"""The results of the sweep (sweep.py): the table of docs/models.md, for all tested versions of transformers.

Where two versions differ, each has its own rows. A verdict names its cases in brackets if other cases of the
family have a better one. It is "runs under sdpa" if a refused family matches under
`register(on_unsupported="sdpa")`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from torch_fattn import _versions

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
MARK = "<!-- The rest is written by python -m tests.transformers.sweep -->"
HEAD = "| kind | transformers | verdict | families | why |\n|---|---|---|---|---|\n"
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
    return read(PAGE.read_text())


def recorded(version: str) -> Document | None:
    """The results of this version, if it was tested."""
    return next((found for found in all_recorded() if found["transformers"] == version), None)


def record(found: Document) -> None:
    """Puts a document in place of that of its minor version; keeps the oldest and newest supported ones."""
    minors = {_versions.minor(other["transformers"]): other for other in [*all_recorded(), found]}
    kept = (minors[minor] for minor in _versions.TRANSFORMERS if minor in minors)
    PAGE.write_text(PAGE.read_text().partition(MARK)[0] + text_of(kept))


def read(page: str) -> list[Document]:
    documents: dict[str, Document] = {}
    for line in page.partition(HEAD)[2].splitlines():
        kind, versions, cell, families, why = (part.strip() for part in line.strip("|").split("|"))
        if not (match := _VERDICT.fullmatch(cell)):
            raise ValueError(f"{PAGE.name} has a verdict {cell!r}")
        verdict, only, under_sdpa = match.groups()
        found = {"verdict": verdict, "only": only, "why": why}
        names = families.split(", ")
        for version in versions.split():
            document = documents.setdefault(
                version, {"transformers": version, "families": {}, "under_sdpa": {}}
            )
            group = document["families"].setdefault(kind, {})
            group |= {name: {word: message for word, message in found.items() if message} for name in names}
            document["under_sdpa"].setdefault(kind, []).extend(names if under_sdpa else [])
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

    lines = []
    for row in sorted(families, key=place):
        cases = f" ({row.only})" if row.only else ""
        verdict = f"{row.verdict}{cases}{', runs under sdpa' if row.under_sdpa else ''}"
        lines.append(
            f"| {row.kind} | {row.versions} | {verdict} | {', '.join(sorted(families[row]))} | {row.why} |\n"
        )
    summaries = "".join(f"{_summary(document)}\n\n" for document in reversed(documents))
    return f"{MARK}\n\n{summaries}{HEAD}{''.join(lines)}"


def _summary(document: Document) -> str:
    verdicts = [found["verdict"] for group in document["families"].values() for found in group.values()]
    counts = ", ".join(f"{each} {verdicts.count(each)}" for each in VERDICTS if each in verdicts)
    under_sdpa = sum(len(names) for names in document["under_sdpa"].values())
    return (
        f"transformers {document['transformers']}, {len(verdicts)} entries: {counts}; {under_sdpa} of those "
        "that refuse run under sdpa."
    )


def _oldest_first(documents: Iterable[Document]) -> list[Document]:
    return sorted(documents, key=lambda document: _versions.minor(document["transformers"]))
