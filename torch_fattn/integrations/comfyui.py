"""torch_fattn's attention in ComfyUI models: for custom nodes and scripts.

    from torch_fattn.integrations import comfyui
    model = comfyui.apply(model)  # a clone; the given model is unchanged

`integrations/comfyui_node` in the repository is a package of nodes that do this.

On a Mac, ComfyUI computes attention in slices unless it is started with --use-pytorch-cross-attention, and
`torch_fattn.install()` never sees those calls. This module uses its `optimized_attention_override`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..patterns.attention import Pattern
from ..runtime.signatures import public
from .pytorch.sdpa import has_kernel

__all__ = ["apply", "attention_override"]

_OVERRIDE = "optimized_attention_override"
_OVERRIDE_NAME = "torch_fattn.integrations.comfyui.attention_override"
# Options of ComfyUI's functions that do not affect these kernels.
_NO_EFFECT = {"transformer_options", "_inside_attn_wrapper", "low_precision_attention"}


@public("torch_fattn.integrations.comfyui.apply")
def apply(model: Any, pattern: Pattern | None = None, *, exact_steps: int = 2) -> Any:
    """Returns a clone of a ModelPatcher that uses torch_fattn's attention. An existing override of the model
    runs first, since it may change the call; it is given torch_fattn instead of ComfyUI's function.

    Args:
        pattern: what replaces long self-attention without a mask, such as
            `torch_fattn.patterns.Pattern(0.3)`: an approximation. All other calls stay exact.
        exact_steps: the first steps of a sampler, which stay exact too: they decide the layout of the
            picture. A compiled model needs 0 or a graph break at each call.
    """
    name = "torch_fattn.integrations.comfyui.apply"
    if fault := _fault_of(model):
        raise TypeError(f"{name}: {fault}; pass a ModelPatcher, which ComfyUI's loaders return")
    clone = model.clone()
    options = dict(clone.model_options.get("transformer_options", {}))
    before = options.get(_OVERRIDE)
    if isinstance(before, _Override):
        before = before.before
    elif before is attention_override:
        before = None
    plain = before is None and pattern is None
    options[_OVERRIDE] = attention_override if plain else _Override(before, pattern, exact_steps)
    clone.model_options = {**clone.model_options, "transformer_options": options}
    return clone


def _fault_of(model: Any) -> str:
    """Why `model` is not a ModelPatcher; empty if it is one."""
    if isinstance(model, type):
        return f"model is the class {model.__name__}"
    if not (callable(getattr(model, "clone", None)) and hasattr(model, "model_options")):
        return f"model is of type {type(model).__name__}"
    options = model.model_options
    if not isinstance(options, Mapping):
        return f"its model_options are of type {type(options).__name__}, not a dict"
    options = options.get("transformer_options", {})
    if not isinstance(options, Mapping):
        return f"its transformer_options are of type {type(options).__name__}, not a dict"
    return ""


@public(_OVERRIDE_NAME)
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask: Tensor | None = None,
    attn_precision: torch.dtype | None = None,  # sums and softmax are always in float32
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    *more: Any,
    scale: float | None = None,
    enable_gqa: bool = False,
    pattern: Pattern | None = None,
    **others: Any,
) -> Tensor | None:
    """Attention of q `[B, L, H * D]`, or `[B, H, L, D]` with skip_reshape; out is `[B, L, H * D]`, or `[B, H,
    L, D]` with skip_output_reshape. None if there is no kernel or an option is unknown."""
    asked = (value for name, value in others.items() if name not in _NO_EFFECT)
    if any(value is not None and value is not False for value in (*more, *asked)):
        return None
    if not skip_reshape:
        if heads < 1 or not q.dim() == k.dim() == v.dim() == 3 or not q.shape[-1] or q.shape[-1] % heads:
            return None
        head_dim = q.shape[-1] // heads
        if k.shape[-1] % head_dim or v.shape[-1] % head_dim:
            return None
        q, k, v = (tensor.unflatten(-1, (-1, head_dim)).transpose(1, 2) for tensor in (q, k, v))
    if mask is not None and mask.dim() < 2:  # ComfyUI's own functions disagree on its meaning
        return None
    if mask is not None and mask.dim() == 3:  # [B, Lq, Lk]; others broadcast from the last dimension
        mask = mask[:, None]
    arguments = (q, k, v, mask, 0.0, False)
    # A compiled graph cannot call ComfyUI's function, so `sdpa` falls back to torch's attention.
    if not has_kernel(q, k, v, mask, scale, enable_gqa):
        return None
    out = None
    if pattern is not None and mask is None:
        out = pattern.attention(q, k, v, scale=scale)
    if out is None:
        layout = {"token_major_out": not skip_output_reshape}
        out = torch.ops.fattn.sdpa(*arguments, scale=scale, enable_gqa=enable_gqa, **layout)
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


@public(_OVERRIDE_NAME)
def attention_override(
    func: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, heads: int, *args: Any, **kwargs: Any
) -> Tensor:
    """The value of `transformer_options["optimized_attention_override"]`. `func`, the function that ComfyUI
    chose, runs calls that torch_fattn has no kernel for."""
    out = _attention(q, k, v, heads, *args, **kwargs)
    return func(q, k, v, heads, *args, **kwargs) if out is None else out


class _Override:
    """The same with a pattern, and inside of another override."""

    def __init__(
        self, before: Callable[..., Tensor] | None, pattern: Pattern | None, exact_steps: int
    ) -> None:
        self.before = before
        self._pattern = pattern
        self._exact_steps = exact_steps
        self._latest: tuple[Any, bool] = (None, True)  # the sigmas of a step, and whether it is exact

    def __call__(self, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        if self.before is None:
            return self._own(func, *args, **kwargs)
        return self.before(functools.wraps(func)(functools.partial(self._own, func)), *args, **kwargs)

    def _own(self, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        is_exact = self._pattern is None or self._is_exact(kwargs.get("transformer_options") or {})
        out = _attention(*args, pattern=None if is_exact else self._pattern, **kwargs)
        return func(*args, **kwargs) if out is None else out

    def _is_exact(self, options: Mapping[str, Any]) -> bool:
        """Whether the sampler is in its first steps. Reading its sigmas waits for the GPU, so this happens
        once for all layers of a step."""
        every, now = options.get("sample_sigmas"), options.get("sigmas")
        if self._exact_steps <= 0 or every is None or now is None:
            return False
        if self._latest[0] is not now:
            step = int((every.cpu() > now.max().cpu()).sum())
            self._latest = (now, step < self._exact_steps)
        return self._latest[1]
