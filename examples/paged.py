"""Generates several continuations of one prompt: a paged cache whose sequences share the blocks of the
prompt.

    python examples/paged.py [--device mps] [--continuations 4] [--tokens 24]

The "model" is two layers of attention with seeded random weights over a vocabulary of 64. Every continuation
draws its own tokens. At the end each is computed again without a cache, and its logits are compared.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import torch_fattn
from torch_fattn import CacheFullError, PagedKVCache

LAYERS, HEADS, KV_HEADS, DIM, VOCABULARY = 2, 8, 2, 64, 64


class Model:
    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.embedding = torch.randn(VOCABULARY, HEADS * DIM).to(device)
        width = HEADS + 2 * KV_HEADS
        self.projections = [(torch.randn(HEADS * DIM, width * DIM) * 0.04).to(device) for _ in range(LAYERS)]

    def project(self, layer: int, x: Tensor) -> tuple[Tensor, ...]:
        """Query, key and value `[tokens, heads, dim]` of packed tokens `[tokens, width]`."""
        heads = (x @ self.projections[layer]).unflatten(-1, (-1, DIM))
        return heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1)

    def logits(self, x: Tensor) -> Tensor:
        return torch.nn.functional.normalize(x, dim=-1) @ self.embedding.T

    def step(self, cache: PagedKVCache, sequences: list[int], tokens: Tensor) -> Tensor:
        """Returns the next token's logits, `[sequences, vocabulary]`; each sequence adds the same number of
        tokens."""
        count = len(tokens) // len(sequences)
        new = cache.extend(sequences, count)
        x = self.embedding[tokens]
        for layer in range(LAYERS):
            query, key, value = self.project(layer, x)
            cache.append(layer, new, key, value)
            rows = query.unflatten(0, (len(sequences), count)).transpose(1, 2)
            out = cache.decode(layer, new, rows)  # up to 16 new tokens at a time
            x = x + out.transpose(1, 2).flatten(0, 1).flatten(1)
        return self.logits(x.unflatten(0, (len(sequences), count))[:, -1])

    def without_cache(self, tokens: Tensor) -> Tensor:
        x = self.embedding[tokens]
        for layer in range(LAYERS):
            query, key, value = (part.transpose(0, 1)[None] for part in self.project(layer, x))
            out = torch_fattn.prefill(query, key, value, is_causal=True)
            x = x + out[0].transpose(0, 1).flatten(1)
        return self.logits(x[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description="Continue one prompt several times from shared blocks.")
    parser.add_argument("--device", default="mps" if torch.backends.mps.is_available() else "cpu")
    parser.add_argument("--continuations", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=24)
    options = parser.parse_args()

    model = Model(options.device)
    cache = PagedKVCache(LAYERS, 40, KV_HEADS, DIM, block_size=8, dtype=torch.float32, device=options.device)
    prompt = torch.randint(VOCABULARY, (45,))
    first = cache.allocate()
    for piece in prompt.split(16):
        logits = model.step(cache, [first], piece.to(options.device))
    sequences = [first, *(cache.fork(first) for _ in range(options.continuations - 1))]
    blocks = cache.blocks(first)
    print(f"prompt        {len(prompt)} tokens in {len(blocks)} blocks, for {len(sequences)} sequences")

    logits = logits.expand(len(sequences), -1)
    texts = [prompt.tolist() for _ in sequences]
    try:
        for _ in range(options.tokens):
            drawn = torch.multinomial(logits.softmax(-1).cpu(), 1).flatten()
            logits = model.step(cache, sequences, drawn.to(options.device))
            for text, token in zip(texts, drawn.tolist(), strict=True):
                text.append(token)
    except CacheFullError as full:
        print(f"stopped       {full}")

    shared = set.intersection(*(set(cache.blocks(sequence)) for sequence in sequences))
    used = {block for sequence in sequences for block in cache.blocks(sequence)}
    print(f"blocks        {len(used)} in use, {len(shared)} of them shared by all")
    worst = 0.0
    for text, mine in zip(texts, logits, strict=True):
        exact = model.without_cache(torch.tensor(text[: cache.length(first)], device=options.device))
        worst = max(worst, (mine - exact).abs().max().item())
    print(f"difference    {worst:.2g} at most, from logits of up to {logits.abs().max().item():.2g}")
    for sequence in sequences:
        cache.free(sequence)
    print(f"freed         {cache.free_blocks} of 40 blocks are free")


if __name__ == "__main__":
    main()
