"""Runs clips of different lengths through an encoder: padded, with a mask, and packed.

    python examples/encoder.py [--device mps] [--clips 6] [--longest 150]

The encoder is like Whisper's: every frame sees every frame of its clip. It has two layers of attention and
output projection with seeded random weights.

Padded, the batch is `[B, L, width]` and a bool mask `[B, 1, 1, L]` hides the padding; it is broadcast over
heads and rows without a copy. Results are `[B, L, H, D]` in memory (`token_major_out`), which the projection
reads without a copy. The packed batch computes no padding. At the end each clip is encoded alone, with
torch's own attention on the CPU, and compared.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor

import torch_fattn

LAYERS, HEADS, DIM = 2, 6, 64
WIDTH = HEADS * DIM


class Encoder:
    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.into = [(torch.randn(WIDTH, 3 * WIDTH) * 0.05).to(device) for _ in range(LAYERS)]
        self.out_of = [(torch.randn(WIDTH, WIDTH) * 0.05).to(device) for _ in range(LAYERS)]

    def heads(self, layer: int, x: Tensor) -> tuple[Tensor, ...]:
        """Query, key and value `[..., heads, dim]`, views of one product."""
        return (x @ self.into[layer]).unflatten(-1, (3, HEADS, DIM)).unbind(-3)

    def padded(self, x: Tensor, mask: Tensor) -> Tensor:
        """Encodes clips `[B, L, width]`; `mask` `[B, 1, 1, L]` is False at padding."""
        for layer in range(LAYERS):
            query, key, value = (part.transpose(1, 2) for part in self.heads(layer, x))
            out = torch_fattn.prefill(query, key, value, mask, token_major_out=True)
            x = x + out.transpose(1, 2).view(x.shape) @ self.out_of[layer]
        return x

    def packed(self, x: Tensor, starts: Tensor, longest: int) -> Tensor:
        """Encodes all frames `[frames, width]`; `starts` has the first frame of each clip, and the end of the
        last."""
        for layer in range(LAYERS):
            query, key, value = self.heads(layer, x)
            out = torch_fattn.varlen_prefill(query, key, value, starts, starts, longest, longest)
            x = x + out.view(x.shape) @ self.out_of[layer]
        return x

    def alone(self, x: Tensor) -> Tensor:
        """Encodes one clip `[frames, width]`."""
        for layer in range(LAYERS):
            query, key, value = (part.transpose(0, 1) for part in self.heads(layer, x))
            out = F.scaled_dot_product_attention(query, key, value)
            x = x + out.transpose(0, 1).flatten(1) @ self.out_of[layer]
        return x


def main() -> None:
    parser = argparse.ArgumentParser(description="Encode clips of their own lengths, padded and packed.")
    parser.add_argument("--device", default="mps" if torch.backends.mps.is_available() else "cpu")
    parser.add_argument("--clips", type=int, default=6)
    parser.add_argument("--longest", type=int, default=150)
    options = parser.parse_args()

    encoder = Encoder(options.device)
    lengths = torch.randint(1, options.longest + 1, (options.clips,)).tolist()
    lengths[0] = options.longest
    frames = torch.randn(options.clips, options.longest, WIDTH)
    is_frame = torch.arange(options.longest) < torch.tensor(lengths)[:, None]
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(options.device)
    print(f"batch         {options.clips} clips of {min(lengths)} to {max(lengths)} frames")
    padded_rows, padded_pairs = options.clips * options.longest, options.clips * options.longest**2
    print(f"padded        {padded_rows:,} rows, {padded_pairs:,} pairs of frames")
    print(f"packed        {sum(lengths):,} rows, {sum(n * n for n in lengths):,} pairs of frames")

    mask = is_frame[:, None, None, :].to(options.device)
    padded = encoder.padded(frames.to(options.device), mask)
    packed = encoder.packed(frames[is_frame].to(options.device), starts, options.longest)
    on_cpu = Encoder("cpu")
    of_padded, of_packed = 0.0, 0.0
    for clip, length, row, part in zip(
        frames, lengths, padded.cpu(), packed.cpu().split(lengths), strict=True
    ):
        alone = on_cpu.alone(clip[:length])
        of_padded = max(of_padded, float((row[:length] - alone).abs().max()))
        of_packed = max(of_packed, float((part - alone).abs().max()))
    print(f"difference    padded {of_padded:.1e}, packed {of_packed:.1e} at most, from each clip alone")
    if options.device == "mps":
        print(f"kernels       {torch_fattn.launch_counts()['fattn_prefill']} launches of fattn_prefill")


if __name__ == "__main__":
    main()
