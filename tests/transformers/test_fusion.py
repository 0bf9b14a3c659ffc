"""Norms that run as one kernel: which modules have the form, what they compute, and where their own forward
runs. Every test of generation in this folder runs with them too."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    CLIPVisionConfig,
    LlamaForCausalLM,
    LlavaConfig,
    PreTrainedModel,
    Qwen3Config,
    T5Config,
)
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm, Llama4TextRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.models.t5.modeling_t5 import T5LayerNorm

from tests.conftest import counted_launches
from tests.transformers.test_native import MODELS
from tests.transformers.tiny_models import COMMON, DEVICE, ENCODER, LAYERS, prompt, tiny
from torch_fattn.integrations.transformers import register, report, unregister
from torch_fattn.integrations.transformers.fusion import models, norms

SIZE = 48
RUN = 5  # of the nine norms of `model_of`; four are of heads, and join their rotation
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def norm_of(
    kind: type[nn.Module] = LlamaRMSNorm, dtype: torch.dtype = torch.bfloat16, eps: float = 1e-6
) -> nn.Module:
    norm: nn.Module = kind(SIZE, eps)
    with torch.no_grad():
        norm.weight.normal_()
    return norm.to(dtype).to(DEVICE).requires_grad_(False)


class OfSum(LlamaRMSNorm):
    """One that differs only where eps matters."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.float()
        norm = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True).clamp(min=self.variance_epsilon))
        return (norm * self.weight.float()).to(hidden_states.dtype)


class OfHalf(LlamaRMSNorm):
    """One whose first half alone counts, as in partial norms."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        half = SIZE // 2
        scale = hidden_states[..., :half].float().square().mean(-1, keepdim=True) + self.variance_epsilon
        return (hidden_states.float() * torch.rsqrt(scale) * self.weight.float()).to(hidden_states.dtype)


class Rounded(LlamaRMSNorm):
    """Three roundings."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        scale = hidden_states.float().square().mean(-1, keepdim=True) + self.variance_epsilon
        return hidden_states * torch.rsqrt(scale).to(hidden_states.dtype) * (self.weight * 1.004)


KINDS: dict[type[nn.Module], bool] = {  # and whether torch's kernel has the form
    LlamaRMSNorm: True,
    Olmo2RMSNorm: True,
    T5LayerNorm: True,
    GptOssRMSNorm: True,
    Gemma3RMSNorm: False,
    Qwen3_5RMSNorm: False,
    Llama4TextL2Norm: False,
    Qwen3NextRMSNormGated: False,
    Qwen3_5RMSNormGated: False,
    KimiLinearRMSNormGated: False,
}


@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_norms_of_the_form(
    kind: type[nn.Module], dtype: torch.dtype, weight_dtype: torch.dtype | None
) -> None:
    """In one launch, for rows in any order, with a gate by place or by name; not where the own forward must
    run."""
    norm = kind(1e-5) if kind is Llama4TextL2Norm else norm_of(kind, weight_dtype or dtype)
    is_ours = not KINDS[kind] or weight_dtype not in (None, dtype)
    scales = torch.tensor([1e-3, 1.0, 20.0, 1e15, 1e30][: 5 if is_ours and dtype is torch.float32 else 3])
    x = (torch.randn(len(scales), 5, SIZE) * scales.view(-1, 1, 1)).to(DEVICE, dtype)
    gates = (torch.randn_like(x),) if "Gated" in kind.__name__ else ()
    own = norm(x, *gates)
    assert norms.fuse(norm) == "" and norms.is_fused(norm)
    with counted_launches() as launches:
        results = [norm(x, *gates), norm(x, **dict(zip(("gate",), gates, strict=False)))]
        turned = norm(*(each.transpose(0, 1) for each in (x, *gates)))
    assert launches == ({"fattn_rms_norm": 3} if is_ours else {})
    rounding, rtol = torch.finfo(dtype), 8 if dtype is torch.float32 else 2.1
    for fused in (*results, turned.transpose(0, 1)):
        assert fused.dtype is own.dtype and fused.isfinite().all()
        error = (fused - own).float().abs()
        assert (error <= rtol * rounding.eps * own.float().abs() + rounding.smallest_normal).all()
        assert not is_ours or own.dtype is torch.float32 or (fused != own).float().mean() < 0.02
    with counted_launches() as launches:
        norm(x.clone().requires_grad_(), *gates)
        for gate in gates:
            norm(x, gate[:1])  # broadcast
    assert launches == {}
    norms.restore(norm)
    assert "forward" not in vars(norm)


