"""Layers of linear attention as one kernel: what they compute, where their own forward or functions run, and
how many kernels they launch."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet, Qwen3_5RMSNormGated

from tests.conftest import counted_launches
from tests.transformers.linear_layers import FAMILIES, fuse, layer_of, new_cache, run, states, tokens
from tests.transformers.test_native import MODELS
from tests.transformers.tiny_models import DEVICE, TOLERANCE, pair, prompt
from torch_fattn.integrations.transformers import register, report, unregister
from torch_fattn.integrations.transformers.fusion import delta_functions, mixers, running
from torch_fattn.integrations.transformers.fusion.launches import Launches

STEP = "fattn_gated_delta_step"


def steps(launches: dict[str, int]) -> int:
    return sum(number for kernel, number in launches.items() if kernel.startswith(STEP))


def both(family: str, **changes: Any) -> tuple[Any, Any]:
    """A fused layer, and its like on the CPU."""
    own = layer_of(family, **changes)
    if own is None:
        pytest.skip("transformers lacks the family")
    ours = copy.deepcopy(own).to(DEVICE)
    assert fuse(ours) == ""
    return ours, own


@pytest.mark.parametrize(
    ("family", "changes"), [(family, gates) for family, each in FAMILIES.items() for gates in ({}, *each[1:])]
)
def test_layers(family: str, changes: dict[str, Any]) -> None:
    """Left padding, a step, several tokens at once after the sequences changed places, a long continuation;
    then a prompt of one token, after writes to A_log and dt_bias. Packed sequences are separate."""
    layers, caches = both(family, **changes), (new_cache(), new_cache())
    for begin, length in ((0, 9), (9, 1), (10, 3), (13, 20), (0, 1), (1, 2)):
        x, mask = tokens(2, 33)[:, begin : begin + length], None
        if length == 9:
            mask = torch.ones(2, 9)
            mask[0, :4] = 0
        if length == 3:
            for cache in caches:
                cache.reorder_cache(torch.tensor([1, 0]))
        if (begin, length) == (0, 1):
            for cache, layer in zip(caches, layers, strict=True):
                cache.reset()
                gates = getattr(layer, "forget_gate", layer)
                for weight in (gates.A_log, gates.dt_bias):
                    weight.data.copy_(weight + 1)
        with counted_launches() as launches:
            mine, theirs = (run(*each, mask) for each in zip(layers, (x, x), caches, strict=True))
        is_step = length < 9 and begin > 0 and not changes
        assert steps(launches) == is_step and launches.get("fattn_gated_delta_scan", 0) == (not is_step)
        torch.testing.assert_close(mine, theirs, atol=2 * TOLERANCE, rtol=0)
        for state, own in zip(*map(states, caches), strict=True):
            torch.testing.assert_close(state, own, atol=TOLERANCE, rtol=TOLERANCE)
    check_packed(*layers)


def check_packed(ours: Any, own: Any) -> None:
    x, packed = tokens(1, 9), {"cu_seq_lens_q": torch.tensor([0, 4, 4, 9], device=DEVICE)}
    apart = torch.cat([run(own, x[:, a:b], None) for a, b in ((0, 4), (4, 9))], 1)
    for cache in (None, new_cache()):
        torch.testing.assert_close(run(ours, x, cache, **packed), apart, atol=2 * TOLERANCE, rtol=0)
    assert (run(own, x, None) - apart).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "kimi_linear"])
def test_rounding(family: str, dtype: torch.dtype) -> None:
    """At most twice the error of the own layer, beside float64. States made in inference mode go on in it."""
    ours, own = both(family, dtype=dtype)
    exact = copy.deepcopy(own).double()
    caches = new_cache(), new_cache(), new_cache()
    for length in (12, 1):
        x = tokens(2, length).to(dtype)
        with torch.inference_mode():
            mine, theirs, right = map(run, (ours, own, exact), (x, x, x.double()), caches)
        errors = [(each.double() - right).abs().max() for each in (mine, theirs)]
        assert 0 < errors[0] < 2 * errors[1]
    run(ours, x, None)


def recording(_layer: Any, cache: Any) -> None:
    cache.activate_past_recording()


def hooked(layer: Any, _cache: Any) -> None:
    layer.norm.register_forward_hook(lambda *_: None)


def offloaded(layer: Any, _cache: Any) -> None:
    add_hook_to_module(layer.conv1d, AlignDevicesHook(layer.A_log.device, offload=True))


class Doubled(Qwen3_5GatedDeltaNet):
    def forward(self, *arguments: Any, **options: Any) -> Any:
        return 2 * super().forward(*arguments, **options)


def derived(layer: Any, _cache: Any) -> None:
    layer.__class__ = Doubled


@pytest.mark.parametrize("change", [recording, hooked, offloaded, derived])
def test_own_forward_runs_where_it_must(change: Callable[[Any, Any], None]) -> None:
    """Its functions are fused."""
    ours, own = both("qwen3_5")
    caches = new_cache(), new_cache()
    for layer, cache in zip((ours, own), caches, strict=True):
        run(layer, tokens(2, 5), cache)
        change(layer, cache)
    for length in (1, 3):
        with counted_launches() as launches:
            mine = run(ours, tokens(2, length), caches[0])
        assert steps(launches) == 0 and any("gated_delta" in kernel for kernel in launches)
        torch.testing.assert_close(mine, run(own, tokens(2, length), caches[1]), atol=TOLERANCE, rtol=0)


def test_neither_operators_nor_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients, autocast, the CPU, a model that is not fused."""
    ours, own = both("qwen3_5")
    assert fuse(own) == ""
    x = tokens(2, 5).to(DEVICE)
    monkeypatch.setattr(mixers, "_run", None)
    monkeypatch.setattr(delta_functions, "_rule", None)
    with counted_launches() as launches:
        with running.run(True):
            ours(x).sum().backward()
            with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
                ours(x)
            with torch.no_grad():
                own(x.cpu())
        with torch.no_grad():
            ours(x)
    assert not any("delta" in kernel or "conv1d" in kernel for kernel in launches)


