"""Random problems of tests/helpers/problems.py, whose keys and rows are sharded over ranks at random."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import torch_fattn
from tests.conftest import EMULATED
from tests.distributed.pool import Pool, World
from tests.helpers import drawing, problems
from tests.helpers.accuracy import assert_close
from tests.helpers.problems import Case, Problem
from tests.helpers.tensors import same_bits
from torch_fattn import distributed
from torch_fattn.distributed import Shards

OPS = ("decode", "paged_decode", "prefill", "varlen_prefill")
MOST_RANKS = 4
WORK = 2e6  # multiply-adds of a problem
OF_COLUMNS = ("key", "value", "key_scales", "value_scales")  # with the keys in dimension 2


@dataclass(frozen=True)
class Sharded:
    """`rows`: which rows each rank has; None: all."""

    problem: Problem
    shards: Shards
    rows: Shards | None = None
    method: str = "auto"
    of_sequences: tuple[tuple[Shards, Shards], ...] = ()  # varlen_prefill: keys and rows of each

    def __str__(self) -> str:
        runs = [[count for _, count in runs] for runs in self.shards.runs]
        return f"{self.problem} keys {runs} rows {self.rows and self.rows.runs} by {self.method}"


def draw(op: str, count: int, most_ranks: int = MOST_RANKS) -> list[Sharded]:
    drawn = drawing.draw(count, OPS.index(op), ops=(op,), work=WORK, of=4)
    return [_sharded(problem, random.Random(f"{op} {problem.index}"), most_ranks) for problem in drawn]


def _sharded(problem: Problem, rng: random.Random, most_ranks: int) -> Sharded:
    ranks = rng.randint(1, most_ranks) if problem.index % 8 else most_ranks
    if problem.op == "prefill":
        problem = replace(problem, seq_lens=None, block_mask=None)
    if problem.op == "paged_decode":
        blocks = _shards(problem.kv_len // problem.block_size, ranks, rng)
        return Sharded(problem, _mapped(blocks, lambda n: n * problem.block_size))
    shards = _shards(problem.kv_len, ranks, rng)
    if problem.op == "varlen_prefill":
        pairs = zip(problem.lengths, problem.rows, strict=True)
        each = tuple((_shards(keys, ranks, rng), _shards(rows, ranks, rng)) for keys, rows in pairs)
        return Sharded(replace(problem, spare_rows=0), shards, of_sequences=each)
    if problem.op == "decode" or rng.random() < 0.3:
        return Sharded(problem, shards)
    rows = shards if problem.q_len == problem.kv_len else _shards(problem.q_len, ranks, rng)
    methods = ["auto", "ring"]
    if problem.mask is None:
        methods.append("rows")
    is_of_all_rows = problem.mask is None or (problem.mask_broadcast[2] and 1 not in rows.counts)
    if problem.kv_heads % ranks == 0 and is_of_all_rows:
        methods += ["heads", "heads"]
    return Sharded(problem, shards, rows, rng.choice(methods))


def _shards(length: int, ranks: int, rng: random.Random) -> Shards:
    kind = rng.choice(("contiguous", "sizes", "sizes", "round_robin", "zigzag"))
    if kind == "contiguous":
        return Shards.contiguous(length, ranks)
    if kind == "zigzag":
        return Shards.zigzag(length, ranks)
    if kind == "round_robin":
        return Shards.round_robin(length, ranks, rng.choice((1, 4, 16, 64)))
    cuts = sorted(rng.choice((0, rng.randint(0, length), length)) for _ in range(ranks - 1))
    return Shards.sizes([end - begin for begin, end in zip([0, *cuts], [*cuts, length], strict=True)])


def _mapped(shards: Shards, of: Callable[[int], int]) -> Shards:
    """Shards of blocks as shards of positions, or the other way round."""
    return Shards(tuple(tuple((of(first), of(count)) for first, count in runs) for runs in shards.runs))


# ---- on every rank


@dataclass(frozen=True)
class Result:
    out: Tensor
    lse: Tensor
    launches: int  # of attention kernels
    is_in_memory: bool  # whether out is contiguous in the requested layout


def run(world: World, sharded: Sharded, checked: bool = False) -> Result:
    arguments, _ = problems.build(sharded.problem).arguments(world.device)
    own = own_arguments(arguments, sharded, world.rank)
    function = getattr(distributed, sharded.problem.op)
    before = _launches()
    with _checks(checked and world.device == "mps"):
        out, lse = function(**own, group=world.group, return_lse=True)
    in_memory = out.transpose(1, 2) if sharded.problem.token_major_out else out
    return Result(out.cpu(), lse.cpu(), _launches() - before, in_memory.is_contiguous())


def own_arguments(arguments: dict[str, Any], sharded: Sharded, rank: int) -> dict[str, Any]:
    """The arguments of this rank, of those of the operator over all keys."""
    problem, shards, rows = sharded.problem, sharded.shards, sharded.rows
    own = {name: value for name, value in arguments.items() if name != "mask_map"}
    if sharded.of_sequences:
        return _own_packed(own, sharded, rank)
    if problem.op == "paged_decode":
        blocks = _mapped(shards, lambda n: n // problem.block_size)
        own["block_tables"] = blocks.take(own["block_tables"], 1, rank)
    else:
        own |= {name: shards.take(own[name], 2, rank) for name in OF_COLUMNS if name in own}
    mask = own.get("attn_mask")
    if mask is not None and rows is None and mask.shape[-1] > 1:
        own["attn_mask"] = shards.take(mask, -1, rank)
    if rows is not None:
        own["query"] = rows.take(own["query"], 2, rank)
        if mask is not None and mask.shape[-2] > 1:
            own["attn_mask"] = rows.take(mask, -2, rank)
    own["shards"] = shards
    if problem.op == "prefill":
        own |= {"query_shards": "replicated" if rows is None else rows, "method": sharded.method}
    return own


def _own_packed(own: dict[str, Any], sharded: Sharded, rank: int) -> dict[str, Any]:
    own = {name: value for name, value in own.items() if not name.startswith(("cu_seqlens", "max_seqlen"))}
    keys, rows = zip(*sharded.of_sequences, strict=True)
    for name, shards in (("query", rows), ("key", keys), ("value", keys)):
        whole = own[name].split([each.length for each in shards])
        taken = [each.take(part, 0, rank) for each, part in zip(shards, whole, strict=True)]
        own[name] = torch.cat(taken)
    return own | {"shards": keys, "query_shards": rows}


def _launches() -> int:
    counts = torch_fattn.launch_counts()
    return sum(n for kernel, n in counts.items() if kernel.startswith(("fattn_decode", "fattn_prefill")))


def _checks(wanted: bool) -> Any:
    if not wanted or not EMULATED:
        return contextlib.nullcontext()
    import softmetal

    return softmetal.checks(race=True, bounds=True, uninit=True)


# ---- in the test


def check(pool: Pool, sharded: Sharded, *arguments: Any, function: Callable[..., Result] = run) -> int:
    """Runs the problem on its ranks, by `function`, and returns the launches of all ranks."""
    results = pool.run(sharded.shards.ranks, function, sharded, *arguments)
    case = problems.build(sharded.problem)
    assert all(result.is_in_memory for result in results)
    out, lse = _whole(case, sharded, results)
    assert_close(case, out, lse)
    return sum(result.launches for result in results)


def _whole(case: Case, sharded: Sharded, results: list[Result]) -> tuple[Tensor, Tensor]:
    if sharded.of_sequences:
        rows = [each for _, each in sharded.of_sequences]
        parts = [result.out.split([each.count(r) for each in rows]) for r, result in enumerate(results)]
        lses = [result.lse.split([each.count(r) for each in rows], 1) for r, result in enumerate(results)]
        out = [each.join([part[b] for part in parts], 0) for b, each in enumerate(rows)]
        return torch.cat(out), torch.cat([e.join([lse[b] for lse in lses], 1) for b, e in enumerate(rows)], 1)
    if sharded.rows is None:
        first = results[0]
        for rank, result in enumerate(results[1:], start=1):
            assert same_bits(result.out, first.out), f"out of rank {rank} has other bits"
            assert same_bits(result.lse, first.lse), f"lse of rank {rank} has other bits"
        return first.out, first.lse
    out = sharded.rows.join([result.out for result in results], 2)
    if case.problem.token_major_out:
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return out, sharded.rows.join([result.lse for result in results], 2)
