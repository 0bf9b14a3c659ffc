"""A tiny Llama generates over several processes, each with a part of its cache: the tokens of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedConfig

from tests.distributed.pool import Pool, World, error_of
from tests.transformers.tiny_models import COMMON
from torch_fattn.integrations.transformers import ShardedCache, register

pytestmark = pytest.mark.host_only

PROMPT, NEW = 19, 14
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**COMMON),
    "window": MistralConfig(**COMMON, sliding_window=8),
}


def model_of(config: PreTrainedConfig, implementation: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()


def prompts(padded: bool) -> dict[str, Tensor]:
    tokens = torch.randint(3, 60, (2, PROMPT), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    if padded:
        mask[1, :9] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def generate(model: Any, padded: bool, **options: Any) -> Tensor:
    with torch.no_grad():
        return model.generate(**prompts(padded), max_new_tokens=NEW, do_sample=False, **options)


def on_ranks(world: World, config: PreTrainedConfig, padded: bool) -> tuple[Tensor, int]:
    """The tokens, and the positions that this rank keeps."""
    register()
    cache = ShardedCache(world.group, block_size=4)
    tokens = generate(model_of(config, "fattn_sharded"), padded, past_key_values=cache)
    assert cache.get_seq_length() == PROMPT + NEW - 1
    layer: Any = cache.layers[0]
    return tokens, layer.keys.shape[2]


@pytest.mark.parametrize("n", [2, 4, 1])
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens(ranks: Pool, name: str, n: int) -> None:
    for padded in (False, True):
        alone = generate(model_of(CONFIGS[name], "eager"), padded)
        assert len(alone[:, PROMPT:].unique()) > 4, "a model that repeats itself hides errors"
        for tokens, kept in ranks.run(n, on_ranks, CONFIGS[name], padded):
            assert torch.equal(tokens, alone)
            assert kept <= 2 * (PROMPT + NEW) / n + 4


def by_lookup(world: World) -> tuple[Tensor, list[int]]:
    """Tokens with drafts, most of which are rejected; then the lengths of a cache that refused a batch."""
    register()
    model, cache = model_of(CONFIGS["llama"], "fattn_sharded"), ShardedCache(world.group, block_size=4)
    one = prompts(False)["input_ids"][:1]
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "past_key_values": cache}
    tokens = model.generate(one, prompt_lookup_num_tokens=3, **options)
    before = [layer.get_seq_length() for layer in cache.layers]
    for refused, words in (
        ({"input_ids": one.expand(2, -1)}, "2 sequences are added to a cache of 1; use a new cache"),
        ({"input_ids": one, "attention_mask": torch.zeros(1, 1, 1, 1)}, "attention_mask has 4 dimensions"),
        ({"input_ids": one, "position_ids": torch.arange(one.shape[1])[None] % 7}, "sequences are packed"),
        ({"input_ids": one, "cu_seq_lens_q": torch.tensor([0, 7])}, "sequences are packed.*a row of its own"),
        ({"input_ids": one, "unheard_of": torch.zeros(1)}, "the keyword unheard_of is unknown"),
    ):
        with torch.no_grad(), pytest.raises((NotImplementedError, ValueError), match=words):
            model(**refused, past_key_values=cache if len(refused) == 1 else ShardedCache(world.group))
    assert [layer.get_seq_length() for layer in cache.layers] == before
    return tokens, before


def test_drafts(ranks: Pool) -> None:
    model = model_of(CONFIGS["llama"], "eager")
    alone = model.generate(prompts(False)["input_ids"][:1], max_new_tokens=NEW, do_sample=False)
    for tokens, lengths in ranks.run(2, by_lookup):
        assert torch.equal(tokens, alone) and set(lengths) == {PROMPT + NEW - 1}


def without_cache(world: World) -> str:
    register()
    return error_of(model_of(CONFIGS["llama"], "fattn_sharded"), torch.tensor([[3, 4]]))


def test_refusal(ranks: Pool) -> None:
    (error,) = ranks.run(1, without_cache)
    assert error.startswith("ValueError: fattn_sharded: LlamaAttention has no ShardedCache; pass")
