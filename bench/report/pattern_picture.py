"""Draws block masks: a window over a video's latents in two orders of tokens, and the heaviest blocks."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from torch_fattn import patterns

from .pictures import COLOURS, GRID, MUTED, STYLE, plt, save

LATENTS, WINDOW, TILE, BLOCK = (8, 24, 24), (8, 4, 4), (4, 4, 4), (64, 64)


def masks() -> dict[str, Tensor]:
    order = patterns.tile_order(LATENTS, TILE)
    # Rows of a random field; nearby tokens are alike.
    torch.manual_seed(0)
    noise = torch.randn(1, 64, 3, 7, 7)
    field = torch.nn.functional.interpolate(noise, size=LATENTS, mode="trilinear", align_corners=True)
    rows = field.flatten(2).mT[:, None, order] * 3
    return {
        "window, row by row": patterns.neighborhood(LATENTS, WINDOW, BLOCK),
        "window, in tiles": patterns.neighborhood(LATENTS, WINDOW, BLOCK, order),
        "top blocks, in tiles": patterns.top_blocks(patterns.pooled_scores(rows, rows, BLOCK), 0.3),
    }


def draw(stem: Path) -> Path:
    """Writes the picture to stem.png."""
    drawn = masks()
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(drawn), figsize=(8.8, 3.4), layout="constrained")
        colours = plt.matplotlib.colors.ListedColormap([GRID, COLOURS["fattn"]])
        for panel, (title, mask) in zip(axes, drawn.items(), strict=True):
            panel.imshow(mask[0, 0], cmap=colours, vmin=0, vmax=1, interpolation="nearest")
            panel.set_title(f"{title}\n{mask.float().mean():.0%} visible", fontsize=10)
            panel.set(xlabel="blocks of keys", xticks=[], yticks=[])
            panel.spines[["left", "bottom"]].set_color(MUTED)
        axes[0].set_ylabel("blocks of query rows")
        return save(figure, stem, (".png",))[0]
