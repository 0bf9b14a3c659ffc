"""Argument checks that flash-attn's functions share. They raise before any launch or write."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from ..operators import DTYPES
from ..runtime.signatures import is_checked
from ..runtime.tensor_checks import Shape, check_device, check_shape

Window = tuple[int | None, int | None] | None

ROWS: Shape = ("batch", "length", "heads", "head_dim")
POOL: Shape = ("num_blocks", "block_size", "kv_heads", "head_dim")
MAX_SOFTCAP = 1e30
MAX_SCALE = 1e38  # stays finite in float32 after the kernels' factors
NO_LIMIT = 2**31  # larger than any window


def check_operands(op: str, q: Tensor, **others: tuple[Any, Shape]) -> None:
    """Checks that `others` have these shapes, and the dtype and device of q."""
    if q.dtype not in DTYPES.values():
        raise TypeError(f"{op}: q is {q.dtype}; pass torch.float32, torch.float16 or torch.bfloat16")
    for what, (tensor, shape) in others.items():
        check_shape(op, what, tensor, shape)
        check_device(op, what, tensor, q, "q")
        if tensor.dtype != q.dtype:
            raise TypeError(
                f"{op}: {what} is {tensor.dtype} and q {q.dtype}; pass one dtype for all"
                f"{': convert with .to(q.dtype)' if tensor.is_floating_point() else ''}"
            )


def check_sizes(op: str, what: str, **sizes: int) -> None:
    (first, size), *others = sizes.items()
    for other, its_size in others:
        if its_size != size:
            raise ValueError(f"{op}: {first} has {what} {size} and {other} {its_size}; they must be equal")


def check_heads(op: str, q: Tensor, k: Tensor, v: Tensor, k_name: str = "k", v_name: str = "v") -> None:
    check_sizes(op, "head size", **{"q": q.shape[-1], k_name: k.shape[-1]})
    check_sizes(op, "head count", **{k_name: k.shape[-2], v_name: v.shape[-2]})
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if heads % kv_heads if kv_heads else heads:
        raise ValueError(
            f"{op}: {heads} heads of q cannot share {kv_heads} of {k_name}; pass a multiple of "
            "them, and transpose q and the keys if yours have the heads before the length"
        )
    for what, size in (("q", q.shape[-1]), (v_name, v.shape[-1])):
        if size == 0:
            raise ValueError(f"{op}: {what} has head size 0; pass heads of at least one column")


def check_slopes(op: str, slopes: Tensor | None, q: Tensor, batch: int) -> None:
    if slopes is None:
        return
    heads = q.shape[-2]
    # Size by size: Dynamo cannot find a tuple of symbols in a tuple of tuples.
    of_heads = slopes.dim() in (1, 2) and slopes.shape[-1] == heads
    if not of_heads or (slopes.dim() == 2 and slopes.shape[0] != batch):
        raise ValueError(
            f"{op}: alibi_slopes has shape {list(slopes.shape)}; pass one slope for each head, "
            f"[{heads}], or also for each sequence, [{batch}, {heads}]"
        )
    if slopes.dtype not in DTYPES.values():
        raise TypeError(f"{op}: alibi_slopes is {slopes.dtype}; convert it with .float()")
    check_device(op, "alibi_slopes", slopes, q, "q")


def refuse_gradient_by_distance(op: str, trains: bool) -> None:
    """Refuses gradients of ALiBi by distance: its two passes are not differentiable."""
    if trains:
        raise NotImplementedError(
            f"{op}: alibi_slopes without causal=True have no backward; use "
            "F.scaled_dot_product_attention of the transposed [batch, heads, length, head_dim], with an "
            "attn_mask that holds the ALiBi bias, or call under torch.no_grad()"
        )


def integer(op: str, what: str, number: int | Tensor | None, meaning: str) -> int:
    """Checks an integer; like flash-attn, accepts a one-element tensor."""
    if number is None:
        raise TypeError(f"{op}: {what} is None; pass {meaning}")
    if isinstance(number, Tensor) and (number.dim() or number.dtype not in (torch.int32, torch.int64)):
        raise TypeError(f"{op}: {what} is {number.dtype} of shape {list(number.shape)}; pass {meaning}")
    size = number if isinstance(number, int) else operator.index(number)  # a symbol stays symbolic
    if size < 0:
        raise ValueError(f"{op}: {what} {size} is negative; pass {meaning}")
    return size


def softcap_of(op: str, softcap: float, scale: float | None) -> float:
    cap = float(softcap)
    if not 0.0 <= cap <= MAX_SOFTCAP or (cap and abs(1.0 if scale is None else scale) / cap > MAX_SCALE):
        raise ValueError(
            f"{op}: softcap {cap} is negative, not finite or out of range; pass a number up to "
            f"{MAX_SOFTCAP:.0e}, or 0.0 for none"
        )
    return cap


def scale_of(op: str, softmax_scale: float | None) -> float | None:
    if softmax_scale is None:
        return None
    scale = float(softmax_scale)
    if not abs(scale) <= MAX_SCALE:
        raise ValueError(
            f"{op}: softmax_scale {scale} is not finite in float32; pass None for the default, "
            "1 / sqrt(head size)"
        )
    return scale


def refuse_dropout(op: str, dropout_p: float) -> None:
    if dropout_p != 0.0:
        raise NotImplementedError(
            f"{op}: dropout_p {dropout_p} is not 0 and there is no dropout; use "
            "F.scaled_dot_product_attention for training"
        )


def window(size: Window) -> dict[str, int]:
    """The operators' window options. A side of -1 or None is unlimited; vLLM's default is None for the
    window."""
    sides = (None, None) if size is None else size
    left, right = (-1 if side is None else min(max(operator.index(side), -1), NO_LIMIT) for side in sides)
    return {"window_left": left, "window_right": right}


def check_between(op: str, what: str, numbers: Tensor, most: int | Tensor) -> None:
    """With FATTN_CHECK=1, checks the range of numbers on the device."""
    if not is_checked():
        return
    limits = most.tolist() if isinstance(most, Tensor) else [most] * numbers.shape[0]
    for b, (number, limit) in enumerate(zip(numbers.tolist(), limits, strict=True)):
        if not 0 <= number <= limit:
            raise ValueError(f"{op}: {what}[{b}] is {number} and must be between 0 and {max(limit, 0)}")


def check_blocks(op: str, what: str, table: Tensor, lens: Tensor, new: int, pool: Tensor) -> None:
    """Checks the block table entries in use after appending `new` keys to sequences of these lengths."""
    if not is_checked():
        return
    num_blocks, block_size = pool.shape[:2]
    for b, (row, length) in enumerate(zip(table.tolist(), lens.tolist(), strict=True)):
        for entry, block in enumerate(row[: -(-max(length + new, 0) // max(block_size, 1))]):
            if not 0 <= block < num_blocks:
                place = f"{b}, {entry}" if what == "block_table" else f"{b}"
                raise ValueError(
                    f"{op}: {what}[{place}] is {block} and must be between 0 and {num_blocks - 1}"
                )
    _check_apart(op, what, table.tolist(), lens.tolist(), new, block_size)


def _check_apart(
    op: str, what: str, table: list[list[int]], lens: list[int], new: int, block_size: int
) -> None:
    """Checks that new keys have different slots."""
    owner: dict[tuple[int, int], int] = {}
    for b, (row, length) in enumerate(zip(table, lens, strict=True)):
        for position in range(length, length + new):
            place = row[position // block_size], position % block_size
            if place in owner:
                raise ValueError(
                    f"{op}: new keys of sequences {owner[place]} and {b} have the same place; "
                    f"give each sequence different entries in {what}"
                )
            owner[place] = b
