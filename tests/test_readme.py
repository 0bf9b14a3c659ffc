"""The README quotes bench/results, and nothing else."""

from __future__ import annotations

import json

from bench import readme


def test_measured_numbers_are_those_of_the_results() -> None:
    text = readme.README.read_text()
    assert readme.render(text) == text


def test_another_number_would_be_noticed() -> None:
    text = readme.README.read_text()
    row = json.loads(readme.RESULTS.read_text())["rows"][0]
    quoted = f"{row['ms_median']:.3f} ms"
    assert quoted in text
    assert readme.render(text.replace(quoted, "0.001 ms")) == text
