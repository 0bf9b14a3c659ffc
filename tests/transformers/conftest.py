"""Registers the attention implementation for every test of this folder, and puts it back after tests that
break it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from torch_fattn.integrations.transformers import register


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register()
    yield
    register()
