"""The list of models, and its summary in the README, is families.json's, and nothing else."""

from __future__ import annotations

import pytest

from tests.transformers.models_table import MODELS, README, main, render, summary

pytestmark = pytest.mark.host_only


def test_the_lists_are_those_of_the_file() -> None:
    assert main([]) == 0


def test_another_list_would_be_noticed() -> None:
    text = MODELS.read_text()
    assert "llama, " in text
    assert render(text.replace("llama, ", "")) == text
    text = README.read_text()
    assert " match eager attention" in text
    assert render(text.replace(" match eager attention", " match"), summary) == text
