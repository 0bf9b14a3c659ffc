"""The operators on logits as Python functions, documented. All work is in `torch.ops.fattn`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.signatures import public

__all__ = ["softcap", "softmax"]


@public("fattn.softmax")
def softmax(scores: Tensor, *, softcap: float = 0.0) -> Tensor:
    """Softmax over the last dimension, read once and written once for rows of up to 16,384 columns.

    Args:
        scores: any shape and strides, float32, float16 or bfloat16. A tensor is copied only if it has more
            than five dimensions beside the last that cannot be merged. A row has at most 2^30 columns, and a
            call 2^33 elements.
        softcap: c > 0 turns a score s into `c * tanh(s / c)` first. 0: none.

    The arithmetic is in float32. An entry of -inf is hidden: its weight is exactly 0, even with a softcap
    (which would turn it into -c). A row with only -inf is 0, like a row of the attention operators that sees
    no key; `torch.softmax` returns NaN. A row with a NaN, or with +inf and no softcap, is NaN in every
    column, as in `torch.softmax`.

    Under torch.autocast it keeps the dtype of scores.

    Returns:
        A contiguous tensor of the shape and dtype of scores.

    Raises:
        TypeError: dtypes; no tensor.
        ValueError: a softcap that is negative or no normal number of float32; sizes above the limits.
        RuntimeError: from `backward`; the operators have no gradient.
    """
    return torch.ops.fattn.softmax(scores, softcap=softcap)


@public("fattn.softcap")
def softcap(x: Tensor, cap: float) -> Tensor:
    """`cap * tanh(x / cap)`, element by element: x where it is small, bounded by +-cap (Gemma 2).

    Args:
        x: of any shape and strides, float32, float16 or bfloat16, as in `softmax`. The arithmetic is in
            float32; +-inf becomes +-cap, and NaN remains.
        cap: a positive normal number of float32.

    Returns:
        A contiguous tensor of the shape and dtype of x, whatever the strides of x. Under torch.autocast it
        keeps that dtype.

    Raises as `softmax` does.
    """
    return torch.ops.fattn.softcap(x, cap)
