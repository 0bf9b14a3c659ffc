"""Generates many answers to one prompt: forks of a paged cache read the prompt's blocks together.

    python examples/shared_prefix.py [--device mps] [--answers 6] [--prompt 400] [--tokens 12]

The model is one layer of attention with seeded random queries, keys and values. Every token is decoded twice,
with and without `shared_prefix`; the results differ only by rounding. The output also shows how often each
decode reads a key.
"""

from __future__ import annotations

import argparse

import torch

from torch_fattn import CacheStep, PagedKVCache

HEADS, KV_HEADS, DIM, BLOCK = 8, 2, 64, 16


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode forks of one prompt, which is read once for all.")
    parser.add_argument("--device", default="mps" if torch.backends.mps.is_available() else "cpu")
    parser.add_argument("--answers", type=int, default=6)
    parser.add_argument("--prompt", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=12)
    options = parser.parse_args()

    torch.manual_seed(0)
    blocks = -(-options.prompt // BLOCK) + options.answers * (options.tokens // BLOCK + 2)
    cache = PagedKVCache(1, blocks, KV_HEADS, DIM, block_size=BLOCK, device=options.device)

    def append(sequences: list[int], tokens: int) -> CacheStep:
        step = cache.extend(sequences, tokens)
        key, value = torch.randn(2, len(sequences) * tokens, KV_HEADS, DIM).half().to(options.device)
        cache.append(0, step, key, value)
        return step

    prompt = cache.allocate()
    append([prompt], options.prompt)
    answers = [prompt, *(cache.fork(prompt) for _ in range(options.answers - 1))]
    worst, keys_together, keys_apart = 0.0, 0, 0
    for _ in range(options.tokens):
        step = append(answers, 1)
        query = torch.randn(len(answers), HEADS, 1, DIM).half().to(options.device)
        together = cache.decode(0, step, query, shared_prefix=True)
        apart = cache.decode(0, step, query)
        worst = max(worst, (together.float() - apart.float()).abs().max().item())
        shared = step.shared_blocks * BLOCK
        rows = len(answers) * HEADS // KV_HEADS
        keys_together += -(-rows // 32) * shared + sum(step.lengths) - len(answers) * shared
        keys_apart += sum(step.lengths)

    print(
        f"prompt        {options.prompt} tokens, {step.shared_blocks} whole blocks for {len(answers)} answers"
    )
    print(f"keys read     {keys_together:,} together, {keys_apart:,} apart")
    print(f"difference    {worst:.2g} at most, from results of up to {apart.abs().max().item():.2g}")


if __name__ == "__main__":
    main()
