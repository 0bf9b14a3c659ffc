"""The operators as Python functions, and their fakes for `torch.compile`."""

from __future__ import annotations

OPERATORS = ("prefill", "decode", "paged_decode", "paged_prefill", "varlen_prefill", "merge")  # (out, lse)
LOGITS_OPERATORS = ("softmax", "softcap")  # one tensor like their first
PLANNED = (*OPERATORS, *LOGITS_OPERATORS, "mask_map", "cache_write")
