"""A result depends on its own sequence alone, bit by bit, on "mps" and on "cpu": on random problems with
everything combined, a sequence gives the same alone, in another place of the batch, with a larger cache, and
when run again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_fattn
from tests.conftest import needs_emulator
from tests.helpers import direct_launch, drawing, problems
from tests.helpers.problems import Problem
from tests.helpers.tensors import same_bits
from tests.operators.test_prefill_parts import CUT

DIMS = ((64, 64), (80, 40), (64, 40), (192, 128))  # few, which compile few kernels
CACHED = (*problems.DECODES, "paged_prefill")
DRAWN = [p for p in drawing.draw(600) if (p.head_dim, p.value_dim) in DIMS]


def stay_in_key(p: Problem) -> bool:
    """Values in the columns of their keys are read as such in both calls. Copies of int4 scales are no views
    of the keys', and the operator copies dense keys whose columns are not contiguous."""
    copied = p.layouts[1] == "every_other" and not p.block_size
    return not (p.value_in_key and (p.kv_format == "int4" or copied))


KEPT = [p for p in DRAWN if stay_in_key(p)]
# Few rows (decode_vector), and sequences of several chunks.
FEW_ROWS = [
    Problem(200, "decode", torch.float16, 3, 2, 2, 1, 1300, 64, 64, seq_lens=(1300, 5, 700)),
    Problem(
        201, "paged_decode", torch.bfloat16, 2, 2, 1, 1, 640, 128, 80, seq_lens=(640, 300), block_size=16
    ),
]
f32, f16, bf16 = problems.DTYPES
# Caches so short that one launch does it all; with more room, two launches do. On 8 cores, the merge of two
# has eight simdgroups for one to four key-value heads, and one for more.
ONE_LAUNCH = [
    Problem(300, "decode", f16, 1, 8, 8, 1, 600, 64, 64, seq_lens=(600,)),
    Problem(301, "decode", bf16, 3, 2, 2, 1, 1000, 80, 40, seq_lens=(900, 0, 257), sinks=True),
    Problem(302, "decode", bf16, 4, 1, 1, 1, 1024, 80, 40, seq_lens=(1024, 1, 256, 511), alibi_slopes=True),
    Problem(303, "paged_decode", f16, 2, 4, 4, 2, 1000, 128, 128, seq_lens=(1000, 700), block_size=8,
        tree="each", token_major_out=True),
    Problem(304, "decode", f16, 3, 8, 2, 1, 500, 64, 64, seq_lens=(500, 0, 130), mask=torch.bool),
    Problem(305, "decode", f16, 2, 32, 8, 1, 1024, 96, 128, seq_lens=(1024, 512), softcap=3.0),
    Problem(306, "paged_decode", bf16, 4, 16, 2, 2, 480, 96, 80, seq_lens=(480, 300, 0, 17), block_size=16,
        sinks=True, mask=bf16),
    Problem(307, "decode", f32, 6, 8, 1, 1, 384, 40, 128, seq_lens=(300, 384, 128, 129, 7, 257),
        window_left=100, sink_tokens=7, sinks=True),
    Problem(308, "decode", f16, 2, 24, 6, 1, 1000, 128, 128, seq_lens=(900, 384), kv_format="int8"),
    Problem(309, "paged_decode", bf16, 2, 24, 6, 1, 512, 64, 64, seq_lens=(400, 129), kv_format="int4",
        block_size=16),
    Problem(310, "decode", f16, 2, 8, 8, 1, 5000, 64, 64, seq_lens=(5000, 300), window_left=400),
    Problem(311, "decode", f16, 9, 1, 1, 1, 1024, 64, 64, sinks=True,
        seq_lens=(1024, 0, 1, 128, 129, 512, 513, 900, 1000)),
    Problem(312, "paged_decode", bf16, 8, 2, 1, 1, 512, 128, 80, block_size=16, softcap=3.0,
        alibi_slopes=True, seq_lens=(512, 0, 300, 257, 256, 64, 65, 511)),
    Problem(313, "decode", f32, 4, 4, 2, 1, 1000, 128, 128, seq_lens=(1000, 640, 1, 768), mask=torch.bool),
]  # fmt: skip
TWO_ROUNDS = {301, 302, 303, 310, 311, 312, 313}  # of four chunks
BATCHES = [p for op in problems.OPS for p in [p for p in KEPT if p.op == op and p.batch > 1][:6]]
BATCHES += [p for p in FEW_ROWS + ONE_LAUNCH if p.batch > 1]
BATCHES += [replace(problem, batch=3) for problem in CUT]
CACHES = [p for op in CACHED for p in [p for p in KEPT if p.op == op][:10]] + FEW_ROWS
# Arguments that have an entry for each sequence if they have so many dimensions, or else one for all.
OF_A_SEQUENCE = {
    "query": 4,
    "key": 4,
    "value": 4,
    "attn_mask": 4,
    "mask_map": 4,
    "block_mask": 4,
    "seq_lens": 1,
    "block_tables": 2,
    "tree_mask": 2,
    "alibi_slopes": 2,
}

