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
part of the message if its text matters.

`// --- setup` begins a text that opens a function. It precedes the programs below it that start with an
indented line, up to the next setup; they are the rest of the function, without its closing brace.

Lines that end with `// accepted` replace the lines marked `// error` and `// rejected` in a second program,
the control, which must compile. A control with larger differences is a separate accepted program with the
same name.

certain  the specification or a message of Apple's compiler in a public issue says so
likely   the specification or such a message suggests it
unsure   no public source shows what Apple's compiler does: rejected with SOFTMETAL_REFUSE=unsure only
policy   softmetal's own choice, independent of Apple's compiler

`rejected (likely, metal4.1)` names a language version other than 3.1. Sources: "MSL 4.2" is a section of the
Metal Shading Language Specification, "slang #4129" an issue of that project. PRELUDE precedes every program
that does not include <metal_stdlib> itself.

    python softmetal/tests/msl/catalogue.py                 print the table of rules
    python softmetal/tests/msl/catalogue.py c_cast          compile the programs with this text in their names
    python softmetal/tests/msl/catalogue.py --write DIR     write the programs as files, for Apple's compiler
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from softmetal.msl.compile import CompileError, Program, compile_program
from softmetal.msl.language import DEFAULT, LANGUAGES

FOLDER = Path(__file__).with_name("conformance")
PRELUDE = "#include <metal_stdlib>\nusing namespace metal;\n"
_HEADER = re.compile(
    r"// --- (?P<name>\w+) \| (?P<verdict>accepted|rejected)"
    r"(?: \((?P<certainty>certain|likely|unsure|policy)(?:, (?P<std>\S+))?\))?"
    r"(?: \| (?P<source>[^|]+) \| (?P<rule>[^|]+\.))?"
)
_ERROR = re.compile(r"// error(?:: (?P<message>.+))?$")
# The marks of lines in only one of the two programs.
_MARKS = {"accepted": re.compile(r"// accepted$"), "rejected": re.compile(r"// rejected$|// error(: .+)?$")}


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


def _programs(verdict: str, body: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yields the program of an entry, and its control. A line of only one program is empty in the other."""
    verdicts = (verdict, "accepted") if any(map(_MARKS["accepted"].search, body)) else (verdict,)
    for one in verdicts:
        other = _MARKS["rejected" if one == "accepted" else "accepted"]
        yield one, body if len(verdicts) == 1 else ["" if other.search(line) else line for line in body]


def parse(text: str, file: str) -> list[Entry]:
    """The entries of a catalogue. A line of a program keeps its line number in the catalogue."""
    lines = text.splitlines()
    headers = [number for number, line in enumerate(lines) if line.startswith("// ---")]
    entries: list[Entry] = []
    columns: dict[str, str] = {}
    setup: list[str] = []
    for number, end in zip(headers, [*headers[1:], len(lines)], strict=True):
        if lines[number] == "// --- setup":
            setup = lines[number + 1 : end]
            continue
        header = _HEADER.fullmatch(lines[number])
        if header is None:
            raise ValueError(f"{file}:{number + 1}: no header: {lines[number]}")
        if header["certainty"]:
            columns["std"] = header["std"] or DEFAULT
        columns |= {column: value for column, value in header.groupdict().items() if value}
        for verdict, body in _programs(columns["verdict"], lines[number + 1 : end]):
            errors = [
                (at, found) for at, line in enumerate(body, number + 2) if (found := _ERROR.search(line))
            ]
            if len(columns) != 6 or columns["std"] not in LANGUAGES or len(errors) != (verdict == "rejected"):
                raise ValueError(
                    f"{file}:{number + 1}: the first header needs all columns, "
                    "a rejected program one `// error`"
                )
            before = [] if "#include <metal_stdlib>" in body else PRELUDE.splitlines()
            if lines[number + 1].startswith(" "):
                before, body = [*before, *setup], [*body, "}"]
            source = "\n".join([*before, *[""] * (number + 1 - len(before)), *body, ""])
            unsure = columns["certainty"] == "unsure"
            entries.append(
                Entry(
                    name=f"{Path(file).stem}/{columns['name']}",
                    verdict=verdict,
                    certainty=columns["certainty"],
                    std=columns["std"],
                    source=columns["source"],
                    rule=columns["rule"],
                    program=Program(source, name=file, std=columns["std"], refuse_unsure=unsure),
                    error_line=errors[0][0] if errors else 0,
                    message=(errors[0][1]["message"] or "") if errors else "",
                )
            )
    return entries


ENTRIES = [entry for path in sorted(FOLDER.glob("*.metal")) for entry in parse(path.read_text(), path.name)]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python softmetal/tests/msl/catalogue.py",
        description="The table of rules, or with a name: compile its programs.",
    )
    parser.add_argument("name", nargs="?", help="a part of topic/name")
    parser.add_argument(
        "--write", type=Path, metavar="DIR", help="write the programs as files, compile nothing"
    )
    arguments = parser.parse_args()
    entries = [entry for entry in ENTRIES if (arguments.name or "") in entry.name]
    if not entries:
        parser.error(f"no program has {arguments.name!r} in its name; without a name, this command lists all")
    unexpected = 0
    for entry in entries:
        print(
            f"{entry.name} | {entry.verdict} ({entry.certainty}, {entry.std}) | {entry.source} | {entry.rule}"
        )
        if arguments.write:
            file = arguments.write / f"{entry.name}.{entry.verdict}.{entry.std}.metal"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(entry.program.source)
        elif arguments.name:
            try:
                print(f"  {compile_program(entry.program, 'fast')}")
                unexpected += entry.verdict == "rejected"
            except CompileError as error:
                print(*(f"  {line}" for line in str(error).splitlines()), sep="\n")
                unexpected += not (entry.verdict == "rejected" and entry.has_error_where_marked(str(error)))
    if arguments.name and not arguments.write:
        print(f"{len(entries)} programs, {unexpected} with another result than the catalogue's")
    return int(unexpected > 0)


if __name__ == "__main__":
    sys.exit(main())
