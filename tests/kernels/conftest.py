from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.tensor_machines import Machines


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    """Simulated machines with tensor units."""
    started = Machines()
    yield started
    started.stop()