Results = tuple[Tensor, ...]  # out and lse


def run(op: str, arguments: dict[str, Any]) -> Results:
    out, lse = getattr(torch.ops.fattn, op)(**arguments)
    return out.cpu(), lse.cpu()


def of_sequences(arguments: dict[str, Any], order: list[int]) -> dict[str, Any]:
    """The call of these sequences of the batch, in this order."""
    chosen = dict(arguments)
    is_dense = "key" in arguments
    for name, dimensions in (OF_A_SEQUENCE | (scale_dimensions(arguments) if is_dense else {})).items():
        tensor = arguments.get(name)
        is_mask = name in ("attn_mask", "mask_map", "block_mask")
        if tensor is not None and tensor.dim() == dimensions and (tensor.shape[0] > 1 or not is_mask):
            # A single sequence stays the view that it is.
            chosen[name] = tensor[order] if len(order) > 1 else tensor[order[0] : order[0] + 1]
    for name, side in (("query", "q"), ("key", "k"), ("value", "k")):
        starts = arguments.get(f"cu_seqlens_{side}")
        if starts is not None:
            parts = [arguments[name][rows_of(starts, b)] for b in order]
            ends = torch.tensor([0, *map(len, parts)]).cumsum(0).to(torch.int32)
            chosen |= {name: torch.cat(parts), f"cu_seqlens_{side}": ends.to(parts[0].device)}
            chosen[f"max_seqlen_{side}"] = max(map(len, parts))
    return kept_in_key(arguments, chosen)


def rows_of(starts: Tensor, sequence: int) -> slice:
    return slice(*starts[sequence : sequence + 2].tolist())


def result_of(sequence: int, arguments: dict[str, Any], results: Results) -> Results:
    if "cu_seqlens_q" not in arguments:
        return tuple(result[sequence : sequence + 1] for result in results)
    rows = rows_of(arguments["cu_seqlens_q"], sequence)
    return results[0][rows], results[1][:, rows]


def scale_dimensions(arguments: dict[str, Any]) -> dict[str, int]:
    return {name: arguments[name].dim() for name in ("key_scales", "value_scales") if name in arguments}


def kept_in_key(arguments: dict[str, Any], chosen: dict[str, Any]) -> dict[str, Any]:
    """With values that are a view of the keys, if they were one before."""
    if "key" in arguments and arguments["value"].data_ptr() == arguments["key"].data_ptr():
        chosen["value"] = chosen["key"][..., : arguments["value"].shape[-1]]
    return chosen


def with_capacity(problem: Problem, arguments: dict[str, Any], more: int) -> dict[str, Any]:
    """The same call with room for `more` keys, or more blocks; NaN there, and no block."""
    larger = dict(arguments)
    if problem.block_size:
        table = arguments["block_tables"]
        larger["block_tables"] = torch.cat([table, table.new_full((problem.batch, more), -1)], dim=1)
        more *= problem.block_size
    else:
        for name in ("key", "value", *scale_dimensions(arguments)):
            old = arguments[name]
            fill = torch.nan if old.dtype.is_floating_point else 0x7F  # NaN of fp8_e4m3
            room = old.new_full((*old.shape[:2], more, *old.shape[3:]), fill)
            larger[name] = torch.cat([old, room], dim=2)
        lengths = torch.tensor(problem.lengths, dtype=torch.int32)
        larger["seq_lens"] = lengths.to(arguments["query"].device)
    mask = arguments.get("attn_mask")
    if mask is not None and mask.shape[-1] > 1:
        fill = True if mask.dtype == torch.bool else torch.nan
        larger["attn_mask"] = torch.cat([mask, mask.new_full((*mask.shape[:3], more), fill)], dim=3)
    return kept_in_key(arguments, larger)


