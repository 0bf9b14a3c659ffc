"""Single layers of linear attention with random weights, by family of transformers."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from tests.transformers.tiny_models import DEVICE
from torch_fattn.integrations.transformers.fusion import delta_functions, mixers, norms, running

HIDDEN = 32
KEYS, VALUES, KEY_COLUMNS, VALUE_COLUMNS = 2, 4, 16, 24
CONFIG: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "layer_types": ["linear_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": KEYS,
    "linear_num_value_heads": VALUES,
    "linear_key_head_dim": KEY_COLUMNS,
    "linear_value_head_dim": VALUE_COLUMNS,
    "linear_num_heads": KEYS,  # of KDA
    "linear_head_dim": KEY_COLUMNS,
    "output_gate_type": "sigmoid",  # of qwen4_exp
    "linear_allow_neg_eigval": False,  # and below of olmo_hybrid
    "linear_a_log_min": 0.5,
    "linear_a_log_max": 8,
    "linear_dt_min": 0.001,
    "linear_dt_max": 0.1,
    "linear_dt_init_floor": 1e-4,
    "linear_lower_bound": None,  # of glm5_next
    "kda_safe_gate": False,  # of bailing_hybrid
    "kda_lower_bound": -5.0,
}
# Families, and what differs from CONFIG in layers whose gates the step does not compute.
FAMILIES: dict[str, tuple[Any, ...]] = {
    "qwen3_next": ("Qwen3NextGatedDeltaNet",),
    "qwen3_5": ("Qwen3_5GatedDeltaNet",),
    "qwen3_5_moe": ("Qwen3_5MoeGatedDeltaNet",),
    "qwen4_exp": ("Qwen4ExpTextGatedDeltaNet",),
    "olmo_hybrid": ("OlmoHybridGatedDeltaNet", {"linear_allow_neg_eigval": True}),
    "kimi_linear": ("KimiLinearDeltaAttention",),
    "glm5_next": ("Glm5NextTextLinearAttention", {"linear_lower_bound": -5.0}),
    "bailing_hybrid": ("BailingHybridDeltaAttention", {"kda_safe_gate": True}),
    "lara_mini": ("LaraMiniGatedDeltaNet",),
}


def layer_of(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """None if transformers lacks the family."""
    try:
        file = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    except ImportError:
        return None
    torch.manual_seed(0)
    layer = getattr(file, FAMILIES[family][0])(SimpleNamespace(**CONFIG | changes), 0)
    randomise(layer)
    return layer.to(dtype).eval()


def randomise(module: nn.Module) -> None:
    """Weights with which every part of a layer matters."""
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "A_log" in name:
                weight.uniform_(-2, 1)
            elif "dt_bias" in name:
                weight.normal_()
            elif "norm" in name:
                weight.normal_(0.5, 0.3)
            elif weight.ndim == 2 and "embed" not in name:
                weight.normal_(0, 2 * weight.shape[-1] ** -0.5)


def fuse(layer: Any) -> str:
    for norm in filter(norms.is_norm, layer.modules()):
        norms.fuse(norm)
    return mixers.fuse(layer, delta_functions.fuse([layer]))


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(1))


def run(layer: Any, x: Tensor, cache: Cache | None, mask: Tensor | None = None, **options: Any) -> Tensor:
    """A call of a layer in a fused model, on the layer's device."""
    device = next(layer.parameters()).device
    with torch.no_grad(), running.run(device.type == DEVICE):
        out: Tensor = layer(x.to(device), cache, None if mask is None else mask.to(device), **options)
    return out.cpu()


def new_cache() -> Cache:
    return Cache(layers=[LinearAttentionLayer()])


def states(cache: Cache) -> tuple[Tensor, Tensor]:
    """The columns that a convolution reads, and the matrices."""
    layer: Any = cache.layers[0]
    return layer.conv_states[0][..., 1:].cpu(), layer.recurrent_states[0].cpu()
