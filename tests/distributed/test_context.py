"""Meshes, DTensors and `context_parallel`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_fattn
from tests.distributed.pool import Pool, World, error_of
from torch_fattn import distributed
from torch_fattn.distributed import Shards, context_parallel, unshard

LENGTH = 26
TOLERANCE = 1e-5


def operands(seed: int = 0, heads: tuple[int, int, int] = (4, 2, 2), dim: int = 32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, n, LENGTH, dim, generator=generator) for n in heads]


def expected(whole: list[Tensor], **options: Any) -> Tensor:
    return torch_fattn.reference.prefill(*whole, **{"q_offset": 0, **options})[0]


# ---- meshes and DTensors


def on_meshes(world: World) -> dict[str, float]:
    from torch.distributed.device_mesh import init_device_mesh

    whole = operands()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    cp = mesh["cp"]
    shards = Shards.zigzag(LENGTH, 2)
    own = [shards.take(operand, 2, cp.get_local_rank()) for operand in whole]
    out = distributed.prefill(*own, group=cp, shards=shards, is_causal=True)
    errors = {"mesh": _error(unshard(out, 2, shards, cp), expected(whole, is_causal=True))}
    text = "the mesh has 2 dimensions ('dp', 'cp'); pass the one over which the sequence is sharded"
    assert text in error_of(distributed.prefill, *own, group=mesh, shards=shards)
    return errors


@pytest.mark.host_only
def test_meshes(ranks: Pool) -> None:
    for errors in ranks.run(4, on_meshes):
        assert len(errors) == 1 and max(errors.values()) < TOLERANCE


def on_dtensors(world: World) -> dict[str, float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (4,))
    whole = operands()
    query, key, value = (distribute_tensor(operand, mesh, [Shard(2)]) for operand in whole)
    exact = expected(whole, is_causal=True)
    out, lse = distributed.prefill(query, key, value, is_causal=True, return_lse=True)
    assert out.placements == (Shard(2),) == lse.placements and lse.shape == (2, 4, LENGTH)
    errors = {"sharded": _error(out.full_tensor(), exact)}
    replicated = distribute_tensor(whole[0], mesh, [Replicate()])
    out = distributed.prefill(replicated, key, value, is_causal=True)
    assert out.placements == (Replicate(),)
    errors["replicated"] = _error(out.to_local(), exact)
    for words, wrong in {
        "key is placed as R; redistribute it to S(2)": (query, replicated[:, :2], value),
        "value is a plain tensor beside DTensors": (query, key, whole[2]),
    }.items():
        assert words in error_of(distributed.prefill, *wrong).replace("Replicate()", "R")
    for call in (distributed.decode, lambda *operands: unshard(operands[0], 2, Shards.contiguous(26, 4))):
        assert "is a DTensor; pass this rank's part of it" in error_of(call, query, key, value)
    return errors


@pytest.mark.host_only
def test_dtensors(ranks: Pool) -> None:
    for errors in ranks.run(4, on_dtensors):
        assert len(errors) == 2 and max(errors.values()) < TOLERANCE, errors


def _error(result: Tensor, exact: Tensor) -> float:
    assert result.shape == exact.shape
    return float((result.cpu() - exact).abs().max())


# ---- context_parallel


def in_context(world: World, layout: str, install: bool) -> dict[str, Any]:
    whole = [operand.to(world.device) for operand in operands(dim=20)]
    text = whole[1][:, :, :3], whole[2][:, :, :3]
    before = F.scaled_dot_product_attention
    copies = [operand.clone() for operand in whole]
    if install:
        torch_fattn.install()
    with context_parallel(
        world.group, buffers=copies, buffer_seq_dims=[2, 2, 2], no_restore_buffers={copies[2]}, layout=layout
    ) as shards:
        assert copies[0].shape[2] == shards.count(world.rank)
        out = F.scaled_dot_product_attention(*copies, is_causal=True, enable_gqa=True)
        cross = F.scaled_dot_product_attention(copies[0], *text, enable_gqa=True)
        every = unshard(out, 2, shards, world.group), unshard(cross, 2, shards, world.group)
        wrong: tuple[dict[str, Any], ...] = ({"dropout_p": 0.5, "enable_gqa": True}, {})
        refused = [error_of(F.scaled_dot_product_attention, *copies, **options) for options in wrong]
    torch_fattn.uninstall()
    assert F.scaled_dot_product_attention is before
    assert torch.equal(copies[0], whole[0]) and copies[2].shape[2] == shards.count(world.rank)
    cpu = [operand.cpu() for operand in whole]
    alone = F.scaled_dot_product_attention(cpu[0], *(t.cpu() for t in text), enable_gqa=True)
    exact = F.scaled_dot_product_attention(*cpu, is_causal=True, enable_gqa=True)
    return {"out": _error(every[0], exact), "cross": _error(every[1], alone), "refused": refused}


def _check_context(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["out"] < TOLERANCE and result["cross"] < TOLERANCE
        assert [text.partition("; ")[0] for text in result["refused"]] == [
            "NotImplementedError: torch_fattn.distributed.context_parallel: there is no dropout across ranks",
            "ValueError: torch_fattn.distributed.context_parallel: query has 4 heads and key 2",
        ]


@pytest.mark.host_only
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("n", [1, 3])
def test_context_parallel(ranks: Pool, n: int, layout: str) -> None:
    _check_context(ranks.run(n, in_context, layout, False))


def test_context_parallel_on_gpu(gpu_ranks: Pool) -> None:
    _check_context(gpu_ranks.run(2, in_context, "zigzag", True))


def nested(world: World) -> float:
    """A block in a block, which an error leaves."""
    outer, inner = (operand.clone() for operand in operands(heads=(4, 4, 4))[:2])
    exact, before = expected([outer] * 3), F.scaled_dot_product_attention
    inner = inner[:, :, :-5].clone()
    with context_parallel(world.group, buffers=[outer], buffer_seq_dims=[2]) as shards:
        with (
            pytest.raises(KeyError),
            context_parallel(world.group, buffers=[inner], buffer_seq_dims=[2]),
        ):
            raise KeyError
        assert inner.shape[2] == LENGTH - 5
        out = F.scaled_dot_product_attention(outer, outer, outer)
        error = _error(unshard(out, 2, shards, world.group), exact)
    assert F.scaled_dot_product_attention is before and outer.shape[2] == LENGTH
    return error


@pytest.mark.host_only
def test_nested_blocks(ranks: Pool) -> None:
    assert max(ranks.run(3, nested)) < TOLERANCE


def in_shared_memory(world: World) -> None:
    """Tokens and the tokens after them are views of one tensor, as in a training loop."""
    whole = torch.arange(3 * LENGTH).view(3, LENGTH)
    before, tokens, following, columns = whole.clone(), whole[:, :-1], whole[:, 1:], whole.T[1:]
    with context_parallel(
        world.group, buffers=[tokens, following, columns], buffer_seq_dims=[1, 1, 0]
    ) as shards:
        assert torch.equal(tokens, shards.take(before[:, :-1], 1, world.rank))
        assert torch.equal(following, shards.take(before[:, 1:], 1, world.rank))
        assert torch.equal(columns, following.T) and torch.equal(whole, before)
    assert torch.equal(whole, before) and torch.equal(columns, before.T[1:])
    tokens[0, 0] = -1
    assert whole[0, 0] == -1, "a buffer is a view again"


@pytest.mark.host_only
def test_buffers_that_share_memory(ranks: Pool) -> None:
    ranks.run(3, in_shared_memory)
