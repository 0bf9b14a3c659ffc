"""What mutants are tried on: calls of every op, small and rich in edges, each with its answer and with bounds
of what it may cost (counts.json).

Trials that share a pipeline stand together, since one compilation serves them all; the first ones combine as
many features as they can, since most mutants die there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torch_fattn.reference as reference
from tests import direct_launch, problems
from tests.accuracy import assert_close
from tests.problems import Problem

CHECKS = "race,bounds,uninit,bytes"
WATCHDOG = 10.0  # seconds for a threadgroup that takes hundredths of one
_COUNTED = (
    *("products", "simd_reductions", "shuffles", "threadgroup_barriers", "simdgroup_barriers", "exps"),
    *("device_loads", "device_stores"),
)
_SPACES = ("device", "threadgroup")
f32, f16, bf16 = problems.DTYPES
PADDED = ("padded_rows", "padded_rows", "padded_rows")  # no row on a 16-byte boundary
OFF = ("offset", "offset", "token_major")

Counts = dict[str, int]


@dataclass(frozen=True)
class Trial:
    name: str
    op: str
    arguments: Mapping[str, Any]  # on the CPU
    check: Callable[[Tensor, Tensor], None]  # out and lse

    def kernels(self) -> set[str]:
        """The sources that it launches."""
        return {step["source"] for step in direct_launch.plan_of(self.op, self.arguments)["passes"]}

    def run(self, mutate: direct_launch.Mutate | None = None, cache: Path | None = None) -> Counts:
        """Launches the kernels, checks the result, and returns what was counted."""
        plan = direct_launch.plan_of(self.op, self.arguments)
        buffers = direct_launch.buffers_of(self.op, self.arguments, plan)
        counts: Counts = dict.fromkeys([*_COUNTED, *(f"{space}_bytes" for space in _SPACES)], 0)
        for step in plan["passes"]:
            counters = direct_launch.launch(
                step, buffers, mutate, checks=CHECKS, watchdog=WATCHDOG, cache=cache
            )
            for name in _COUNTED:
                counts[name] += counters[name]
            for space in _SPACES:
                counts[f"{space}_bytes"] += counters["bytes_read"][space] + counters["bytes_written"][space]
        self.check(buffers["out"], buffers["lse"])
        return counts


def _of_problem(name: str, op: str, dtype: torch.dtype, *sizes: int, **options: Any) -> Trial:
    """`sizes` are those of Problem: batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim."""
    case = problems.build(Problem(0, op, dtype, *sizes, **options), seed=7)  # type: ignore[arg-type]
    return Trial(name, op, case.arguments("cpu")[0], lambda out, lse: assert_close(case, out, lse))


def _of_operands(name: str, op: str, tolerance: float = 0.02, **arguments: Any) -> Trial:
    """NaN, too, must be where the reference has it and nowhere else."""
    exact_out, exact_lse = getattr(reference, op)(**arguments)

    def check(out: Tensor, lse: Tensor) -> None:
        for result, exact in ((out.double(), exact_out), (lse.double(), exact_lse)):
            torch.testing.assert_close(result, exact, rtol=1e-3, atol=tolerance, equal_nan=True)

    return Trial(name, op, arguments, check)


def _randn(dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def _decode() -> Iterator[Trial]:
    half = ("decode", f16)
    yield _of_problem("decode-edges", *half, 3, 4, 2, 2, 96, 64, 32, seq_lens=(75, 0, 64))
    yield _of_problem(
        "decode-sinks", *half, 2, 8, 2, 1, 600, 64, 32, seq_lens=(600, 513), sinks=True, scale=0.3
    )
    window: dict[str, Any] = {"window_left": 60, "sink_tokens": 5}
    yield _of_problem("decode-wide-window", *half, 1, 2, 1, 2, 100, 64, 32, window_left=300, sink_tokens=3)
    # Key 23 is in the window of some rows, and no sink token.
    yield _of_problem("decode-sinks-in-window", *half, 1, 1, 1, 8, 90, 64, 32, window_left=62, sink_tokens=23)
    yield _of_problem("decode-window", *half, 2, 2, 1, 2, 700, 64, 32, seq_lens=(530, 301), **window)
    yield _of_problem(
        "decode-far-window", *half, 3, 2, 1, 1, 1100, 64, 32, seq_lens=(1100, 33, 700),
        window_left=300, sink_tokens=64,
    )  # fmt: skip
    yield _of_problem("decode-whole-steps", *half, 1, 2, 1, 2, 512, 64, 32, window_left=353, sink_tokens=32)
    yield _of_problem(
        "decode-modifiers", *half, 2, 4, 2, 2, 96, 64, 32, seq_lens=(96, 70), mask=f32, softcap=2.0,
        alibi_slopes=True, sinks=True, mask_layout="padded_rows", layouts=OFF,
    )  # fmt: skip
    yield _of_problem(
        "decode-alibi", *half, 1, 4, 1, 2, 300, 64, 32, alibi_slopes=True, softcap=30.0, layouts=PADDED
    )
    for tree in ("shared", "each"):
        yield _of_problem(f"decode-tree-{tree}", *half, 2, 2, 1, 4, 100, 64, 32, seq_lens=(98, 3), tree=tree)
    yield _of_problem("decode-tree-end", *half, 1, 2, 1, 2, 66, 64, 32, seq_lens=(66,), tree="shared")
    yield _of_problem(
        "decode-bool-mask", *half, 2, 4, 2, 2, 70, 64, 32, seq_lens=(70, 41), mask=torch.bool,
        mask_layout="offset",
    )  # fmt: skip
    lengths = (260, *[n % 3 for n in range(38)], 257, 0)
    yield _of_problem("decode-many", *half, 41, 1, 1, 1, 300, 64, 32, seq_lens=lengths)
    paged = ("paged_decode", f16)
    for block_size, capacity in ((16, 96), (1, 40), (8, 72), (12, 96), (24, 96), (64, 128), (256, 512)):
        yield _of_problem(
            f"paged-{block_size}", *paged, 2, 4, 2, 2, capacity, 64, 32,
            seq_lens=(capacity, capacity * 2 // 5), block_size=block_size,
            head_major_pool=block_size % 16 == 0,
        )  # fmt: skip
    yield _of_problem(
        "paged-window", *paged, 2, 2, 1, 3, 640, 64, 32, seq_lens=(640, 299), block_size=16, tree="each",
        window_left=90, sink_tokens=20, sinks=True,
    )  # fmt: skip
    for block_size in (16, 12):
        yield _strange_tables(block_size)
    yield _hidden_nan("decode", f16, 64, 32)
    yield _unlikely("decode", f16, 64, 32)
    yield from _other_pipelines()


def _other_pipelines() -> Iterator[Trial]:
    """Of decode: float32 and bfloat16, more packed rows than eight, heads of every kind of chunk."""
    yield _of_problem("decode-18-rows", "decode", f32, 2, 9, 1, 2, 75, 40, 24, seq_lens=(75, 44))
    yield _of_problem("decode-f32-chunks", "decode", f32, 1, 16, 1, 2, 2100, 40, 24, layouts=PADDED)
    yield _of_problem("decode-32-rows", "decode", f32, 1, 16, 1, 3, 70, 40, 24, sinks=True, tree="shared")
    yield _hidden_nan("decode", f32, 40, 24, group=9)
    yield _of_problem(
        "decode-f32-mask", "decode", f32, 1, 16, 1, 2, 50, 40, 24, mask=f16, alibi_slopes=True, softcap=3.0
    )
    yield _of_problem(
        "decode-bf16", "decode", bf16, 2, 2, 1, 2, 300, 72, 16, seq_lens=(300, 9), mask=bf16, sinks=True
    )
    yield _of_problem(
        "paged-bf16", "paged_decode", bf16, 2, 2, 1, 2, 320, 72, 16, seq_lens=(300, 9), block_size=16
    )
    yield _of_problem("decode-16-rows", "decode", f16, 1, 16, 1, 1, 600, 8, 8, seq_lens=(600,))
    # Of one chain of 128 roundings, the accuracy rule would have too much.
    yield _of_problem("decode-f32-long-sums", "decode", f32, 1, 2, 1, 1, 60, 128, 16, scale=1.0)
    yield _of_problem("decode-long-head", "decode", f16, 1, 2, 1, 1, 60, 16, 128, seq_lens=(60,))


def _strange_tables(block_size: int) -> Trial:
    """Lengths and blocks out of range are no keys."""
    pools = {name: _randn(f16, 6, block_size, 1, dim) for name, dim in (("key", 64), ("value", 32))}
    # Every other entry of a storage.
    tables = torch.tensor([[0, 9, 2, -5], [3, 1, -1, 6], [5, 5, 5, 5]], dtype=torch.int32)
    tables = tables.repeat_interleave(2, dim=1)[:, ::2]
    return _of_operands(
        f"strange-tables-{block_size}",
        "paged_decode",
        query=_randn(f16, 3, 2, 2, 64),
        key_cache=pools["key"],
        value_cache=pools["value"],
        block_tables=tables,
        seq_lens=torch.tensor([4 * block_size, 7, 1000, 7, -3], dtype=torch.int32)[::2],
    )


def _hidden_nan(op: str, dtype: torch.dtype, head_dim: int, value_dim: int, group: int = 2) -> Trial:
    """Keys 21, 40 and 67, in three steps of prefill and staged by three simdgroups, are NaN or infinite; some
    rows see them, in part at a weight of 0."""
    rows, length = (40, 70) if op == "prefill" else (3, 70)
    query = _randn(dtype, 1, group, rows, head_dim)
    key, value = _randn(dtype, 1, 1, length, head_dim), _randn(dtype, 1, 1, length, value_dim)
    mask = torch.zeros(1, group, rows, length)
    mask[:, 0, :, 21] = -torch.inf
    mask[:, 1:, 0, 21] = -1e4
    mask[:, 1:, 1, 21] = -torch.inf
    mask[:, 0, 1:, 40] = -torch.inf
    mask[:, 1:, :, 40] = -torch.inf
    mask[..., 67] = -torch.inf
    mask[:, 0, 0, 67] = 0.0
    value[:, :, 67, 2::3] = torch.nan
    value[:, :, 21, ::3] = torch.nan
    value[:, :, 40, 1::2] = torch.inf
    return _of_operands(
        f"{op}-{problems.SHORT[dtype]}-hidden-nan", op, query=query, key=key, value=value, attn_mask=mask
    )


def _unlikely(op: str, dtype: torch.dtype, head_dim: int, value_dim: int) -> Trial:
    """Every key has a score far below 0, in some rows of 1,000 below the others."""
    query = _randn(dtype, 1, 2, 3, head_dim)
    key, value = _randn(dtype, 1, 1, 70, head_dim), _randn(dtype, 1, 1, 70, value_dim)
    mask = torch.full((1, 2, 3, 70), -1000.0)
    mask[:, :, 1, :40] = -2000.0
    return _of_operands(f"{op}-unlikely", op, query=query, key=key, value=value, attn_mask=mask)


def _prefill() -> Iterator[Trial]:
    half = ("prefill", f16)
    causal: dict[str, Any] = {"causality": "bottom_right"}
    yield _of_problem("prefill-causal", *half, 1, 4, 2, 80, 150, 64, 32, **causal)
    yield _of_problem("prefill-full", *half, 2, 2, 1, 70, 75, 64, 32, layouts=PADDED, scale=0.3)
    yield _of_problem(
        "prefill-mask", *half, 2, 2, 1, 33, 70, 64, 32, mask=f16, mask_layout="padded_rows", layouts=OFF
    )
    yield _of_problem("prefill-bool-mask", *half, 1, 2, 1, 33, 64, 64, 32, mask=torch.bool, **causal)
    for offset in (0, -40, 60, 1, 31):  # of 1 and 31, steps begin and end with a tile's rows
        yield _of_problem(
            f"prefill-offset{offset}", *half, 1, 2, 1, 150, 130, 64, 32, causality="offset", q_offset=offset
        )
    yield _of_problem("prefill-one-row", *half, 2, 2, 2, 1, 9, 64, 32, **causal)
    yield _hidden_nan("prefill", f16, 64, 32)
    yield _unlikely("prefill", f16, 64, 32)
    yield _of_problem("prefill-f32", "prefill", f32, 1, 2, 1, 43, 75, 40, 24, mask=f32, **causal)
    yield _hidden_nan("prefill", f32, 40, 24)
    yield _of_problem("prefill-f32-full", "prefill", f32, 1, 2, 1, 43, 75, 40, 24, layouts=OFF)
    yield _of_problem("prefill-bf16", "prefill", bf16, 1, 2, 1, 70, 100, 72, 16, mask=bf16, layouts=PADDED)
    yield _of_problem("prefill-f16-long-head", *half, 1, 1, 1, 30, 40, 16, 128, **causal)


def _merge() -> Iterator[Trial]:
    for name, dtype, parts, columns in (
        ("merge", f32, 5, 200),
        ("merge-40-parts", f16, 40, 24),
        ("merge-128-columns", f16, 12, 128),
        ("merge-12-parts", bf16, 12, 300),
    ):
        outs, lses = _randn(dtype, parts, 2, 2, 3, columns), _randn(f32, parts, 2, 2, 3) * 5
        lses[1, 0, 0] = -torch.inf
        lses[:, 1, 1, 0] = -torch.inf
        outs[1, 0, 0] = torch.nan
        yield _of_operands(name, "merge", 1e-5 if dtype == f32 else 0.02, outs=outs, lses=lses)


def all_trials() -> list[Trial]:
    return [*_decode(), *_prefill(), *_merge()]
