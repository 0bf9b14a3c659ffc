"""The override for ComfyUI, called as ComfyUI calls it."""

from __future__ import annotations

import copy
import importlib
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_fattn
from tests.conftest import counted_launches
from torch_fattn import patterns
from torch_fattn.integrations.comfyui import apply, attention_override


class Patcher:
    """The attributes of a ModelPatcher that the override uses."""

    def __init__(self, **transformer_options: Any) -> None:
        self.model_options: dict[str, Any] = {"transformer_options": transformer_options}

    def clone(self) -> Patcher:
        return copy.copy(self)


def theirs(q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | None = None, **options: Any) -> Tensor:
    """ComfyUI's contract, on the CPU in float64."""
    q, k, v = (t.cpu().double() for t in (q, k, v))
    if not options.get("skip_reshape"):
        dim = q.shape[-1] // heads
        q, k, v = (t.view(t.shape[0], t.shape[1], -1, dim).transpose(1, 2) for t in (q, k, v))
    if mask is not None:
        mask = mask.cpu() if mask.dtype == torch.bool else mask.cpu().double()
        mask = mask[None] if mask.dim() == 2 else mask
        mask = mask[:, None] if mask.dim() == 3 else mask
    chosen = {name: options[name] for name in ("scale", "enable_gqa") if name in options}
    out = F.scaled_dot_product_attention(q, k, v, mask, **chosen)
    return out if options.get("skip_output_reshape") else out.transpose(1, 2).flatten(2)


def never(*_: Any, **__: Any) -> Tensor:
    raise AssertionError("ComfyUI's own function is not asked")


@pytest.mark.parametrize("mask", [None, "keys", "batch", "heads", "added"])
@pytest.mark.parametrize("gqa", [False, True])
@pytest.mark.parametrize("shapes", ["flat", "skip_reshape", "skip_both"])
def test_calls(mask: str | None, gqa: bool, shapes: str) -> None:
    torch.manual_seed(0)
    kv_heads = 2 if gqa else 4
    q, k, v = (torch.randn(2, n, h * 16, device="mps") for n, h in ((9, 4), (7, kv_heads), (7, kv_heads)))
    options: dict[str, Any] = {
        "transformer_options": {},
        "attn_precision": torch.float32,
        "_inside_attn_wrapper": True,
    }
    if gqa:
        options |= {"enable_gqa": True, "scale": 0.3}
    if shapes != "flat":
        q, k, v = (t.unflatten(-1, (-1, 16)).transpose(1, 2) for t in (q, k, v))
        options |= {"skip_reshape": True, "skip_output_reshape": shapes == "skip_both"}
    masks = {"keys": (9, 7), "batch": (2, 9, 7), "heads": (2, 4, 9, 7), "added": (9, 7)}
    if mask is not None:
        drawn = torch.randn(masks[mask], device="mps")
        options["mask"] = drawn if mask == "added" else drawn > -0.5
    with counted_launches() as launches:
        out = attention_override(never, q, k, v, 4, **options)
    assert launches.get("fattn_prefill") == 1
    exact = theirs(q, k, v, 4, **options)
    assert out.shape == exact.shape and torch.allclose(out.cpu().double(), exact, atol=1e-6)


def test_calls_without_a_kernel_are_comfyuis() -> None:
    asked = []

    def own(*args: Any, **kwargs: Any) -> str:
        asked.append((args, kwargs))
        return "own"

    for q in (
        torch.randn(1, 9, 4 * 584, device="mps"),
        torch.randn(1, 9, 64),
        torch.randn(1, 9, 64, device="mps"),
    ):
        with counted_launches() as launches:
            out = attention_override(own, q.requires_grad_(), q, q, 4, mask=None)  # type: ignore[arg-type]
        assert out == "own" and not launches
    assert len(asked) == 3 and asked[0][0][3] == 4 and asked[0][1] == {"mask": None}
    with torch.no_grad():
        assert isinstance(attention_override(never, q, q, q, 4), Tensor), "the control"


def test_a_mask_of_one_dimension_and_unknown_options_are_comfyuis() -> None:
    def own(*_: Any, **__: Any) -> str:
        return "own"

    q = torch.randn(1, 9, 64, device="mps")
    line = torch.zeros(9, dtype=torch.bool, device="mps")
    for options in ({"mask": line}, {"softcap": 20.0}, {"window": 4}):
        assert attention_override(own, q, q, q, 4, **options) == "own"  # type: ignore[arg-type]
    ignored = {
        "softcap": None,
        "causal": False,
        "low_precision_attention": True,
        "transformer_options": {"a": 1},
    }
    assert isinstance(attention_override(never, q, q, q, 4, **ignored), Tensor), "the control"


@pytest.mark.parametrize(
    ("option", "wrong"),
    [("scale", "x"), ("enable_gqa", "x"), ("mask", 5), ("mask", "mask"), ("skip_reshape", 1.5)],
)
def test_an_option_of_another_type(option: str, wrong: Any) -> None:
    q = torch.randn(1, 9, 64)
    named = rf"comfyui.attention_override: {option} is of type {type(wrong).__name__}; pass "
    with pytest.raises(TypeError, match=named):
        attention_override(never, q, q, q, 4, **{option: wrong})
    if option == "mask":
        with pytest.raises(TypeError, match=named):
            attention_override(never, q, q, q, 4, wrong)


def test_apply_refuses_other_objects() -> None:
    no_options, no_dict = Patcher(), Patcher()
    no_options.model_options = None  # type: ignore[assignment]
    no_dict.model_options = {"transformer_options": 3}
    for wrong, message in (
        (Patcher, "model is the class Patcher"),
        (no_options, "its model_options are of type NoneType, not a dict"),
        (no_dict, "its transformer_options are of type int, not a dict"),
        (3, "model is of type int"),
    ):
        with pytest.raises(TypeError, match=f"comfyui.apply: {message}; pass a ModelPatcher"):
            apply(wrong)
    apply(Patcher())