@pytest.mark.parametrize("kind", [BambaRMSNormGated, OfSum, OfHalf, Rounded])
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_norms_are_left(kind: type[nn.Module], dtype: torch.dtype) -> None:
    norm = norm_of(kind, dtype)
    assert "computes something else" in norms.fuse(norm) and not norms.is_fused(norm)


def with_bias(norm: nn.Module) -> None:
    norm.bias = nn.Parameter(torch.zeros(SIZE))


def hooked(norm: nn.Module) -> None:
    norm.forward = partial(norm.forward)


def of_another(norm: nn.Module) -> None:
    norm.forward = norm_of().forward


def on_meta(norm: nn.Module) -> None:
    norm.weight = nn.Parameter(norm.weight.to("meta"))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (with_bias, "more than a weight"),
        (hooked, "replaced"),
        (of_another, "replaced"),
        (on_meta, "not a vector in memory"),
    ],
)
def test_changed_norms_are_left(change: Callable[[nn.Module], None], why: str) -> None:
    norm = norm_of()
    change(norm)
    assert why in norms.fuse(norm)


def test_own_forward_runs_where_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    norm, x = norm_of(), torch.randn(2, SIZE, device=DEVICE).bfloat16()
    norms.fuse(norm)
    own = mock.Mock(side_effect=lambda norm, hidden_states: hidden_states)
    monkeypatch.setattr(LlamaRMSNorm, "forward", own)
    norm(x)
    own.assert_not_called()
    for call in (
        lambda: norm(x.float()),
        lambda: norm(x.clone().requires_grad_()),
        lambda: norm(nn.Parameter(x, requires_grad=False)),
        lambda: torch.autocast(DEVICE, torch.bfloat16)(norm)(x),
        lambda: norm.requires_grad_()(x),
    ):
        own.reset_mock()
        call()
        own.assert_called_once()


def test_other_arguments() -> None:
    norm, x = norm_of(Llama4TextRMSNorm), torch.randn(2, SIZE, device=DEVICE).bfloat16()
    own = norm(x)
    assert norms.fuse(norm) == ""
    assert torch.equal(norm(x=x), own)
    norm.weight = nn.Parameter(torch.ones_like(norm.weight[:1]), requires_grad=False)
    assert norm(x).shape == x.shape


def model_of(implementation: str = "fattn", dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    config = Qwen3Config(**COMMON)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=dtype)
    return model.eval().to(DEVICE)


def fused_norms(model: nn.Module) -> int:
    return sum(norms.is_fused(module) for module in model.modules())


