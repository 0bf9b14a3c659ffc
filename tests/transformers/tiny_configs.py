"""Shrinks the default config of any model family to a few thousand weights, by the names of its fields: the
rules know fields, not families."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

VOCAB = 64
HEADS = 4
KV_HEADS = 2
HIDDEN = 64
HEAD_DIM = HIDDEN // HEADS
POSITIONS = 128
# Two layers are enough for most; families that mix kinds of layers want to see every kind.
LAYER_COUNTS = (2, 4, 8)

_LAYERS = "layers"
_ATTENTION_HEADS = re.compile(r"(\w+_)?attention_heads|(\w+_)?num_heads|n_heads?|attn_heads?|index_n_heads")
_KV_HEADS = re.compile(r"(\w+_)?(kv|key_value|kv_attention)_heads|multi_query_group_num")
# The first pattern that matches the whole name of a field gives the largest value it may keep.
_RULES: list[tuple[str, int | str]] = [
    (r"(mamba_)?n_?groups|mamba_ngroups|n_group|topk_group", 1),
    (r"n_mamba_heads|mamba_n_heads|mamba_num_heads", 8),
    (r"(mamba_)?(d_head|head_?dim)|head_size|d_kv|kv_channels|\w*_head_dim", HEAD_DIM),
    (r"rotary_dim|attention_window", HEAD_DIM // 2),
    (
        r"\w*(position_embeddings|positions)|n_positions|n_ctx|max_seq_len|seq_length|context_length",
        POSITIONS,
    ),
    (r"\w*vocab_size(_per_layer_input)?|n_vocab", VOCAB),
    (r"(num_)?(\w+_)?layers|n_layers?|num_\w*blocks|depth", _LAYERS),
    (r"(\w+_)?hidden_size|(\w+_)?embed_dim|d_model|n_embd|n_embed|dim|emb_dim|width|embed_size", HIDDEN),
    (r"embedding_size|word_embed_proj_dim|\w*bottleneck_size", HIDDEN),
    (r"\w*intermediate_size|\w*ffn_dim|\w*ffn_size|d_ff|n_inner|ffn_hidden_size|dim_feedforward", HIDDEN),
    (r"(\w+_)?(output_dim|projection_dim|proj_dim|out_hidden_size|projector_hidden_size)", HIDDEN),
    (r"(num|n)_(\w+_)?experts|num_experts", 4),
    (r"(num_)?experts_per_tok|num_experts_per_token|moe_topk|top_k|moe_k|num_selected_experts", 2),
    (r"n_shared_experts|num_shared_experts|first_k_dense_replace", 1),
    (r"\w*lora_rank", HEAD_DIM),
    (r"image_size|img_size|input_size", 32),
    (r"patch_size", 8),
]
_COMPILED = [(re.compile(pattern), largest) for pattern, largest in _RULES]
_COUNTS_OF_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers")
# Fields that some configs leave to the checkpoint.
_WITHOUT_DEFAULT: dict[str, Any] = {
    "head_dim": HEAD_DIM,
    "num_key_value_heads": HEADS,
    "vocab_size": VOCAB,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "attn_layer_indices": [1],
}
_NOT_ARGUMENTS = (
    "_name_or_path architectures dtype id2label label2id output_attentions transformers_version"
).split()


def tiny_configs(model_type: str) -> Iterator[PreTrainedConfig]:
    """Attempts at a small config of the family, the most plain first. Not every one of them can be built."""
    config_class = CONFIG_MAPPING[model_type]
    for layers in LAYER_COUNTS:
        for complete in (False, True):
            try:
                fields = shrink(config_class().to_dict(), layers, complete)
                del fields["model_type"]  # names the class of a part
                config = config_class(**fields)
            except Exception:  # each config class has its own checks
                continue
            yield config


def shrink(fields: dict[str, Any], layers: int, complete: bool) -> dict[str, Any]:
    """`complete`: also fills fields without a default, and the sections of multi-axis rotary embeddings."""
    default_layers = next((fields[n] for n in _COUNTS_OF_LAYERS if isinstance(fields.get(n), int)), None)
    heads = next((v for k, v in fields.items() if _ATTENTION_HEADS.fullmatch(k) and isinstance(v, int)), 0)
    small: dict[str, Any] = {}
    for name, value in fields.items():
        if name in _NOT_ARGUMENTS:
            continue
        if isinstance(value, dict):
            small[name] = _small_dict(name, value, layers, complete)
        elif isinstance(value, int) and not isinstance(value, bool):
            small[name] = _small_number(name, value, layers, heads)
        elif isinstance(value, list) and default_layers and len(value) == default_layers:
            kinds = [_small_number(name, v, layers, heads) if type(v) is int else v for v in value]
            small[name] = _one_of_each_kind(kinds, layers)
        elif complete and value is None and name in _WITHOUT_DEFAULT:
            small[name] = _WITHOUT_DEFAULT[name]
        elif complete and value is None and name == "layer_types":
            small[name] = ["full_attention"] * layers
        else:
            small[name] = value
    if "qk_nope_head_dim" in small and "qk_head_dim" in small:
        small["qk_head_dim"] = small["qk_nope_head_dim"] + small["qk_rope_head_dim"]
    if "pad_token_id" in small:
        small["pad_token_id"] = 0
    return small


def _small_dict(name: str, value: dict[Any, Any], layers: int, complete: bool) -> dict[Any, Any]:
    if name.startswith("rope"):
        return _small_rope(value) if complete else value
    if all(str(key).isdigit() for key in value):  # one entry per layer that differs from the others
        return {key: entry for key, entry in value.items() if int(key) < layers}
    return shrink(value, layers, complete)


def _small_number(name: str, value: int, layers: int, heads: int) -> int:
    if name.endswith(("_token_id", "_token_index")):
        return value if value < VOCAB else 1
    if _KV_HEADS.fullmatch(name):
        return value if value <= KV_HEADS else KV_HEADS if value < heads else HEADS
    if _ATTENTION_HEADS.fullmatch(name):
        return min(value, HEADS)
    for pattern, largest in _COMPILED:
        if pattern.fullmatch(name):
            return min(value, layers if isinstance(largest, str) else largest)
    return value


def _one_of_each_kind(per_layer: list[Any], layers: int) -> list[Any]:
    """One entry for each layer, with as many kinds as possible."""
    kinds: list[Any] = []
    for entry in per_layer:
        if entry not in kinds:
            kinds.append(entry)
    return (kinds + per_layer)[:layers]


def _small_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """The sections of multi-axis rotary embeddings add up to half of the rotated columns of a head."""
    if any(isinstance(value, dict) for value in rope.values()):
        return {k: _small_rope(v) if isinstance(v, dict) else v for k, v in rope.items()}
    half = int(HEAD_DIM * rope.get("partial_rotary_factor", 1.0)) // 2
    return {**rope, "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
