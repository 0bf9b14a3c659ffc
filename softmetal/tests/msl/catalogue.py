"""The conformance catalogues: programs that Metal accepts or rejects, as a table of rules per topic.

A header begins each program of conformance/TOPIC.metal:

    // --- local_pointer | rejected (certain) | MSL 4; slang #4129 | A pointer needs an address space.
    kernel void k(device float* x) {
      float* y = x + 1;  // error: needs an address space
      device float* y = x + 1;  // accepted
      *y = 2;
    }

The columns are name, verdict (and certainty), source and rule. A header inherits omitted columns from the
header above it. A blank line separates rules. `// error` marks the line that the compiler must name, with a
part of the message if its text matters. If several lines are marked, each has a program without the others.

`// --- setup` begins a text that opens a function. It precedes the programs below it that start with an
indented line, up to the next setup; they are the rest of the function, without its closing brace.

Lines that end with `// accepted` replace the lines marked `// error` and `// rejected` in a second program,
the control, which must compile. Several errors after a setup have one too: the text without these lines. A
control with larger differences is a separate accepted program with the same name.

certain  the specification or a message of Apple's compiler in a public issue says so
likely   the specification or such a message suggests it
unsure   no public source shows what Apple's compiler does: rejected with SOFTMETAL_REFUSE=unsure only
policy   softmetal's own choice, independent of Apple's compiler

`rejected (likely, metal4.1)` names a language version other than 3.1. Sources: "MSL 4.2" is a section of the
Metal Shading Language Specification, "slang #4129" an issue of that project. PRELUDE precedes every program
that does not include <metal_stdlib> itself.

    python softmetal/tests/msl/catalogue.py DIR   writes the programs as files, for Apple's compiler
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from softmetal.msl.compile import Program
from softmetal.msl.language import DEFAULT, LANGUAGES

FOLDER = Path(__file__).with_name("conformance")
PRELUDE = "#include <metal_stdlib>\nusing namespace metal;\n"
_HEADER = re.compile(
    r"// --- (?P<name>\w+) \| (?P<verdict>accepted|rejected)"
    r"(?: \((?P<certainty>certain|likely|unsure|policy)(?:, (?P<std>\S+))?\))?"
    r"(?: \| (?P<source>[^|]+) \| (?P<rule>[^|]+\.))?"
)
_MARK = re.compile(r"// (?P<mark>error|accepted|rejected)(?:: (?P<message>.+))?$")


@dataclass(frozen=True)
class Entry:
    name: str  # topic/name: an accepted and a rejected program may share it
    verdict: str
    certainty: str
    std: str
    source: str
    rule: str
    program: Program
    error_line: int = 0
    message: str = ""

    def has_error_where_marked(self, message: str) -> bool:
        place = f"{self.program.name}:{self.error_line}: error: "
        return any(line.startswith(place) and self.message in line for line in message.splitlines())


@dataclass(frozen=True)
class _Text:
    """A program of an entry. Lines of the others are empty."""

    verdict: str
    lines: list[str]
    error: int = -1  # the marked line
    message: str = ""


def _texts(verdict: str, body: list[str], is_inside: bool) -> Iterator[_Text]:
    marks = [_MARK.search(line) for line in body]
    kinds = [mark["mark"] if mark else "" for mark in marks]

    def without(*others: str, but: int = -1) -> list[str]:
        return [
            "" if kind in others and number != but else line
            for number, (line, kind) in enumerate(zip(body, kinds, strict=True))
        ]

    if verdict == "accepted":
        yield _Text(verdict, body, kinds.index("error") if "error" in kinds else -1)
        return
    for number, mark in enumerate(marks):
        if mark and mark["mark"] == "error":
            yield _Text(verdict, without("error", "accepted", but=number), number, mark["message"] or "")
    if "accepted" in kinds or (is_inside and kinds.count("error") > 1):
        yield _Text("accepted", without("error", "rejected"))


def parse(text: str, file: str) -> list[Entry]:
    """The entries of a catalogue. A line of a program keeps its line number in the catalogue."""
    lines = text.splitlines()
    headers = [number for number, line in enumerate(lines) if line.startswith("// ---")]
    entries: list[Entry] = []
    columns: dict[str, str] = {}
    setup: list[str] = []
    for number, end in zip(headers, [*headers[1:], len(lines)], strict=True):
        where = f"{file}:{number + 1}"
        if lines[number] == "// --- setup":
            setup = lines[number + 1 : end]
            continue
        header = _HEADER.fullmatch(lines[number])
        if header is None:
            raise ValueError(f"{where}: no header: {lines[number]}")
        if header["certainty"]:
            columns["std"] = header["std"] or DEFAULT
        columns |= {column: value for column, value in header.groupdict().items() if value}
        is_inside = lines[number + 1].startswith(" ")
        texts = [*_texts(columns["verdict"], lines[number + 1 : end], is_inside)] or [_Text("", [])]
        if len(columns) != 6 or columns["std"] not in LANGUAGES:
            raise ValueError(f"{where}: the first header needs all columns")
        if texts[0].verdict != columns["verdict"] or (texts[0].error >= 0) != (
            texts[0].verdict == "rejected"
        ):
            raise ValueError(f"{where}: a rejected program needs an `// error`, an accepted one has none")
        for place, one in enumerate(texts):
            before, body = [] if "#include <metal_stdlib>" in one.lines else PRELUDE.splitlines(), one.lines
            if is_inside:
                before, body = [*before, *setup], [*body, "}"]
            entries.append(
                Entry(
                    name=f"{Path(file).stem}/{columns['name']}"
                    + (f"_{place + 1}" if place and one.error >= 0 else ""),
                    verdict=one.verdict,
                    certainty=columns["certainty"],
                    std=columns["std"],
                    source=columns["source"],
                    rule=columns["rule"],
                    program=Program(
                        "\n".join([*before, *[""] * (number + 1 - len(before)), *body, ""]),
                        name=file,
                        std=columns["std"],
                        refuse_unsure=columns["certainty"] == "unsure",
                    ),
                    error_line=number + 2 + one.error if one.error >= 0 else 0,
                    message=one.message,
                )
            )
    return entries


ENTRIES = [entry for path in sorted(FOLDER.glob("*.metal")) for entry in parse(path.read_text(), path.name)]


def write(folder: Path) -> None:
    for entry in ENTRIES:
        file = folder / f"{entry.name}.{entry.verdict}.{entry.std}.metal"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(entry.program.source)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
