"""torch_fattn's attention as nodes of ComfyUI. Without torch_fattn, ComfyUI starts without the nodes, and its
log tells why."""

from __future__ import annotations

import logging
from typing import Any

NODE_CLASS_MAPPINGS: dict[str, Any] = {}
NODE_DISPLAY_NAME_MAPPINGS: dict[str, str] = {}

try:
    from .nodes import Attention, SparseAttention
except ImportError as error:  # it names the torch that torch_fattn needs
    logging.warning(
        "torch_fattn's nodes are missing: %s; a wheel of torch-fattn is for one minor version of torch, 2.13 "
        "or later: install the one for your torch with pip in ComfyUI's environment",
        error,
    )
else:
    NODE_CLASS_MAPPINGS |= {"TorchFattnAttention": Attention, "TorchFattnSparseAttention": SparseAttention}
    NODE_DISPLAY_NAME_MAPPINGS |= {
        "TorchFattnAttention": "Attention (torch_fattn)",
        "TorchFattnSparseAttention": "Sparse attention (torch_fattn)",
    }
