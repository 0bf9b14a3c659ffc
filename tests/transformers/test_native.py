"""Windows, soft caps, sinks and filled lengths reach the operators as options, not as dense masks, and
generated tokens and logits equal those of eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AttentionMaskInterface,
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    DeepseekV3Config,
    DynamicCache,
    ModernBertConfig,
    PreTrainedConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    StaticCache,
)

from tests.conftest import counted_launches, decodes
from tests.transformers.calls import Call
from tests.transformers.tiny_models import (
    BERT,
    CACHES,
    COMMON,
    LAYERS,
    MODERN_BERT,
    TOLERANCE,
    VISIBLE_ERROR,
    WINDOW,
    attention_launches,
    both_forward,
    generate,
    largest_logit_error,
    pair,
    prompt,
    same_as_eager,
    tiny,
)
from torch_fattn.integrations.transformers import NAME

NEW_TOKENS = 20
PROMPT = 20
SOFTCAP = 0.5
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MODELS: dict[str, PreTrainedConfig] = {
    **{name: tiny(name) for name in ("llama", "mistral", "gemma3", "gpt_oss")},
    "gemma2": tiny("gemma2", query_pre_attn_scalar=1),
    "qwen3_next": Qwen3NextConfig(**COMMON, **LINEAR, num_experts=2, num_experts_per_tok=1),
    "qwen3_5": Qwen3_5TextConfig(**COMMON, **LINEAR),
    "deepseek": DeepseekV3Config(
        **{**COMMON, "num_key_value_heads": 4, "head_dim": 64},
        **{"kv_lora_rank": 16, "q_lora_rank": 16, "first_k_dense_replace": LAYERS},
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    ),
}


def attention_layers(config: PreTrainedConfig) -> list[str]:
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * LAYERS
    if config.model_type == "mistral":
        kinds = ["sliding_attention"] * LAYERS
    return [kind for kind in kinds if kind != "linear_attention"]


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", MODELS)
def test_generate(name: str, cache: str, padding: int, calls: list[Call]) -> None:
    config = MODELS[name]
    kinds = attention_layers(config)
    launches = same_as_eager(config, NEW_TOKENS, cache=cache, padding=padding)
    wide = "_wide" if name == "deepseek" else ""
    assert launches[f"fattn_prefill{wide}"] == len(kinds)
    assert decodes(launches) == len(kinds) * (NEW_TOKENS - 1)
    # The prompt of a recurrent model has the whole mask, since its padding tokens count.
    dense = len(kinds) if padding and name.startswith("qwen") else 0
    assert [call.has_dense_mask for call in calls] == [index < dense for index in range(len(calls))]
    for index, call in [*enumerate(calls)][dense:]:
        step, kind = divmod(index, len(kinds))
        check_call(call, kinds[kind], step, cache, padding)
        if name == "gemma2":
            assert call["softcap"] == SOFTCAP
        if name == "gpt_oss":
            assert call["sinks"].shape == (4,)


def check_call(call: Call, kind: str, step: int, cache: str, padding: int) -> None:
    assert call.op == "decode"
    if step == 0:
        assert (call["attn_mask"] is None) == (padding == 0)
        assert call.keys == PROMPT
        assert call["window_left"] == (WINDOW - 1 if kind == "sliding_attention" else -1)
        return
    filled = min(PROMPT + step, WINDOW) if kind == "sliding_attention" else PROMPT + step
    assert call["window_left"] == -1, "the cache holds one window"
    if cache == "static" and kind == "full_attention":  # of the others the host knows the length
        assert call["seq_lens"].tolist() == [filled, filled]
    else:
        assert call["seq_lens"] is None and call.keys == filled


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("pieces", [(5, 2, 1, 3), (5, 1, 1, 1, 1, 1), (10, 3, 20), (3, 17, 2), (20, 18, 1)])
def test_pieces(pieces: tuple[int, ...], static: bool, name: str, padding: int, calls: list[Call]) -> None:
    """Sliding caches that fill up in one row or in several, and queries of several rows after that."""
    ours, eager = pair(AutoModelForCausalLM, MODELS[name])
    ids, mask = prompt(sum(pieces), padding)
    logits: list[list[torch.Tensor]] = [[], []]
    for model, found in zip((ours, eager), logits, strict=True):
        config = model.config
        cache = StaticCache(config, max_cache_len=sum(pieces) + 3) if static else DynamicCache(config=config)
        begin = 0
        for rows in pieces:
            end = begin + rows
            inputs = {"input_ids": ids[:, begin:end], "attention_mask": mask[:, :end]}
            on_device = {key: tensor.to(model.device) for key, tensor in inputs.items()}
            calls.clear()
            with torch.no_grad(), counted_launches() as launches:
                out = model(**on_device, past_key_values=cache).logits.cpu()
            assert len(calls) == attention_launches(launches) == (LAYERS if model is ours else 0)
            assert not any(call.has_dense_mask for call in calls)
            found.append(out[mask[:, begin:end].bool()])
            begin = end
    for mine, theirs in zip(*logits, strict=True):
        assert (mine - theirs).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_static_cache_used_again(name: str, calls: list[Call]) -> None:
    """After a reset its length is on the device from the first token on: prompts go to the operators with
    seq_lens, and nothing that the cache held before is seen."""
    config = MODELS[name]
    ours, eager = pair(AutoModelForCausalLM, config)
    logits = []
    for model in (ours, eager):
        cache = StaticCache(model.config, max_cache_len=PROMPT + 9)
        with torch.no_grad(), counted_launches() as launches:
            model(prompt(PROMPT + 5)[0].to(model.device), past_key_values=cache)
            cache.reset()
            calls.clear()
            logits.append(model(prompt(PROMPT)[0].to(model.device), past_key_values=cache).logits.cpu())
        if model is ours:
            assert not any(call.has_dense_mask for call in calls)
            for call, kind in zip(calls, attention_layers(config), strict=True):
                if kind == "sliding_attention":
                    assert call["window_left"] == WINDOW - 1, "of these the host knows the length"
                else:
                    assert call["seq_lens"].tolist() == [PROMPT, PROMPT]
            assert attention_launches(launches) == 2 * len(calls)
    assert (logits[0] - logits[1]).abs().max() < TOLERANCE


def test_a_short_mask_over_a_static_cache() -> None:
    """A mask that ends before the newest tokens hides them, as it does under eager."""
    ours, eager = pair(AutoModelForCausalLM, tiny("llama"))
    ids, mask = prompt(PROMPT)
    last = []
    for model in (ours, eager):
        cache = StaticCache(model.config, max_cache_len=20)
        with torch.no_grad():
            for piece in (ids[:, :10], ids[:, 10:]):
                out = model(
                    piece.to(model.device),
                    attention_mask=mask[:, :10].to(model.device),
                    past_key_values=cache,
                )
        last.append(out.logits.cpu())
    assert (last[0] - last[1]).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("name", "lost"), [("gemma2", "softcap"), ("gpt_oss", "sinks"), ("mistral", "window_left")]
)
def test_control_lost_option(name: str, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison notices an option that never reaches the operators."""
    none = {"softcap": 0.0, "sinks": None, "window_left": -1}[lost]
    for op in ("prefill", "decode"):
        operator = getattr(torch.ops.fattn, op)

        def without(*arguments: Any, operator: Any = operator, **options: Any) -> Any:
            return operator(*arguments, **{**options, lost: none})

        monkeypatch.setattr(torch.ops.fattn, op, without)
    assert first_logit_error(name) > VISIBLE_ERROR


