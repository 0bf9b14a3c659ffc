"""RMSNorm modules that run as one kernel on mps, where most models launch eight: torch's fused `rms_norm`
where it has the form, else `torch_fattn.rms_norm`.

Random numbers show which form of `torch_fattn.rms_norm` a module has. One that computes something else, such
as a gate before the norm, is left as it is.
"""

from __future__ import annotations

import copy
import functools
import inspect
from itertools import product
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import running
from .deferred import Deferred, HeadNorm, plain

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps")
# The form of a fused module. A hook that kept the fused forward follows `restore` by it.
_MARK = "_fattn_fused"
_ROWS = 4
_Options = dict[str, Any]


class Form(NamedTuple):
    """How a norm computes."""

    eps: str  # its name
    alike: _Options  # of `torch_fattn.rms_norm`, for a weight in the dtype of x, or none
    mixed: _Options | None  # the same for a float32 weight and x of 16 bits
    is_gated: bool


def fuse(norm: nn.Module) -> str:
    """Fuses a norm if it has the form. Returns why not, or an empty string."""
    if is_fused(norm):  # a copy's, or one that the model has twice
        return ""
    if why := _fault(norm):
        return why
    form = _form_of(norm)
    if form is None:
        return "it computes something else than x / rms(x) * weight"
    norm.forward = MethodType(forward, norm)
    vars(norm)[_MARK] = form
    return ""


def restore(norm: nn.Module) -> None:
    vars(norm).pop(_MARK, None)
    if replaced_by(norm) is forward:
        del norm.forward


def is_fused(norm: nn.Module) -> bool:
    return _MARK in vars(norm) and replaced_by(norm) is forward


def form_in(norm: nn.Module) -> Form:
    """That of a fused norm."""
    form: Form = vars(norm)[_MARK]
    return form


def replaced_by(norm: nn.Module) -> Any:
    """The function that runs in place of the forward of a module's class. Unpickled modules, and those whose
    hooks were removed, have that forward themselves, which is none."""
    method: Any = vars(norm).get("forward")
    if isinstance(method, MethodType) and method.__self__ is norm:
        return None if method.__func__ is type(norm).forward else method.__func__
    return method


def is_norm(module: nn.Module) -> bool:
    """Whether `fuse` should look at it. torch's own norms are fused already."""
    return "norm" in type(module).__name__.lower() and not type(module).__module__.startswith("torch.")


def forward(norm: nn.Module, *arguments: Any, **options: Any) -> Tensor:
    """The forward of a fused norm. Runs the module's own where the kernels would be several or round
    differently: with gradients, under autocast or torch.compile, for other dtypes, tensor-parallel shards and
    other arguments."""
    weight: Any = norm._parameters.get("weight")
    form: Form | None = vars(norm).get(_MARK)
    named = options.values() if options.keys() == {"gate"} else ()
    operands = tuple(map(plain, (*arguments, *named)))
    if (
        not running.is_enabled
        or form is None
        or len(operands) != 1 + form.is_gated
        or (options and not named)
        or torch.compiler.is_compiling()
        or not _fits(*operands)
        or (chosen := _chosen(form, operands[0], weight)) is None
        or torch.is_autocast_enabled(operands[0].device.type)
    ):
        own: Tensor = type(norm).forward(norm, *arguments, **options)
        return own
    eps = getattr(norm, form.eps)
    compute = functools.partial(_rms_norm, form, chosen, eps, weight, *operands)
    is_head = operands[0].ndim == 4 and running.tables() is not None  # perhaps, before its rotation
    if is_head and weight is not None and not form.is_gated and not chosen["float32_out"]:
        head = HeadNorm(operands[0], weight, {"norm": chosen["norm"], "eps": eps}, functools.cache(compute))
        return Deferred.of(head, operands[0])
    return compute()


def _rms_norm(form: Form, chosen: _Options, eps: float, weight: Any, x: Tensor, *gate: Tensor) -> Tensor:
    if weight is None or form.is_gated or chosen is form.mixed or chosen["norm"] == "plus_one":
        result: Tensor = torch.ops.fattn.rms_norm(x, weight, *gate, eps=eps, **chosen)
        return result
    return torch.rms_norm(x.contiguous(), weight.shape, weight, eps)


