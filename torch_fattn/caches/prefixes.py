"""Keys of the blocks of a prefix. The key of a block hashes its tokens and the key of the block before, so it
identifies all tokens up to its end, as in vLLM's automatic prefix caching (Kwon et al. 2023) and the paths of
SGLang's radix tree (Zheng et al. 2024). SHA-256 collisions are infeasible, so tokens are not compared.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence

from .blocks import GONE
from .sequences import Window


def block_keys(
    token_ids: Sequence[int], block_size: int, salt: str, before: Sequence[bytes] = ()
) -> Iterator[bytes]:
    """The keys of the whole blocks after `before`."""
    key = (
        before[-1]
        if before
        else hashlib.sha256(b"torch_fattn" + salt.encode(errors="surrogatepass")).digest()
    )
    for first in range(len(before) * block_size, len(token_ids) - block_size + 1, block_size):
        tokens = array("q", token_ids[first : first + block_size])
        key = hashlib.sha256(key + tokens.tobytes()).digest()
        yield key


def check_token_ids(name: str, token_ids: Sequence[int]) -> None:
    if token_ids and not (-(2**63) <= min(token_ids) and max(token_ids) < 2**63):
        raise ValueError(f"{name}: token_ids has a number of more than 63 bits; pass ids of tokens")


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first index at which two lists differ, up to the length of the shorter."""
    both = min(len(a), len(b))
    if list(a[:both]) == list(b[:both]):
        return None
    return next(n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


def longest_prefix(blocks: Sequence[int | None], window: Window, block_size: int) -> list[int]:
    """The longest prefix whose visible blocks were all found (None: not found). Blocks that later rows do not
    see are `GONE`."""
    first_missing = next((n for n, block in enumerate(blocks) if block is None), len(blocks))
    longest, run = 0, 0  # run: consecutive blocks found, ending here
    for end, block in enumerate(blocks, 1):
        run = 0 if block is None else run + 1
        begin_hidden, end_hidden = window.hidden(end * block_size, block_size)
        if run >= end - end_hidden and first_missing >= begin_hidden:
            longest = end
    begin_hidden, end_hidden = window.hidden(longest * block_size, block_size)
    seen = [None if begin_hidden <= n < end_hidden else block for n, block in enumerate(blocks[:longest])]
    return [GONE if block is None else block for block in seen]
