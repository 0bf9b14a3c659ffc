"""`BlockPool`: which blocks of a paged cache are in use, and by how many sequences. Host numbers only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class BlockPool:
    """Blocks 0 to `total - 1` with reference counts. The block that was released last is taken first."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._users: dict[int, int] = {}  # of every block in use

    @property
    def available(self) -> int:
        """How many blocks `take` can return."""
        return len(self._free)

    @property
    def shared(self) -> int:
        """How many blocks have several users."""
        return sum(users > 1 for users in self._users.values())

    def users(self, block: int) -> int:
        return self._users.get(block, 0)

    def take(self, count: int) -> list[int]:
        """Blocks with one user. The caller has checked that there are enough."""
        taken = [self._free.pop() for _ in range(count)]
        self._users.update(dict.fromkeys(taken, 1))
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a user to each of these blocks, which are in use."""
        for block in blocks:
            self._users[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Takes a user from each block, the last one first: a `take` of as many returns them in order."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block] == 0:
                del self._users[block]
                self._free.append(block)
