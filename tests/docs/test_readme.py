"""README and docs are true: the numbers of bench/results, the environment variables, commands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench.report import readme
from torch_fattn import __main__ as command_line


def test_measured_numbers_are_those_of_the_results() -> None:
    assert readme.main([]) == 0


@pytest.mark.parametrize(("page", "only"), [(readme.README, readme.IN_THE_README), (readme.MEASURED, ())])
def test_another_number_would_be_noticed(page: Path, only: tuple[str, ...]) -> None:
    text = page.read_text()
    rows = json.loads(readme.RESULTS.read_text())["rows"]
    row = next(row for row in rows if row["impl"] == "fattn" and f"{row['op']} {row['call']}" in text)
    quoted = f"| {row['ms_median']:.3f} ms"
    assert quoted in text
    assert readme.render(text.replace(quoted, "| 0.001 ms"), only) == text


def test_a_row_that_was_not_measured_is_not_left_out_silently() -> None:
    with pytest.raises(ValueError, match="has no row of prefill of pigs"):
        readme.render(readme.README.read_text(), ("prefill of pigs",))


def variables_that_are_read() -> set[str]:
    """Environment variables of the product, its build, the bench and the tests."""
    reads = re.compile(r"""(?:getenv|environ\.(?:get|setdefault))\(\s*"([A-Z_]+)"|environ\["([A-Z_]+)"\]""")
    files = [readme.ROOT / "setup.py"]
    for folder in ("csrc", "torch_fattn", "bench", "tools", "tests"):
        files += [
            path for path in (readme.ROOT / folder).rglob("*") if path.suffix in (".cpp", ".mm", ".h", ".py")
        ]
    found = {name for path in files for names in reads.findall(path.read_text()) for name in names if name}
    set_by_us = {"_PYTHON_HOST_PLATFORM", "OMP_NUM_THREADS"}
    return (
        {name for name in found if not name.startswith("SOFTMETAL_")}
        - set_by_us
        - {"PATH", "PYTHONPATH", "XDG_CACHE_HOME"}
    )


def test_environment_variables_are_documented() -> None:
    page = readme.ROOT / "docs" / "environment.md"
    cells = re.findall(r"^\| (`[A-Z_]+[=`][^|]*)\|", page.read_text(), re.MULTILINE)
    documented = {name for cell in cells for name in re.findall(r"`([A-Z_]+)", cell)}
    read = variables_that_are_read()
    assert {"FATTN_CHECK", "MLX_METAL_WHEEL", "FATTN_LOCAL_VERSION", "COMFYUI"} <= read
    assert not read - documented
    others = {"MAX_JOBS", "PYTHON"}  # torch's and the Makefile's
    assert documented - read == others | {"NANOGPT", "TIMM", "DIFFUSERS"}  # by name, of checkouts


def test_explain_as_the_readme_writes_it(capsys: pytest.CaptureFixture[str]) -> None:
    commands = re.findall(r"^python -m torch_fattn (explain .*)", readme.README.read_text(), re.MULTILINE)
    assert commands
    for command in commands:
        assert command_line.main(command.split("#")[0].split()) == 0
        words = command.split()
        figures = (words[words.index(option) + 1] for option in ("--family", "--cores"))
        expected = "on an Apple GPU (Apple family {}, {} cores)".format(*figures)
        assert expected in capsys.readouterr().out.splitlines()[0]
