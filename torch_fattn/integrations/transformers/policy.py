"""The policy for layers and models that `fattn` cannot run: `register(on_unsupported=...)`."""

from __future__ import annotations

import re
from typing import Literal, get_args

import torch

from ...runtime.signatures import shown
from ...runtime.warn import warn

OnUnsupported = Literal["error", "sdpa"]

_chosen: OnUnsupported = "error"
_warned: set[tuple[str, str]] = set()


def choose(on_unsupported: OnUnsupported) -> None:
    """Sets the policy and resets the warnings."""
    global _chosen
    if not isinstance(on_unsupported, str) or on_unsupported not in get_args(OnUnsupported):
        raise ValueError(
            f"torch_fattn.integrations.transformers.register: on_unsupported is {shown(on_unsupported)}; "
            'pass "error" or "sdpa"'
        )
    _chosen = on_unsupported
    _warned.clear()


def falls_back() -> bool:
    return _chosen == "sdpa"


def warn_once(who: str, where: str, why: str) -> None:
    """Warns once per kind of layer and reason, ignoring the numbers and the operator's name in the reason. A
    graph under tracing cannot count and does not warn."""
    if torch.compiler.is_compiling():
        return
    kind = (who, re.sub(r"\d+", "#", re.sub(r"^fattn\.\w+: ", "", why)))
    if kind not in _warned:
        _warned.add(kind)
        warn(f"fattn attention in {where}: {why}")
