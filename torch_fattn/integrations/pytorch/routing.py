"""Routes a plain attention call to these kernels, or to torch's own where they are expected to be faster.
csrc/plan/route.h has the rule and its sources."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ...operators.differentiable import needs_gradient
from ...operators.head_padding import HEAD_STEP
from ...runtime.options import defaults_of
from ...runtime.settings import check_settings
from ...runtime.tracing import constant_in_graphs

# Arguments that torch's attention can express, or that do not change results.
IN_TORCH = {"attn_mask", "mask_map", "is_causal", "q_offset", "scale", "seq_lens", "token_major_out"}
# All others, with the value that disables each.
LACKING_IN_TORCH = {
    name: off for op in ("prefill", "decode") for name, off in defaults_of(op).items() if name not in IN_TORCH
}

_may_go_to_torch: bool | None = None  # None: not yet queried


@dataclass(frozen=True)
class Route:
    """The route of a plain call: `to` is "fattn" or "torch"; `why` is the reason."""

    to: Literal["fattn", "torch"]
    why: str

    def __str__(self) -> str:
        taken = "taken" if self.to == "fattn" else "left to torch's own kernels"
        return f"{taken}: {self.why}"


def forget() -> None:
    """Drops cached decisions. Call it after the rule has changed."""
    global _may_go_to_torch
    _may_go_to_torch = None


def is_version(text: object) -> bool:
    return isinstance(text, str) and re.fullmatch(r"\d{1,3}(\.\d{1,2}){1,2}", text) is not None


def is_torch_version(text: object) -> bool:
    """Also accepts versions like `torch.__version__`: "2.13.0+cpu", "2.16.0.dev20261001"."""
    if not isinstance(text, str):
        return False
    return is_version(re.sub(r"(?:a0|rc\d+|\.dev\d+)?(?:\+[\w.]+)?$", "", text, count=1))


def version_number(version: str) -> int:
    """ "26.2" is 2602; "2.14.1" and "2.14a0" are 214."""
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major) * 100 + int(minor)


def system_and_torch() -> tuple[str, str]:
    """The versions of macOS (0.0 on other systems) and torch, to which timings apply."""
    macos, torch_version = torch.ops.fattn._system_and_torch()
    return f"{macos // 100}.{macos % 100}", f"{torch_version // 100}.{torch_version % 100}"


def is_plain(options: Mapping[str, Any]) -> bool:
    """Whether torch's attention supports all these options."""
    given = ((options.get(name), default) for name, default in LACKING_IN_TORCH.items())
    return all(value is None or (default is not None and value == default) for value, default in given)


def torchs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool,
    scale: float | None,
) -> Tensor | None:
    """The result of torch's own attention, `[B, H, L, D]`, if the rule routes this call to torch; else None.
    Causal masks are aligned to the lower right corner, which torch supports only if Lq equals Lk."""
    if query.device.type != "mps" or not query.dim() == key.dim() == 4:
        return None
    check_settings()
    compiling = torch.compiler.is_compiling()
    padded = query.shape[-1] % HEAD_STEP or value.shape[-1] % HEAD_STEP
    if not (_some_are_torchs() or (padded and not compiling)):
        return None
    is_causal = is_causal and query.shape[2] > 1
    if is_causal and (mask is not None or query.shape[2] != key.shape[2]):
        return None
    arguments = (query, key, value, mask, 0.0, is_causal)
    options: dict[str, Any] = {"scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    # A graph cannot query the rule; `sdpa` decides during tracing.
    if not compiling:
        reason = torch.ops.fattn._sdpa_reason(*arguments, **options)
        if torch.ops.fattn._reason_name(reason) != "torch_is_faster":
            return None
    return torch.ops.fattn.sdpa(*arguments, **options)


@constant_in_graphs
def _some_are_torchs() -> bool:
    global _may_go_to_torch
    if _may_go_to_torch is None:
        _may_go_to_torch = torch.ops.fattn._may_go_to_torch()
    return _may_go_to_torch


def route_of(
    op: str,
    call: Mapping[str, Any],
    family: int | None = None,
    cores: int | None = None,
    macos: str | None = None,
    torch_version: str | None = None,
    tensor: str | None = None,
) -> Route | None:
    """The route of the equivalent plain call of torch's attention, or of the call with these gradients; None
    if there is none. A cache counts as full."""
    if op not in ("prefill", "prefill_backward", "decode", "sdpa"):
        return None
    query, key, mask = call["query"], call["key"], call.get("attn_mask")
    if not is_plain(call) or call.get("grad_lse") is not None:
        return None
    is_causal = bool(call.get("is_causal"))
    if op == "decode" and query.shape[2] > 1:  # causal, aligned to the lower right corner
        return None
    if is_causal:
        offset = 0 if op == "sdpa" else call.get("q_offset")
        first_row = key.shape[2] - query.shape[2] if offset is None else offset
        if first_row != 0 or mask is not None:
            return None
    to_torch, why = torch.ops.fattn._route(
        query,
        key,
        call["value"],
        mask,
        is_causal,
        op == "prefill_backward" or (op == "sdpa" and needs_gradient(query, key, call["value"])),
        family,
        cores,
        None if macos is None else version_number(macos),
        None if torch_version is None else version_number(torch_version),
        tensor,
    )
    return Route("torch" if to_torch else "fattn", why)