def test_compiled_in_one_graph() -> None:
    q = torch.randn(1, 9, 64, device="mps")

    def attention(q: Tensor) -> Tensor:
        return attention_override(never, q, q, q, 4, mask=None, transformer_options={})

    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    with torch.no_grad(), counted_launches() as launches:
        out = compiled(q)
    assert launches.get("fattn_prefill") == 1
    assert torch.allclose(out.cpu().double(), theirs(q, q, q, 4), atol=1e-6)


def test_apply_clones_and_calls_an_override_first() -> None:
    model = Patcher(other=1)
    ours = apply(apply(model))
    assert model.model_options == {"transformer_options": {"other": 1}}
    assert ours.model_options["transformer_options"] == {
        "other": 1,
        "optimized_attention_override": attention_override,
    }

    def doubled(func: Any, q: Tensor, *args: Any, **kwargs: Any) -> Any:
        assert func.__name__ == "own"
        return func(2 * q, *args, **kwargs)

    def own(q: Tensor, *_: Any, **__: Any) -> tuple[str, Tensor]:
        return "own", q

    twice = apply(apply(Patcher(optimized_attention_override=doubled)))
    override = twice.model_options["transformer_options"]["optimized_attention_override"]
    q = torch.randn(1, 9, 4 * 584, device="mps")
    name, seen = override(own, q, q, q, 4)
    assert name == "own" and torch.equal(seen, 2 * q), "no kernel for heads of 584"
    q = q[..., :32]
    with counted_launches() as launches:
        out = override(own, q, q, q, 4)
    assert launches.get("fattn_prefill") == 1
    assert torch.allclose(out.cpu().double(), theirs(2 * q, q, q, 4), atol=1e-6)
    assert torch_fattn.report().installed is False


def hides_all(query: Tensor, key: Tensor) -> Tensor:
    """A pattern whose results are 0."""
    return torch.zeros(1, 1, 2, 2, dtype=torch.bool, device=query.device)


HIDES_ALL = patterns.Pattern(hides_all, (32, 32), min_tokens=64)


def override_of(model: Patcher) -> Any:
    return model.model_options["transformer_options"]["optimized_attention_override"]


def test_a_pattern_takes_long_self_attention_after_the_first_steps() -> None:
    q, sigmas = torch.randn(1, 64, 64, device="mps"), torch.tensor([9.0, 5.0, 2.0, 0.0], device="mps")
    attend = override_of(apply(Patcher(), HIDES_ALL, exact_steps=2))
    assert not attend(never, q, q, q, 4).any(), "without a sampler"
    for sigma, is_exact in ((9.0, True), (5.0, True), (3.0, False), (2.0, False)):
        now = {"sample_sigmas": sigmas, "sigmas": torch.full((2,), sigma, device="mps")}
        for _layer in range(2):
            assert attend(never, q, q, q, 4, transformer_options=now).any() == is_exact, sigma
    seen = torch.ones(64, 64, dtype=torch.bool, device="mps")
    for k, mask in ((q, seen), (q[:, :63], None)):
        assert attend(never, q, k, k, 4, mask).any(), "masks and cross-attention are exact"
    assert attend(never, q[:, :63], q[:, :63], q[:, :63], 4).any(), "short calls are exact"
    heads = q.unflatten(-1, (4, 16)).transpose(1, 2).contiguous()
    for given, options in ((q, {}), (heads, {"skip_reshape": True})):
        for mask in (seen, None):
            out = attend(never, given, given, given, 4, mask, **options)
            assert out.shape == q.shape and out._is_view(), "no copy"


def test_a_pattern_is_replaced_and_keeps_the_override_before() -> None:
    q = torch.randn(1, 64, 64, device="mps")

    def bordered(func: Any, *args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs) + 1

    model = apply(apply(Patcher(optimized_attention_override=bordered)), HIDES_ALL)
    assert (override_of(model)(never, q, q, q, 4) == 1).all()
    out = override_of(apply(model))(never, q, q, q, 4)
    assert torch.allclose(out.cpu().double(), theirs(q, q, q, 4) + 1, atol=1e-6)
    with pytest.raises(TypeError, match="comfyui.apply: pattern is of type int; pass a Pattern or None"):
        apply(Patcher(), 3)  # type: ignore[arg-type]


def test_nodes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    q, names = torch.randn(1, 300, 64, device="mps"), {"TorchFattnAttention", "TorchFattnSparseAttention"}
    node = importlib.import_module("integrations.comfyui_node")
    assert node.NODE_CLASS_MAPPINGS.keys() == node.NODE_DISPLAY_NAME_MAPPINGS.keys() == names
    outs = []
    for name in sorted(names):
        cls = node.NODE_CLASS_MAPPINGS[name]
        inputs = cls.INPUT_TYPES()["required"]
        settings = {key: value[1]["default"] for key, value in inputs.items() if key != "model"}
        if settings:
            settings |= {"min_tokens": 300}
        (model,) = getattr(cls(), cls.FUNCTION)(model=Patcher(), **settings)
        outs.append(override_of(model)(never, q, q, q, 4).cpu().double())
    exact, sparse = outs
    assert torch.allclose(exact, theirs(q, q, q, 4), atol=1e-6)
    assert not torch.allclose(sparse, exact, atol=1e-3)
    monkeypatch.setitem(sys.modules, node.__name__ + ".nodes", None)
    assert importlib.reload(node).NODE_CLASS_MAPPINGS == {}
    assert "for one minor version of torch" in caplog.text
