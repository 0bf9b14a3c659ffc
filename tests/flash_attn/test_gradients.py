"""Gradients through flash-attn's functions, compared with float64 autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.flash_attn_oracle import Options
from torch_fattn import flash_attn as fa

LENGTHS = (3, 0, 6)
STARTS = torch.tensor([0, 3, 3, 9], dtype=torch.int32)
SLOPES = torch.tensor([0.5, 0.1, 0.03, 0.2])
OPTIONS: dict[str, Options] = {
    "plain": Options(),
    "causal": Options(causal=True),
    "window": Options(causal=True, window=(2, 0)),
    "both windows": Options(window=(2, 1), scale=0.3),
    "softcap": Options(softcap=2.0),
    "slopes": Options(causal=True, slopes=SLOPES),
    "sinks": Options(causal=True, sinks=SLOPES),
}


def gradients(call: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = call(*leaves)
    factors = torch.randn(out.shape, generator=torch.Generator().manual_seed(7))
    (out * factors.to(out)).sum().backward()
    found = [leaf.grad for leaf in leaves]
    return [g for g in found if g is not None]


def assert_same(mine: list[Tensor], exact: list[Tensor]) -> None:
    assert len(mine) == len(exact) > 0
    for a, b in zip(mine, exact, strict=True):
        assert (a.cpu().double() - b).abs().max() <= 1e-5 * b.abs().max()


def randn(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dim", [16, 20], ids=["", "padded"])
@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_dense(options: Options, rows: int, dim: int, device: str) -> None:
    """One row too: without gradients it is decode's."""
    q, k, v = randn(2, rows, 4, dim), randn(2, 9, 2, dim, seed=1), randn(2, 9, 2, dim, seed=2)

    def exact(*tensors: Tensor) -> Tensor:
        return torch.stack([options.attend(b, *(t[b] for t in tensors))[0] for b in range(2)])

    def ours(*tensors: Tensor) -> Tensor:
        return fa.flash_attn_func(*tensors, **options.arguments(device))  # type: ignore[no-any-return]

    wanted = gradients(exact, *(t.double() for t in (q, k, v)))
    assert_same(gradients(ours, *(t.to(device) for t in (q, k, v))), wanted)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_packed(options: Options, device: str) -> None:
    q, k, v = randn(9, 4, 16), randn(9, 2, 16, seed=1), randn(9, 2, 16, seed=2)

    def exact(*tensors: Tensor) -> Tensor:
        parts = zip(*(t.split(LENGTHS) for t in tensors), strict=True)
        return torch.cat([options.attend(b, *each)[0] for b, each in enumerate(parts) if len(each[0])])

    def ours(*tensors: Tensor) -> Tensor:
        starts = STARTS.to(device)
        return fa.flash_attn_varlen_func(*tensors, starts, starts, 6, 6, **options.arguments(device))  # type: ignore[no-any-return]

    wanted = gradients(exact, *(t.double() for t in (q, k, v)))
    assert_same(gradients(ours, *(t.to(device) for t in (q, k, v))), wanted)


@pytest.mark.parametrize("packed", [False, True])
def test_operands_in_one_tensor(packed: bool, device: str) -> None:
    cu, name = STARTS.to(device), "flash_attn_varlen" if packed else "flash_attn"
    of_parts, of_kv, of_all = (getattr(fa, f"{name}_{of}func") for of in ("", "kvpacked_", "qkvpacked_"))
    lens: tuple[Any, ...] = (cu, cu, 6, 6) if packed else ()
    three = randn(*((9,) if packed else (2, 9)), 3, 2, 16).to(device)
    parts = three.unbind(-3)
    wanted = torch.stack(gradients(lambda *qkv: of_parts(*qkv, *lens, causal=True), *parts), -3)
    (mine,) = gradients(lambda qkv: of_all(qkv, *lens[1:3], causal=True), three)
    assert torch.equal(mine, wanted)
    kv = three[..., 1:, :, :]
    _, mine = gradients(lambda q, kv: of_kv(q, kv, *lens, causal=True), parts[0], kv)
    assert torch.equal(mine, wanted[..., 1:, :, :])


@pytest.mark.parametrize("packed", [False, True])
def test_the_log_sum_exp_and_slopes_have_gradients(packed: bool, device: str) -> None:
    q, k = randn(9, 4, 16), randn(9, 2, 16, seed=1)

    def exact(q: Tensor, slopes: Tensor) -> Tensor:
        return Options(causal=True, slopes=slopes).attend(0, q, k.double(), k.double())[1].square()

    def ours(q: Tensor, slopes: Tensor) -> Tensor:
        keys, starts = k.to(device), torch.tensor([0, 9], dtype=torch.int32, device=device)
        options: dict[str, Any] = {"causal": True, "alibi_slopes": slopes, "return_attn_probs": True}
        if packed:
            lse = fa.flash_attn_varlen_func(q, keys, keys, starts, starts, 9, 9, **options)[1]
        else:
            lse = fa.flash_attn_func(q[None], keys[None], keys[None], **options)[1][0]
        return lse.square()

    wanted = gradients(exact, q.double(), SLOPES.double())
    assert_same(gradients(ours, q.to(device), SLOPES.to(device)), wanted)
