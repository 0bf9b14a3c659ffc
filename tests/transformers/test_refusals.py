"""Arguments that the kernels cannot express are refused before any work, and never silently ignored."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import counted_launches
from tests.transformers.tiny_models import DEVICE
from torch_fattn import reference
from torch_fattn.integrations.transformers import attend
from torch_fattn.integrations.transformers.visibility import write_pattern

ROWS = 4
ADVICE = re.compile(
    r'; .*(attn_implementation="(eager|sdpa)"|model\.eval\(\)|position_ids|create_\w+_mask)'
    "|pass a (bool )?mask"
)


class Layer(nn.Module):
    is_causal = True


def call(
    rows: int = ROWS, head_dim: int = 16, dtype: torch.dtype = torch.float32, **options: Any
) -> torch.Tensor:
    query = torch.randn(1, 4, rows, head_dim, device=DEVICE).to(dtype)
    key = torch.randn(1, 2, ROWS, head_dim, device=DEVICE).to(dtype)
    return attend(Layer(), query, key, key, options.pop("attention_mask", None), **options)[0]


def refusal(error: type[Exception] = NotImplementedError, **options: Any) -> str:
    """The sentence of a refused call, which launches nothing and advises a user of transformers."""
    with counted_launches() as launches, pytest.raises(error) as raised:
        call(**options)
    sentence = str(raised.value)
    assert not any(launches.values())
    assert sentence.startswith("fattn attention in Layer: ") and "\n" not in sentence
    assert ADVICE.search(sentence), sentence
    assert "scaled_dot_product_attention" not in sentence and "attn_mask" not in sentence
    return sentence


@pytest.mark.parametrize(
    "name",
    ["indices", "block_indices", "position_bias", "head_mask", "cu_seq_lens_q", "seq_idx", "unheard_of"],
)
def test_keyword_that_changes_attention(name: str) -> None:
    assert name in refusal(**{name: torch.zeros(1, dtype=torch.int32)})
    assert call(**{name: None}).shape == (1, ROWS, 4, 16), "None has no effect"


def test_harmless_keywords_are_accepted() -> None:
    """The control of the test above: what models pass along without changing attention's meaning."""
    options = {
        "position_ids": torch.arange(ROWS),
        "use_cache": True,
        "output_router_logits": True,
        "max_length_q": 4,
    }
    assert call(**options).shape == (1, ROWS, 4, 16)
    assert call(softcap=0.0, sliding_window=None).shape == (1, ROWS, 4, 16)


def test_packed_sequences_with_their_mask() -> None:
    mask = torch.ones(1, 1, ROWS, ROWS, dtype=torch.bool, device=DEVICE).tril()
    lens = torch.tensor([0, ROWS], dtype=torch.int32)
    assert call(cu_seq_lens_q=lens, attention_mask=mask).shape == (1, ROWS, 4, 16)


def test_position_bias() -> None:
    """Added to the scores under any whole mask; what cannot be is refused."""
    query = torch.randn(1, 4, ROWS, 16, device=DEVICE)
    bias = torch.randn(1, 4, ROWS, ROWS, device=DEVICE)
    hidden = torch.ones(1, 1, ROWS, ROWS, dtype=torch.bool, device=DEVICE).tril()
    additive = torch.zeros(hidden.shape, device=DEVICE).masked_fill(~hidden, -torch.inf)
    for mask, added in (
        (hidden, bias + additive),
        (additive, bias + additive),
        (torch.ones((), dtype=torch.bool, device=DEVICE).expand(hidden.shape), bias),
    ):
        for of_heads in (bias, bias[:, :1]):
            added_of = added if of_heads is bias else added - bias + of_heads
            out, _ = attend(Layer(), query, query, query, mask, position_bias=of_heads)
            exact, _ = reference.prefill(query, query, query, added_of)
            assert (out.cpu() - exact.transpose(1, 2)).abs().max() < 1e-5
    causal, _ = attend(Layer(), query, query, query, None, position_bias=bias)
    exact, _ = reference.prefill(query, query, query, bias, is_causal=True)
    assert (causal.cpu() - exact.transpose(1, 2)).abs().max() < 1e-5

    padding = torch.tensor([[False, True, True, True]], device=DEVICE)
    pattern = write_pattern(1, ROWS, ROWS, 2, padding, DEVICE)
    within_two = additive.masked_fill(~hidden.triu(-1), -torch.inf)
    for mask, added in ((padding, additive), (pattern, within_two)):
        out, _ = attend(Layer(), query, query, query, mask, position_bias=bias)
        exact, _ = reference.prefill(
            query, query, query, bias + added.masked_fill(~padding[:, None, None], -torch.inf)
        )
        assert (out.cpu() - exact.transpose(1, 2)).abs().max() < 1e-5
    assert "soft cap of 5.0" in refusal(position_bias=bias, softcap=5.0)
    assert f"(1, 4, {ROWS}, 3) and not numbers for (1, 4, {ROWS}, {ROWS})" in refusal(
        position_bias=bias[..., :3]
    )
    assert "torch.int64" in refusal(position_bias=bias.long())


