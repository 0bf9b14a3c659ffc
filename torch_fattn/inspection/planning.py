"""Plans what a public function would launch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..integrations.pytorch.report import REASONS
from ..operators import DIFFERENTIABLE, PLANNED
from ..operators.attention import decode, prefill
from ..operators.head_padding import pad_heads
from ..operators.options import PrefillOptions
from ..runtime.signatures import SIGNATURES, Signature
from .block_masks import Blocks, blocks_of
from .cost import Cost, cost_of

COMPOSED = ("shared_prefix_decode", "shared_prefix_paged_decode", "sparse_decode")
FUNCTIONS = (*PLANNED, *DIFFERENTIABLE, "sdpa", *COMPOSED)


@dataclass(frozen=True)
class Planned:
    """An operator call, and the JSON that the planner wrote."""

    op: str
    text: str
    cost: Cost
    blocks: Blocks | None = None


def signature_of(function: str) -> Signature:
    return SIGNATURES.get(f"fattn.{function}") or SIGNATURES[f"torch_fattn.{function}"]


def planned(op: str, call: Mapping[str, Any], overload: str = "default", **machine: Any) -> Planned:
    """Plans an operator call. `machine`: the additional keywords of the planning operators."""
    plan = getattr(getattr(torch.ops.fattn, f"_plan_{op}"), overload)
    arguments = getattr(getattr(torch.ops.fattn, op), overload)._schema.arguments
    every = {each.name: each.default_value for each in arguments} | dict(call)
    text = plan(**call, **machine)
    blocks = blocks_of(every, json.loads(text)) if every.get("block_mask") is not None else None
    return Planned(op, text, cost_of(op, every, blocks.pairs if blocks else None), blocks)


def plans_of(function: str, call: Mapping[str, Any], **machine: Any) -> list[Planned]:
    """Plans of the operator calls that a function makes, in order. Nothing is computed."""
    if function in PLANNED or function in DIFFERENTIABLE:
        call = {name: value for name, value in call.items() if name != "return_lse"}
        return [planned(DIFFERENTIABLE.get(function, function), call, **machine)]
    run = _sdpa if function == "sdpa" else signature_of(function).function
    bases: dict[int, Tensor] = {}
    with Recorder(**machine) as recorder:
        run(**{name: _on_meta(value, bases) for name, value in call.items()})
    return recorder.planned


class Recorder(TorchDispatchMode):
    """Plans the operators called inside, for this machine or that of the tensors."""

    def __init__(self, **machine: Any) -> None:
        super().__init__()
        self.machine = machine
        self.planned: list[Planned] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, op = func._schema.name.partition("::")
        if namespace == "fattn" and op in PLANNED:
            names = [each.name for each in func._schema.arguments]
            call = dict(zip(names, args, strict=False)) | (kwargs or {})
            self.planned.append(planned(op, call, func._overloadname, **self.machine))
        return func(*args, **(kwargs or {}))


def _on_meta(operand: Any, bases: dict[int, Tensor]) -> Any:
    """The operand on "meta". Views of one tensor still share memory."""
    if not isinstance(operand, Tensor):
        return operand
    memory = operand.untyped_storage()
    base = bases.setdefault(memory._cdata, torch.empty(memory.nbytes(), dtype=torch.uint8, device="meta"))
    typed = base[: memory.nbytes() // operand.itemsize * operand.itemsize].view(operand.dtype)
    return typed.as_strided(operand.shape, operand.stride(), operand.storage_offset())


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """The operator call of `sdpa`, without its route to torch."""
    if dropout_p or (is_causal and attn_mask is not None):
        raise NotImplementedError(REASONS["dropout" if dropout_p else "mask_with_causal"])
    query, key, value = (each[(None,) * (4 - each.dim())] for each in (query, key, value))
    token_major_out = query.stride(1) < query.stride(2)
    batch = max(each.shape[0] for each in (query, key, value))
    query, key, value = (each.expand(batch, -1, -1, -1) for each in (query, key, value))
    query, key, value, scale = pad_heads(query, key, value, scale)
    if query.shape[2] == 1 and not is_causal:
        return decode(query, key, value, attn_mask=attn_mask, scale=scale)
    options: PrefillOptions = {"scale": scale, "token_major_out": token_major_out}
    if is_causal:
        options |= {"is_causal": True, "q_offset": 0}
    return prefill(query, key, value, attn_mask, **options)
