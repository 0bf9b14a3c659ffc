"""The supported versions of torch and transformers. setup.py reads this file without torch."""

from __future__ import annotations

VERSION = "0.1.0"
# Ranges of minor versions, both ends included.
TORCH = ((2, 13), (2, 15))
TRANSFORMERS = ((5, 17), (5, 24))

Minor = tuple[int, int]


def minor(version: str) -> Minor:
    """ "2.15.0a0+git123" is (2, 15)."""
    major, second = version.split(".")[:2]
    return int(major), int(second)


def text(version: Minor) -> str:
    return f"{version[0]}.{version[1]}"


def requirement(name: str, supported: tuple[Minor, Minor]) -> str:
    """A pip requirement: `torch>=2.13,<2.16`."""
    (oldest, (major, last)) = supported
    return f"{name}>={text(oldest)},<{text((major, last + 1))}"


def fault(name: str, version: str, supported: tuple[Minor, Minor]) -> str | None:
    """An error message for a version outside the range; None for one inside."""
    oldest, newest = supported
    if oldest <= minor(version) <= newest:
        return None
    return (
        f"torch_fattn {VERSION} is made for {name} {text(oldest)} to {text(newest)}, and this is {name} "
        f"{version}: run `pip install '{requirement(name, supported)}'`"
    )
