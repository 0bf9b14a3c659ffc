"""The operators as Python functions, and their fakes for `torch.compile`."""

from __future__ import annotations

import torch

from . import logits

ATTENTION = ("prefill", "decode", "paged_decode", "paged_prefill", "varlen_prefill")
OPERATORS = (*ATTENTION, "merge")  # (out, lse)
DIFFERENTIABLE = {"attention": "prefill", "varlen_attention": "varlen_prefill"}  # and what each computes
BACKWARDS = ("prefill_backward", "varlen_prefill_backward")  # gradients
LOGITS_OPERATORS = tuple(logits.__all__)  # one tensor like their first
ROTARY = ("rotary", "rotary_write")
LINEAR = ("gated_delta_rule", "gated_delta_step", "causal_conv1d")
PLANNED = (
    *(*OPERATORS, *BACKWARDS, *LOGITS_OPERATORS, "mask_map", "cache_write", *ROTARY, "rms_norm"),
    *LINEAR,
)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}  # of query
