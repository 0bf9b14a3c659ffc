"""`BlockPool`: reference counts of a paged cache's blocks, and the keys that find them. Host numbers only.

The key of a block hashes its tokens and the key of the block before, so it identifies all tokens up to its
end, as in vLLM's automatic prefix caching (Kwon et al. 2023) and the paths of SGLang's radix tree (Zheng et
al. 2024). SHA-256 collisions are infeasible, so tokens are not compared.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence

GONE = -1  # instead of a block that a sequence has released


def _is_block(block: int) -> bool:
    return block != GONE


class BlockPool:
    """Blocks 0 to `total - 1` with reference counts.

    A block with a key can be found by it, even without users, until `take` evicts it. `take` first uses free
    blocks without keys, the last released first, and then evicts the least recently used.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.evictions = 0
        self._free = list(range(total - 1, -1, -1))
        self._users: dict[int, int] = {}  # of every block in use
        self._keys: dict[int, bytes] = {}
        self._blocks: dict[bytes, int] = {}
        self._unused: dict[int, None] = {}  # no users, but a key; least recently used first

    @property
    def available(self) -> int:
        """How many blocks `take` can return."""
        return len(self._free) + len(self._unused)

    @property
    def shared(self) -> int:
        """How many blocks have several users."""
        return sum(users > 1 for users in self._users.values())

    @property
    def cached(self) -> int:
        """How many blocks have a key."""
        return len(self._keys)

    def users(self, block: int) -> int:
        return self._users.get(block, 0)

    def take(self, count: int) -> list[int]:
        """Takes blocks, each with one user. The caller has checked that enough are available."""
        taken = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        self._users.update(dict.fromkeys(taken, 1))
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a user to each of these blocks, which are in use or found by their keys."""
        for block in filter(_is_block, blocks):
            self._unused.pop(block, None)
            self._users[block] = self.users(block) + 1

    def release(self, blocks: Sequence[int]) -> None:
        """Removes a user of each block, last block first, so that `take` returns them in order and evicts the
        end of a prefix before its beginning."""
        for block in filter(_is_block, reversed(blocks)):
            self._users[block] -= 1
            if self._users[block] == 0:
                del self._users[block]
                if block in self._keys:
                    self._unused[block] = None
                else:
                    self._free.append(block)

    def register(self, block: int, key: bytes) -> None:
        """Gives a block in use a key, unless another block has it."""
        if key not in self._blocks and block not in self._keys:
            self._keys[block] = key
            self._blocks[key] = block

    def find(self, key: bytes) -> int | None:
        return self._blocks.get(key)

    def forget(self, block: int) -> None:
        """Removes the key of a block in use that is about to be written."""
        key = self._keys.pop(block, None)
        if key is not None:
            del self._blocks[key]

    def forget_all(self) -> None:
        self._keys.clear()
        self._blocks.clear()
        self._free += reversed(self._unused)
        self._unused.clear()

    def _evict(self) -> int:
        block = next(iter(self._unused))
        del self._unused[block]
        self.forget(block)
        self.evictions += 1
        return block


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
