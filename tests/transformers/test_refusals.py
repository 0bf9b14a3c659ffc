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


CAUSAL = torch.ones(1, 1, ROWS, ROWS, dtype=torch.bool).tril()
PADDING = torch.tensor([[False, True, True, True]])
EVERYTHING = torch.ones((), dtype=torch.bool)  # expanded, as the mask function makes it
# Forms of masks, with the keys that they show.
MASKS: dict[str, tuple[torch.Tensor | None, torch.Tensor]] = {
    "none": (None, CAUSAL),
    "bool": (CAUSAL, CAUSAL),
    "additive": (torch.zeros(CAUSAL.shape).masked_fill(~CAUSAL, -torch.inf), CAUSAL),
    "nothing hidden": (EVERYTHING.expand(CAUSAL.shape), torch.ones_like(CAUSAL)),
    "padding": (PADDING, CAUSAL & PADDING),
    "pattern": (write_pattern(1, ROWS, ROWS, ROWS, None, "cpu"), CAUSAL),
    "window": (write_pattern(1, ROWS, ROWS, 2, PADDING, "cpu"), CAUSAL.triu(-1) & PADDING),
}


def check_masked(form: str, seen: torch.Tensor, bias: torch.Tensor, **options: Any) -> None:
    """`attend` under this mask and options gives attention over the keys `seen`, with `bias` added."""
    mask = MASKS[form][0]
    query = torch.randn(1, 4, ROWS, 16)
    if form != "nothing hidden" and mask is not None:
        mask = mask.to(DEVICE)
    elif mask is not None:
        mask = EVERYTHING.to(DEVICE).expand(mask.shape)
    out, _ = attend(Layer(), *[query.to(DEVICE)] * 3, mask, **options)
    exact, _ = reference.prefill(query, query, query, bias.masked_fill(~seen, -torch.inf))
    assert (out.cpu() - exact.transpose(1, 2)).abs().max() < 1e-5


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("form", MASKS)
def test_position_bias(form: str, heads: int) -> None:
    """Added to the scores under any mask."""
    bias = torch.randn(1, heads, ROWS, ROWS)
    check_masked(form, MASKS[form][1], bias, position_bias=bias.to(DEVICE))


def test_position_biases_that_are_refused() -> None:
    bias = torch.randn(1, 4, ROWS, ROWS, device=DEVICE)
    assert "soft cap of 5.0" in refusal(position_bias=bias, softcap=5.0)
    assert f"(1, 4, {ROWS}, 3) and not numbers for (1, 4, {ROWS}, {ROWS})" in refusal(
        position_bias=bias[..., :3]
    )
    assert "torch.int64" in refusal(position_bias=bias.long())


@pytest.mark.parametrize("form", MASKS)
def test_a_selection_of_keys(form: str) -> None:
    """A selection of keys for every row and all heads, within the mask; DeepSeek V3.2 makes it."""
    indices = torch.tensor([[[0, 3], [1, 0], [2, 2], [3, 1]]])
    selected = torch.zeros(1, ROWS, ROWS, dtype=torch.bool).scatter_(-1, indices, True)[:, None]
    check_masked(form, MASKS[form][1] & selected, torch.zeros(1, 1, 1, 1), indices=indices.to(DEVICE))


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
