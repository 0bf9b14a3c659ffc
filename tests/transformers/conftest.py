"""Registers the attention implementation for every test of this folder, and puts it back after tests that
break it; `calls` shows what reaches the operators."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torch_fattn
from tests.transformers.calls import Call
from torch_fattn.integrations.transformers import register


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register()
    yield
    register()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Every call of an attention operator, in order, with all its arguments by name."""
    found: list[Call] = []
    for op in ("prefill", "decode", "paged_prefill", "paged_decode", "varlen_prefill"):
        monkeypatch.setattr(torch.ops.fattn, op, _recording(op, found))
    return found


def _recording(op: str, found: list[Call]) -> Any:
    operator = getattr(torch.ops.fattn, op)
    signature = inspect.signature(getattr(torch_fattn, op))

    def record(*arguments: Any, **options: Any) -> Any:
        bound = signature.bind(*arguments, **options)
        bound.apply_defaults()
        found.append(Call(op, dict(bound.arguments)))
        return operator(*arguments, **options)

    return record
