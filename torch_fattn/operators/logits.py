"""The operators on logits as Python functions, documented. All work is in `torch.ops.fattn`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.signatures import public

__all__ = ["softcap", "softmax"]


@public("fattn.softmax")
def softmax(scores: Tensor, *, softcap: float = 0.0) -> Tensor:
    """Softmax over the last dimension; rows of up to 16,384 columns are read once and written once.

    Args:
        scores: any shape and strides, float32, float16 or bfloat16. A tensor is copied only if it has more
            than five dimensions before the last that cannot be merged. At most 2^30 columns and 2^33
            elements.
        softcap: c > 0 turns a score s into `c * tanh(s / c)` first. 0: none.

    The arithmetic is in float32. An entry of -inf is hidden: its weight is exactly 0, even with a softcap. A
    row with only -inf is 0, like an attention row that sees no key; `torch.softmax` returns NaN. A row with a
    NaN, or with +inf and no softcap, is NaN in every column, as in `torch.softmax`.

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
        A contiguous tensor of the shape and dtype of x, also under torch.autocast.

    Raises as `softmax` does.
    """
    return torch.ops.fattn.softcap(x, cap)
