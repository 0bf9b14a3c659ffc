"""register() and the version of transformers that is installed."""

from __future__ import annotations

import warnings

import pytest
import transformers
from transformers import AttentionInterface

from torch_fattn.integrations.transformers import NAME, register, registration
from torch_fattn.runtime import versions

pytestmark = pytest.mark.host_only
OLDEST, NEWEST = versions.TRANSFORMERS
SENTENCE = (
    rf"torch_fattn \S+ is made for transformers {versions.text(OLDEST)} to {versions.text(NEWEST)}, "
    "and this is transformers {}: run `pip install"
)


@pytest.mark.parametrize("version", ["4.57.6", "5.16.1"])
def test_an_older_one_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration.transformers, "__version__", version)
    with pytest.raises(ImportError, match=SENTENCE.format(version)):
        register()


def test_a_newer_one_costs_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = f"{versions.text((NEWEST[0], NEWEST[1] + 1))}.0.dev0"
    monkeypatch.setattr(registration.transformers, "__version__", newer)
    with pytest.warns(UserWarning, match=SENTENCE.format(newer)):
        register()
    assert NAME in AttentionInterface()


@pytest.mark.parametrize("version", [transformers.__version__, "5.17.0", "5.20.2", "5.24.0"])
def test_a_version_in_the_range_gives_no_warning(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration.transformers, "__version__", version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register()
