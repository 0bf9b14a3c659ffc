"""The list of models, in the README and on its page, is families.json's and nothing else."""

from __future__ import annotations

import pytest

from tests.transformers.models_table import PAGE, README, page, render

pytestmark = pytest.mark.host_only


def test_the_list_is_that_of_the_file() -> None:
    text = README.read_text()
    assert render(text) == text


def test_another_list_would_be_noticed() -> None:
    text = README.read_text()
    assert "llama, " in text
    assert render(text.replace("llama, ", "")) == text


def test_the_page() -> None:
    assert PAGE.read_text() == page()
    assert "## Causal LM: match (" in page() and "<" not in page()
