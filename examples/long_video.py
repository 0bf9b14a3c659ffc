"""Prints the error of block-sparse attention on a made-up video, by the density of its blocks.

    python examples/long_video.py [--device mps] [--grid 8 16 16] [--block 64]

Keys and values are smooth random fields over frames, rows and columns, and a query is its own key with noise.
Peaked heads give nearly all weight to a tenth of the keys, flat heads three fifths. Real models differ:
compare the columns, and measure your own model.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor
from torch.nn.functional import interpolate

import torch_fattn
from torch_fattn import patterns

HEADS, DIM = 2, 64
SHARPNESS = {"peaked": 3.0, "flat": 0.75}
TILE = (4, 4, 4)
DENSITIES = (0.1, 0.3)


def field(grid: list[int]) -> Tensor:
    """Smooth noise `[1, H, T * H * W, D]` with variance 1."""
    coarse = [max(2, -(-size // 3)) for size in grid]
    noise = torch.randn(1, HEADS * DIM, *coarse)
    smooth = interpolate(noise, size=tuple(grid), mode="trilinear", align_corners=True)
    return (smooth / smooth.std()).view(1, HEADS, DIM, -1).mT.contiguous()


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the error of block-sparse attention by density.")
    parser.add_argument("--device", default="mps" if torch.backends.mps.is_available() else "cpu")
    parser.add_argument("--grid", type=int, nargs=3, default=[8, 16, 16], metavar=("T", "H", "W"))
    parser.add_argument("--block", type=int, default=64)
    options = parser.parse_args()

    torch.manual_seed(0)
    block = (options.block, options.block)
    shared, value = field(options.grid), field(options.grid)
    order = patterns.tile_order(options.grid, TILE)
    print(f"{shared.shape[2]:,} tokens, blocks of {options.block}, relative L2 error of the result")
    print("| heads | a tenth of the keys holds | density | raster | tiles | tiles with means |")
    print("|---|---|---|---|---|---|")
    for kind, sharpness in SHARPNESS.items():
        query = sharpness * (0.8 * shared + 0.6 * torch.randn_like(shared))
        weights = torch.softmax(query @ shared.mT / math.sqrt(DIM), -1)
        tenth = weights.topk(weights.shape[-1] // 10, -1).values.sum(-1).mean()
        errors: dict[float, list[float]] = {density: [] for density in DENSITIES}
        for is_tiled in (False, True):
            operands = [x[..., order, :] if is_tiled else x for x in (query, shared, value)]
            q, k, v = (x.to(options.device) for x in operands)
            exact = torch_fattn.prefill(q, k, v)
            scores = patterns.pooled_scores(q, k, block)
            for density in DENSITIES:
                mask = patterns.top_blocks(scores, density)
                outs = [torch_fattn.prefill(q, k, v, block_mask=mask, block_size=block)]
                if is_tiled:
                    outs.append(patterns.attention_with_means(q, k, v, mask, block_size=block))
                errors[density] += [((out - exact).norm() / exact.norm()).item() for out in outs]
        for density, row in errors.items():
            print(f"| {kind} | {tenth:.2f} | {density} | {' | '.join(f'{error:.2f}' for error in row)} |")
    # With every block visible, a pattern is exact.
    mask = torch.ones_like(mask)
    worst = (torch_fattn.prefill(q, k, v, block_mask=mask, block_size=block) - exact).abs().max().item()
    print(f"difference    {worst:.1e} at most, with every block visible")


if __name__ == "__main__":
    main()
