"""Derivatives that the operators lack; see __init__.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_fattn
from tests.helpers.public_calls import heads
from tests.helpers.refusals import Refusal
from torch_fattn import reference


def _gradient(attention: Callable[..., Tensor], dim: int = 8) -> Callable[[], Tensor]:
    def call() -> Tensor:
        query = heads(1, 2, 3, dim).requires_grad_()
        key = heads(1, 2, 5, dim, seed=1)
        attention(query, key, key).square().sum().backward()
        assert query.grad is not None
        return query.grad

    return call


BIAS = heads(3, 5, seed=2).requires_grad_()


def _with_bias(attention: Callable[..., Tensor], bias: Tensor) -> Callable[..., Tensor]:
    return lambda query, key, value: attention(query, key, value, bias)


def _by_hand_with_bias(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT * query.shape[-1] ** -0.5 + BIAS.detach()).softmax(-1) @ value


def _second_derivative(attention: Callable[..., Tensor]) -> Callable[[], Tensor]:
    def call() -> Tensor:
        query = heads(1, 2, 3, 8).requires_grad_()
        key = heads(1, 2, 5, 8, seed=1)
        (first,) = torch.autograd.grad(attention(query, key, key).square().sum(), query, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), query)
        return second

    return call


def _by_torchs_math(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query, key, value)


def _of_learned_scale(attention: Callable[..., Tensor]) -> Callable[[], Tensor]:
    def call() -> Tensor:
        scale = torch.tensor(0.3, requires_grad=True)
        key = heads(1, 2, 5, 8, seed=1)
        attention(heads(1, 2, 3, 8), key, key, scale).square().sum().backward()
        assert scale.grad is not None
        return scale.grad

    return call


def _tangent(attention: Callable[..., Tensor]) -> Callable[[], Tensor]:
    query, key = heads(1, 2, 3, 8), heads(1, 2, 5, 8, seed=1)
    return lambda: jvp(lambda query: attention(query, key, key), (query,), (query,))[1]


def _difference() -> Tensor:
    """The result of `_tangent`, from the reference."""
    query, key = heads(1, 2, 3, 8).double(), heads(1, 2, 5, 8, seed=1)
    above, below = (reference.prefill(query * (1 + step), key, key)[0] for step in (1e-4, -1e-4))
    return (above - below) / 2e-4


def _by_hand(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1) @ value


REFUSALS: list[Refusal] = [
    *(
        Refusal(
            "use torch_fattn.attention, torch_fattn.varlen_attention or "
            "torch.nn.functional.scaled_dot_product_attention where gradients are needed",
            _gradient(torch_fattn.prefill),
            _gradient(followed),
            _gradient(_by_hand),
        )
        for followed in (torch_fattn.attention, F.scaled_dot_product_attention)
    ),
    Refusal(
        "use torch.nn.functional.scaled_dot_product_attention where gradients are needed",
        _gradient(torch_fattn.attention, 264),
        _gradient(F.scaled_dot_product_attention, 264),
        _gradient(_by_hand, 264),
    ),
    *(
        Refusal(
            "pass attn_mask.detach(), or use torch.nn.functional.scaled_dot_product_attention",
            _gradient(_with_bias(torch_fattn.attention, BIAS)),
            _gradient(followed),
            _gradient(_by_hand_with_bias),
        )
        for followed in (
            _with_bias(torch_fattn.attention, BIAS.detach()),
            _with_bias(F.scaled_dot_product_attention, BIAS),
        )
    ),
    Refusal(
        "use torch.nn.functional.scaled_dot_product_attention under "
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) where one is needed",
        _second_derivative(torch_fattn.attention),
        _second_derivative(_by_torchs_math),
        _second_derivative(_by_hand),
    ),
    Refusal(
        "pass scale.item(), or multiply the query by it and pass 1.0",
        _of_learned_scale(lambda q, k, v, scale: torch_fattn.attention(q, k, v, scale=scale)),
        _of_learned_scale(lambda q, k, v, scale: torch_fattn.attention(q * scale, k, v, scale=1.0)),
        _of_learned_scale(lambda q, k, v, scale: (q @ k.mT * scale).softmax(-1) @ v),
    ),
    Refusal(
        "use torch.softmax or torch.tanh where one is needed",
        _gradient(lambda q, k, v: torch_fattn.softmax(q @ k.mT) @ v),
        _gradient(lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v),
        _gradient(lambda q, k, v: _by_hand(q, k * 8**0.5, v)),
    ),
    Refusal(
        "use torch.matmul and torch.softmax where one is needed",
        _tangent(torch_fattn.prefill),
        _tangent(_by_hand),
        _difference,
    ),
]
