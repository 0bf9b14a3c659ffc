"""Models that select keys for each row read only those, and give the tokens and logits of eager attention."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from tests.conftest import counted_launches, decodes
from tests.transformers.calls import Call
from tests.transformers.tiny_configs import tiny_configs
from tests.transformers.tiny_models import (
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
