"""Tiny video and image transformers whose attention runs through diffusers' dispatcher or ComfyUI's override:
exact, and with a pattern as the float64 model whose attention sees the same blocks."""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.conftest import counted_launches
from tests.integrations.test_comfyui import HIDES_ALL, Patcher, never
from torch_fattn import patterns
from torch_fattn.integrations import comfyui, diffusers

HEADS, DIM, TEXT, TOKENS = 4, 16, 20, 128
Dispatch = Callable[[Tensor, Tensor, Tensor], Tensor]  # attention of [B, L, H, D]


def native(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **options: Any,
) -> Tensor:
    """diffusers' own function."""
    operands = (x.transpose(1, 2) for x in (query, key, value))
    out = F.scaled_dot_product_attention(*operands, attn_mask, dropout_p, is_causal, scale=scale, **options)
    return out.transpose(1, 2)


BACKENDS: dict[str, Callable[..., Tensor]] = {}


@pytest.fixture(autouse=True)
def dispatcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The part of diffusers that the integration uses."""
    module: Any = types.ModuleType("diffusers.models.attention_dispatch")
    module.AttentionBackendName = types.SimpleNamespace(NATIVE="native")
    module._AttentionBackendRegistry = types.SimpleNamespace(_backends=BACKENDS)
    for name in ("diffusers", "diffusers.models"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    BACKENDS["native"] = native
    yield
    diffusers.unregister()


class Model(nn.Module):
    """Two layers: self-attention of the tokens and cross-attention to text, or self-attention of both."""

    def __init__(self, joint: bool) -> None:
        super().__init__()
        self.joint = joint
        self.qkv = nn.ModuleList(nn.Linear(HEADS * DIM, 3 * HEADS * DIM) for _ in range(4))

    def forward(self, x: Tensor, text: Tensor, dispatch: Dispatch) -> Tensor:
        for layer in (0, 2):
            if self.joint:
                both = attend(self.qkv[layer], torch.cat([text, x], 1), None, dispatch)
                text, x = both.split([TEXT, TOKENS], 1)
            else:
                x = attend(self.qkv[layer], x, None, dispatch)
                x = attend(self.qkv[layer + 1], x, text, dispatch)
        return x


def attend(project: nn.Module, x: Tensor, context: Tensor | None, dispatch: Dispatch) -> Tensor:
    query, key, value = project(x).unflatten(-1, (3, HEADS, DIM)).unbind(2)
    if context is not None:
        _, key, value = project(context).unflatten(-1, (3, HEADS, DIM)).unbind(2)
    query, key = (F.rms_norm(each, (DIM,)) * 2 for each in (query, key))
    out = dispatch(query, key, value)
    joined = out.flatten(2)
    assert joined.device.type != "mps" or joined.data_ptr() == out.data_ptr(), "a copy"
    return x + joined


def by_diffusers(pattern: patterns.Pattern | None) -> Dispatch:
    diffusers.register(pattern)
    return BACKENDS["native"]


def by_comfyui(pattern: patterns.Pattern | None) -> Dispatch:
    options = comfyui.apply(Patcher(), pattern).model_options["transformer_options"]

    def dispatch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        flat = (x.flatten(2) for x in (query, key, value))
        out = options["optimized_attention_override"](never, *flat, HEADS, transformer_options={})
        return out.unflatten(-1, (HEADS, DIM))

    return dispatch


def through(masks: list[Tensor]) -> Dispatch:
    """Attention in which each self-attention sees the blocks of the next mask."""
    left = iter(masks)

    def dispatch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        visible = None
        if masks and query.shape == key.shape:
            visible = next(left).repeat_interleave(32, -2).repeat_interleave(32, -1)
            visible = visible[..., : query.shape[2], : query.shape[2]]
        return F.scaled_dot_product_attention(query, key, value, visible).transpose(1, 2)

    return dispatch


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("joint", [False, True], ids=["video", "image"])
@pytest.mark.parametrize("library", [by_diffusers, by_comfyui])
@torch.no_grad()
def test_a_model(library: Callable[..., Dispatch], joint: bool, sparse: bool) -> None:
    torch.manual_seed(0)
    model = Model(joint)
    x, text = torch.randn(2, TOKENS, HEADS * DIM), torch.randn(2, TEXT, HEADS * DIM)
    masks: list[Tensor] = []

    def select(query: Tensor, key: Tensor) -> Tensor:
        mask = patterns.top_blocks(patterns.pooled_scores(query, key, (32, 32)), 0.5)
        masks.append(mask.cpu())
        return mask

    pattern = patterns.Pattern(select, (32, 32), min_tokens=TOKENS) if sparse else None
    ours = copy.deepcopy(model).to("mps")
    with counted_launches() as launches:
        out = ours(x.to("mps"), text.to("mps"), library(pattern))
    assert launches["fattn_prefill"] == (2 if joint else 4) and len(masks) == 2 * sparse
    exact = copy.deepcopy(model).double()(x.double(), text.double(), through(masks))
    torchs = model(x, text, through(masks))
    limit = 2 * (torchs.double() - exact).abs().max() + 1e-6
    assert (out.cpu().double() - exact).abs().max() <= limit
    if sparse:
        assert (model(x, text, through([])) - exact).abs().max() > 100 * limit, "the control: it hides keys"


def test_another_pattern_replaces_the_first() -> None:
    query = torch.randn(1, 64, HEADS, DIM, device="mps")
    attend = by_diffusers(HIDES_ALL)
    assert not attend(query, query, query).any()
    for exact in ((query[:, :63],) * 3, (query, query[:, :63], query[:, :63])):
        assert attend(*exact).any(), "short calls and cross-attention"
    wide = torch.randn(1, 64, 1, 584, device="mps")
    assert attend(wide, wide, wide).any(), "heads without a kernel"
    for options in ({"attn_mask": torch.ones(64, 64, dtype=torch.bool, device="mps")}, {"is_causal": True}):
        assert attend(query, query, query, **options).any()  # type: ignore[call-arg]
    diffusers.register()
    assert attend(query, query, query).any()
    diffusers.register(HIDES_ALL)
    diffusers.unregister()
    assert BACKENDS == {"native": native} and attend(query, query, query).any()
    with pytest.raises(TypeError, match="diffusers.register: pattern is of type int; pass a Pattern or None"):
        diffusers.register(3)  # type: ignore[arg-type]
