"""What flex_attention remembers between calls survives no change of what its functions read."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, noop_mask

from tests.pytorch.test_flex_attention import DEVICES, HEADS, Mod, eager, exact, hiding  # noqa: F401
from torch_fattn.integrations.flex_attention import attention as ours
from torch_fattn.integrations.flex_attention import flex_attention, tracing

SETTINGS = SimpleNamespace()
called = flex_attention


def changes(device: str) -> dict[str, tuple[Mod, Callable[[], Any]]]:
    """Mask functions of 40 rows and keys, and a change of what each reads."""
    document, later = torch.arange(40, device=device) // 30, torch.arange(40, device=device) // 8
    offset, numbers, array = torch.zeros((), dtype=torch.int64, device=device), [30], numpy.arange(40) // 30
    with torch.inference_mode():
        inferred = document.clone()
    SETTINGS.at, SETTINGS.document = 30, document.clone()
    with_default: Any = lambda b, h, q, k, at=30: k < at  # noqa: E731

    def same(which: Tensor) -> Mod:
        return lambda b, h, q, k: which[q] == which[k]

    def change() -> None:
        numbers[0] = array[:] = SETTINGS.at = 9
        SETTINGS.document, with_default.__defaults__ = later, (9,)

    return {
        "in place": (same(document), lambda: document.copy_(later)),
        ".data": (same(document), lambda: document.data.copy_(later)),
        "another .data": (same(document), lambda: setattr(document, "data", later)),
        "inference mode": (same(inferred), lambda: torch.inference_mode()(inferred.copy_)(later)),
        "offset": (lambda b, h, q, k: q + offset >= k, lambda: offset.add_(5)),
        "rebound": (lambda b, h, q, k: SETTINGS.document[q] == SETTINGS.document[k], change),
        "numpy": (lambda b, h, q, k: torch.from_numpy(array).to(device)[k] == 0, change),
        "numpy number": (lambda b, h, q, k: k < array.max() * 20, change),
        "list": (lambda b, h, q, k: k < numbers[0], change),
        "global": (lambda b, h, q, k: k < SETTINGS.at, change),
        "partial": (functools.partial(lambda of, b, h, q, k: k < of.at, SETTINGS), change),
        "default": (with_default, change),
    }


def errors_after(name: str, device: str) -> list[float]:
    """Before and after the change, of a BlockMask and of a score_mod."""
    mask_mod, change = changes(device)[name]
    partial = {"BLOCK_SIZE": 16, "separate_full_blocks": False}
    block_mask = create_block_mask(noop_mask, None, None, 40, 40, device, **partial)
    block_mask.mask_mod = mask_mod
    query, errors = torch.randn(1, HEADS, 40, 16, device=device), []
    for step in (lambda: None, change):
        step()
        wanted, _ = exact(query, query, query, None, mask_mod)
        for given in ({"block_mask": block_mask}, {"score_mod": hiding(mask_mod)}):
            out = called(query, query, query, **given)
            errors.append(float((out.cpu() - wanted).abs().max()))
    return errors


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", changes("cpu"))
def test_a_captured_value_changes(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(errors_after(name, device)) < 1e-5
    # The control: a memory that knows functions by their identity.
    monkeypatch.setattr(tracing.Expression, "__repr__", lambda _: "a mask_mod")
    monkeypatch.setattr(tracing.Expression, "reads", property(lambda _: [], lambda *_: None), False)
    assert errors_after(name, device)[2] > 1e-2


@pytest.mark.host_only
@pytest.mark.parametrize("name", ["numpy number", "list"])
def test_a_compiled_caller(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for function in (flex_attention, lambda *operands, **options: flex_attention(*operands, **options) * 1):
        torch._dynamo.reset()
        monkeypatch.setattr(sys.modules[__name__], "called", torch.compile(function, backend="eager"))
        assert max(errors_after(name, "cpu")) < 1e-5


@pytest.mark.host_only
def test_a_graph_breaks() -> None:
    compiled = torch.compile(lambda query: flex_attention(query, query, query), fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="flex_attention traces score_mod and mask_mod"):
        compiled(torch.ones(1, 1, 8, 8))


@pytest.mark.host_only
def test_a_change_of_the_default_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    query = torch.randn(1, 1, 40, 16)
    mask_mod: Mod = lambda b, h, q, k: q * 0.1 >= k * 0.3  # noqa: E731

    def error_after() -> float:
        block_mask = create_block_mask(noop_mask, 1, 1, 40, 40, "cpu", 16, separate_full_blocks=False)
        block_mask.mask_mod = mask_mod
        flex_attention(query, query, query, block_mask=block_mask)
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            out = flex_attention(query, query, query, block_mask=block_mask)
            return float((out - exact(query, query, query, None, mask_mod)[0]).abs().max())
        finally:
            torch.set_default_dtype(default)

    assert error_after() < 1e-5
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float32)
    assert error_after() > 1e-2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("change", ["in place", "rebound", "another .data", "inference mode"])
def test_a_change_of_the_lists(change: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    query = torch.randn(1, 1, 48, 16, device=device)
    wanted, _ = exact(query, query, query, None, lambda b, h, q, k: k < 16)

    @torch.inference_mode(change == "inference mode")
    def error_after() -> float:
        block_mask = create_block_mask(noop_mask, 1, 1, 48, 48, device=device, BLOCK_SIZE=16)
        flex_attention(query, query, query, block_mask=block_mask)
        counts, ones = block_mask.full_kv_num_blocks, torch.ones(1, 1, 3, dtype=torch.int32, device=device)
        if change == "rebound":
            block_mask.full_kv_num_blocks = ones  # only the first block of a row
        elif change == "another .data":
            counts.data = ones
        else:
            counts.copy_(ones)
        out = flex_attention(query, query, query, block_mask=block_mask)
        return float((out.cpu() - wanted).abs().max())

    assert error_after() < 1e-5
    monkeypatch.setattr(ours, "_state_of", lambda block_mask, _: (id(block_mask), (block_mask,)))
    assert error_after() > 1e-2
