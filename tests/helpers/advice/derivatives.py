"""Advice about derivatives, which the operators lack; see __init__.py."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor
from torch.func import jvp

import torch_fattn
from tests.helpers.advice import Advice
from tests.helpers.public_calls import heads
from torch_fattn import reference


def _gradient(attention: Callable[..., Tensor]) -> Callable[[], Tensor]:
    def call() -> Tensor:
        query = heads(1, 2, 3, 8).requires_grad_()
        key = heads(1, 2, 5, 8, seed=1)
        attention(query, key, key).square().sum().backward()
        assert query.grad is not None
        return query.grad

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


ADVICE: list[Advice] = [
    Advice(
        "use torch.nn.functional.scaled_dot_product_attention where gradients are needed",
        _gradient(torch_fattn.prefill),
        _gradient(F.scaled_dot_product_attention),
        _gradient(_by_hand),
    ),
    Advice(
        "use torch.matmul and torch.softmax where one is needed",
        _tangent(torch_fattn.prefill),
        _tangent(_by_hand),
        _difference,
    ),
]
