"""What Metal refuses is refused, with the line of the .metal source; beside every refused program stands an
accepted sibling.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from softmetal.msl.compile import CompileError, Program, compile_program

PRELUDE = "#include <metal_stdlib>\nusing namespace metal;\n"
_RULE = re.compile(
    r"^//// (?P<name>.*)\n//// error: (?P<message>.*)\n(?P<refused>(?:.*\n)*?)"
    r"//// accepted\n(?P<accepted>(?:(?!////).*\n)*)",
    re.MULTILINE,
)


@dataclass
class Rule:
    name: str
    message: str
    refused: str  # the offending line ends in // HERE
    accepted: str
    unsure: bool

    def program(self, source: str) -> Program:
        return Program(PRELUDE + source, name="test.metal", refuse_unsure=self.unsure)


def read_rules(file: str, *, unsure: bool = False) -> list[Rule]:
    text = Path(__file__).with_name(file).read_text() + "\n"
    return [Rule(**match.groupdict(), unsure=unsure) for match in _RULE.finditer(text)]


UNSURE = read_rules("unsure_rules.txt", unsure=True)
RULES = read_rules("strict_rules.txt") + UNSURE


def refusal(program: Program, tmp_path: Path) -> str:
    with pytest.raises(CompileError) as caught:
        compile_program(program, "fast", tmp_path)
    return str(caught.value)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_refused_with_its_line(rule: Rule, tmp_path: Path) -> None:
    program = rule.program(rule.refused)
    line = next(number for number, text in enumerate(program.source.splitlines(), 1) if "// HERE" in text)
    message = refusal(program, tmp_path)
    assert rule.message in message
    assert f"test.metal:{line}: error:" in message


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_accepted_sibling(rule: Rule, tmp_path: Path) -> None:
    assert compile_program(rule.program(rule.accepted), "fast", tmp_path).exists()


@pytest.mark.parametrize("rule", UNSURE, ids=lambda rule: rule.name)
def test_unsure_is_accepted_unasked(rule: Rule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOFTMETAL_REFUSE", raising=False)
    asked = rule.program(rule.refused)
    unasked = Program(asked.source, name=asked.name)
    assert not unasked.refuse_unsure and compile_program(unasked, "fast", tmp_path).exists()
    monkeypatch.setenv("SOFTMETAL_REFUSE", "unsure")
    assert Program(asked.source, name=asked.name) == asked


def test_line_directives_name_the_place(tmp_path: Path) -> None:
    message = refusal(Program('#line 41 "tile.h"\n\nconstant int x = y;\n'), tmp_path)
    assert message.startswith("tile.h:42: error:")


def test_host_library_does_not_show_in_messages(tmp_path: Path) -> None:
    source = PRELUDE + "kernel void k(device float3* x) { x[0] = float3(1.0f, 2.0f); }"
    message = refusal(Program(source, name="test.metal"), tmp_path)
    assert "test.metal:3" in message and "vectors.h" not in message
