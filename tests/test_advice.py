"""What a refusal says to do instead gives the result that was asked for, by the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torch_fattn
from torch_fattn import reference

LENGTH = 24
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
SINKS = torch.tensor([0.3, -1.0, 2.0, 0.0])


def operands() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    query, key, value = (torch.randn(2, 4, LENGTH, 16, generator=generator) for _ in range(3))
    return query, key, value


def positions() -> tuple[Tensor, Tensor]:
    row = torch.arange(LENGTH)
    return row[:, None], row[None, :]


def refusal(**option: Any) -> str:
    with pytest.raises(NotImplementedError) as caught:
        torch_fattn.prefill(*(t.to("mps") for t in operands()), is_causal=True, **option)
    return str(caught.value)


def exact(**option: Any) -> tuple[Tensor, Tensor]:
    return reference.prefill(*operands(), is_causal=True, **option)


def test_a_window_is_a_mask() -> None:
    row, key = positions()
    assert "bool attn_mask" in refusal(window_left=5)
    out = torch_fattn.prefill(*operands(), key >= row - 5, is_causal=True)
    assert torch.allclose(out.double(), exact(window_left=5)[0], atol=1e-5)


def test_sink_tokens_are_a_mask() -> None:
    row, key = positions()
    assert "bool attn_mask" in refusal(sink_tokens=2)
    out = torch_fattn.prefill(*operands(), (key >= row - 5) | (key < 2), is_causal=True)
    assert torch.allclose(out.double(), exact(window_left=5, sink_tokens=2)[0], atol=1e-5)


def test_alibi_is_a_mask() -> None:
    row, key = positions()
    assert "slope * (key position - query position) as a float attn_mask" in refusal(
        alibi_slopes=SLOPES.to("mps")
    )
    mask = SLOPES[:, None, None] * (key - row)
    out = torch_fattn.prefill(*operands(), mask, is_causal=True)
    assert torch.allclose(out.double(), exact(alibi_slopes=SLOPES)[0], atol=1e-5)


def test_sinks_are_a_factor() -> None:
    """No mask can say it: the sink has a logit and no key."""
    sentence = refusal(sinks=SINKS.to("mps"))
    assert "attn_mask" not in sentence and "torch.sigmoid(lse - sinks[:, None])[..., None]" in sentence
    out, lse = torch_fattn.prefill(*operands(), is_causal=True, return_lse=True)
    out = out * torch.sigmoid(lse - SINKS[:, None])[..., None]
    assert torch.allclose(out.double(), exact(sinks=SINKS)[0], atol=1e-5)


def test_softcap_is_no_mask() -> None:
    sentence = refusal(softcap=3.0)
    assert "attn_mask" not in sentence and "scaled_dot_product_attention" not in sentence
    assert "softcap * tanh(scores / softcap)" in sentence
    query, key, value = operands()
    scores = 3.0 * torch.tanh(query @ key.mT / 4.0 / 3.0)
    row, column = positions()
    out = scores.masked_fill(column > row, -torch.inf).softmax(-1) @ value
    assert torch.allclose(out.double(), exact(softcap=3.0)[0], atol=1e-5)


@pytest.mark.parametrize("other", [{"window_left": 4}, {"sink_tokens": 4}])
def test_the_worst_option_decides(other: dict[str, Any]) -> None:
    """Beside softcap or sinks, a window must not send the caller to a mask."""
    for option in ({"softcap": 3.0}, {"sinks": SINKS.to("mps")}):
        assert refusal(**option, **other) == refusal(**option)
