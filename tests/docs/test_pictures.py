"""The pictures of the documents agree with the kernels and with their captions."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import pytest
import torch

import torch_fattn
from tests.conftest import counted_launches
from tests.helpers.documents import PAGES, ROOT

sys.path.insert(0, str(ROOT / "tools"))
import mask_pictures  # noqa: E402

PICTURES = mask_pictures.PICTURES


def difference(picture: mask_pictures.Picture, shown: torch.Tensor) -> float:
    """Between the weights that are drawn and those by which the kernels weigh the keys."""
    with counted_launches() as launches:
        mine = picture.weights(getattr(torch_fattn, picture.op), "mps")
    assert launches, "the kernels did not run"
    assert mine.shape == shown.shape
    return float((mine - shown).abs().max())


@pytest.mark.parametrize("name", PICTURES)
def test_the_kernels_weigh_as_drawn(name: str) -> None:
    assert difference(PICTURES[name], PICTURES[name].exact()) < 1e-5


def test_another_picture_would_be_noticed() -> None:
    """One without its option, one with it at another value."""
    window = PICTURES["window"]
    assert difference(window, PICTURES["causal"].exact()) > 0.05
    assert difference(replace(window, options=window.options | {"window_left": 3}), window.exact()) > 0.05


@pytest.mark.host_only
def test_a_hidden_key_is_grey_and_a_visible_one_is_not() -> None:
    for picture in PICTURES.values():
        cells = re.findall(r"<rect x=[^>]*fill='(#\w+)'", picture.svg())
        weights = picture.exact()
        sink = len(picture.rows) if "sinks" in picture.options else 0
        assert cells.count(mask_pictures.SEEN) == int((weights > 1e-9).sum()) + sink
        assert cells.count(mask_pictures.HIDDEN) == int((weights <= 1e-9).sum())


@pytest.mark.host_only
def test_captions_name_their_options() -> None:
    for picture in PICTURES.values():
        values = {k: v for k, v in picture.options.items() if not isinstance(v, torch.Tensor)}
        for option, value in values.items() if picture.op == "prefill" else ():
            assert f"{option}={value}" in picture.caption or option == "scale", picture.caption


@pytest.mark.host_only
def test_every_picture_is_shown_and_is_the_same_each_time() -> None:
    files = mask_pictures.files()
    shown = {name for page in PAGES for name in re.findall(r"\((pictures/[\w-]+\.svg)\)", page.read_text())}
    assert shown == set(files)
    assert files == mask_pictures.files()