def step(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(prompt(8)[0].to(DEVICE)).logits
    return logits


def kernels(model: PreTrainedModel) -> int:
    """The number of fused norms that a forward of a model runs."""
    with mock.patch.object(torch, "rms_norm", wraps=torch.rms_norm) as rms_norm:
        step(model)
    return rms_norm.call_count


def test_a_copy_has_its_own_implementation() -> None:
    model = model_of()
    step(model)
    copied, kept = copy.deepcopy(model), copy.deepcopy(model)
    copied.set_attn_implementation("sdpa")
    assert (kernels(model), kernels(copied), kernels(kept)) == (RUN, 0, RUN)
    never_run = copy.deepcopy(model)
    unregister()
    never_run.set_attn_implementation("sdpa")
    assert kernels(never_run) == 0


@pytest.mark.parametrize("wrapped_first", [False, True])
def test_wrapped_norms(wrapped_first: bool) -> None:
    """Hooks of accelerate keep the forward that they find, and put it back when they are removed."""
    model = model_of()
    norm = model.model.norm
    if not wrapped_first:
        step(model)
    found = norm.forward
    norm.forward = partial(lambda norm, *arguments: found(*arguments), norm)
    assert kernels(model) == RUN - wrapped_first
    model.set_attn_implementation("sdpa")
    assert kernels(model) == 0
    norm.forward = found
    assert kernels(model) == 0
    model.set_attn_implementation("fattn")
    assert kernels(model) == RUN


def test_a_norm_used_twice() -> None:
    model = model_of()
    first, second = model.model.layers
    second.input_layernorm = first.input_layernorm
    step(model)
    found = models.fused_in(model)
    assert (len(found.norms), dict(found.left)) == (9, {})


def test_under_a_default_device() -> None:
    model = model_of()
    with torch.device(DEVICE):
        assert kernels(model) == RUN


def test_models_are_not_decided_in_a_transform() -> None:
    model = model_of(dtype=torch.float32)
    ids = prompt(8)[0].to(DEVICE)
    with torch.no_grad():
        torch.func.vmap(lambda row: model(row[None], use_cache=False).logits)(ids)
    assert fused_norms(model) == 0
    assert kernels(model) == RUN


class Mixin(nn.Module):
    calls = 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        return super().__call__(*arguments, **options)


class Mixed(LlamaForCausalLM, Mixin):  # type: ignore[misc]
    pass


def test_calls_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Mixed._from_config(tiny("llama"), attn_implementation="fattn").to(DEVICE)
    step(model)
    assert model.calls == 1
    unregister()
    called: list[nn.Module] = []

    def call(self: nn.Module, *arguments: Any, **options: Any) -> Any:
        called.append(self)
        return nn.Module.__call__(self, *arguments, **options)

    monkeypatch.setattr(PreTrainedModel, "__call__", call, raising=False)
    register()
    step(model)
    assert called == [model, model.model]
    unregister()
    assert vars(PreTrainedModel)["__call__"] is call


def test_saved_and_loaded() -> None:
    model = model_of()
    logits = step(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(step(loaded), logits)
    assert fused_norms(loaded) == 9


@pytest.mark.parametrize(
    ("family", "before", "after"),
    [("llama", 40, 15), ("qwen3", 56, 15), ("gemma3", 84, 17), ("gpt_oss", 39, 10), ("qwen3_5", 78, 16.5)],
)
def test_report_counts_the_kernels_of_a_step(family: str, before: int, after: int) -> None:
    config = MODELS[family] if family in MODELS else Qwen3Config(**COMMON)
    config = copy.deepcopy(config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="fattn", dtype=torch.bfloat16)
    if family == "gpt_oss":  # as it is loaded
        for norm in filter(norms.is_norm, model.modules()):
            norm.float()
    found = report(model.eval().to(DEVICE))

    def of_layer(parts: dict[str, float]) -> float:
        return sum(count for part, count in parts.items() if part != "besides the layers")

    experts = found.before["MLP"] if family == "gpt_oss" else 0  # by the version of transformers
    assert (of_layer(found.before) - experts, of_layer(found.after) - experts) == (before, after)
    assert all("vision" in name for name in found.left)
    assert str(found).splitlines()[0] == f"fused: {len(found.fused)} norms"


def test_report_of_a_model_with_a_vision_tower() -> None:
    """The mean is over the layers that ran."""
    text = AutoModelForCausalLM.from_config(tiny("llama"), attn_implementation="fattn").eval()
    config = LlavaConfig(
        text_config=tiny("llama"),
        vision_config=CLIPVisionConfig(**ENCODER | {"image_size": 32, "patch_size": 16}),
        image_token_index=5,
    )
    whole = AutoModelForImageTextToText.from_config(config, attn_implementation="fattn").eval()
    assert report(whole).after == report(text).after


def test_report_of_an_encoder_decoder() -> None:
    """It fuses modules that have not run."""
    config = T5Config(vocab_size=64, d_model=64, d_kv=16, d_ff=64, num_layers=LAYERS, num_heads=4)
    found = report(AutoModelForSeq2SeqLM.from_config(config, attn_implementation="fattn").eval())
    assert len(found.fused) == 2 * LAYERS + 3 * LAYERS + 2
    assert found.before == found.after == {}
