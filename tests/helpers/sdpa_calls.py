"""A seeded generator of calls of F.scaled_dot_product_attention that torch takes and torch_fattn has kernels
for: every way to broadcast, to lay out and to mask, head sizes that have to be padded, two and three
dimensions."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.accuracy import EXTRA_ERROR
from tests.helpers.layouts import strided

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_DIMS = (8, 40, 64, 72, 80, 128, 136, 256, 5, 36, 60, 131)
VALUE_DIMS = {80: 40, 64: 128, 128: 64, 60: 125, 36: 33}  # which random problems of the operators have, too
LENGTHS = (0, 1, 1, 2, 7, 16, 17, 33, 64, 65, 130)
LAYOUTS = ("contiguous", "token_major", "offset", "every_other", "padded", "flipped_memory")
MASK_RANKS = (2, 3, 4)
LARGE = 16.0


@dataclass(frozen=True)
class SdpaCall:
    operands: tuple[Tensor, Tensor, Tensor]  # on the CPU, laid out
    options: dict[str, Any]

    def on(self, device: str, dtype: torch.dtype | None = None) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """The call on a device, in the layouts of the operands; with a dtype, in that one and contiguous."""

        def move(tensor: Tensor) -> Tensor:
            if dtype is None:
                return with_strides_of(tensor, device)
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        options = {n: move(v) if isinstance(v, Tensor) else v for n, v in self.options.items()}
        return tuple(move(operand) for operand in self.operands), options

    def expected(self) -> Tensor:
        operands, options = self.on("cpu", torch.float64)
        return F.scaled_dot_product_attention(*operands, **options)

    def limit(self, exact: Tensor) -> float:
        """Twice the error of torch's own in the same dtype, on the CPU. For scores beyond LARGE also what
        rounding the largest to float32 does to a weight, less than which torch's error can be by chance."""
        if not exact.numel():
            return 0.0
        theirs = F.scaled_dot_product_attention(*self.operands, **self.options)
        limit = 2 * (theirs.double() - exact).abs().max().item() + EXTRA_ERROR
        largest = self.largest_score()
        return limit + torch.finfo(torch.float32).eps / 2 * largest if largest > LARGE else limit

    def largest_score(self) -> float:
        query, key = (operand.double() for operand in self.operands[:2])
        if query.dim() > 2 and query.shape[-3] != key.shape[-3] != 1:
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        scores = query @ key.mT * self.options.get("scale", query.shape[-1] ** -0.5)
        return scores.abs().max().item() if scores.numel() else 0.0

    def __str__(self) -> str:
        shapes = ", ".join(f"{tuple(t.shape)} by {t.stride()}" for t in self.operands)
        return f"{self.operands[0].dtype} {shapes} {self.options}"


def with_strides_of(tensor: Tensor, device: str) -> Tensor:
    """A copy of the tensor's memory on the device, and the same view of it: strides of 0 stay 0."""
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return whole.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def lay_out(tensor: Tensor, layout: str) -> Tensor:
    ways: dict[str, dict[str, Any]] = {
        "token_major": {"order": (0, 2, 1, 3)},
        "offset": {"offset": 24},
        "every_other": {"step": 2},
        "padded": {"offset": 8, "gaps": {3: 8}},
        "flipped_memory": {"order": (3, 2, 1, 0)},
    }
    operand = strided(tensor.shape, tensor.dtype, **ways.get(layout, {})).holding(tensor)
    return operand.of(operand.base)


def a_call(seed: int) -> SdpaCall:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype = rng.choice(DTYPES)
    head_dim = rng.choice(HEAD_DIMS)
    value_dim = head_dim if rng.random() < 0.3 else VALUE_DIMS.get(head_dim, head_dim)
    q_len, kv_len = rng.choice(LENGTHS), rng.choice(LENGTHS)
    batch = rng.choice((1, 1, 2, 3))
    q_heads, kv_heads, gqa = rng.choice(
        ((4, 4, False), (3, 3, True), (4, 2, True), (6, 1, True), (8, 2, True), (5, 1, False), (1, 1, False))
    )
    sizes = {
        "query": [batch, q_heads, q_len, head_dim],
        "key": [batch, kv_heads, kv_len, head_dim],
        "value": [batch, kv_heads, kv_len, value_dim],
    }
    # torch does not broadcast empty tensors either.
    broadcast = rng.random() if q_len and kv_len else 1.0
    if broadcast < 0.15:  # one batch for all
        sizes[rng.choice(list(sizes))][0] = 1
    elif broadcast < 0.25:
        sizes["key"][0] = sizes["value"][0] = 1
    elif broadcast < 0.35 and not gqa and kv_heads == q_heads:  # one head for all
        sizes[rng.choice(list(sizes))][1] = 1
    operands = []
    for shape in sizes.values():
        layout = rng.choice(LAYOUTS)
        operand = lay_out(torch.randn(shape).to(dtype), layout)
        if operand.shape[0] == 1 and batch > 1 and rng.random() < 0.5:
            operand = operand.expand(batch, -1, -1, -1)
        operands.append(operand)
    options: dict[str, Any] = {"enable_gqa": gqa} if gqa or rng.random() < 0.3 else {}
    if options and not gqa:
        options["enable_gqa"] = False
    if rng.random() < 0.3:
        options["scale"] = rng.choice((0.05, 0.3, 1.0, 2.0))  # of 0 and below torch on the CPU makes NaN
    masking = rng.random()
    if masking < 0.3:
        options["is_causal"] = True
    elif masking < 0.75:
        options["attn_mask"] = a_mask(rng, dtype, (batch, q_heads, q_len, kv_len))
    rank = rng.choice((2, 3, 4, 4))
    mask_rank = options["attn_mask"].dim() if "attn_mask" in options else 2
    while operands[0].dim() > max(rank, mask_rank) and all(len(operand) == 1 for operand in operands):
        if operands[0].dim() == 3 and "enable_gqa" in options:
            break  # torch requires a dimension of heads
        operands = [operand[0] for operand in operands]
    return SdpaCall((operands[0], operands[1], operands[2]), options)


def a_mask(rng: random.Random, dtype: torch.dtype, scores: tuple[int, ...]) -> Tensor:
    rank = rng.choice(MASK_RANKS)
    shape = [size if rng.random() < 0.6 else 1 for size in scores[-rank:]]
    keep = torch.rand(shape) < rng.choice((0.3, 0.8, 1.0))
    kind = rng.choice(("bool", "float32", "same", "infinite"))
    if kind == "bool":
        mask = keep
    elif kind == "infinite":
        mask = torch.zeros(shape, dtype=dtype).masked_fill(~keep, -torch.inf)
    else:
        mask = torch.randn(shape).to(torch.float32 if kind == "float32" else dtype)
    arrangement = rng.random()
    if arrangement < 0.3:
        mask = mask.expand(scores[-rank:])
    elif arrangement < 0.5:
        mask = mask.mT.contiguous().mT
    return mask
