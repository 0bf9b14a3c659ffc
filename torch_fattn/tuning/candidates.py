"""The candidates of `python -m torch_fattn tune`: tile sizes for each kernel, dtype and head size, and the
calls that are only timed against torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from ..inspection.plans import Explanation, explain
from ..operators.differentiable import MAX_BACKWARD_HEAD_DIM
from .tuned_file import SIZES, TENSORS, TunedRoute, TunedRow, fault_of

# Prefills of up to this many rows are timed and tuned separately.
SHORT_PREFILL = 512

Sizes = tuple[tuple[str, int], ...]  # tile sizes by name


@dataclass(frozen=True)
class Calls:
    """Per operator: query and key-value heads, and the (rows, keys) of the calls that are timed. Rows up to
    SHORT_PREFILL come first."""

    heads: dict[str, tuple[int, int]]
    lengths: dict[str, tuple[tuple[int, int], ...]]


# Training is timed where torch keeps matrices of 2 and 34 MB. From 46 MB on, a Mac with 16 GB always trains
# here (csrc/plan/route.h).
FULL = Calls(
    {"prefill": (8, 8), "decode": (32, 8), "training": (8, 8)},
    {
        "prefill": ((256, 256), (2048, 2048)),
        "decode": ((1, 1024), (1, 16384)),
        "training": ((256, 256), (1024, 1024)),
    },
)
TINY = Calls(
    {"prefill": (2, 1), "decode": (6, 2), "training": (2, 2)},
    {
        "prefill": ((24, 24), (520, 520)),
        "decode": ((1, 96), (1, 300)),
        "training": ((24, 24), (40, 40)),
    },
)


@dataclass(frozen=True)
class Subject:
    """Calls that are tuned together: one kernel, one dtype, and a range of the larger head size. Training has
    many kernels, whose sizes are not tuned."""

    kernel: str  # or "training", "training_causal"
    dtype: str
    min_dim: int
    max_dim: int
    dim: int  # head size to time

    @property
    def op(self) -> str:
        return self.kernel.split("_")[0]

    @property
    def routed(self) -> str:
        """The op of its routes."""
        return self.kernel if self.op == "training" else self.op

    @property
    def shares_keys(self) -> bool:
        """Whether the timed calls share key-value heads between query heads."""
        return self.kernel != "decode_vector"

    def __str__(self) -> str:
        heads = "" if self.shares_keys else ", no shared heads"
        return f"{self.routed.replace('_', ' ')} {self.dtype} D {self.min_dim} to {self.max_dim}{heads}"

    def row(self, sizes: Sizes, max_length: int | None = None, gain: float = 1.0) -> TunedRow:
        scope = (self.kernel, self.dtype, self.min_dim, self.max_dim)
        return TunedRow(*scope, dict(sizes), max_length, gain)

    def tensors(self, macos: str) -> TunedRow:
        """The row that enables tensor operations for this head size."""
        return TunedRow(TENSORS, self.dtype, self.dim, self.dim, {}, macos=macos)

    def is_of(self, row: TunedRow | TunedRoute) -> bool:
        if isinstance(row, TunedRoute):
            return (row.op, row.dtype, row.dim) == (self.routed, self.dtype, self.dim)
        kernels = (self.kernel, TENSORS) if self.op == "prefill" else (self.kernel,)
        return (
            row.kernel in kernels
            and row.dtype == self.dtype
            and (row.min_dim <= self.max_dim and self.min_dim <= row.max_dim)
        )

    def shapes(self, calls: Calls, i: int) -> list[tuple[int, int]]:
        """Heads and rows of query, key and value of the call with length i."""
        (heads, kv_heads), (q_len, kv_len) = calls.heads[self.op], calls.lengths[self.op][i]
        return [(heads if self.shares_keys else kv_heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len)]

    def operands(self, calls: Calls, i: int, device: str) -> list[torch.Tensor]:
        """Operands of the call with length i; on the CPU, identical on every machine."""
        generator = torch.Generator().manual_seed(1) if device == "cpu" else None
        return [
            torch.randn(1, *shape, self.dim, generator=generator, device=device).to(
                getattr(torch, self.dtype)
            )
            for shape in self.shapes(calls, i)
        ]

    @property
    def options(self) -> dict[str, Any]:
        return {"is_causal": True} if self.routed in ("prefill", "training_causal") else {}

    def plan(self, calls: Calls, i: int) -> Explanation:
        """The plan of the call with length i on this GPU, with the current tuning."""
        dtype = getattr(torch, self.dtype)
        operands = (
            torch.empty(1, 1, rows, self.dim, dtype=dtype, device="mps").expand(-1, heads, -1, -1)
            for heads, rows in self.shapes(calls, i)
        )
        return explain(self.op, *operands, **self.options)


def subjects() -> list[Subject]:
    """All subjects, most useful first."""
    ranges = {"": ((97, 128, 128), (1, 64, 64), (65, 96, 96)), "_wide": ((129, 256, 256), (257, 576, 512))}
    return [
        Subject(kernel, dtype, *dims)
        for kind, all_dims in ranges.items()
        for dtype in ("float16", "bfloat16", "float32")
        for dims in all_dims
        for kernel in (f"prefill{kind}", f"decode{kind}", "training", "training_causal")
        if not kernel.startswith("training") or dims[-1] <= MAX_BACKWARD_HEAD_DIM
    ] + [
        Subject("decode_vector", dtype, *dims)
        for dtype in ("float16", "bfloat16", "float32")
        for dims in ((65, 128, 128), (1, 64, 64), (129, 256, 256))
    ]


def candidates(subject: Subject) -> list[Sizes]:
    """The tile sizes that the planner accepts."""
    return [sizes for sizes in _combinations(subject.kernel) if fault_of([subject.row(sizes)]) == ""]


def _combinations(kernel: str) -> Iterator[Sizes]:
    names = SIZES[kernel]
    if kernel == "prefill":
        values: Iterator[tuple[int, ...]] = product((1, 2), (16, 32), (4, 8), (0, 1))
    elif kernel == "prefill_wide":
        rows, shapes = ((2, 1), (1, 2), (1, 1)), product((16, 32), (4, 8), (0, 1))
        values = ((*row, *shape) for row, shape in product(rows, list(shapes)))
    else:
        keys = (32,) if kernel == "decode_vector" else (8, 16, 32)
        simdgroups = (4, 8) if kernel == "decode" else (4, 8, 16)
        values = product(keys, simdgroups, (128, 256), (2, 3, 4, 6))
    for chosen in values:
        yield tuple(zip(names, chosen, strict=True))


def order_of(kernel: str, sizes: Sizes) -> Sizes:
    """The sizes that determine the summation order, which must not depend on the length
    (csrc/plan/tuned.h)."""
    if kernel.startswith("decode"):
        return sizes
    chosen = dict(sizes)
    shares = 1
    if kernel == "prefill_wide":
        shares = max(chosen["simdgroups"] // chosen["row_groups"] * 8 // chosen["tile_keys"], 1)
    return (("tile_keys", chosen["tile_keys"]), ("sum_shares", shares))


def sizes_of_plan(kernel: str, plan: Explanation) -> Sizes:
    """The sizes that the planner chose for a prefill."""
    macros = plan.passes[0]["macros"]
    sizes = {name: macros[f"FATTN_{name.upper()}"] for name in SIZES[kernel]}
    return tuple(
        (name, int(value == "true" if name == "early_loads" else value)) for name, value in sizes.items()
    )
