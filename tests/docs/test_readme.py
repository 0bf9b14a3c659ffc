"""README and docs are true: the numbers of bench/results, the environment variables, commands."""

from __future__ import annotations

import re

import pytest

from bench.backends.record import read
from bench.report import readme


def test_measured_numbers_match_the_results() -> None:
    assert readme.main([]) == 0


@pytest.mark.parametrize("block", readme.BLOCKS, ids=lambda block: f"{block.page.name} {block.name}")
def test_another_number_would_be_noticed(block: readme.Block) -> None:
    text = block.page.read_text()
    quoted = re.search(r"\| [\d.]+ ms \|", block.text())
    assert quoted is not None and quoted.group() in text
    changed = text.replace(quoted.group(), "| 0.001 ms |")
    assert changed != text and block.render(changed) == text


def test_a_row_that_was_not_measured_is_not_left_out_silently() -> None:
    with pytest.raises(ValueError, match="has no row of prefill of pigs"):
        readme.table(read(readme.RESULTS), ("prefill of pigs",))


def test_times_on_tensor_operations_name_their_gpu() -> None:
    text = readme.tensor_table(read(readme.TENSOR_RESULTS))
    assert "not an Apple GPU" in text.splitlines()[-1]
    assert text.count("\n| prefill B1 32/32x") == 16  # two head sizes, lengths, dtypes; causal and not


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
    assert {"FATTN_CHECK", "MLX_METAL_WHEEL", "FATTN_LOCAL_VERSION"} <= read
    assert not read - documented
    assert documented - read == {"MAX_JOBS", "LDFLAGS", "PYTHON"}  # torch's, setuptools' and the Makefile's
