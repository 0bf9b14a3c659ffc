"""Finds the advice in the sources: the part of an error message after its semicolon."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# Messages of commands are tested in test_command_line.py, test_tune.py, test_demo.py and
# tests/bench/test_command.py.
COMMANDS = re.compile(r"torch_fattn/(commands/|tuning/|runtime/versions\.py$)|/__main__\.py$")
REFUSALS = re.compile(r"\b(?:refuse|TORCH_CHECK\w*)\(")
LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')


def find() -> dict[str, str]:
    """Every advice, with {} for inserted values, and its file."""
    found: dict[str, str] = {}
    for path in sorted((*ROOT.glob("csrc/**/*.cpp"), *ROOT.glob("csrc/**/*.mm"))):
        for sentence in of_cpp(path.read_text(encoding="utf-8")):
            found |= dict.fromkeys(_advice_in(sentence), path.relative_to(ROOT).as_posix())
    for path in sorted(ROOT.glob("torch_fattn/**/*.py")):
        if not COMMANDS.search(path.as_posix()):
            for sentence in of_python(path.read_text(encoding="utf-8")):
                found |= dict.fromkeys(_advice_in(sentence), path.relative_to(ROOT).as_posix())
    return found


def _advice_in(sentence: str) -> list[str]:
    """The advice without the punctuation at its end."""
    return [advice.strip(" {}") for advice in sentence.split("; ")[1:] if re.search("[a-z]", advice)]


def of_cpp(text: str) -> Iterator[str]:
    """The literals of each refusal, one after the other, with {} for the values between them."""
    text = re.sub(r"(?m)//.*$", "", text)
    for call in REFUSALS.finditer(text):
        end = text.find(";\n", call.end())
        pieces = LITERAL.split(text[call.end() : end])
        yield "".join(
            piece if i % 2 else ("{}" if piece.strip(" ,\n") else "") for i, piece in enumerate(pieces)
        ).replace('\\"', '"')


def of_python(text: str) -> Iterator[str]:
    """The strings of each `raise`, and of each call of a function that raises."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and _name(node).startswith("refuse")):
            pieces: set[ast.AST] = set()
            for part in ast.walk(node):
                if isinstance(part, ast.JoinedStr):
                    pieces |= {*part.values}
                    yield "".join(v.value if isinstance(v, ast.Constant) else "{}" for v in part.values)  # type: ignore[misc]
                elif isinstance(part, ast.Constant) and isinstance(part.value, str) and part not in pieces:
                    yield part.value


def _name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
