"""Errors give advice that is right: a call that follows it runs, and has the result of the refused one."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.conftest import counted_launches
from tests.helpers import refusals
from tests.helpers.refusals import Refusal

PARTS = sorted(part.name for part in pkgutil.iter_modules(refusals.__path__, f"{refusals.__name__}."))
REFUSALS = [*refusals.REFUSALS, *(case for part in map(import_module, PARTS) for case in part.REFUSALS)]


@pytest.fixture(autouse=True)
def no_process_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def advice_of(case: Refusal, patch: pytest.MonkeyPatch) -> str:
    """The error after its first semicolon."""
    if case.checked:
        patch.setenv("FATTN_CHECK", "1")
    with counted_launches() as launches, pytest.raises(Exception) as refused:  # noqa: PT011 - of any kind
        case.wrong()
    sentence = str(refused.value)
    assert not launches and "\n" not in sentence, sentence
    return sentence.partition("; ")[2]


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=f"{i}-{case.words[:40]}") for i, case in enumerate(REFUSALS)]
)
def test_advice_leads_to_the_right_result(case: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    assert case.words in (advice := advice_of(case, monkeypatch)), advice
    result = case.right and case.right()
    assert case.expected is None or agrees(result, case.expected())


def agrees(result: Any, expected: Any) -> bool:
    if not isinstance(result, Tensor):
        return bool(result == expected)
    tolerance = 1e-3 if result.dtype == torch.float16 else 2e-5
    same = result.shape == expected.shape
    return same and torch.allclose(
        result.detach().cpu().double(), expected.detach().cpu().double(), atol=tolerance
    )


@pytest.mark.host_only
def test_padding_without_the_scale_is_noticed() -> None:
    """The control: padding without the scale, which the advice once omitted."""
    case = next(case for case in REFUSALS if "scale=60" in case.words)
    assert case.right and case.expected and agrees(case.right(), case.expected())
    odd = {name: refusals.of("prefill")[name][..., :60] for name in ("query", "key")}
    padded = refusals.run("prefill", **{n: refusals.padded_to(one, 64) for n, one in odd.items()})
    assert not agrees(padded(), case.expected())
