"""What the README says: numbers of bench/results and no others, the environment variables, its commands."""

from __future__ import annotations

import json
import re

import pytest

from bench import readme
from torch_fattn import __main__ as command_line


def test_measured_numbers_are_those_of_the_results() -> None:
    text = readme.README.read_text()
    assert readme.render(text) == text


def test_another_number_would_be_noticed() -> None:
    text = readme.README.read_text()
    row = json.loads(readme.RESULTS.read_text())["rows"][0]
    quoted = f"{row['ms_median']:.3f} ms"
    assert quoted in text
    assert readme.render(text.replace(quoted, "0.001 ms")) == text


def variables_of_users() -> set[str]:
    """Environment variables that the product and the bench read."""
    reads = re.compile(r"""(?:getenv|environ\.get)\(\s*"([A-Z_]+)"|environ\["([A-Z_]+)"\]""")
    found: set[str] = set()
    for folder in ("csrc", "torch_fattn", "bench"):
        for path in (readme.ROOT / folder).rglob("*"):
            if path.suffix in (".cpp", ".mm", ".h", ".py"):
                found.update(name for names in reads.findall(path.read_text()) for name in names if name)
    return found - {"CXX", "XDG_CACHE_HOME"}  # everybody's


def test_environment_variables_are_in_the_readme() -> None:
    documented = set(re.findall(r"^\| `([A-Z_]+)=", readme.README.read_text(), re.MULTILINE))
    assert {"FATTN_CHECK", "MLX_METAL_WHEEL"} <= variables_of_users() <= documented
    assert documented - variables_of_users() == {"SOFTMETAL"}  # read by softmetal itself


def test_explain_as_the_readme_writes_it(capsys: pytest.CaptureFixture[str]) -> None:
    commands = re.findall(r"^python -m torch_fattn (explain .*)", readme.README.read_text(), re.MULTILINE)
    assert commands
    for command in commands:
        assert command_line.main(command.split("#")[0].split()) == 0
        words = command.split()
        figures = (words[words.index(option) + 1] for option in ("--family", "--cores"))
        expected = "on an Apple GPU (Apple family {}, {} cores)".format(*figures)
        assert expected in capsys.readouterr().out.splitlines()[0]