def nothing(*_arguments: Any) -> None:
    pass


class PlusOneNorm(Qwen3_5RMSNormGated):
    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        norm = torch.rms_norm(hidden_states, self.weight.shape, 1 + self.weight, self.variance_epsilon)
        return norm * nn.functional.silu(gate)


class Inheriting(Qwen3_5GatedDeltaNet):
    pass


def zeros(*shape: int, device: str = "cpu") -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape, device=device))


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("forward", nothing, "its forward is replaced; its functions are fused"),
        ("activation", "gelu", "activation gelu"),
        ("head_k_dim", 12, "no kernel for its sizes"),
        ("num_k_heads", 3, "no kernel for its sizes"),
        ("conv1d.weight", zeros(160, 1, 9), "no kernel for its sizes"),
        ("norm.forward", nothing, "its norm is not fused"),
        ("norm.__class__", PlusOneNorm, "its norm does not multiply by a weight"),
        ("__class__", Inheriting, "its class inherits the forward"),
        ("A_log", zeros(2), "its weights are shards"),
        ("dt_bias", zeros(4, device="meta"), "or not in memory"),
    ],
)
def test_layers_that_are_left(name: str, value: Any, why: str) -> None:
    layer = layer_of("qwen3_5")
    *path, name = name.split(".")
    setattr(layer.get_submodule(".".join(path)), name, value)
    assert why in fuse(layer) and not mixers.is_fused(layer)


