"""Layers that the kernels cannot run: an error by default, sdpa attention under that policy, and always for
training."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    GPTNeoConfig,
    PreTrainedConfig,
)

from tests.conftest import counted_launches, decodes
from tests.transformers.tiny_models import (
    CACHES,
    DEVICE,
    LAYERS,
    TOLERANCE,
    VISIBLE_ERROR,
    both_forward,
    pair,
    prompt,
    same_as_eager,
    tiny,
)
from torch_fattn.integrations.transformers import (
    FLASH_NAME,
    NAME,
    PAGED_NAME,
    register,
    registration,
    unregister,
)
from torch_fattn.integrations.transformers import attend as attention_function
from torch_fattn.runtime import versions

OLD: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": LAYERS,
    "bos_token_id": 2,
    "eos_token_id": None,
}
OF_THEIR_OWN: dict[str, PreTrainedConfig] = {
    "gpt_neo": GPTNeoConfig(**OLD, attention_types=[[["global"], LAYERS]], max_position_embeddings=64),
    "falcon": FalconConfig(**OLD),
    "bloom": BloomConfig(**OLD),
}


@pytest.fixture
def sdpa_policy() -> Iterator[None]:
    register(on_unsupported="sdpa")
    yield
    unregister()


@pytest.fixture
def seen() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


def sentences(seen: list[warnings.WarningMessage]) -> list[str]:
    found = [one for one in seen if "fattn attention in" in str(one.message)]
    assert all("/tests/" in one.filename for one in found), "not at a line of a library"
    return [str(one.message) for one in found]


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_wide_heads_run_through_sdpa(
    name: str, cache: str, padding: int, sdpa_policy: None, seen: list[warnings.WarningMessage]
) -> None:
    """Every form of a mask becomes the one that sdpa takes."""
    config = tiny(name, head_dim=584)
    launches = same_as_eager(config, 4, cache=cache, padding=padding)
    assert not any(name.startswith(("fattn_prefill", "fattn_decode")) for name in launches)
    (sentence,) = sentences(seen)
    assert "Attention, layer 0: " in sentence and "584" in sentence and "sdpa attention runs" in sentence
    ids, _ = prompt(24, batch=1)
    ours, eager = pair(AutoModelForCausalLM, config)
    packed = {"position_ids": torch.cat((torch.arange(13), torch.arange(11)))[None], "use_cache": False}
    mine, theirs = both_forward(ours, eager, input_ids=ids, **packed)
    assert (mine - theirs).abs().max() < TOLERANCE


def test_one_layer_of_several(sdpa_policy: None, seen: list[warnings.WarningMessage]) -> None:
    """The other layers still run through fattn."""
    ours, eager = pair(AutoModelForCausalLM, tiny("llama"))

    def in_float64(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        """In layer 1 a dtype that no kernel has, on a device that has it."""
        if module.layer_idx == 0:
            return attention_function(module, query, key, value, mask, **options)
        operands = (operand.cpu().double() for operand in (query, key, value))
        out, _ = attention_function(module, *operands, mask.cpu(), **options)
        return out.float().to(query.device), None

    AttentionInterface.register(NAME, in_float64)
    ids, _ = prompt()
    with counted_launches() as launches:
        mine, theirs = both_forward(ours, eager, input_ids=ids, use_cache=False)
    assert (mine - theirs).abs().max() < TOLERANCE
    assert launches["fattn_prefill"] == LAYERS - 1
    (sentence,) = sentences(seen)
    assert "layer 1" in sentence and "float64" in sentence


@pytest.mark.parametrize("name", OF_THEIR_OWN)
@pytest.mark.parametrize("padding", [0, 3])
def test_models_outside_the_interface(
    name: str, padding: int, sdpa_policy: None, seen: list[warnings.WarningMessage]
) -> None:
    same_as_eager(OF_THEIR_OWN[name], 4, padding=padding)
    assert len(sentences(seen)) == 1 + (name != "bloom"), "once for the layers of a table, once for the model"


@pytest.mark.parametrize(
    "dropped",
    [
        {"head_mask": torch.ones(4)},
        {"indices": torch.zeros(1, dtype=torch.int64)},
        {"unheard_of": torch.ones(1)},
        {"sinks": torch.ones(1, 4, 5, 1)},
        {"sliding_window": 2},
    ],
)
def test_options_that_sdpa_would_drop_are_errors(dropped: dict[str, Any], sdpa_policy: None) -> None:
    layer = nn.Module().eval()
    query = torch.randn(1, 4, 5, 16, device=DEVICE)
    with pytest.raises(NotImplementedError, match=next(iter(dropped)).replace("_w", ".w")):
        attention_function(layer, query, query, query, None, is_causal=True, **dropped)
    assert attention_function(layer, query, query, query, None, is_causal=True)[0].shape == (1, 5, 4, 16)


def test_dropout(seen: list[warnings.WarningMessage]) -> None:
    """In training mode alone; without dropout, training mode without gradients is inference."""
    ours, eager = pair(AutoModelForCausalLM, tiny("llama", attention_dropout=0.5))
    ids = prompt()[0]
    with torch.no_grad():
        first, second = (ours.train()(ids.to(DEVICE)).logits.cpu() for _ in range(2))
        (sentence,) = sentences(seen)
        assert "dropout 0.5" in sentence and (first - second).abs().max() > VISIBLE_ERROR
        exact = eager(ids).logits
        for model in (ours.eval(), pair(AutoModelForCausalLM, tiny("llama"))[0].train()):
            with counted_launches() as launches:
                assert (model(ids.to(DEVICE)).logits.cpu() - exact).abs().max() < TOLERANCE
            assert launches["fattn_prefill"] == LAYERS


def test_unregister(seen: list[warnings.WarningMessage]) -> None:
    """Everything is as it was, names and tables, and may be registered again."""
    interfaces = (AttentionInterface, AttentionMaskInterface)
    names = (NAME, FLASH_NAME, PAGED_NAME)
    unregister()
    unregister()
    before = [set(interface()) for interface in interfaces]
    assert not any(name in found for found in before for name in names)
    with pytest.raises(ValueError, match="not supported"):
        AutoModelForCausalLM.from_config(tiny("llama"), attn_implementation=NAME)
    mine = lambda *_, **__: None  # noqa: E731
    AttentionInterface.register(NAME, mine)
    register("sdpa")
    register()
    assert AttentionInterface()[NAME] is attention_function
    unregister()
    assert AttentionInterface()[NAME] is mine
    AttentionInterface._global_mapping.pop(NAME)
    assert [set(interface()) for interface in interfaces] == before
    from transformers.models.gpt_neo.modeling_gpt_neo import GPT_NEO_ATTENTION_CLASSES

    assert NAME not in GPT_NEO_ATTENTION_CLASSES
    register()
    assert NAME in GPT_NEO_ATTENTION_CLASSES


def test_a_policy_of_another_name() -> None:
    with pytest.raises(ValueError, match="on_unsupported is 'eager'"):
        register(on_unsupported="eager")  # type: ignore[arg-type]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("padding", [0, 3])
def test_odd_heads(cache: str, padding: int) -> None:
    """Padded to a multiple of 8, with the scale of their own size."""
    launches = same_as_eager(tiny("llama", head_dim=4), 4, cache=cache, padding=padding)
    assert launches["fattn_prefill"] == LAYERS and decodes(launches) == 3 * LAYERS


def test_odd_heads_without_a_scale() -> None:
    query = torch.randn(1, 4, 5, 12, device=DEVICE)
    key, value = torch.randn(1, 2, 7, 12, device=DEVICE), torch.randn(1, 2, 7, 10, device=DEVICE)
    out, _ = attention_function(nn.Module(), query, key, value, None, is_causal=False)
    operands = (operand.cpu().double() for operand in (query, key, value))
    exact = torch.nn.functional.scaled_dot_product_attention(*operands, enable_gqa=True)
    assert out.is_contiguous() and (out.cpu() - exact.transpose(1, 2)).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype: torch.dtype) -> None:
    """Operands of mixed dtypes are cast as in sdpa attention, and the logits are as near to float32's."""
    errors = []
    ours, exact_model = pair(AutoModelForCausalLM, tiny("llama"))
    ids, mask = prompt(padding=3)
    with torch.no_grad():
        exact = exact_model(ids, attention_mask=mask).logits
        for implementation in (NAME, "sdpa"):
            ours.set_attn_implementation(implementation)
            with torch.autocast(DEVICE, dtype=dtype), counted_launches() as launches:
                out = ours(ids.to(DEVICE), attention_mask=mask.to(DEVICE)).logits
            assert launches.get("fattn_prefill", 0) == (LAYERS if implementation == NAME else 0)
            errors.append((out.float().cpu() - exact)[mask.bool()].abs().max().item())
    assert errors[0] < 2 * errors[1]


# ---- versions of transformers

OLDEST, NEWEST = versions.TRANSFORMERS
SENTENCE = (
    rf"torch_fattn \S+ is made for transformers {versions.text(OLDEST)} to {versions.text(NEWEST)}, "
    "and this is transformers {}: run `pip install"
)


@pytest.mark.host_only
@pytest.mark.parametrize("version", ["4.57.6", "5.16.1"])
def test_an_older_version_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration.transformers, "__version__", version)
    with pytest.raises(ImportError, match=SENTENCE.format(version)):
        register()


@pytest.mark.host_only
def test_a_newer_version_costs_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = f"{versions.text((NEWEST[0], NEWEST[1] + 1))}.0.dev0"
    monkeypatch.setattr(registration.transformers, "__version__", newer)
    with pytest.warns(UserWarning, match=SENTENCE.format(newer)):
        register()
    assert NAME in AttentionInterface()


@pytest.mark.host_only
@pytest.mark.parametrize("version", [transformers.__version__, "5.17.0", "5.20.2", "5.24.0"])
def test_a_version_in_the_range_gives_no_warning(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration.transformers, "__version__", version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register()
