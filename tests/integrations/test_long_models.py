"""Tiny video and image transformers whose attention runs through diffusers' dispatcher or ComfyUI's override:
exact, and with a pattern as the float64 model whose attention sees the same blocks."""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.conftest import counted_launches
from tests.integrations.test_comfyui import Patcher, never
from torch_fattn import patterns
from torch_fattn.integrations import comfyui, diffusers

HEADS, DIM, TEXT, GRID = 4, 16, 20, (2, 8, 8)
TOKENS = GRID[0] * GRID[1] * GRID[2]
Dispatch = Callable[[Tensor, Tensor, Tensor], Tensor]  # attention of [B, L, H, D]


def native(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    """With the signature of diffusers' function."""
    operands = (x.transpose(1, 2) for x in (query, key, value))
    options = {"scale": scale, "enable_gqa": enable_gqa}
    return F.scaled_dot_product_attention(*operands, attn_mask, dropout_p, is_causal, **options).transpose(
        1, 2
    )


class Name(Enum):
    NATIVE = "native"


class Registry:
    _backends: dict[Name, Callable[..., Tensor]] = {}


@pytest.fixture(autouse=True)
def dispatcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The part of diffusers that the integration uses."""
    module: Any = types.ModuleType("diffusers.models.attention_dispatch")
    module.AttentionBackendName, module._AttentionBackendRegistry = Name, Registry
    for name in ("diffusers", "diffusers.models"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    Registry._backends = {Name.NATIVE: native}
    yield
    diffusers.unregister()


class Layer(nn.Module):
    """Self-attention of x or, as a joint one, of text and x, else with cross-attention to text after it."""

    def __init__(self, joint: bool) -> None:
        super().__init__()
        self.joint = joint
        self.qkv = nn.Linear(HEADS * DIM, 3 * HEADS * DIM)
        self.cross = nn.Linear(HEADS * DIM, 3 * HEADS * DIM)
        self.mlp = nn.Sequential(nn.Linear(HEADS * DIM, 96), nn.GELU(), nn.Linear(96, HEADS * DIM))

    def attend(self, project: nn.Module, x: Tensor, context: Tensor, dispatch: Dispatch) -> Tensor:
        query, _, _ = project(x).chunk(3, -1)
        _, key, value = project(context).chunk(3, -1)
        query, key, value = (each.unflatten(-1, (HEADS, DIM)) for each in (query, key, value))
        query, key = (rotated(F.rms_norm(each, (DIM,)) * 2) for each in (query, key))
        out = dispatch(query, key, value)
        joined = out.flatten(2)
        if joined.device.type == "mps":
            assert joined.data_ptr() == out.data_ptr(), "no copy"
        return joined

    def forward(self, x: Tensor, text: Tensor, dispatch: Dispatch) -> tuple[Tensor, Tensor]:
        if self.joint:
            both = torch.cat([text, x], 1)
            both = both + self.attend(self.qkv, both, both, dispatch)
            text, x = both.split([TEXT, x.shape[1]], 1)
        else:
            x = x + self.attend(self.qkv, x, x, dispatch)
            x = x + self.attend(self.cross, x, text, dispatch)
        return x + self.mlp(F.layer_norm(x, x.shape[-1:])), text


def rotated(x: Tensor) -> Tensor:
    angle = torch.arange(x.shape[1], device=x.device)[:, None, None] * torch.logspace(
        0, -2, DIM // 2, device=x.device
    )
    first, second = x.chunk(2, -1)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Model(nn.Module):
    def __init__(self, joint: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(joint) for _ in range(2))

    def forward(self, x: Tensor, text: Tensor, dispatch: Dispatch) -> Tensor:
        for layer in self.layers:
            x, text = layer(x, text, dispatch)
        return x


def by_diffusers(pattern: patterns.Pattern | None) -> Dispatch:
    diffusers.register(pattern)
    return Registry._backends[Name.NATIVE]


def by_comfyui(pattern: patterns.Pattern | None) -> Dispatch:
    options = comfyui.apply(Patcher(), pattern).model_options["transformer_options"]

    def dispatch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        flat = (x.flatten(2) for x in (query, key, value))
        out = options["optimized_attention_override"](never, *flat, HEADS, transformer_options={})
        return out.unflatten(-1, (HEADS, DIM))

    return dispatch


def through(masks: list[Tensor]) -> Dispatch:
    """Attention in which the calls of `TOKENS` rows and more see the next mask's blocks of 32."""
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
    query, mask = torch.randn(1, 64, HEADS, DIM, device="mps"), torch.zeros(1, 1, 2, 2, dtype=torch.bool)
    nothing = patterns.Pattern(lambda q, k: mask.to("mps"), (32, 32), min_tokens=64)
    attend = by_diffusers(nothing)
    assert not attend(query, query, query).any()
    for exact in ((query[:, :63],) * 3, (query, query[:, :63], query[:, :63])):
        assert attend(*exact).any(), "short calls and cross-attention"
    for options in ({"attn_mask": torch.ones(64, 64, dtype=torch.bool, device="mps")}, {"is_causal": True}):
        assert attend(query, query, query, **options).any()  # type: ignore[call-arg]
    diffusers.register()
    assert attend(query, query, query).any()
    diffusers.register(nothing)
    diffusers.unregister()
    assert Registry._backends == {Name.NATIVE: native} and attend(query, query, query).any()
    with pytest.raises(
        TypeError, match="diffusers.register: pattern is of type int; pass a torch_fattn.patterns"
    ):
        diffusers.register(3)  # type: ignore[arg-type]
