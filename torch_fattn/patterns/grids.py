"""Windows and token orders of grids: the frames, rows and columns of a video's latents, or an image's."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..runtime.signatures import public
from ..runtime.tensor_checks import check_available
from .selection import BLOCK_SIZE, check_block_size

_ELEMENTS_AT_A_TIME = 2**24
_MOST = 2**22  # tokens: their blocks of 128 have a mask of 1 GB


@public("torch_fattn.patterns.tile_order")
def tile_order(grid: Sequence[int], tile: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """A permutation of the tokens of a grid: tile by tile, and in row-major order inside a tile. Tokens of
    one block are then close in every dimension. Tiles at the ends may be smaller.

    `x[..., order, :]` reorders tokens, and `y[..., order.argsort(), :]` restores them. Attention does not
    depend on the order, but rotary embeddings do: reorder their tables too.

    Args:
        grid: tokens in each dimension, such as `[T, H, W]`; the last one is contiguous.
        tile: the tile's tokens in each dimension. Sizes whose product is a block's are best.
        device: of the result.

    Returns:
        int64 `[T * H * W]`.
    """
    _check_grid("torch_fattn.patterns.tile_order", grid, "tile", tile, least=1)
    check_available("torch_fattn.patterns.tile_order", device)
    place = torch.zeros(tuple(grid), dtype=torch.long, device=device)
    for dim, (size, step) in enumerate(zip(grid, tile, strict=True)):
        at = torch.arange(size, device=device).view(-1, *(1,) * (len(grid) - dim - 1))
        tiles_after = math.prod(-(-n // t) for n, t in zip(grid[dim + 1 :], tile[dim + 1 :], strict=True))
        inside_after = math.prod(tile[dim + 1 :])
        place = place + at // step * (tiles_after * math.prod(tile)) + at % step * inside_after
    return place.flatten().argsort()


@public("torch_fattn.patterns.neighborhood")
def neighborhood(
    grid: Sequence[int],
    window: Sequence[int],
    block_size: tuple[int, int] = BLOCK_SIZE,
    order: Tensor | None = None,
    first: int = 0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The blocks in which a token is within `window` of another in every dimension. Make it once for a grid:
    its time grows with the square of the tokens.

    Args:
        grid: tokens in each dimension, such as `[T, H, W]`; `[L]` is a sequence.
        window: the distance in each dimension up to which tokens see each other.
        block_size: rows of query and of key in a block.
        order: the order of tokens, from `tile_order`. Default: row-major.
        first: the number of tokens before the grid, such as a prompt's. They see all tokens, and all tokens
            see them.
        device: of the mask, unless that of `order`.

    Returns:
        bool `[1, 1, ceil(L / bq), ceil(L / bk)]` with L = first + T * H * W.
    """
    name = "torch_fattn.patterns.neighborhood"
    _check_grid(name, grid, "window", window, least=0)
    check_block_size(name, block_size)
    tokens = math.prod(grid)
    if not 0 <= first <= _MOST:
        raise ValueError(f"{name}: first is {first}; pass 0 to {_MOST}")
    device = device if order is None else order.device
    check_available(name, device)
    in_row_major = torch.arange(tokens, device=device)
    if order is None:
        order = in_row_major
    elif order.dtype != torch.int64 or not torch.equal(order.sort().values, in_row_major):
        found = f"order is {order.dtype} {list(order.shape)}, not a permutation of {tokens} tokens"
        raise ValueError(f"{name}: {found}; pass tile_order of the same grid")
    length = first + tokens
    rows, columns = (-(-length // size) for size in block_size)
    block_of_token = ((order.argsort() + first) // block_size[0]).view(tuple(grid))
    at_a_time = max(1, _ELEMENTS_AT_A_TIME // max(1, tokens))
    near = []
    for block_rows in torch.arange(rows, device=device).split(at_a_time):
        seen = block_of_token == block_rows.view(-1, *(1,) * len(grid))
        for dim, reach in enumerate(window, start=1):
            seen = _dilated(seen, dim, reach)
        in_order = seen.flatten(1)[:, order]
        padded = torch.nn.functional.pad(in_order, (first, columns * block_size[1] - length))
        near.append(padded.unflatten(1, (columns, block_size[1])).any(2))
    first_rows = torch.arange(rows, device=device)[:, None] * block_size[0] < first
    first_columns = torch.arange(columns, device=device) * block_size[1] < first
    return (torch.cat(near) | first_rows | first_columns)[None, None]


def _dilated(seen: Tensor, dim: int, reach: int) -> Tensor:
    """Whether an element within `reach` along a dimension is True."""
    size = seen.shape[dim]
    at = torch.arange(size, device=seen.device)
    count = torch.nn.functional.pad(seen.cumsum(dim, dtype=torch.int32).movedim(dim, -1), (1, 0))
    after, before = (at + reach + 1).clamp(max=size), (at - reach).clamp(min=0)
    return (count[..., after] > count[..., before]).movedim(-1, dim)


def _check_grid(name: str, grid: Sequence[int], what: str, sizes: Sequence[int], least: int) -> None:
    if not grid or min(grid) < 1 or math.prod(grid) > _MOST:
        raise ValueError(f"{name}: grid is {list(grid)}; pass positive sizes of at most {_MOST} tokens")
    if len(sizes) != len(grid) or min(sizes) < least or max(sizes) > _MOST:
        raise ValueError(
            f"{name}: {what} is {list(sizes)}; pass {len(grid)} sizes of {least} to {_MOST}, one for each "
            "dimension of grid"
        )
