"""The kernel from the Hub: transformers' own loader finds the names that it needs, whichever program fetched
it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    modeling_flash_attention_utils,
    modeling_utils,
)
from transformers.integrations import hub_kernels

from tests.conftest import decodes
from tests.transformers.calls import Call
from tests.transformers.test_paged import tokens_of
from tests.transformers.tiny_models import (
    CACHES,
    COMMON,
    LAYERS,
    MIXED,
    WINDOW,
    pair,
    same_as_eager,
)
from torch_fattn.integrations.transformers import kernel, unregister
from torch_fattn.integrations.transformers.compat import BATCHES_BY_NAME

REPOSITORY = "somebody/fattn-flash"
MODELS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**COMMON),
    "mistral": MistralConfig(**COMMON, sliding_window=WINDOW),
    "gemma2": Gemma2Config(**COMMON, **MIXED, attn_logit_softcapping=0.5),
}


@pytest.fixture(autouse=True)
def repository(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Only the download is faked: `kernels` need not be installed. Nothing else is registered."""
    unregister()
    fetched: list[str] = []

    def get_kernel(name: str, *_: Any, **__: Any) -> Any:
        fetched.append(name)
        return kernel

    for module in (hub_kernels, modeling_utils, modeling_flash_attention_utils):
        monkeypatch.setattr(module, "is_kernels_available", lambda: True, raising=False)
    monkeypatch.setattr(hub_kernels, "get_kernel", get_kernel)
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    yield fetched
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(REPOSITORY, None)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", MODELS)
def test_generate(name: str, cache: str, padding: int, repository: list[str]) -> None:
    launches = same_as_eager(MODELS[name], 6, cache=cache, padding=padding, implementation=REPOSITORY)
    assert repository and set(repository) == {REPOSITORY}
    assert launches["fattn_prefill"] == LAYERS and decodes(launches) == LAYERS * 5


@pytest.mark.skipif(not BATCHES_BY_NAME, reason="this transformers batches through flash_attn_varlen_func")
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_generate_batch(name: str, calls: list[Call]) -> None:
    ours, eager = pair(AutoModelForCausalLM, MODELS[name], REPOSITORY)
    assert tokens_of(ours, REPOSITORY) == tokens_of(eager, "paged|eager")
    assert {call.op for call in calls} == {"paged_prefill", "paged_decode"}
