"""The functions of linear attention in model files, by the names of fla and causal_conv1d, as this package's
operators. They run where a layer is not fused as a whole.

Random numbers show that a function computes what the operator does.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from ....linear_attention import gated_delta_rule
from . import running
from .functions import Functions

RULES = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention",
    "recurrent_kimi_delta_attention",
)
ACTIVATIONS = {None: "none", "silu": "silu", "swish": "silu"}


class Form(Enum):
    RULE = "initial_state"  # a parameter that the others lack
    UPDATE = "conv_state"
    CONVOLUTION = "weight"


def is_column_count(columns: int) -> bool:
    """Whether the operators take queries, keys or values of that many columns."""
    return columns % 8 == 0 and 0 < columns <= 256


def _replacing(function: Callable[..., Any], form: Form) -> Callable[..., Any]:
    ours: Any = {Form.RULE: _rule, Form.UPDATE: _update, Form.CONVOLUTION: _convolution}[form]

    @functools.wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        found = ours(*arguments, **options) if arguments and running.takes(arguments[0]) else None
        return function(*arguments, **options) if found is None else found

    return run


def _rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **_options: Any,
) -> tuple[Tensor, Tensor | None] | None:
    """None if the operator does not take the call. The caller may keep its initial state."""
    packed = cu_seq_lens_q if cu_seqlens is None else cu_seqlens
    sequences = query.shape[0] if packed is None else packed.numel() - 1
    states = (sequences, value.shape[2], key.shape[3], value.shape[3])
    if not all(map(is_column_count, states[2:])) or (packed is not None and query.shape[0] != 1):
        return None
    if initial_state is not None and initial_state.shape != states:
        return None
    return gated_delta_rule(
        *(query, key, value, g, beta),
        initial_state=None if initial_state is None else initial_state.float(),
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=None if packed is None else packed.to(torch.int32),
    )


def _convolution(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **_options: Any,
) -> Tensor | None:
    """None if the operator does not take the call."""
    packed = cu_seq_lens_q
    if packed is not None and (hidden_states.shape[0] != 1 or packed[-1].item() != hidden_states.shape[2]):
        return None  # the tokens of a cache are before them
    if activation not in ACTIVATIONS or weight.dtype not in (hidden_states.dtype, torch.float32):
        return None
    out: Tensor = torch.ops.fattn.causal_conv1d(
        *(hidden_states.transpose(1, 2), weight, bias, conv_state),
        cu_seqlens=None if packed is None else packed.to(torch.int32),
        activation=ACTIVATIONS[activation],
    )
    return out.transpose(1, 2)


def _update(hidden_states: Tensor, conv_state: Tensor, *arguments: Any, **options: Any) -> Tensor | None:
    if conv_state.dtype is not hidden_states.dtype:
        return None
    return _convolution(hidden_states, *arguments, conv_state=conv_state, **options)


def _form_of(function: Callable[..., Any]) -> Form | str:
    own = inspect.unwrap(function)  # of transformers, where a wrapper chooses that of another package
    for form in Form:
        if form.value in inspect.signature(own).parameters:
            with torch.no_grad(), torch.device("cpu"):
                has_form = _is_rule(own) if form is Form.RULE else _is_convolution(own, form)
            return form if has_form else "it computes something else than the operator"
    return "it takes other arguments"


def _is_rule(function: Callable[..., Any]) -> bool:
    numbers = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 5, 2, 8, generator=numbers) for _ in range(3))
    beta, state = torch.rand(2, 5, 2, generator=numbers), torch.randn(2, 2, 8, 8, generator=numbers)
    for decays in ((2,), (2, 8)):
        g = -torch.rand(2, 5, *decays, generator=numbers)
        options = {"g": g, "beta": beta, "use_qk_l2norm_in_kernel": True, "output_final_state": True}
        if _is_same(function, _rule, query, key, value, **options, initial_state=state):
            return True
    return False


def _is_convolution(function: Callable[..., Any], form: Form) -> bool:
    numbers = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=numbers) for shape in ((2, 8, 5), (8, 4), (8,)))
    operands = (x, weight, bias) if form is Form.CONVOLUTION else (x, x[..., :4].sin(), weight, bias)
    ours = _convolution if form is Form.CONVOLUTION else _update
    return _is_same(function, ours, *operands, activation="silu")


def _is_same(
    function: Callable[..., Any], ours: Callable[..., Any], *operands: Tensor, **options: Any
) -> bool:
    results = []
    for run in (function, ours):
        given = [operand.clone() for operand in operands]
        try:
            out = run(*given, **options)
        except Exception:  # it takes other shapes
            return False
        results.append([*(out if isinstance(out, tuple) else (out,)), *given])
    return all(torch.allclose(a[..., 1:], b[..., 1:], atol=1e-4) for a, b in zip(*results, strict=True))


_functions: Functions[Form] = Functions(
    rf"(?:{'|'.join(RULES)}|causal_conv1d_fn|causal_conv1d_update)$", _form_of, _replacing
)
fuse, restore = _functions.fuse, _functions.restore