def test_a_selection_of_keys() -> None:
    """A selection of keys for every row and all heads, within the mask; DeepSeek V3.2 makes it."""
    query = torch.randn(2, 4, ROWS, 16, device=DEVICE)
    indices = torch.tensor(
        [[[0, 3], [1, 0], [2, 2], [3, 1]], [[0, 1], [0, 1], [3, 1], [2, 3]]], device=DEVICE
    )
    selected = torch.zeros(2, ROWS, ROWS, dtype=torch.bool).scatter_(-1, indices.cpu(), True)[:, None]
    causal = torch.ones(1, 1, ROWS, ROWS, dtype=torch.bool, device=DEVICE).tril().expand(2, 1, -1, -1)
    additive = torch.zeros(causal.shape, device=DEVICE).masked_fill(~causal, -torch.inf)
    pattern = write_pattern(2, ROWS, ROWS, ROWS, None, DEVICE)
    for mask in (causal, additive, pattern):
        out, _ = attend(Layer(), query, query, query, mask, indices=indices)
        exact, _ = reference.prefill(query.cpu(), query.cpu(), query.cpu(), causal.cpu() & selected)
        assert (out.cpu() - exact.transpose(1, 2)).abs().max() < 1e-5
    everything = torch.ones((), dtype=torch.bool, device=DEVICE).expand(2, 1, ROWS, ROWS)
    out, _ = attend(Layer(), query, query, query, everything, indices=indices)
    exact, _ = reference.prefill(query.cpu(), query.cpu(), query.cpu(), selected)
    assert (out.cpu() - exact.transpose(1, 2)).abs().max() < 1e-5


def test_window_without_its_mask() -> None:
    assert "sliding window of 2" in refusal(sliding_window=2)
    assert call(sliding_window=4).shape == (1, ROWS, 4, 16), "4 keys fit into a window of 4"


def test_masks_that_contradict_the_options() -> None:
    def ones(*shape: int, dtype: torch.dtype = torch.bool) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype, device=DEVICE)

    assert "2D mask is torch.int64" in refusal(attention_mask=ones(1, ROWS, dtype=torch.int64))
    assert "(4, 4) and must be bool (1, 4)" in refusal(attention_mask=ones(ROWS, ROWS))
    assert "3 dimensions" in refusal(attention_mask=ones(1, ROWS, ROWS))
    assert "torch.int64 is neither" in refusal(attention_mask=ones(1, 1, ROWS, ROWS, dtype=torch.int64))
    two_rows = ones(1, 1, 2, ROWS, dtype=torch.int32)  # a pattern of packed sequences has this form
    assert "torch.int32 is neither" in refusal(rows=2, attention_mask=two_rows)
    assert "mask has 5 keys and the layer 4" in refusal(attention_mask=ones(1, 1, ROWS, ROWS + 1))
    for mask in (ones(1, ROWS), ones(1, 1, 1, ROWS), ones(1, 1, ROWS, ROWS, dtype=torch.float32)):
        assert call(attention_mask=mask).shape == (1, ROWS, 4, 16)


def test_pattern_of_other_lengths() -> None:
    """A pattern for more keys, or for more rows, than the layer has; its control fits."""
    padding = torch.ones(1, ROWS, dtype=torch.bool, device=DEVICE)
    for kv_length in (ROWS + 1, ROWS + 9):
        other = write_pattern(1, kv_length, kv_length, 2, padding, DEVICE)
        assert "not a pattern of 4 rows and 4 keys" in refusal(attention_mask=other)
    fitting = write_pattern(1, ROWS, ROWS, 2, padding, DEVICE)
    assert call(attention_mask=fitting).shape == (1, ROWS, 4, 16)


def test_sinks_of_other_heads() -> None:
    assert "sinks" in refusal(ValueError, s_aux=torch.zeros(3, device=DEVICE))
    assert call(s_aux=torch.zeros(4, device=DEVICE)).shape == (1, ROWS, 4, 16)


def test_a_layer_without_is_causal() -> None:
    query = torch.randn(1, 4, ROWS, 16, device=DEVICE)
    with pytest.raises(NotImplementedError, match="neither a mask nor is_causal"):
        attend(nn.Module(), query, query, query, None)
    assert attend(nn.Module(), query, query, query, None, is_causal=False)[0].shape == (1, ROWS, 4, 16)
    row = query[:, :, :1]
    assert attend(nn.Module(), row, query, query, None)[0].shape == (1, 1, 4, 16), "one row sees every key"


def test_more_causal_rows_than_keys() -> None:
    assert "no alignment" in refusal(rows=ROWS + 1)
    assert call(rows=ROWS + 1, is_causal=False).shape == (1, ROWS + 1, 4, 16)


def test_unbatched_inputs() -> None:
    query = torch.randn(4, ROWS, 16, device=DEVICE)
    with pytest.raises(NotImplementedError, match=r"\[B, H, L, D\] but \(4, 4, 16\)"):
        attend(Layer(), query, query, query, None)


def test_refusals_of_the_operator_have_transformers_advice() -> None:
    assert "head_dim 584" in refusal(head_dim=584)
    assert call(head_dim=576).shape == (1, ROWS, 4, 576)
    assert call(head_dim=12).shape == (1, ROWS, 4, 12), "padded"
    assert "torch.int32" in refusal(TypeError, dtype=torch.int32)


def test_attention_weights_are_not_returned() -> None:
    with pytest.warns(UserWarning, match="eager"):
        call(output_attentions=True)
