"""RMSNorm modules that call torch's fused `rms_norm`: one kernel on mps where most models launch eight.

Random numbers show whether a module computes `x / rms(x) * weight`, rounded to the dtype of x. Modules with
`1 + weight` (Gemma), a float32 weight or a gate compute something else, and are left as they are.
"""

from __future__ import annotations

import copy
import functools
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from . import running
from .deferred import Deferred, HeadNorm, plain

_EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps")
# The name of eps and the form, in a fused module. A hook that kept the fused forward follows `restore` by it.
_MARK = "_fattn_fused"
_ROWS = 4
_enabled = True


def enable(enabled: bool) -> bool:
    """Whether fused modules run torch's `rms_norm` or their own forward. Returns what it was before."""
    global _enabled
    before, _enabled = _enabled, enabled
    return before


def fuse(norm: nn.Module) -> str:
    """Fuses a norm if it has the form. Returns why not, or an empty string."""
    if is_fused(norm):  # a copy's, or one that the model has twice
        return ""
    if why := _fault(norm):
        return why
    form = _form(norm)
    if not form:
        return "it computes something else than x / rms(x) * weight"
    norm.forward = MethodType(forward, norm)
    vars(norm)[_MARK] = _eps_name(norm), form
    return ""


def restore(norm: nn.Module) -> None:
    vars(norm).pop(_MARK, None)
    if _replaced_by(norm) is forward:
        del norm.forward


def is_fused(norm: nn.Module) -> bool:
    return _MARK in vars(norm) and _replaced_by(norm) is forward


def _replaced_by(norm: nn.Module) -> Any:
    """The function that runs in place of the forward of a norm's class. Unpickled norms, and those whose
    hooks were removed, have that forward themselves, which is none."""
    method: Any = vars(norm).get("forward")
    if isinstance(method, MethodType) and method.__self__ is norm:
        return None if method.__func__ is type(norm).forward else method.__func__
    return method


def is_norm(module: nn.Module) -> bool:
    """Whether `fuse` should look at it. torch's own norms are fused already."""
    return "norm" in type(module).__name__.lower() and not type(module).__module__.startswith("torch.")


def forward(norm: nn.Module, *arguments: Any, **options: Any) -> Tensor:
    """The forward of a fused norm. Runs the module's own where torch's `rms_norm` would be several kernels or
    round differently: with gradients, under autocast or torch.compile, for other dtypes, tensor-parallel
    shards and other arguments."""
    weight: Any = norm.weight
    mark = vars(norm).get(_MARK)
    hidden_states: Any = plain(arguments[0]) if arguments else None
    if (
        not _enabled
        or mark is None
        or len(arguments) != 1
        or options
        or torch.compiler.is_compiling()
        or type(hidden_states) is not Tensor
        or type(weight) is not nn.Parameter
        or weight.dtype is not hidden_states.dtype
        or weight.shape != hidden_states.shape[-1:]
        or (torch.is_grad_enabled() and (weight.requires_grad or hidden_states.requires_grad))
        or torch.is_autocast_enabled(hidden_states.device.type)
    ):
        own: Tensor = type(norm).forward(norm, *arguments, **options)
        return own
    eps_name, form = mark
    eps = getattr(norm, eps_name)
    compute = functools.partial(_rms_norm, hidden_states, weight, eps)
    if hidden_states.ndim == 4 and running.tables() is not None:  # perhaps heads, before their rotation
        options = {"norm": form, "eps": eps}
        return Deferred.of(HeadNorm(hidden_states, weight, options, functools.cache(compute)), hidden_states)
    return compute()


def _rms_norm(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.rms_norm(hidden_states.contiguous(), weight.shape, weight, eps)


def _eps_name(norm: nn.Module) -> str:
    return next((name for name in _EPS_NAMES if isinstance(vars(norm).get(name), float)), "")


def _fault(norm: nn.Module) -> str:
    weight = norm._parameters.get("weight")
    if _replaced_by(norm) not in (None, forward):
        return "its forward is replaced"
    if weight is None and not norm._buffers and not norm._modules:
        return "it has no weight"
    if weight is None or len(norm._parameters) > 1 or norm._buffers or norm._modules:
        return "it is more than a weight"
    if type(weight) is not nn.Parameter or weight.ndim != 1 or weight.is_meta:
        return "its weight is a shard, or not a vector in memory"
    if not weight.is_floating_point() or weight.dtype is torch.float64:
        return f"torch's rms_norm is not one kernel in {weight.dtype}"
    if not _eps_name(norm):
        return "it has no eps"
    return ""


def _form(norm: nn.Module) -> str:
    """The option `norm` of `torch_fattn.rotary`, if a copy with random weights has the form, with two
    roundings at most, on rows that include one as small as eps; else empty."""
    weight: Any = norm.weight
    dtype, eps = weight.dtype, getattr(norm, _eps_name(norm))
    numbers = torch.Generator().manual_seed(0)
    probed, random = copy.copy(norm), _random(numbers, weight.shape[0]).to(dtype)
    probed._parameters = {"weight": nn.Parameter(random, requires_grad=False)}
    scales = torch.tensor([[max(eps, 1e-6) ** 0.5], [0.3], [1.0], [30.0]], device="cpu")
    x = (_random(numbers, _ROWS, weight.shape[0]) * scales).to(dtype)
    try:
        with torch.no_grad(), torch.device("cpu"):
            found = type(norm).forward(probed, x)
    except Exception:  # another signature, or code that needs its device
        return ""
    if not isinstance(found, Tensor) or found.shape != x.shape or found.dtype is not dtype:
        return ""
    exact = x.double()
    normalised = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
    exact = normalised * random.double()
    roundings = 1.01 if dtype.itemsize < 4 else 4  # of half an ulp each, relative to a power of two
    bound = roundings * torch.finfo(dtype).eps * exact.abs() + torch.finfo(dtype).smallest_normal
    if bool(((found - exact).abs() > bound).any()):
        return ""
    twice = normalised.to(dtype) * random
    return "rounded" if (found == twice).sum() >= (found == exact.to(dtype)).sum() else "float"


def _random(numbers: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=numbers, device="cpu")