@pytest.mark.parametrize("problem", BATCHES, ids=str)
def test_alone_and_in_any_place(problem: Problem, device: str) -> None:
    arguments, _ = problems.build(problem, seed=9).arguments(device)
    results = run(problem.op, arguments)
    for order in ([*reversed(range(problem.batch))], *([b] for b in range(problem.batch))):
        others = of_sequences(arguments, order)
        again = run(problem.op, others)
        for place, b in enumerate(order):
            assert same_bits(result_of(place, others, again), result_of(b, arguments, results)), order


@pytest.mark.parametrize("more", [1, 700])
@pytest.mark.parametrize("problem", CACHES, ids=str)
def test_any_capacity(problem: Problem, more: int, device: str) -> None:
    arguments, _ = problems.build(problem, seed=9).arguments(device)
    if problem.block_size:
        more = -(-more // problem.block_size)
    larger = with_capacity(problem, arguments, more)
    assert same_bits(run(problem.op, arguments), run(problem.op, larger))


@needs_emulator
@pytest.mark.parametrize("problem", ONE_LAUNCH, ids=str)
def test_one_launch_and_two(problem: Problem) -> None:
    """Without seq_lens, too."""
    arguments, _ = problems.build(problem, seed=9).arguments("mps")
    larger = with_capacity(problem, arguments, -(-3000 // max(problem.block_size, 1)))
    plans = [torch_fattn.explain(problem.op, **call) for call in (arguments, larger)]
    assert [len(plan.passes) for plan in plans] == [1, 1 + (problem.window_left < 0)]
    macros = plans[0].passes[0]["macros"]
    assert macros["FATTN_CHUNKS"] == "4"
    assert macros.get("FATTN_CHUNK_ROUNDS", "1") == ("2" if problem.index in TWO_ROUNDS else "1")
    assert same_bits(run(problem.op, arguments), run(problem.op, larger))
    if problem.op == "decode" and problem.lengths[0] == problem.kv_len:
        first = of_sequences(arguments, [0])
        del first["seq_lens"]
        assert same_bits(run(problem.op, first), run(problem.op, of_sequences(larger, [0])))


@needs_emulator
def test_another_order_of_the_chunks_is_noticed() -> None:
    """The control of one launch and two."""
    problem = next(p for p in ONE_LAUNCH if p.dtype == f32)
    case = problems.build(problem, seed=9)

    def backwards(text: str) -> str:
        for part in ("value_of(states, c - kKeptChunks", "weights + (c * kPackedRows + row)"):
            assert text.count(part) == 1
        text = text.replace("states, c - kKeptChunks", "states, kChunks - 1 - c")
        return text.replace("weights + (c * ", "weights + ((kChunks - 1 - c) * ")

    right = direct_launch.run(case)
    turned = direct_launch.run(case, {"fattn_decode": backwards})
    assert torch.allclose(right[0], turned[0], atol=2e-3) and not same_bits(right, turned)


@pytest.mark.parametrize("problem", DRAWN[:24], ids=str)
def test_run_to_run(problem: Problem, device: str) -> None:
    """Whatever the order in which threadgroups are run by the threads of the host."""
    arguments, _ = problems.build(problem, seed=9).arguments(device)
    first = run(problem.op, arguments)
    assert all(same_bits(first, run(problem.op, arguments)) for _ in range(3))


# ---- controls


def test_an_additional_key_is_noticed() -> None:
    """The additional slots of the larger cache are NaN, so that a read of them shows."""
    problem = Problem(0, "decode", torch.float16, 1, 2, 1, 1, 40, 64, 64, seq_lens=(40,))
    arguments, _ = problems.build(problem, seed=9).arguments("mps")
    larger = with_capacity(problem, arguments, 8)
    larger["seq_lens"] = torch.full_like(larger["seq_lens"], problem.kv_len + 8)
    assert run(problem.op, larger)[0].isnan().any()
