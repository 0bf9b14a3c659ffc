"""Keywords of flash-attn 3, flash-attn 4 and vLLM's flash-attn that flash-attn 2.8 lacks. Those that cannot
change a result are ignored; the others are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from torch import Tensor

from ..operators import DTYPES
from ..runtime.tensor_checks import check_device, check_shape
from .arguments import ROWS, check_operands
from .cache_arguments import check_written


class DenseArguments(TypedDict, total=False):
    out: Tensor | None
    learnable_sink: Tensor | None
    s_aux: Tensor | None
    qv: Tensor | None
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    attention_chunk: int
    fa_version: int | None
    pack_gqa: bool | None
    sm_margin: int


class PagedArguments(DenseArguments, total=False):
    page_table: Tensor | None
    scheduler_metadata: Tensor | None
    q_v: Tensor | None
    seqused_q: Tensor | None


class PackedArguments(PagedArguments, total=False):
    cp_world_size: int
    cp_rank: int
    cp_tot_seqused_k: Tensor | None
    mask_mod: Any
    block_sparse_tensors: Any
    aux_tensors: Any
    aux_tensor_leading_dims: Any
    dynamic_causal: Tensor | None
    output_scale: Tensor | None


class CacheArguments(PagedArguments, total=False):
    cu_seqlens_q: Tensor | None
    cu_seqlens_k_new: Tensor | None
    max_seqlen_q: int | None
    rotary_seqlens: Tensor | None


DEFAULTS: dict[str, Any] = dict.fromkeys(PackedArguments.__annotations__ | CacheArguments.__annotations__)
DEFAULTS |= {"attention_chunk": 0, "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0}
# Arguments that would change the result, and what to use instead.
_JOINED = "pass the second query joined to q, and the values joined to the keys"
_MASKED = "use torch_fattn.prefill with an attn_mask"
_PACKED = "use flash_attn_varlen_func, with cache_seqlens as seqused_k"
_NOT_BUILT = {"qv": _JOINED, "q_v": _JOINED, "attention_chunk": _MASKED, "seqused_q": _MASKED}
_NOT_BUILT |= {"cu_seqlens_q": _PACKED, "cu_seqlens_k_new": _PACKED}
_NOT_BUILT |= {"mask_mod": _MASKED, "block_sparse_tensors": _MASKED, "dynamic_causal": _MASKED}
_NOT_BUILT |= {
    "cp_world_size": "use the functions of torch_fattn.distributed",
    "output_scale": "quantise the result",
    "rotary_seqlens": "rotate q and k before the call",
}


def check_newer(op: str, given: Mapping[str, Any], **operands: Any) -> None:
    """Refuses the arguments of `_NOT_BUILT`, and scales of float8 operands."""
    for name, value in given.items():
        if name not in DEFAULTS:  # torch.compile does not check names
            raise TypeError(f"{op}: there is no argument {name!r}; leave it out")
        if name in _NOT_BUILT and (isinstance(value, Tensor) or value != DEFAULTS[name]):
            raise NotImplementedError(f"{op}: {name} is not implemented; {_NOT_BUILT[name]}")
    for name, operand in operands.items():
        scale = f"{name[0]}_descale"
        if given.get(scale) is not None and isinstance(operand, Tensor) and operand.dtype.itemsize == 1:
            raise NotImplementedError(
                f"{op}: {name} is {operand.dtype} with {scale}; pass their product in torch.float16 "
                "or torch.bfloat16"
            )


def one_of(op: str, **tensors: Tensor | None) -> Tensor | None:
    """The one argument that has these names; raises if several are given."""
    given = [name for name, tensor in tensors.items() if tensor is not None]
    if len(given) > 1:
        raise ValueError(f"{op}: {' and '.join(given)} are the same argument; pass one of them")
    return tensors[given[0]] if given else None


def sinks_of(op: str, given: Mapping[str, Any], q: Tensor) -> dict[str, Tensor]:
    """The operators' option for sinks."""
    named = {name: given.get(name) for name in ("s_aux", "learnable_sink")}
    sinks = one_of(op, **named)
    if sinks is None:
        return {}
    (what,) = (name for name, tensor in named.items() if tensor is not None)
    check_shape(op, what, sinks, (q.shape[-2],))
    if sinks.dtype not in DTYPES.values():
        raise TypeError(f"{op}: {what} is {sinks.dtype}; convert it with .float()")
    check_device(op, what, sinks, q, "q")
    return {"sinks": sinks}


def check_out(op: str, out: Tensor | None, q: Tensor, value_dim: int) -> None:
    if out is not None:
        check_operands(op, q, out=(out, ROWS if q.dim() == 4 else ("tokens", "heads", "head_dim")))
        if out.shape[:-1] != q.shape[:-1] or out.shape[-1] != value_dim:
            shape = [*q.shape[:-1], value_dim]
            raise ValueError(f"{op}: out has shape {list(out.shape)}; pass {shape}")
        check_written(op, out=out)


def into(out: Tensor | None, result: Tensor) -> Tensor:
    return result if out is None else out.copy_(result)