def test_functions_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    register(fuse=False)
    layer = layer_of("qwen3_5")
    file: Any = importlib.import_module(type(layer).__module__)
    other = lambda query, *_operands, initial_state, **_options: (query, initial_state)  # noqa: E731
    monkeypatch.setattr(file, "torch_chunk_gated_delta_rule", other)
    assert fuse(layer) == "its functions compute something else than the gated delta rule"
    register(fuse=False)


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear"])
def test_functions(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In layers of an unknown source the functions are fused. Callers may keep their states."""
    monkeypatch.setattr(mixers, "FAMILIES", {})
    own = layer_of(family)
    ours, caches = copy.deepcopy(own).to(DEVICE), (new_cache(), new_cache())
    assert "not known" in fuse(ours)
    for length in (9, 1, 3):
        with counted_launches() as launches:
            mine = run(ours, tokens(2, length), caches[0])
        assert {"fattn_causal_conv1d", "fattn_rms_norm"} <= launches.keys()
        torch.testing.assert_close(mine, run(own, tokens(2, length), caches[1]), atol=TOLERANCE, rtol=0)
    check_packed(ours, own)


def test_calls_of_functions() -> None:
    """Callers keep their states. Tokens of a cache before packed sequences are not packed."""
    layer = layer_of("qwen3_next").to(DEVICE)
    fuse(layer)
    file: Any = importlib.import_module(type(layer).__module__)
    query, key, value = (torch.randn(1, 5, 2, 16, device=DEVICE) for _ in range(3))
    state = torch.randn(1, 2, 16, 16, device=DEVICE)
    kept, rates = state.clone(), {"g": -torch.rand(1, 5, 2, device=DEVICE), "beta": query.sigmoid()[..., 0]}
    x, bounds = torch.randn(1, 8, 9, device=DEVICE), torch.tensor([0, 2, 5], device=DEVICE)
    rule, convolve, finals = file.torch_chunk_gated_delta_rule, file.causal_conv1d_fn, []
    with torch.no_grad(), running.run(True), counted_launches() as launches:
        for wanted in (True, False):
            options = {"initial_state": state, "output_final_state": wanted}
            finals.append(rule(query, key, value, **rates, **options)[1])
        convolve(x, x[0, :, :4], cu_seq_lens_q=bounds)
    assert torch.equal(state, kept) and not torch.equal(finals[0], kept) and finals[1] is None
    assert launches == {"fattn_gated_delta_prepare": 2, "fattn_gated_delta_scan": 2}


def test_report_and_unregister() -> None:
    model, eager = pair(AutoModelForCausalLM, MODELS["qwen3_5"])
    layer, ids = model.model.layers[0].linear_attn, prompt()[0]
    file: Any = importlib.import_module(type(layer).__module__)
    register(fuse=False)
    theirs = file.causal_conv1d_fn
    register()
    found = report(model)
    assert found.mixers == ("model.layers.0.linear_attn",)
    assert "fused: 1 layers of linear attention" in str(found)
    copied = copy.deepcopy(model)
    assert mixers.is_fused(layer) and mixers.is_fused(copied.model.layers[0].linear_attn)
    assert file.causal_conv1d_fn is not theirs
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        assert (compiled(ids.to(DEVICE)).logits.cpu() - eager(ids).logits).abs().max() < TOLERANCE
    unregister()
    assert not mixers.is_fused(layer) and "forward" not in vars(layer)
    assert file.causal_conv1d_fn is theirs
    copied.set_attn_implementation("sdpa")
    with counted_launches() as launches, torch.no_grad():
        copied(ids.to(DEVICE))
    assert steps(launches) == 0


@pytest.mark.parametrize(
    ("family", "step", "prefill"), [("qwen3_next", 4, 9), ("qwen3_5", 6, 10), ("kimi_linear", 10, 15)]
)
def test_kernels_of_a_layer(family: str, step: int, prefill: int) -> None:
    ours, _own = both(family)
    cache = new_cache()
    run(ours, tokens(2, 9), new_cache())  # makes what all layers share
    for length, expected in ((9, prefill), (1, step)):
        x, launches = tokens(2, length).to(DEVICE), Launches(ours)
        with launches.count():
            run(ours, x, cache)
        assert launches.parts.total() == expected + 1  # and the copy from the device
