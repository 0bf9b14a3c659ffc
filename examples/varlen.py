"""Runs sentences of different lengths through a bidirectional encoder, packed instead of padded.

    python examples/varlen.py [--device mps] [--sentences 12] [--longest 200]

The "encoder" is two layers of attention with seeded random weights. The packed batch has no padding: every
sentence attends to itself. At the end each is computed again alone and compared.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import torch_fattn

LAYERS, HEADS, KV_HEADS, DIM, VOCABULARY = 2, 8, 4, 64, 64


class Encoder:
    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.embedding = torch.randn(VOCABULARY, HEADS * DIM).to(device)
        width = HEADS + 2 * KV_HEADS
        self.projections = [(torch.randn(HEADS * DIM, width * DIM) * 0.04).to(device) for _ in range(LAYERS)]

    def project(self, layer: int, x: Tensor) -> tuple[Tensor, ...]:
        """Query, key and value `[tokens, heads, dim]` of packed tokens `[tokens, width]`."""
        heads = (x @ self.projections[layer]).unflatten(-1, (-1, DIM))
        return heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1)

    def packed(self, tokens: Tensor, starts: Tensor, longest: int) -> Tensor:
        """Encodes all sentences at once; `starts` has the first token of each, and the end of the last."""
        x = self.embedding[tokens]
        for layer in range(LAYERS):
            query, key, value = self.project(layer, x)
            out = torch_fattn.varlen_prefill(query, key, value, starts, starts, longest, longest)
            x = x + out.flatten(1)
        return x

    def alone(self, tokens: Tensor) -> Tensor:
        x = self.embedding[tokens]
        for layer in range(LAYERS):
            query, key, value = (part.transpose(0, 1)[None] for part in self.project(layer, x))
            out = torch_fattn.prefill(query, key, value)
            x = x + out[0].transpose(0, 1).flatten(1)
        return x


def main() -> None:
    parser = argparse.ArgumentParser(description="Encode sentences of their own lengths without padding.")
    parser.add_argument("--device", default="mps" if torch.backends.mps.is_available() else "cpu")
    parser.add_argument("--sentences", type=int, default=12)
    parser.add_argument("--longest", type=int, default=200)
    options = parser.parse_args()

    encoder = Encoder(options.device)
    lengths = torch.randint(1, options.longest + 1, (options.sentences,)).tolist()
    lengths[0] = options.longest
    tokens = torch.randint(VOCABULARY, (sum(lengths),)).to(options.device)
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(options.device)
    padded = options.sentences * options.longest
    print(f"batch         {options.sentences} sentences of {min(lengths)} to {max(lengths)} tokens")
    print(f"rows          {sum(lengths):,} packed, {padded:,} padded")

    together = encoder.packed(tokens, starts, options.longest)
    differences = [
        float((packed - encoder.alone(sentence)).abs().max())
        for packed, sentence in zip(together.split(lengths), tokens.split(lengths), strict=True)
    ]
    print(f"difference    {max(differences):.1e} at most, from each sentence alone")


if __name__ == "__main__":
    main()
