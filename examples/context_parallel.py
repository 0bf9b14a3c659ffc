"""One sequence over several processes: a prompt by ring attention, then single tokens over a cache of which
every process holds a part.

    python examples/context_parallel.py [--ranks 3] [--device mps] [--length 600] [--tokens 8]
    torchrun --nproc-per-node 3 examples/context_parallel.py

On several machines, start it with torchrun on each of them. The "model" is a layer of attention with seeded
random weights. Rank 0 compares the results with those of one process.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from torch import Tensor

import torch_fattn
from torch_fattn import distributed
from torch_fattn.distributed import Shards, context_parallel, unshard

HEADS, KV_HEADS, DIM, BLOCK = 8, 2, 64, 16


def project(tokens: Tensor) -> tuple[Tensor, ...]:
    """Query, key and value `[1, heads, tokens, dim]` of tokens `[1, tokens, width]`."""
    weights = torch.randn(
        HEADS * DIM, (HEADS + 2 * KV_HEADS) * DIM, generator=torch.Generator().manual_seed(1)
    )
    heads = (tokens @ (weights * 0.04).to(tokens.device)).unflatten(-1, (-1, DIM)).transpose(1, 2)
    return heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1)


def prompt(tokens: Tensor) -> Tensor:
    """The prompt's attention. Inside the block each rank has its own positions of `own`."""
    own = tokens.clone()
    with context_parallel(None, buffers=[own], buffer_seq_dims=[1]) as shards:
        out = F.scaled_dot_product_attention(*project(own), is_causal=True, enable_gqa=True)
        return unshard(out, 2, shards)


def generate(tokens: Tensor, new: Tensor) -> list[Tensor]:
    """The attention of new tokens, one after the other, over the cache of the prompt and themselves."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    length = tokens.shape[1] + new.shape[1]
    shards = Shards.round_robin(length, ranks, BLOCK)
    _, *keys_and_values = project(torch.cat((tokens, torch.zeros_like(new)), 1))
    key, value = (shards.take(whole, 2, rank).clone() for whole in keys_and_values)
    outs = []
    for step in range(new.shape[1]):
        position = tokens.shape[1] + step
        query, new_key, new_value = project(new[:, step : step + 1])
        if position // BLOCK % ranks == rank:  # this rank's turn
            slot = position // (BLOCK * ranks) * BLOCK + position % BLOCK
            key[:, :, slot], value[:, :, slot] = new_key[:, :, 0], new_value[:, :, 0]
        seq_lens = torch.tensor([position + 1], dtype=torch.int32, device=tokens.device)
        outs.append(distributed.decode(query, key, value, seq_lens, shards=shards))
    return outs


def run(options: argparse.Namespace) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    every = torch.randn(1, options.length + options.tokens, HEADS * DIM, generator=generator)
    tokens, new = every.to(options.device).split((options.length, options.tokens), 1)
    out, outs = prompt(tokens), generate(tokens, new)
    if rank > 0:
        return
    query, key, value = project(every.to(options.device))
    exact = torch_fattn.prefill(query, key, value, is_causal=True).cpu()
    difference = (torch.cat([out, *outs], 2).cpu() - exact).abs().max().item()
    shards = Shards.zigzag(options.length, ranks)
    print(f"ranks         {ranks}, with {[shards.count(r) for r in range(ranks)]} tokens of the prompt")
    own = project(shards.take(tokens, 1, 0))
    print(distributed.explain("prefill", *own, ranks=ranks, shards=shards, is_causal=True))
    print(f"difference    {difference:.2g} at most, from {exact.shape[2]} rows on one process")


def spawned(rank: int, ranks: int, folder: str, options: argparse.Namespace) -> None:
    store = Path(folder, "store").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    run(options)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description="Attend over one sequence on several processes.")
    parser.add_argument("--device", default="mps" if torch.backends.mps.is_available() else "cpu")
    parser.add_argument("--ranks", type=int, default=3, help="without torchrun")
    parser.add_argument("--length", type=int, default=600)
    parser.add_argument("--tokens", type=int, default=8)
    options = parser.parse_args()
    if "RANK" in os.environ:  # torchrun's
        dist.init_process_group("gloo")
        run(options)
        dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(spawned, (options.ranks, folder, options), nprocs=options.ranks)


if __name__ == "__main__":
    main()
