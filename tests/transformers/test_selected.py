"""Models that select keys for each row read only those, and give the tokens and logits of eager attention."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

import torch_fattn
from tests.conftest import counted_launches, decodes
from tests.transformers.calls import Call
from tests.transformers.tiny_configs import tiny_configs
from tests.transformers.tiny_models import (
    DEVICE,
    LAYERS,
    VISIBLE_ERROR,
    both_forward,
    generate,
    pair,
    prompt,
    same_as_eager,
)
from torch_fattn.integrations.transformers import attention, selected

TOP_K = 4
FEW_BLOCKS = {"index_block_size": 2, "index_topk_blocks": 3, "index_local_blocks": 1}
MODELS = ["deepseek_v32", "glm_moe_dsa", "axk2", "minimax_m3_vl_text"]
NEW_TOKENS = 6


def config_of(model_type: str) -> PreTrainedConfig:
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    config = next(iter(tiny_configs(model_type)))
    fields: dict[str, Any] = {"index_topk": TOP_K, **FEW_BLOCKS}
    for name, value in fields.items():
        if hasattr(config, name):
            setattr(config, name, value)
    if model_type.startswith("minimax"):
        config.layer_types = ["minimax_m3_sparse"] * LAYERS
        config.index_n_heads = config.num_key_value_heads
    return config


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("model_type", MODELS)
def test_generate(model_type: str, padding: int, calls: list[Call]) -> None:
    config = config_of(model_type)
    if model_type.startswith("minimax") and padding:
        pytest.skip("its blocks are of slots, so that padding on the left moves them")
    with counted_launches() as launches:
        same_as_eager(config, NEW_TOKENS, padding=padding)
    steps = [call for call in calls if call.op == "paged_decode"]
    assert len(steps) == LAYERS * (NEW_TOKENS - 1) == decodes(launches)
    widest = TOP_K if hasattr(config, "index_topk") else 2 * 3
    assert all(call["key_cache"].shape[1] == 1 and call["block_tables"].shape[1] == widest for call in steps)


@pytest.mark.parametrize("model_type", MODELS)
def test_a_prefill_of_few_selected_keys(
    model_type: str, calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of a long prompt are sequences of at most K keys."""
    ours, eager = pair(AutoModelForCausalLM, config_of(model_type))
    ids, _mask = prompt(length=120, batch=1)
    mine, theirs = both_forward(ours, eager, input_ids=ids, use_cache=False)
    assert (mine - theirs).abs().max() < 2e-4
    assert {call.op for call in calls} == {"prefill"}, "32 rows select more than 120 keys"
    del calls[:]
    monkeypatch.setattr(selected, "_ROWS_OF_A_TILE", 1)
    mine, _ = both_forward(ours, eager, input_ids=ids, use_cache=False)
    assert {call.op for call in calls} == {"paged_decode"}
    assert (mine - theirs).abs().max() < 2e-4


@pytest.mark.parametrize("model_type", MODELS[:1])
def test_control_other_keys(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, eager = pair(AutoModelForCausalLM, config_of(model_type))
    take = selected.take_selection
    monkeypatch.setattr(
        attention,
        "take_selection",
        lambda call: (take(call)[0], None if (at := take(call)[1]) is None else (at - 1).clamp(min=0)),
    )
    ids, mask = prompt()
    mine = generate(ours, ids, mask, NEW_TOKENS)
    theirs = generate(eager, ids, mask, NEW_TOKENS)
    errors = [(a.cpu() - b).abs().max().item() for a, b in zip(mine.logits, theirs.logits, strict=True)]
    assert max(errors) > VISIBLE_ERROR


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_the_latent_cache(model_type: str) -> None:
    """sparse_decode over latent vectors, with the projections absorbed, is the model's own eager attention
    over its expanded keys and values."""
    config = config_of(model_type)
    _, eager = pair(AutoModelForCausalLM, config)
    layer: Any = eager.model.layers[0].self_attn
    modeling = importlib.import_module(type(layer).__module__)
    tokens, latent = 40, layer.kv_lora_rank
    hidden = torch.randn(1, tokens, config.hidden_size, generator=torch.Generator().manual_seed(3))
    positions = torch.arange(tokens)[None]
    cos_sin = eager.model.rotary_emb(hidden, positions)
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool).tril()
    indices: list[torch.Tensor] = []
    layer.indexer.register_forward_hook(lambda _module, _given, out: indices.append(out))
    outs: list[torch.Tensor] = []
    layer.o_proj.register_forward_pre_hook(lambda _module, given: outs.append(given[0]))
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    with torch.no_grad():
        layer(hidden, cos_sin, additive, position_ids=positions)
        query = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(hidden)))
        query = query.view(1, tokens, -1, layer.qk_head_dim).transpose(1, 2)
        no_rope, rope = query.split([layer.qk_nope_head_dim, layer.qk_rope_head_dim], dim=-1)
        passed, key_rope = layer.kv_a_proj_with_mqa(hidden).split([latent, layer.qk_rope_head_dim], dim=-1)
        passed = layer.kv_a_layernorm(passed)
        rope, key_rope = modeling.apply_rotary_pos_emb_interleave(rope, key_rope[:, None], *cos_sin)
        expand = layer.kv_b_proj.weight.view(config.num_attention_heads, -1, latent)
        to_keys, to_values = expand.split([layer.qk_nope_head_dim, layer.v_head_dim], dim=1)
        absorbed = torch.cat((torch.einsum("bhld,hdc->bhlc", no_rope, to_keys), rope), dim=-1).to(DEVICE)
        cache = torch.cat((passed[:, None], key_rope), dim=-1).to(DEVICE)
        with counted_launches() as launches:
            out = torch_fattn.sparse_decode(
                absorbed, cache, cache[..., :latent], indices[0].to(DEVICE), scale=layer.scaling
            )
        out = torch.einsum("bhlc,hvc->blhv", out.cpu(), to_values).flatten(2)
    assert decodes(launches) == 1
    assert indices[0].shape == (1, tokens, TOP_K)
    assert (out - outs[0]).abs().max() < 1e-5
