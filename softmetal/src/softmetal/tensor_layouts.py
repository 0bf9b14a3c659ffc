"""Names of the layouts of cooperative tensors, which simt/tensor_layouts.cpp describes."""

from __future__ import annotations

import re

_KNOWN = {"m5": 0, "blocks8": 1}
_RANDOM = 2  # SOFTMETAL_LAYOUT_RANDOM


def number_and_seed(layout: str) -> tuple[int, int]:
    """The layout and seed in softmetal_settings of "m5", "blocks8" or "random:SEED"."""
    if layout in _KNOWN:
        return _KNOWN[layout], 0
    seed = re.fullmatch(r"random:(\d+)", layout)
    if seed is None or int(seed[1]) >= 1 << 64:
        raise ValueError(f"tensor_layout {layout!r} is unknown; use 'm5', 'blocks8' or 'random:SEED'.")
    return _RANDOM, int(seed[1])