def first_logit_error(name: str, padding: int = 0) -> float:
    mine, theirs = (
        generate(model, *prompt(PROMPT, padding), 1) for model in pair(AutoModelForCausalLM, MODELS[name])
    )
    return largest_logit_error(mine, theirs)


def test_compiled_steps_over_a_static_cache() -> None:
    """The length is read on the device: one graph serves every step."""
    ours, eager = pair(AutoModelForCausalLM, tiny("llama"))
    ids, _ = prompt(PROMPT)
    torch._dynamo.reset()
    last = []
    for model in (ours, eager):
        cache = StaticCache(model.config, max_cache_len=20)
        step = torch.compile(model, backend="aot_eager", fullgraph=True) if model is ours else model
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
            model(ids[:, :9].to(model.device), past_key_values=cache)
            for row in range(9, PROMPT):
                out = step(ids[:, row : row + 1].to(model.device), past_key_values=cache).logits
        last.append(out.cpu())
    assert (last[0] - last[1]).abs().max() < TOLERANCE


def test_a_tokenizer() -> None:
    """`generate` takes one, for stop strings, and hands it on to every layer."""
    assert same_as_eager(tiny("llama"), 6, tokenizer=object())["fattn_prefill"] == LAYERS


def test_control_padding_ignored() -> None:
    """The comparison notices a lost padding mask."""
    AttentionMaskInterface.register(NAME, lambda **_: None)
    assert first_logit_error("llama", padding=3) > VISIBLE_ERROR


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("config", [BERT, MODERN_BERT], ids=["bert", "modernbert"])
def test_encoder(config: BertConfig | ModernBertConfig, padding: int) -> None:
    ours, eager = pair(AutoModel, config)
    ids, mask = prompt(padding=padding)
    with counted_launches() as launches:
        mine, theirs = both_forward(ours, eager, input_ids=ids, attention_mask=mask)
    real = mask.bool()
    assert (mine - theirs)[real].abs().max() < TOLERANCE
    assert launches["fattn_prefill"] == LAYERS


@pytest.mark.parametrize("padding", [0, 3])
def test_is_causal_argument_overrides_the_layer(padding: int) -> None:
    """A decoder run bidirectionally, as embedding models are; with causal attention the result is another."""
    ours, eager = pair(AutoModel, tiny("llama"))
    ids, mask = prompt(padding=padding)
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    mine, theirs = both_forward(ours, eager, **inputs, is_causal=False)
    causal, _ = both_forward(ours, eager, **inputs)
    real = mask.bool()
    assert (mine - theirs)[real].abs().max() < TOLERANCE
    assert (mine - causal)[real].abs().max() > VISIBLE_ERROR
