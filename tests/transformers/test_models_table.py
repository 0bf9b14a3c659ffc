"""The README's list of models is families.json's, and nothing else."""

from __future__ import annotations

import pytest

from tests.transformers.models_table import README, render

pytestmark = pytest.mark.host_only


def test_the_list_is_that_of_the_file() -> None:
    text = README.read_text()
    assert render(text) == text


def test_another_list_would_be_noticed() -> None:
    text = README.read_text()
    assert "llama, " in text
    assert render(text.replace("llama, ", "")) == text
