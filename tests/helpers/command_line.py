"""Runs a command in this process: its exit status, and its error message."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


def status_of(main: Callable[[list[str]], int], arguments: str | list[str]) -> int:
    """The exit status; argparse raises SystemExit."""
    try:
        return main(arguments.split() if isinstance(arguments, str) else arguments)
    except SystemExit as leaving:
        assert isinstance(leaving.code, int), f"a traceback or a bare message: {leaving.code!r}"
        return leaving.code


def refusal_of(
    main: Callable[[list[str]], int], arguments: str | list[str], capsys: pytest.CaptureFixture[str]
) -> str:
    assert status_of(main, arguments) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert printed.err.count("\n") == 1, printed.err
    return printed.err


def save_checkpoint(folder: Path, positions: int) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=positions,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
