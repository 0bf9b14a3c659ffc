"""Small programs that Metal refuses or takes, each with its rule, how sure it is and where it is from.

The first line of a program says so: `// certain: rule (source)`. `certain` and `likely` come from the
specification or from messages of Apple's compiler in public issues; `worth` is what is worth refusing
whatever Apple's compiler does. `// std: metal4.1` names another version of the language than 3.1. Of a
program that is refused, `// HERE` marks the line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from softmetal.msl.compile import CompileError, Program, compile_program
from softmetal.msl.language import DEFAULT

FOLDER = Path(__file__).with_name("conformance")
_HEADER = re.compile(r"// (?P<sure>certain|likely|worth): (?P<rule>.+)\n(?:// std: (?P<std>\S+)\n)?")


@dataclass
class Case:
    path: Path
    source: str
    rule: str
    std: str

    @property
    def program(self) -> Program:
        return Program(self.source, name=self.path.name, std=self.std)


def read_cases(kind: str) -> list[Case]:
    cases = []
    for path in sorted((FOLDER / kind).glob("*.metal")):
        source = path.read_text()
        header = _HEADER.match(source)
        assert header, f"{path.name} must begin with // certain|likely|worth: rule"
        cases.append(Case(path, source, header["rule"], header["std"] or DEFAULT))
    return cases


@pytest.mark.parametrize("case", read_cases("reject"), ids=lambda case: case.path.stem)
def test_refused_at_its_line(case: Case, tmp_path: Path) -> None:
    line = next(number for number, text in enumerate(case.source.splitlines(), 1) if "// HERE" in text)
    with pytest.raises(CompileError) as caught:
        compile_program(case.program, "fast", tmp_path)
    assert f"{case.path.name}:{line}: error:" in str(caught.value), case.rule


@pytest.mark.parametrize("case", read_cases("accept"), ids=lambda case: case.path.stem)
def test_accepted(case: Case, tmp_path: Path) -> None:
    assert compile_program(case.program, "fast", tmp_path).exists(), case.rule
