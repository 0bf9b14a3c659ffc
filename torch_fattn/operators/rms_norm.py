"""`rms_norm` as a Python function, documented. All work is in `torch.ops.fattn`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.signatures import public

__all__ = ["rms_norm"]


@public("fattn.rms_norm")
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    gate: Tensor | None = None,
    *,
    eps: float = 1e-6,
    norm: str = "rounded",
    activation: str = "silu",
    float32_out: bool = False,
) -> Tensor:
    """`x * rsqrt(mean(x ** 2) + eps) * weight * activation(gate)` over the last dimension, in one launch: the
    forms of RMSNorm that `torch.nn.functional.rms_norm` lacks or rounds differently.

    The arithmetic is in float32, and rounding is that of transformers' modules: float16 and bfloat16 results
    have their bits, but for the order of the sum, which may move a rounding. A row does not depend on others.

    Args:
        x: `[.., D]`, float32, float16 or bfloat16, of any D and any strides. A tensor is copied only if its
            columns are apart, or if more than three dimensions before the last cannot be merged.
            A row of up to 8,192 columns is read once.
        weight: `[D]`, in the dtype of x or float32. Default: no weight.
        gate: of the shape and dtype of x, of any strides as x. It multiplies the result after the weight.
            Default: no gate.
        eps: added to the mean of the squares; at least 0.
        norm: what is rounded to the dtype of x. "rounded": the normalised x (Llama), and with a gate its
            product with a weight of that dtype (Qwen3-Next). "float": neither (OLMo-2, GPT-OSS; with a gate
            Kimi-Linear). "plus_one": neither, and the product is with 1 + weight (Gemma, Qwen3.5).
        activation: of the gate, "silu" or "sigmoid".
        float32_out: returns float32, unrounded, instead of the dtype of x.

    A NaN or an infinity makes its own row NaN or 0 and no other; float32 rows whose squares overflow are 0,
    as in transformers. Under torch.autocast it keeps the dtypes of its tensors.

    Returns:
        A contiguous tensor of the shape of x.

    Raises:
        TypeError: dtypes; no tensor.
        ValueError: shapes, devices, unknown names, eps; more than 2^30 rows or columns.
        RuntimeError: gradients, in the backward.
    """
    return torch.ops.fattn.rms_norm(
        x, weight, gate, eps=eps, norm=norm, activation=activation, float32_out=float32_out
    )
