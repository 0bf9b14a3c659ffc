"""A random history of all methods of PagedKVCache, with memory running out at every op, against a dense
model."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.helpers.cache_classes import paged
from tests.helpers.faults import OutOfMemory, with_faults
from tests.helpers.kv_formats import QUANTISED
from torch_fattn import CacheFullError, CacheStep, reference
from torch_fattn.caches import paged as paged_cache
from torch_fattn.caches.files import Saved, read

KINDS = ("plain", "window", "latent", *QUANTISED)
LAYERS, HEADS, DIM = 2, 2, 32
SIGNS = (1, -1)  # of the numbers in the keys of each layer
_Result = TypeVar("_Result")


def read_outside(*arguments: Any) -> Saved:
    """Safetensors cannot read in a dispatch mode."""
    with _disable_current_modes():
        return read(*arguments)


class Contents:
    """The number in a key's columns: it identifies the token and all before it. Layer 1 has its negative."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[object, int], int] = {}

    def of(self, salt: str, tokens: Sequence[int]) -> list[int]:
        found, before = [], salt
        for token in tokens:
            before = self.numbers.setdefault((before, token), len(self.numbers) + 1)
            found.append(before)
        return found


class History:
    def __init__(self, kind: str, seed: int, device: str) -> None:
        self.rng = rng = random.Random(f"{kind} {seed}")
        self.device = device
        self.block_size = rng.choice((1, 2, 3, 4, 8))
        self.kv_format = kind if kind in QUANTISED else rng.choice(("auto", "auto", *QUANTISED))
        self.latent = kind == "latent" or (kind in QUANTISED and rng.random() < 0.3)
        self.window = {"window_left": rng.choice((0, 3, 10)), "sink_tokens": rng.choice((0, 2))}
        self.window = self.window if kind == "window" or (kind != "plain" and rng.random() < 0.3) else {}
        self.cache = paged(
            device,
            num_layers=LAYERS,
            num_kv_heads=HEADS,
            head_dim=DIM,
            value_dim=DIM,
            block_size=self.block_size,
            num_blocks=rng.choice((8, 12, 20)),
            max_sequences=6,
            kv_format=self.kv_format,
            latent=self.latent,
            **self.window,
        )
        self.contents = Contents()
        common = [rng.randint(0, 1) for _ in range(10)]
        self.prompts = [common + [rng.randint(0, 1) for _ in range(90)] for _ in range(2)]
        self.prompt_of: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.salts: dict[int, str] = {}
        self.swapped: set[int] = set()
        self.handed_out: list[tuple[Tensor, list[int]]] = []  # tensors of the last steps
        self.faults = self.full = 0

    # ---- calls

    def run(self, actions: int) -> None:
        names = [name.removeprefix("do_") for name in dir(self) if name.startswith("do_")]
        weights = [
            {"grow": 5, "accept": 2, "commit": 3, "allocate": 2, "interrupted": 2}.get(name, 1)
            for name in names
        ]
        for name in self.rng.choices(names, weights, k=actions):
            if not self.tokens.keys() - self.swapped and name != "swap_in":
                name = "allocate"
            getattr(self, f"do_{name}")()
            self.check()
        for sequence in list(self.tokens):
            self.cache.free(sequence)
        self.cache.clear_prefixes()
        pool = self.cache._pool
        assert sorted(pool._free) == list(range(pool.total)) and not pool._users and not pool._unused
        assert len(set(self.cache._tables._free_rows)) == 6

    def call(self, function: Callable[..., _Result], *arguments: Any, **options: Any) -> _Result:
        before = self.host_state()

        def check_unchanged() -> None:
            assert self.host_state() == before

        step = self.rng.choice((1, 4, 4, 1000))  # every op, every fourth, or mostly none
        ops = range(self.rng.randrange(step), 2000, step)
        result, failures = with_faults(lambda: function(*arguments, **options), check_unchanged, ops)
        self.faults += failures
        return result

    def host_state(self) -> Any:
        """What no failed call changes."""
        cache = self.cache
        sequences = {s: (cache.length(s), cache.blocks(s)) for s in cache.sequences}
        return sequences, cache.free_blocks, dict(cache._pool._users), cache.stats.tokens

    def any(self) -> int:
        return self.rng.choice([s for s in self.tokens if s not in self.swapped])

    def do_allocate(self) -> None:
        every = self.rng.choice(self.prompts)
        prompt = every[: self.rng.randint(0, 24)]
        salt = self.rng.choice(("", "", "", "adapter"))
        if len(self.tokens) == 6:
            with pytest.raises(CacheFullError, match="allocate: 6 sequences are allocated"):
                self.cache.allocate(prompt)
            return
        sequence = self.call(self.cache.allocate, prompt, salt=salt)
        found = self.cache.length(sequence)
        assert found % self.block_size == 0 and found < max(len(prompt), 1)
        self.tokens[sequence], self.salts[sequence], self.prompt_of[sequence] = prompt[:found], salt, every

    def do_commit(self) -> None:
        sequence = self.any()
        self.call(self.cache.commit, sequence, self.tokens[sequence] + [0, 1])

    def do_clear(self) -> None:
        if self.rng.random() < 0.1:
            self.call(self.cache.clear_prefixes)
            assert self.cache.stats.cached_blocks == 0

    def do_fork(self) -> None:
        source = self.any()
        if len(self.tokens) < 6:
            self.fork(source)

    def fork(self, source: int) -> int:
        copy = self.call(self.cache.fork, source)
        self.tokens[copy], self.salts[copy] = list(self.tokens[source]), self.salts[source]
        self.prompt_of[copy] = self.prompt_of[source]
        return copy

    def do_free(self) -> None:
        sequence = self.any()
        if self.rng.random() < 0.7:
            self.call(self.cache.commit, sequence, self.tokens[sequence])
        self.call(self.cache.free, sequence)
        del self.tokens[sequence]

    def do_swap_out(self) -> None:
        sequence = self.any()
        self.call(self.cache.swap_out, sequence)
        self.swapped.add(sequence)
        with pytest.raises(ValueError, match=rf"extend: sequence {sequence} is swapped out; call swap_in\("):
            self.cache.extend([sequence])

    def do_swap_in(self) -> None:
        for sequence in [*self.swapped][:2]:
            try:
                self.call(self.cache.swap_in, sequence)
                self.swapped.remove(sequence)
            except CacheFullError:
                self.full += 1

    def do_save_and_load(self) -> None:
        """A file of some sequences, read into the same cache."""
        sequences = list(self.some())
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/sequences.safetensors"
            self.call(self.cache.save, path, sequences)
            try:
                with mock.patch.object(paged_cache, "read", read_outside):
                    loaded = self.call(self.cache.load, path)
            except CacheFullError:
                self.full += 1
                return
        for source, copy in zip(sequences, loaded, strict=True):
            self.tokens[copy], self.salts[copy] = list(self.tokens[source]), self.salts[source]
            self.prompt_of[copy] = self.prompt_of[source]

    def do_truncate(self) -> None:
        sequence = self.any()
        length = self.rng.randint(0, len(self.tokens[sequence]))
        if -1 in self.seen_blocks(sequence, length):
            with pytest.raises(ValueError, match=f"rows after {length} tokens .* its window has released"):
                self.cache.truncate(sequence, length)
            return
        self.call(self.cache.truncate, sequence, length)
        del self.tokens[sequence][length:]

    def seen_blocks(self, sequence: int, length: int) -> set[int]:
        """The blocks that rows after so many tokens see, or are written to."""
        left, sinks = self.window.get("window_left", length), self.window.get("sink_tokens", 0)
        end = length - length % self.block_size
        seen = {p for p in range(length) if p >= min(length - 1 - left, end) or p < sinks}
        return {self.cache.blocks(sequence)[p // self.block_size] for p in seen}

    def do_grow(self) -> None:
        self.grow_by(self.some())

    def do_grow_alike(self) -> None:
        """Steps that continue the one before, with other calls in between."""
        count = self.rng.randint(1, self.block_size)
        counts = dict.fromkeys(self.some(), count)
        others = (self.do_fork, self.do_free, self.do_truncate, self.do_accept, self.do_failed)
        for _ in range(8):
            if counts := {s: count for s in counts if s in self.tokens}:
                self.grow_by(counts)
                if self.rng.random() < 0.1:
                    self.rng.choice(others)()

    def grow_by(self, counts: dict[int, int]) -> None:
        if (step := self.extend(counts)) is None:
            return
        new = {s: self.next_tokens(s, n) for s, n in counts.items()}
        for layer in range(LAYERS):
            self.append(layer, step, {s: self.numbers_after(s, own) for s, own in new.items()})
        self.grow(step, new)

    def grow(self, step: CacheStep, new: dict[int, list[int]]) -> None:
        for sequence, tokens in new.items():
            self.tokens[sequence] += tokens
        if self.rng.random() < 0.3:
            self.check_attention(step)

    def do_interrupted(self) -> None:
        """A failure between the layers: no other step has its sequences until it is finished or dropped."""
        counts = self.some()
        if (step := self.extend(counts)) is None:
            return
        new = {s: self.next_tokens(s, n) for s, n in counts.items()}
        is_finished = self.rng.random() < 0.3
        numbers = {s: self.numbers_after(s, own) if is_finished else [7] * len(own) for s, own in new.items()}
        self.append(0, step, numbers)
        self.cache.extend([s for s in self.tokens if s not in {*counts, *self.swapped}], 0)
        for sequence, length in [(s, len(self.tokens[s])) for s, n in counts.items() if n > 0]:
            self.call(self.cache.commit, sequence, self.tokens[sequence] + new[sequence])
            if 1 in self.cache._layers.written:
                words = rf"layer 1 does .* {length} on; .* truncate\({sequence}, {length}\)"
                with pytest.raises(ValueError, match=words):
                    self.rng.choice((self.cache.extend, self.cache.blocks_needed))([sequence], 0)
        if is_finished:
            self.append(1, step, numbers)
            self.grow(step, new)
        else:
            for sequence in counts:
                self.call(self.cache.truncate, sequence, len(self.tokens[sequence]))

    def do_accept(self) -> None:
        """Drafts that are not kept have contents of their own; a fork may keep all of them for a while."""
        counts = self.some()
        if (step := self.extend(counts)) is None:
            return
        kept = {s: sorted(self.rng.sample(range(n), self.rng.randint(0, n))) for s, n in counts.items()}
        path = {s: self.next_tokens(s, len(own)) for s, own in kept.items()}
        drafts = {}
        for sequence, n in counts.items():
            known = self.tokens[sequence]
            numbers = iter(self.numbers_after(sequence, path[sequence]))
            other = self.contents.of("other", [*known, sequence])[-1]
            drafts[sequence] = [next(numbers) if i in kept[sequence] else other for i in range(n)]
        for layer in range(LAYERS):
            self.append(layer, step, drafts)
        fork, source = None, self.rng.choice(list(counts))
        if self.rng.random() < 0.3 and len(self.tokens) < 6:
            fork = self.fork(source)
        try:
            self.call(self.cache.accept, step, list(kept.values()))
        except CacheFullError:
            self.full += 1
            for sequence in counts:
                self.cache.truncate(sequence, len(self.tokens[sequence]))
            path = {}
        for sequence, tokens in path.items():
            self.tokens[sequence] += tokens
        if fork is not None:
            every = self.contents.of(self.salts[fork], self.tokens[fork]) + drafts[source]
            self.check_contents({fork: every})
            self.call(self.cache.truncate, fork, len(self.tokens[fork]))

    def next_tokens(self, sequence: int, count: int) -> list[int]:
        """Mostly those of its prompt, so that prefixes are found."""
        if self.rng.random() < 0.2:
            return [self.rng.randint(0, 1) for _ in range(count)]
        length = len(self.tokens[sequence])
        return (self.prompt_of[sequence] + [0] * (length + count))[length : length + count]

    def do_failed(self) -> None:
        """A call that is not repeated."""
        counts = self.some()
        with OutOfMemory(self.rng.randint(0, 8)), contextlib.suppress(MemoryError, RuntimeError):
            self.cache.extend(list(counts), list(counts.values()))
        for sequence in counts:
            self.cache.truncate(sequence, len(self.tokens[sequence]))  # if it did not fail
        self.extend({s: 0 for s in self.tokens if s not in self.swapped})

    def some(self) -> dict[int, int]:
        here = [s for s in self.tokens if s not in self.swapped]
        chosen = self.rng.sample(here, self.rng.randint(1, len(here)))
        return {s: self.rng.choice((0, 1, 1, 2, self.rng.randint(0, 2 * self.block_size))) for s in chosen}

    def extend(self, counts: dict[int, int]) -> CacheStep | None:
        cache = self.cache
        chosen, numbers = list(counts), list(counts.values())
        needed, free, before = cache.blocks_needed(chosen, numbers), cache.free_blocks, self.host_state()
        assert needed == self.needed(counts)
        if needed > free:
            with pytest.raises(CacheFullError, match=f"{needed} blocks .* are needed and {free} of"):
                cache.extend(chosen, numbers)
            assert self.host_state() == before
            self.full += 1
            return None
        step = self.call(cache.extend, chosen, numbers)
        assert cache.free_blocks == free - needed or (self.window and cache.free_blocks > free - needed)
        self.check_step(step, counts)
        return step

    def needed(self, counts: dict[int, int]) -> int:
        """New blocks, and copies of shared ends: one user keeps the block."""
        size, grown = self.block_size, {s: len(self.tokens[s]) for s, n in counts.items() if n > 0}
        new = sum(-(-(length + counts[s]) // size) - -(-length // size) for s, length in grown.items())
        ends = [self.cache.blocks(s)[-1] for s, length in grown.items() if length % size]
        return new + sum(min(ends.count(b), self.cache._pool._users[b] - 1) for b in {*ends})

    def append(self, layer: int, step: CacheStep, new: dict[int, list[int]]) -> None:
        numbers = [number for own in new.values() for number in own]
        rows = torch.tensor(numbers, dtype=torch.float32)[:, None, None].expand(-1, HEADS, DIM) * SIGNS[layer]
        value = [] if self.latent else [-rows.to(self.device)]
        self.call(self.cache.append, layer, step, rows.to(self.device), *value)

    def numbers_after(self, sequence: int, tokens: list[int]) -> list[int]:
        known = self.tokens[sequence]
        return self.contents.of(self.salts[sequence], known + tokens)[len(known) :]

    # ---- checks

    def check_step(self, step: CacheStep, counts: dict[int, int]) -> None:
        size = self.block_size
        assert step.seq_lens.tolist() == list(step.lengths) == [self.cache.length(s) for s in counts]
        positions, slots = [], []
        for (sequence, count), row in zip(counts.items(), step.block_tables.tolist(), strict=True):
            blocks = self.cache.blocks(sequence)
            assert len(row) >= len(blocks)
            assert all(block in (own, -1) for own, block in zip(row, blocks, strict=False))
            own = range(len(self.tokens[sequence]), len(self.tokens[sequence]) + count)
            positions += own
            slots += [blocks[p // size] * size + p % size for p in own]
        assert step.positions.tolist() == positions and step.slot_mapping.tolist() == slots
        tensors = step.seq_lens, step.positions, step.slot_mapping, step.block_tables, step.cu_seqlens_q
        self.handed_out = [*self.handed_out[-15:], *((each, each.tolist()) for each in tensors)]
        if not self.window:
            assert step.shared_blocks == len(os.path.commonprefix([self.cache.blocks(s) for s in counts]))

    def check(self) -> None:
        cache, pool = self.cache, self.cache._pool
        used: dict[int, int] = {}
        for sequence, tokens in self.tokens.items():
            blocks = cache.blocks(sequence)
            assert cache.length(sequence) == len(tokens) and len(blocks) == -(-len(tokens) // self.block_size)
            for block in {*blocks} - {-1}:
                used[block] = used.get(block, 0) + 1
            assert sequence in self.swapped or -1 not in self.seen_blocks(sequence, len(tokens))
        assert pool._users == used and set(cache.sequences) == self.tokens.keys()
        assert all(tensor.tolist() == numbers for tensor, numbers in self.handed_out)
        assert cache.stats.swapped == len(self.swapped)
        assert sorted([*used, *pool._free, *pool._unused]) == list(range(pool.total))
        self.check_contents({s: self.contents.of(self.salts[s], own) for s, own in self.tokens.items()})

    def check_contents(self, numbers: dict[int, list[int]]) -> None:
        size = self.block_size
        for layer in range(LAYERS):
            for side in ("key", "value"):
                rows, sign = self.stored(layer, side), self.sign(layer, side)
                for sequence, own in numbers.items():
                    for n, block in enumerate(self.cache.blocks(sequence)):
                        if block != -1:
                            expected = [sign * number for number in own[n * size : (n + 1) * size]]
                            assert rows[block][: len(expected)] == expected

    def sign(self, layer: int, side: str) -> int:
        return SIGNS[layer] * (-1 if side == "value" and not self.latent else 1)

    def check_attention(self, step: CacheStep) -> None:
        """The newest rows of each sequence, in layer 1; and all new ones, packed."""
        packed = torch.randn(sum(step._counts), HEADS, DIM, generator=torch.Generator().manual_seed(0))
        outs = self.cache.prefill(1, step, packed.to(self.device), scale=1e-3).cpu().split(step._counts)
        for sequence, own, out in zip(step.sequences, packed.split(step._counts), outs, strict=True):
            self.check_rows(sequence, own.transpose(0, 1), out.transpose(0, 1))
        rows, fewest = self.rng.randint(1, max(step.max_seqlen_q, 1)), max(min(step._counts), 1)
        query = torch.randn(len(step.sequences), HEADS, rows, DIM, generator=torch.Generator().manual_seed(0))
        try:
            options: Any = {"scale": 1e-3, "shared_prefix": self.rng.random() < 0.5}
            out = self.cache.decode(1, step, query.to(self.device), **options).cpu()
        except ValueError as refusal:
            assert self.window and rows > fewest and "window has released" in str(refusal)
            return
        for row, own, sequence in zip(query, out, step.sequences, strict=True):
            self.check_rows(sequence, row, own)

    def check_rows(self, sequence: int, query: Tensor, out: Tensor) -> None:
        """The newest rows of a sequence, `[heads, rows, DIM]`."""
        numbers = torch.tensor(self.contents.of(self.salts[sequence], self.tokens[sequence]))
        key, value = (
            self.sign(1, side) * numbers.float()[None, None, :, None].expand(1, HEADS, -1, DIM)
            for side in ("key", "value")
        )
        exact, _ = reference.decode(query[None], key, value, scale=1e-3, **self.window)
        limit = 2e-3 * max(numbers.tolist(), default=0)
        assert torch.all((out.double() - exact[0]).abs() <= limit), f"sequence {sequence}"

    def stored(self, layer: int, side: str) -> list[list[int]]:
        """The number in each slot of each block, by some column of some head."""
        memory = self.cache._layers.operands(layer)[side == "value"].cpu()
        options = self.cache._layers.options(layer)
        if options:
            memory = reference.dequantise(memory, options[f"{side}_scales"].cpu(), self.kv_format)
        head, column = self.rng.randrange(HEADS), self.rng.randrange(DIM)
        return memory[:, :, head, column].nan_to_num().round().long().tolist()
