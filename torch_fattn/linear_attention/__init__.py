"""Linear attention by the gated delta rule, with the names of flash-linear-attention (fla) and transformers:
gated delta net (Qwen3-Next, Qwen3.5) and KDA (Kimi-Linear). `StateCache` holds the states of a model's linear
layers during generation, beside a `PagedKVCache` for the others.
"""

from .functions import causal_conv1d, gated_delta_rule, gated_delta_step
from .states import StateCache, StateStep

__all__ = ["StateCache", "StateStep", "causal_conv1d", "gated_delta_rule", "gated_delta_step"]
