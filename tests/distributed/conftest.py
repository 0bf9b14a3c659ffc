"""Processes for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool, pool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Four ranks on the CPU, with gloo."""
    with pool(4) as made:
        yield made


@pytest.fixture(scope="session")
def gpu_ranks() -> Iterator[Pool]:
    """Two ranks on "mps": each compiles its kernels."""
    with pool(2, device="mps") as made:
        yield made
