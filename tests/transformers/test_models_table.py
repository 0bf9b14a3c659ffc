"""The list of models on its page, and its summary in the README, are those of families.txt."""

from __future__ import annotations

import pytest

from tests.transformers.models_table import PAGE, README, page, render

pytestmark = pytest.mark.host_only


def test_the_summary_matches_the_file() -> None:
    text = README.read_text()
    assert render(text) == text


def test_another_summary_would_be_noticed() -> None:
    text = README.read_text()
    assert " match eager attention" in text
    assert render(text.replace(" match eager attention", " match")) == text


def test_the_page() -> None:
    assert PAGE.read_text() == page()
    assert "## Causal LM: match (" in page() and "llama, " in page() and "<" not in page()
