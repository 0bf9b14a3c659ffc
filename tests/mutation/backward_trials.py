"""Trials of prefill_backward and varlen_prefill_backward (csrc/kernels/backward)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import torch_fattn.reference as reference
from tests.helpers import backward_problems, direct_launch, problems
from tests.helpers.backward_problems import BackwardProblem
from tests.helpers.gradient_accuracy import assert_gradients_close
from tests.helpers.problems import Problem
from torch_fattn.operators.backward import Gradients

from .trial import Device, Plan, Prepared, Trial, bf16, f16, f32, randn

PADDED = ("padded_rows", "padded_rows", "padded_rows")  # no row on a 16-byte boundary
OFF = ("offset", "offset", "token_major")
CAUSAL: dict[str, Any] = {"causality": "bottom_right"}
DIMS = (64, 32)
# Sequences without keys, without rows, and rows and keys of no sequence.
MIXED: dict[str, Any] = {"q_lens": (70, 1, 9, 0, 20), "seq_lens": (113, 65, 0, 30, 37), "spare_rows": 3}
MIXED_SIZES = (5, 4, 2, 70, 120)


def backward() -> Iterator[Trial]:
    """float16, of one simdgroup for all columns of its rows or keys."""
    yield _of("backward", 2, 4, 2, 40, 70, *DIMS, scale=0.3)
    yield _of("backward-causal", 1, 4, 2, 80, 150, *DIMS, grad_lse=True, **CAUSAL)
    yield _of("backward-out", 1, 4, 2, 70, 75, *DIMS, out="float32", layouts=OFF, grad_layout="offset")
    yield _of("backward-out-lse", 1, 2, 1, 80, 90, *DIMS, out="float32", grad_lse=True, **CAUSAL)
    yield _of("backward-padded", 1, 2, 2, 33, 41, 72, 40, layouts=PADDED, grad_layout="padded_rows")
    for offset in (0, -40, 60, 1, 31):  # of 1 and 31, steps begin and end with a tile's rows
        yield _of(
            f"backward-offset{offset}", 1, 2, 1, 90, 80, *DIMS, causality="offset", q_offset=offset,
            grad_lse=True,
        )  # fmt: skip
    yield _of("backward-one-row", 2, 2, 2, 1, 9, *DIMS, **CAUSAL)
    yield from _masked()
    yield from _options()
    yield from _packed()
    yield _of("backward-slices", 2, 4, 2, 70, 70, *DIMS, change=_in_slices, **CAUSAL)


def other_backward() -> Iterator[Trial]:
    """Columns over several simdgroups, other dtypes, and the tiles of later GPUs."""
    yield _of("backward-wide", 1, 2, 1, 40, 50, 136, 200, grad_lse=True, **CAUSAL)
    yield _of("backward-wide-padded", 1, 2, 1, 40, 50, 200, 24, layouts=PADDED, out="float32", sinks=True)
    yield _of(
        "backward-wide-map", 1, 2, 1, 40, 100, 136, 136, mask=f16, mask_pattern="patches", mask_map=True,
    )  # fmt: skip
    yield _of("backward-96", 1, 2, 1, 40, 50, 96, 88, softcap=2.0, **CAUSAL)
    # The last row that sees a tile's keys ends a step.
    yield _of("backward-128", 1, 2, 1, 40, 50, 128, 64, window_left=10, sink_tokens=3, **CAUSAL)
    yield _of("backward-f32", 1, 2, 1, 43, 45, 40, 24, dtype=f32, mask=f32, grad_lse=True, **CAUSAL)
    yield _of("backward-f32-out", 1, 2, 1, 43, 45, 24, 32, dtype=f32, out="float32", alibi_slopes=True)
    yield _of("backward-f32-96", 1, 2, 1, 20, 30, 96, 88, dtype=f32, grad_lse=True, **CAUSAL)
    yield _of("backward-f32-wide", 1, 2, 1, 20, 30, 136, 200, dtype=f32, layouts=PADDED, **CAUSAL)
    yield _of("backward-bf16", 1, 2, 1, 43, 45, 72, 16, dtype=bf16, mask=bf16, sinks=True, index=1)
    yield _of("backward-later", 1, 2, 1, 70, 90, *DIMS, family=9, grad_lse=True, sinks=True, **CAUSAL)
    yield _of("backward-later-out", 1, 2, 1, 70, 80, 40, 64, family=9, out="float32", alibi_slopes=True)
    yield _of(
        "backward-later-map", 1, 2, 1, 70, 160, *DIMS, family=9, mask=torch.bool, mask_pattern="patches",
        mask_map=True,
    )  # fmt: skip
    yield _of("backward-later-bf16", 1, 2, 1, 43, 75, *DIMS, dtype=bf16, family=9, window_left=20, **CAUSAL)
    yield _of("backward-later-96", 1, 2, 1, 43, 75, 96, 80, family=9, sinks=True, grad_lse=True, **CAUSAL)
    yield _of(
        "backward-later-128", 1, 2, 1, 70, 150, 128, 104, family=9, mask=torch.bool, mask_pattern="patches",
        mask_map=True, **CAUSAL,
    )  # fmt: skip
    yield _of("varlen-backward-wide", *MIXED_SIZES, 136, 136, op="varlen_prefill", **MIXED, **CAUSAL)
    yield _of(
        "varlen-backward-f32", *MIXED_SIZES, 40, 24, op="varlen_prefill", dtype=f32, sinks=True,
        alibi_slopes=True, index=1, **MIXED,
    )  # fmt: skip


def on_tensors() -> Iterator[Trial]:
    """Calls that the kernels on tensor operations take: values as wide as keys, and 16 rows."""
    dims = (64, 64)
    yield _of("backward", 2, 4, 2, 70, 70, *dims, scale=0.3)
    yield _of("backward-causal", 1, 4, 2, 80, 150, *dims, grad_lse=True, grad_layout="token_major", **CAUSAL)
    yield _shifted_lse(dims[1])
    for offset in (-40, 60, 31):
        yield _of(
            f"backward-offset{offset}", 1, 2, 1, 90, 80, *dims, causality="offset", q_offset=offset,
            grad_lse=True,
        )  # fmt: skip
    # No row sees some keys between those that rows see.
    yield _of(
        "backward-bool-mask", 1, 4, 2, 33, 96, *dims, mask=torch.bool, grad_lse=True,
        mask_broadcast=(False, True, True, False), **CAUSAL,
    )  # fmt: skip
    yield _of("backward-mask", 2, 2, 1, 40, 70, *dims, mask=f16, softcap=2.0, mask_layout="padded_rows")
    yield _of(
        "backward-map", 2, 2, 1, 70, 150, *dims, mask=f16, mask_layout="every_other", grad_lse=True,
        mask_pattern="patches", mask_map=True, **CAUSAL,
    )  # fmt: skip
    yield _whole_map("backward-whole-map-causal", dims[1], is_causal=True)
    yield _whole_map("backward-whole-map-window", dims[1], window_left=46, window_right=16)
    yield _unlikely(20, dims[1])
    # The last row of a step alone does not see the first of a group's keys.
    yield _of(
        "backward-window", 1, 2, 1, 80, 150, *dims, window_left=52, sink_tokens=20, sinks=True, grad_lse=True,
        **CAUSAL,
    )  # fmt: skip
    yield _of(
        "backward-window-right", 1, 2, 1, 90, 100, *dims, window_left=11, window_right=11, sink_tokens=3
    )
    yield _of(
        "backward-sinks-alone", 1, 2, 1, 300, 40, *dims, causality="offset", q_offset=20, window_left=5,
        sinks=True, grad_lse=True,
    )  # fmt: skip
    yield _of("backward-alibi", 1, 4, 2, 70, 70, *dims, alibi_slopes=True, softcap=30.0, **CAUSAL)
    yield _of("backward-sequence-slopes", 3, 4, 2, 40, 30, *dims, alibi_slopes=True, sinks=True, index=1)
    yield _of("backward-sharp", 1, 2, 1, 40, 50, *dims, sharpness=8.0, sinks=True)
    yield _nan(100, 80, 48, dims[1])
    yield _every_option("prefill", 2, 4, 2, 40, 70, *dims, mask=f16, **CAUSAL)
    yield _every_option("varlen_prefill", *MIXED_SIZES, *dims, **MIXED, **CAUSAL)
    for name, options in (
        ("varlen-backward", {"causality": "bottom_right", "grad_lse": True}),
        ("varlen-backward-slopes", {"alibi_slopes": True, "causality": "offset", "q_offset": 11}),
        ("varlen-backward-window", {"window_left": 40, "window_right": 9, "sink_tokens": 7}),
    ):
        yield _of(name, *MIXED_SIZES, *dims, op="varlen_prefill", **MIXED, **options)
    yield _strange_starts(
        "varlen-backward-strange-keys", [3, 9, 20, 50, 80], [-5, 70, 2**31 - 1, 20, -(2**31)], 60, dims[1],
        is_causal=True,
    )  # fmt: skip
    yield _of("backward-slices", 2, 4, 2, 70, 70, *dims, change=_in_slices, **CAUSAL)
    yield _of("backward-padded", 1, 2, 1, 43, 75, 72, 72, dtype=bf16, sinks=True, **CAUSAL)
    yield _of("backward-128", 1, 2, 1, 70, 90, 128, 128, window_left=10, sink_tokens=3, **CAUSAL)
    yield _of("backward-wide", 1, 2, 1, 40, 75, 256, 256, grad_lse=True, **CAUSAL)


def _masked() -> Iterator[Trial]:
    """Masks of either kind, broadcast and not, and maps of masks in patches."""
    mapped: dict[str, Any] = {"mask_pattern": "patches", "mask_map": True}
    # No row sees some keys between those that rows see.
    yield _of(
        "backward-bool-mask", 1, 4, 2, 33, 64, *DIMS, mask=torch.bool, grad_lse=True,
        mask_broadcast=(False, True, True, False), **CAUSAL,
    )  # fmt: skip
    yield _of(
        "backward-mask", 2, 2, 1, 40, 70, *DIMS, mask=f16, mask_layout="padded_rows", out="float32",
        mask_broadcast=(False, True, False, False),
    )  # fmt: skip
    yield _of("backward-mask-f32", 1, 2, 1, 40, 50, *DIMS, mask=f32, softcap=2.0, sinks=True, grad_lse=True)
    # Half of the last step's cells are past the rows.
    yield _of("backward-map", 1, 2, 1, 80, 150, *DIMS, mask=torch.bool, **mapped)
    yield _of(
        "backward-map-causal", 2, 2, 1, 70, 100, *DIMS, mask=f16, mask_layout="every_other", grad_lse=True,
        **mapped, **CAUSAL,
    )  # fmt: skip
    # The last key that a step's first row sees ends a group, and the first that its last row sees begins one.
    yield _whole_map("backward-whole-map-causal", is_causal=True)
    yield _whole_map("backward-whole-map-window", window_left=46, window_right=16)
    yield _unlikely()


def _options() -> Iterator[Trial]:
    """Windows with a gap before them, sinks, and what modifies scores."""
    # The last row of a step alone does not see the first of a group's keys.
    yield _of(
        "backward-window", 1, 2, 1, 80, 150, *DIMS, window_left=44, sink_tokens=20, sinks=True, grad_lse=True,
        **CAUSAL,
    )  # fmt: skip
    # The last row that sees a tile's keys begins a step.
    yield _of(
        "backward-window-right", 1, 2, 1, 90, 100, *DIMS, window_left=11, window_right=11, sink_tokens=3
    )
    yield _of("backward-right", 1, 1, 1, 70, 100, *DIMS, window_right=11, sink_tokens=40, out="float32")
    # Rows so far behind the keys that their window has none, and their sinks have all weight; more of them
    # than threads that add up the sinks' gradients.
    yield _of(
        "backward-sinks-alone", 1, 2, 1, 300, 40, *DIMS, causality="offset", q_offset=20, window_left=5,
        sinks=True, grad_lse=True,
    )  # fmt: skip
    yield _of(
        "backward-sinks-alone-out", 1, 2, 1, 40, 40, *DIMS, causality="offset", q_offset=-20, sinks=True,
        grad_lse=True, out="float32",
    )  # fmt: skip
    yield _of("backward-sinks", 3, 4, 2, 20, 40, *DIMS, sinks=True, grad_lse=True, index=1)
    yield _of("backward-alibi", 1, 4, 2, 70, 70, *DIMS, alibi_slopes=True, softcap=30.0, **CAUSAL)
    yield _of("backward-sequence-slopes", 3, 4, 2, 40, 30, *DIMS, alibi_slopes=True, index=1)
    yield _of("backward-softcap", 1, 2, 1, 40, 50, *DIMS, softcap=2.0, out="float32")
    yield _of("backward-sharp", 1, 2, 1, 40, 50, *DIMS, sharpness=8.0, sinks=True)
    yield _steep()
    yield _nan()
    yield _every_option("prefill", 2, 4, 2, 40, 70, *DIMS, mask=f16, **CAUSAL)
    yield _every_option("varlen_prefill", *MIXED_SIZES, *DIMS, **MIXED, **CAUSAL)


def _packed() -> Iterator[Trial]:
    """Whole and ragged steps of several sequences, more of them than lanes, and starts out of range."""
    for name, options in (
        ("varlen-backward", {"causality": "bottom_right", "grad_lse": True}),
        ("varlen-backward-full", {"out": "float32", "grad_layout": "padded_rows", "layouts": OFF}),
        ("varlen-backward-offset", {"causality": "offset", "q_offset": 11, "alibi_slopes": True}),
        ("varlen-backward-slopes", {"alibi_slopes": True, "sinks": True, "index": 1, "grad_lse": True}),
        ("varlen-backward-window", {"window_left": 40, "window_right": 9, "sink_tokens": 7}),
    ):
        yield _of(name, *MIXED_SIZES, *DIMS, op="varlen_prefill", **MIXED, **options)
    many = [(n + 1) % 3 for n in range(39)]
    yield _of(
        "varlen-backward-many", 40, 2, 1, 40, 50, *DIMS, op="varlen_prefill", q_lens=(*many, 40),
        seq_lens=(*(1 + 2 * (n // 2) for n in many), 50), spare_rows=3, **CAUSAL,
    )  # fmt: skip
    yield _strange_starts(
        "varlen-backward-strange-keys", [3, 9, 20, 50, 80], [-5, 70, 2**31 - 1, 20, -(2**31)], 60,
        is_causal=True,
    )  # fmt: skip
    # The most keys of a sequence end before the last of a group.
    yield _strange_starts(
        "varlen-backward-strange-rows", [-4, 9, 20, 50, 1000], [0, 70, 70, 75, 80], 63,
        alibi_slopes=randn(f32, 4, 2) / 50,
    )  # fmt: skip


def _of(
    name: str,
    *sizes: int,
    op: str = "prefill",
    dtype: torch.dtype = f16,
    family: int = 7,
    change: Callable[[Plan], None] = lambda plan: None,
    index: int = 0,
    grad_lse: bool = False,
    out: str = "none",
    grad_layout: str = "contiguous",
    **options: Any,
) -> Trial:
    """`sizes` are those of Problem: batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim."""
    forward = Problem(index, op, dtype, *sizes, **options)  # type: ignore[arg-type]
    case = backward_problems.build(BackwardProblem(index, forward, grad_lse, out, grad_layout), seed=7)
    arguments = backward_problems.as_launched(case.arguments("cpu")[0])
    return _of_arguments(
        name, case.problem.op, arguments, lambda found: assert_gradients_close(case, found), family, change
    )


def _of_arguments(
    name: str,
    op: str,
    arguments: dict[str, Any],
    check: Callable[[Gradients], None],
    family: int = 7,
    change: Callable[[Plan], None] = lambda plan: None,
) -> Trial:
    def plan(device: Device) -> Plan:
        made = device.plan_of(op, arguments)
        change(made)
        return made

    def prepare(plan: Plan) -> Prepared:
        buffers = direct_launch.backward_buffers(op, arguments, plan)
        query, key, value, sinks, slopes = (buffers[name] for name in direct_launch.GRADIENTS)
        return buffers, lambda: check((query, key, value, sinks, slopes))

    return Trial(name, plan, prepare, device=Device(family))


def _of_operands(
    name: str, op: str, tolerance: float, grad_out: Tensor, with_out: bool = False, **arguments: Any
) -> Trial:
    """With a gradient of lse; the operands have no memory that must not be read."""
    out, lse = getattr(reference, op)(**arguments)
    grad_lse = randn(f32, *lse.shape)
    given = {"grad_out": grad_out, "grad_lse": grad_lse, **arguments}
    exact = getattr(reference, f"{op}_backward")(out=out, lse=lse, **given)

    def check(found: Gradients) -> None:
        for result, wanted in zip(found, exact, strict=True):
            if wanted is not None:
                assert result is not None
                torch.testing.assert_close(result.double(), wanted, rtol=4e-3, atol=tolerance)

    results = {"out": out.float() if with_out else None, "lse": lse.float()}
    return _of_arguments(name, f"{op}_backward", {**given, **results}, check)


def _every_option(op: str, *sizes: int, **fields: Any) -> Trial:
    """Every option at once, with parameters of layers in float16 and slopes of each sequence. Not counted,
    because a new option may change the counts."""
    options = {name: each.values[-1] for name, each in problems.OPTIONS.items() if op in each.ops}
    options |= {"window_left": 20, "sink_tokens": 4, **fields}
    trial = _of(f"{op}-backward-every-option", *sizes, op=op, index=1, grad_lse=True, **options)
    return replace(trial, counted=False)


def _in_slices(plan: Plan) -> None:
    for step in plan["passes"][:2]:
        direct_launch.cut_into_slices(step, 3)


def _whole_map(name: str, value_dim: int = DIMS[1], **options: Any) -> Trial:
    """A mask that hides no key is read only in steps of which a row may not see a key by position."""
    mask = torch.ones(1, 2, 70, 96, dtype=torch.bool)
    return _of_operands(
        name, "prefill", 4e-3, randn(f16, 1, 2, 70, value_dim),
        query=randn(f16, 1, 2, 70, 64), key=randn(f16, 1, 1, 96, 64), value=randn(f16, 1, 1, 96, value_dim),
        attn_mask=mask, mask_map=reference.mask_map(mask).to(torch.uint8), q_offset=7, **options,
    )  # fmt: skip


def _unlikely(rows: int = 4, value_dim: int = DIMS[1]) -> Trial:
    """Every key has a score far below 0, in some rows of 1,000 below the others. One row sees no key."""
    mask = torch.full((1, 2, rows, 70), -1000.0)
    mask[:, :, 1, :40] = -2000.0
    mask[:, :, 3] = -torch.inf
    query = randn(f16, 1, 2, rows, 64)
    query[:, :, 3] = torch.nan
    return _of_operands(
        "backward-unlikely", "prefill", 2e-3, randn(f16, 1, 2, rows, value_dim),
        query=query, key=randn(f16, 1, 1, 70, 64), value=randn(f16, 1, 1, 70, value_dim), attn_mask=mask,
    )  # fmt: skip


def _shifted_lse(value_dim: int) -> Trial:
    """An error of lse, the origin of weights, cancels."""
    trial = _of_operands(
        "backward-shifted-lse", "prefill", 4e-3, randn(f16, 1, 2, 40, value_dim),
        query=randn(f16, 1, 2, 40, 64), key=randn(f16, 1, 1, 50, 64), value=randn(f16, 1, 1, 50, value_dim),
    )  # fmt: skip

    def prepare(plan: Plan) -> Prepared:
        buffers, check = trial.prepare(plan)
        return {**buffers, "lse": buffers["lse"] + 0.25}, check

    return replace(trial, prepare=prepare)


def _steep() -> Trial:
    """Scores of some hundreds, in rows before and after a step's end. The first rows see no key, and the sink
    of one head has no weight."""
    return _of_operands(
        "backward-steep", "prefill", 4e-3, randn(f16, 1, 2, 43, 32), with_out=True,
        query=randn(f16, 1, 2, 43, 64), key=randn(f16, 1, 1, 20, 64), value=randn(f16, 1, 1, 20, 32),
        is_causal=True, q_offset=-10, alibi_slopes=torch.tensor([-16.0, -16.0]),
        sinks=torch.tensor([-torch.inf, 0.5]),
    )  # fmt: skip


def _nan(rows: int = 60, keys: int = 40, clean: int = 32, value_dim: int = DIMS[1]) -> Trial:
    """The first row is NaN: so are the gradients of the keys that it sees, but not of those that no row sees,
    or from `clean` on no row of its step. Rows that see no key are NaN too, which changes nothing."""
    seen, others, blind = slice(7, 13), slice(0, 7), keys - 7
    query, grad_out = randn(f16, 1, 2, rows, 64), randn(f16, 1, 2, rows, value_dim)
    query[:, :, 0] = query[:, :, blind:] = grad_out[:, :, blind:] = torch.nan
    arguments: dict[str, Any] = {
        "query": query, "key": randn(f16, 1, 1, keys, 64),
        "value": randn(f16, 1, 1, keys, value_dim), "q_offset": 12, "window_left": 5, "window_right": 0,
    }  # fmt: skip
    _, lse = reference.prefill(**arguments)
    given = {"grad_out": grad_out, "grad_lse": None, "out": None, "lse": lse.float(), **arguments}

    def check(found: Gradients) -> None:
        of_query, of_key, of_value, *_ = found
        for each in (of_key, of_value):
            assert each[:, :, seen].isnan().all() and not each[:, :, others].any()
            assert each[:, :, clean:].isfinite().all() and each[:, :, clean:].any()
        assert of_query[:, :, 0].isnan().all() and of_query[:, :, 1:].isfinite().all()
        assert not of_query[:, :, blind:].any()

    return _of_arguments("backward-nan", "prefill_backward", given, check)


def _strange_starts(
    name: str, rows: list[int], keys: list[int], most_keys: int, value_dim: int = DIMS[1], **options: Any
) -> Trial:
    return _of_operands(
        name, "varlen_prefill", 4e-3, randn(f16, 90, 2, value_dim),
        query=randn(f16, 90, 2, 64), key=randn(f16, 80, 1, 64), value=randn(f16, 80, 1, value_dim),
        cu_seqlens_q=torch.tensor(rows, dtype=torch.int32),
        cu_seqlens_k=torch.tensor(keys, dtype=torch.int32),
        max_seqlen_q=40, max_seqlen_k=most_keys, **options,
    )  # fmt: skip
