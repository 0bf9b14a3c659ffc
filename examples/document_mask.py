"""Packs documents side by side under one causal document mask.

    python examples/document_mask.py [--device mps] [--documents 4] [--shortest 128]

Two layers of attention with seeded random weights. The mask hides most of the pack; the map, made once for
both layers, lets prefill skip those cells. At the end each document is computed again alone and compared.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import torch_fattn

LAYERS, HEADS, KV_HEADS, DIM, VOCABULARY = 2, 8, 4, 64, 64


class Decoder:
    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.embedding = torch.randn(VOCABULARY, HEADS * DIM).to(device)
        width = HEADS + 2 * KV_HEADS
        self.projections = [(torch.randn(HEADS * DIM, width * DIM) * 0.04).to(device) for _ in range(LAYERS)]

    def run(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attends under a mask `[tokens, tokens]`; default: causal."""
        x = self.embedding[tokens]
        cells = None if mask is None else torch_fattn.mask_map(mask)
        for projection in self.projections:
            heads = (x @ projection).unflatten(-1, (-1, DIM)).transpose(0, 1)[None]
            query, key, value = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
            out = torch_fattn.prefill(query, key, value, mask, mask_map=cells, is_causal=mask is None)
            x = x + out[0].transpose(0, 1).flatten(1)
        return x


def document_mask(lengths: list[int]) -> Tensor:
    """A token sees the earlier tokens of its document."""
    document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return (document[:, None] == document).tril()


def main() -> None:
    parser = argparse.ArgumentParser(description="Attend within packed documents.")
    parser.add_argument("--device", default="mps" if torch.backends.mps.is_available() else "cpu")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--shortest", type=int, default=128)
    options = parser.parse_args()

    decoder = Decoder(options.device)
    lengths = [options.shortest + 29 * n % options.shortest for n in range(options.documents)]
    tokens = torch.randint(VOCABULARY, (sum(lengths),)).to(options.device)
    mask = document_mask(lengths).to(options.device)
    kinds = (torch_fattn.mask_map(mask) % 4).flatten().tolist()
    hidden, mixed, whole = (kinds.count(kind) for kind in range(3))
    print(f"pack          {options.documents} documents, {sum(lengths):,} tokens")
    print(f"cells         {hidden} are left out, {whole} need no mask, {mixed} are mixed")

    together = decoder.run(tokens, mask)
    differences = [
        float((packed - decoder.run(document)).abs().max())
        for packed, document in zip(together.split(lengths), tokens.split(lengths), strict=True)
    ]
    print(f"difference    {max(differences):.1e} at most, from each document alone")


if __name__ == "__main__":
    main()
