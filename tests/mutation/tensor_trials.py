"""Trials of the kernels on tensor operations, in registers and through threadgroup memory, under a layout of
cooperative tensors that each of them takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from tests.helpers import direct_launch, tensor_kernels

from . import backward_trials
from .prefill_trials import MIXED, in_parts, in_slices
from .special_trials import hidden_nan, huge_sinks
from .trial import Device, Plan, Prepared, Trial, bf16, every_option, f16, of_operands, of_problem, randn

# random:2 differs from every known layout, and reductions match; under random:0 nothing does.
LAYOUT_OF = {"registers": "random:2", "threadgroup": "random:0"}


def tensor() -> Iterator[Trial]:
    for state, layout in LAYOUT_OF.items():
        device = Device(10, state, layout)
        for trial in (*_dense(), *_packed(), *_decodes(), *backward_trials.on_tensors()):
            yield replace(trial, name=f"tensor-{state}-{trial.name}", device=device)
    for trial in _latent():
        yield replace(trial, name=f"tensor-latent-{trial.name}", device=device)
    yield from _probes()


def _probes() -> Iterator[Trial]:
    """What is said of several layouts, with room for all elements and for a part of them."""
    narrow, latent = (64, 32, 64), (576, 16, 128)  # columns of keys, of scores and of the output
    for layout, registers, room, matches, sizes in (
        ("random:2", True, tensor_kernels.ROOM, (True, True, True), narrow),
        ("random:2", False, tensor_kernels.ROOM, (False, False, False), narrow),
        ("random:3", True, tensor_kernels.ROOM, (True, True, True), narrow),
        ("random:4", True, 502, (False, False, False), narrow),
        ("random:2", False, tensor_kernels.ROOM, (False, False, False), latent),
    ):
        dim, *columns = sizes
        key = randn(f16, 1, 1, 64, dim)
        operands = {"query": key, "key": key, "value": key[..., :512]}

        def plan(
            device: Device,
            operands: dict[str, torch.Tensor] = operands,
            registers: bool = registers,
            room: int = room,
        ) -> Plan:
            (prefill,) = device.plan_of("prefill", operands)["passes"]
            return {"passes": [tensor_kernels.probe_step(prefill, registers=registers, room=room)]}

        def prepare(
            _plan: Plan,
            room: int = room,
            matches: tuple[bool, ...] = matches,
            columns: list[int] = columns,
        ) -> Prepared:
            facts = torch.full((room,), -7, dtype=torch.int32)
            return {"tensor_facts": facts}, lambda: _check(facts, matches, columns)

        device = Device(10, "registers", layout)
        yield Trial(f"tensor-probe-{layout}-{registers}-{dim}-{room}", plan, prepare, device=device)


def _check(facts: torch.Tensor, matches: tuple[bool, ...], columns: list[int]) -> None:
    if len(facts) < tensor_kernels.ROOM:
        assert tuple(map(bool, facts[3:6])) == matches
        assert torch.all(facts[tensor_kernels.HEAD_FACTS :] != -7), "as many as there is room for"
        return
    found = tensor_kernels.probe_of(facts)
    assert found.matches == matches and (0 < found.capacities[1] <= 2) == all(matches)
    for elements, width in zip((found.scores, found.output), columns, strict=True):
        places = (elements[:, 1] * width + elements[:, 0]).sort().values
        assert torch.equal(places, torch.arange(16 * width, dtype=places.dtype)), "each element once"
    lists = tensor_kernels.HEAD_FACTS + 64 * (found.capacities[0] + found.capacities[2])
    assert torch.all(facts[lists:] == -7) and torch.all(facts[tensor_kernels.HEAD_FACTS : lists] != -7)


def _dense() -> Iterator[Trial]:
    half = ("prefill", f16)
    causal: dict[str, Any] = {"causality": "bottom_right"}
    yield of_problem("causal", *half, 1, 4, 2, 80, 150, 64, 64, **causal)
    yield of_problem("full", *half, 2, 2, 1, 70, 75, 64, 64, scale=0.3, token_major_out=True)
    yield of_problem("bool-mask", *half, 1, 2, 1, 33, 64, 64, 64, mask=torch.bool, **causal)
    yield of_problem("offset", *half, 1, 2, 1, 150, 130, 64, 64, causality="offset", q_offset=-40)
    yield of_problem(
        "map", *half, 1, 1, 1, 150, 420, 64, 64, mask=f16, mask_pattern="patches", mask_map=True, **causal
    )
    yield of_problem(
        "window", *half, 1, 2, 1, 80, 300, 64, 64, window_left=70, sink_tokens=40, sinks=True, **causal
    )
    yield of_problem(
        "modifiers", *half, 2, 4, 2, 40, 70, 64, 64, mask=f16, softcap=2.0, alibi_slopes=True, sinks=True,
        **causal,
    )  # fmt: skip
    yield hidden_nan("prefill", f16, 64, 64)
    yield huge_sinks("prefill", f16, 64, 64)
    yield every_option("prefill", (2, 4, 2, 18, 70, 64, 64), **causal)
    yield of_problem("slices", *half, 2, 3, 1, 150, 70, 64, 64, change=in_slices, **causal)
    yield of_problem("parts", *half, 1, 2, 1, 70, 260, 64, 64, sinks=True, change=in_parts, **causal)
    yield of_problem("padded", "prefill", bf16, 1, 2, 1, 40, 75, 72, 72, **causal)
    yield of_problem("wide", "prefill", f16, 1, 2, 1, 50, 75, 256, 256, sinks=True, **causal)


def _latent() -> Iterator[Trial]:
    half, dims = ("prefill", f16), (576, 512)
    causal: dict[str, Any] = {"causality": "bottom_right"}
    yield of_problem("causal", *half, 1, 16, 1, 5, 100, *dims, **causal)
    yield of_problem("full", "prefill", bf16, 2, 2, 1, 20, 75, *dims, scale=0.1, token_major_out=True)
    yield of_problem(
        "map", *half, 1, 1, 1, 40, 200, *dims, mask=f16, mask_pattern="patches", mask_map=True, **causal
    )
    yield of_problem(
        "window", *half, 1, 2, 1, 40, 150, *dims, window_left=50, sink_tokens=20, sinks=True, **causal
    )
    yield of_problem(
        "modifiers", *half, 2, 2, 1, 18, 40, *dims, mask=f16, softcap=2.0, alibi_slopes=True, sinks=True,
        **causal,
    )  # fmt: skip
    yield hidden_nan("prefill", f16, *dims)
    yield huge_sinks("prefill", f16, *dims)
    yield every_option("prefill", (2, 4, 2, 18, 70, *dims), **causal)
    yield of_problem("slices", *half, 2, 3, 1, 40, 40, *dims, change=in_slices, **causal)
    yield of_problem("parts", *half, 1, 2, 1, 20, 260, *dims, sinks=True, change=in_parts, **causal)
    for block_size in (16, 24):
        yield of_problem(
            f"packed-{block_size}", "paged_prefill", f16, 3, 16, 1, 9, 96, *dims, block_size=block_size,
            q_lens=(1, 3, 5), seq_lens=(96, 50, 17), value_in_key=True, **causal,
        )  # fmt: skip
    yield _missing_blocks(576, 512)
    yield _missing_blocks_of_drafts(576, 512)
    yield of_problem(
        "decode-tree",
        "decode",
        bf16,
        2,
        16,
        1,
        2,
        70,
        *dims,
        seq_lens=(69, 1),
        tree="each",
        value_in_key=True,
    )


def _packed() -> Iterator[Trial]:
    for block_size in (64, 24):
        yield of_problem(
            f"packed-{block_size}", "paged_prefill", f16, 4, 6, 2, 50, 144, 64, 64, block_size=block_size,
            causality="bottom_right", **MIXED,
        )  # fmt: skip
    yield of_problem(
        "varlen", "varlen_prefill", f16, 3, 4, 2, 70, 120, 64, 64, q_lens=(70, 1, 20), seq_lens=(113, 65, 0),
        spare_rows=2, causality="offset", q_offset=11,
    )  # fmt: skip
    yield _missing_blocks(64, 64)


def _decodes() -> Iterator[Trial]:
    """Tiles of 32 and 64 rows."""
    yield of_problem(
        "decode-tree", "decode", f16, 2, 4, 2, 13, 90, 64, 64, seq_lens=(86, 20), tree="each",
        token_major_out=True,
    )  # fmt: skip
    yield of_problem(
        "decode-rows", "decode", bf16, 2, 14, 2, 5, 80, 80, 80, seq_lens=(3, 71), tree="shared",
        mask=torch.bool, alibi_slopes=True,
    )  # fmt: skip
    yield of_problem(
        "decode-parts", "decode", f16, 2, 8, 2, 6, 700, 64, 64, seq_lens=(690, 150), sinks=True,
        change=by_limits,
    )  # fmt: skip
    yield of_problem(
        "decode-paged", "paged_decode", f16, 2, 8, 1, 3, 160, 64, 64, seq_lens=(160, 41), block_size=32,
        tree="shared", window_left=70, sink_tokens=9,
    )  # fmt: skip
    yield _missing_blocks_of_drafts(64, 64)


def by_limits(plan: Plan) -> None:
    """Parts whose largest size decides, as for longer sequences."""
    step, _ = plan["passes"]
    direct_launch.set_params(step, {"most_parts": 2, "least_part": 1, "largest_part": 8})


def _missing_blocks(head_dim: int, value_dim: int) -> Trial:
    """The first block of one sequence and the second of the other are not in the pool; no key is there."""
    pool = _pool(head_dim)
    return of_operands(
        "missing-blocks", "paged_prefill", query=randn(f16, 40, 4, head_dim), key_cache=pool,
        value_cache=pool.flip(3)[..., :value_dim], block_tables=_ints(-1, 3, 0, 2, 6, 1).view(2, 3),
        seq_lens=_ints(70, 60), cu_seqlens_q=_ints(0, 25, 40), max_seqlen_q=25,
        is_causal=True,
    )  # fmt: skip


def _missing_blocks_of_drafts(head_dim: int, value_dim: int) -> Trial:
    """The same under a tree mask, in steps that end before the drafts."""
    pool = _pool(head_dim)
    return of_operands(
        "missing-blocks-tree", "paged_decode", query=randn(f16, 2, 16, 3, head_dim),
        key_cache=pool, value_cache=pool.flip(3)[..., :value_dim],
        block_tables=_ints(-1, 3, 0, 2, 6, 1).view(2, 3), seq_lens=_ints(70, 60),
        tree_mask=torch.tensor([1, 2, 4]),
    )  # fmt: skip


def _pool(head_dim: int) -> torch.Tensor:
    """Six blocks of 24 keys, of which the last two are NaN."""
    pool = randn(f16, 6, 24, 2, head_dim)
    pool[4:] = torch.nan
    return pool


def _ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)
