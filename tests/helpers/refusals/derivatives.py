"""Derivatives that the operators lack; see __init__.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import jvp

import torch_fattn
from tests.helpers.public_calls import heads
from tests.helpers.refusals import Refusal

QUERY, KEY, BIAS = heads(1, 2, 3, 8), heads(1, 2, 5, 8, seed=1), heads(3, 5, seed=2)


def _gradient(attention: Callable[[Tensor], Tensor], query: Tensor = QUERY) -> Callable[[], None]:
    return lambda: attention(query.clone().requires_grad_()).sum().backward()


def _second_derivative() -> None:
    query = QUERY.clone().requires_grad_()
    out = torch_fattn.attention(query, KEY, KEY)
    (first,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
    first.square().sum().backward()


def _of_learned_scale(attention: Callable[..., Tensor]) -> Callable[[], Tensor]:
    def call() -> Tensor:
        scale = torch.tensor(0.3, requires_grad=True)
        attention(QUERY, KEY, KEY, scale).square().sum().backward()
        assert scale.grad is not None
        return scale.grad

    return call


REFUSALS: list[Refusal] = [
    Refusal(
        "use torch_fattn.attention, torch_fattn.varlen_attention or "
        "torch.nn.functional.scaled_dot_product_attention where gradients are needed",
        _gradient(lambda query: torch_fattn.prefill(query, KEY, KEY)),
    ),
    Refusal(
        "use torch.nn.functional.scaled_dot_product_attention where gradients are needed",
        _gradient(lambda query: torch_fattn.attention(query, query, query), heads(1, 2, 3, 264)),
    ),
    Refusal(
        "pass attn_mask.detach(), or use torch.nn.functional.scaled_dot_product_attention",
        lambda: torch_fattn.attention(QUERY, KEY, KEY, BIAS.clone().requires_grad_()),
        _gradient(lambda query: torch_fattn.attention(query, KEY, KEY, BIAS)),
    ),
    Refusal(
        "use torch.nn.functional.scaled_dot_product_attention under "
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) where one is needed",
        _second_derivative,
    ),
    Refusal(
        "pass scale.item(), or multiply the query by it and pass 1.0",
        _of_learned_scale(lambda q, k, v, scale: torch_fattn.attention(q, k, v, scale=scale)),
        _of_learned_scale(lambda q, k, v, scale: torch_fattn.attention(q * scale, k, v, scale=1.0)),
        _of_learned_scale(lambda q, k, v, scale: (q @ k.mT * scale).softmax(-1) @ v),
    ),
    Refusal(
        "use torch.softmax or torch.tanh where one is needed",
        _gradient(lambda query: torch_fattn.softmax(query @ KEY.mT)),
    ),
    Refusal(
        "use torch's own operators where one is needed",
        lambda: jvp(lambda query: torch_fattn.prefill(query, KEY, KEY), (QUERY,), (QUERY,)),
    ),
]