def _fits(x: Any, *gate: Any) -> bool:
    return all(
        type(each) is Tensor and each.dtype is x.dtype and each.shape == x.shape and _has_no_gradient(each)
        for each in (x, *gate)
    )


def _has_no_gradient(tensor: Tensor) -> bool:
    return not (tensor.requires_grad and torch.is_grad_enabled())


def _chosen(form: Form, x: Tensor, weight: Any) -> _Options | None:
    if weight is None:
        return form.alike if x.dtype in _DTYPES else None
    if type(weight) is not nn.Parameter or weight.shape != x.shape[-1:] or not _has_no_gradient(weight):
        return None
    if weight.dtype is x.dtype:
        return form.alike if x.dtype in _DTYPES else None
    return form.mixed if weight.dtype is torch.float32 and x.dtype in _DTYPES else None


def _eps_name(norm: nn.Module) -> str:
    return next((name for name in _EPS_NAMES if isinstance(vars(norm).get(name), float)), "")


def _fault(norm: nn.Module) -> str:
    weight = norm._parameters.get("weight")
    if replaced_by(norm) not in (None, forward):
        return "its forward is replaced"
    if len(norm._parameters) > (weight is not None) or norm._buffers or norm._modules:
        return "it is more than a weight"
    if weight is not None and (type(weight) is not nn.Parameter or weight.ndim != 1 or weight.is_meta):
        return "its weight is a shard, or not a vector in memory"
    if weight is not None and weight.dtype not in _DTYPES:
        return f"there is no kernel for {weight.dtype}"
    if not _eps_name(norm):
        return "it has no eps"
    return ""


def _form_of(norm: nn.Module) -> Form | None:
    weight = norm._parameters.get("weight")
    dtype = torch.bfloat16 if weight is None else weight.dtype
    is_gated = "gate" in inspect.signature(type(norm).forward).parameters
    alike = _options(norm, dtype, is_gated)
    if alike is None:
        return None
    mixed = _options(norm, torch.bfloat16, is_gated) if dtype is torch.float32 else None
    return Form(_eps_name(norm), alike, mixed, is_gated)


def _options(norm: nn.Module, dtype: torch.dtype, is_gated: bool) -> _Options | None:
    """The options with which `torch_fattn.rms_norm` computes what a copy with random weights does, on rows of
    that dtype that include one as small as eps."""
    weight, eps = norm._parameters.get("weight"), getattr(norm, _eps_name(norm))
    numbers = torch.Generator().manual_seed(0)
    probed, columns = copy.copy(norm), 64 if weight is None else weight.shape[0]
    if weight is not None:
        weight = nn.Parameter(_random(numbers, columns).to(weight.dtype), requires_grad=False)
        probed._parameters = {"weight": weight}
    scales = torch.tensor([[max(eps, 1e-6) ** 0.5], [0.3], [1.0], [30.0]], device="cpu")
    x, gate = (_random(numbers, _ROWS, columns) for _ in range(2))
    operands = [(x * scales).to(dtype), gate.to(dtype)][: 1 + is_gated]
    try:
        with torch.no_grad(), torch.device("cpu"):
            found = type(norm).forward(probed, *operands)
    except Exception:  # another signature, or code that needs its device
        return None
    if not isinstance(found, Tensor) or found.shape != x.shape or found.dtype not in (dtype, torch.float32):
        return None
    forms = ("rounded",) if weight is None else ("rounded", "float", "plus_one")
    for form, activation in product(forms, ("silu", "sigmoid")[: 1 + is_gated]):
        options = {"norm": form, "activation": activation, "float32_out": found.dtype is not dtype}
        mine = torch.ops.fattn.rms_norm(operands[0], weight, *operands[1:], eps=eps, **options)
        if _is_same(found, mine, dtype):
            return options
    return None


def _is_same(found: Tensor, mine: Tensor, dtype: torch.dtype) -> bool:
    """Bit for bit, but for the order of the sum: it moves few roundings to 16 bits."""
    bound = (4 if dtype is torch.float32 else 1.01) * torch.finfo(dtype).eps * mine.abs()
    is_close = ((found - mine).abs() <= bound + torch.finfo(found.dtype).smallest_normal).all()
    return bool(is_close and (dtype is torch.float32 or (found != mine).float().mean() < 0.05))


def _random(numbers: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=numbers, device="cpu")
