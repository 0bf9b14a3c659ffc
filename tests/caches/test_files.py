"""Sequences of a PagedKVCache in files. The histories have those in host memory."""

from __future__ import annotations

import builtins
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from tests.helpers.cache_classes import DIM, KV_HEADS, LAYERS, VALUE_DIM, Dense, paged, same, snapshot
from tests.helpers.faults import OutOfMemory
from tests.helpers.kv_formats import QUANTISED
from torch_fattn import PagedKVCache

FORMATS = ("auto", *QUANTISED)


def filled(cache: PagedKVCache, tokens: int, token_ids: list[int] | None = None) -> int:
    """A sequence with random contents."""
    sequence = cache.allocate()
    step = cache.extend([sequence], tokens)
    for layer in range(LAYERS):
        rows = (torch.randn(tokens, KV_HEADS, dim) for dim in (DIM, VALUE_DIM))
        cache.append(layer, step, *(each.to(step.seq_lens.device) for each in rows))
    if token_ids is not None:
        cache.commit(sequence, token_ids)
    return sequence


def rows_of(cache: PagedKVCache, sequence: int) -> list[Tensor]:
    """The bits of its keys, values and scales."""
    blocks, length = list(cache.blocks(sequence)), cache.length(sequence)
    memory = (tensor.cpu()[blocks].flatten(0, 1)[:length] for tensor in cache._layers.tensors())
    return [rows.contiguous().view(torch.uint8) for rows in memory]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("block_size", [1, 3, 4, 8])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_file_is_read_into_other_blocks(kv_format: str, block_size: int, tmp_path: Path) -> None:
    cache = paged("cpu", kv_format=kv_format)
    one = filled(cache, 10, list(range(10)))
    fork = cache.fork(one)
    step = cache.extend([fork], 3)
    for layer in range(LAYERS):
        cache.append(layer, step, torch.randn(3, KV_HEADS, DIM), torch.randn(3, KV_HEADS, VALUE_DIM))
    empty = cache.allocate()
    cache.save(tmp_path / "cache.safetensors", [fork, one, empty])
    stored = safetensors.torch.load_file(tmp_path / "cache.safetensors")
    assert len(stored["layers.0.key"]) == 8 + 2 + 5, "shared blocks once"
    new = paged("cpu", kv_format=kv_format, block_size=block_size, num_blocks=40)
    loaded = new.load(tmp_path / "cache.safetensors")
    assert [new.length(s) for s in loaded] == [13, 10, 0]
    for source, copy in zip((fork, one), loaded, strict=False):
        assert equal(rows_of(cache, source), rows_of(new, copy))
    shared = 8 // block_size
    assert new.blocks(loaded[0])[:shared] == new.blocks(loaded[1])[:shared]
    assert new.free_blocks == 40 - (-(-13 // block_size) + -(-10 // block_size) - shared)
    prompt = new.allocate(list(range(10)))
    assert new.length(prompt) == 8 // block_size * block_size, "the prefix is found"
    assert new.stats.prefix_hits == 8 // block_size


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    cache = paged("cpu")
    filled(cache, 10)
    cache.save(path)
    for change, words in (
        ({"head_dim": 64}, "head_dim 32 and the cache 64"),
        ({"value_dim": 32}, "value_dim 64 and the cache 32"),
        ({"num_layers": 1}, "num_layers 2 and the cache 1"),
        ({"num_kv_heads": 1}, "num_kv_heads 2 and the cache 1"),
        ({"dtype": torch.float16}, "stored torch.float32 and the cache torch.float16"),
        ({"kv_format": "int8"}, "stored torch.float32 and the cache int8"),
        ({"head_dim": 64, "latent": True}, "head_dim 32 and the cache 64"),
        ({"window_left": 4}, "window_left -1 and the cache 4"),
    ):
        with pytest.raises(ValueError, match=f"load: .* has {words}; load it into a cache made as"):
            paged("cpu", **change).load(path)
    assert paged("cpu", max_sequences=9).load(path) == (0,)


def test_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    cache = paged("cpu")
    filled(cache, 10, list(range(10)))
    cache.save(path)
    whole = path.read_bytes()
    metadata = safetensors.safe_open(path, "pt").metadata()
    tensors = safetensors.torch.load_file(path)

    def rewritten(header: dict[str, str], **changes: Tensor) -> bytes:
        return safetensors.torch.save({**tensors, **changes}, metadata | header)

    rows = tensors["sequences.0.rows"]
    for damaged, words in (
        (b"", "is damaged or no file of a cache"),
        (whole[:-1], "is damaged or no file of a cache"),
        (whole[: len(whole) // 2], "is damaged or no file of a cache"),
        (b"PK" + whole[2:], "is damaged or no file of a cache"),
        (safetensors.torch.save({"x": torch.ones(3)}), "its format is None"),
        (rewritten({"format": "other"}), "its format is 'other'"),
        (rewritten({"version": "2"}), "has version 2 of the format, and this torch_fattn reads 1"),
        (rewritten({"cache": "{"}), "is damaged"),
        (rewritten({"cache": "[]"}), r"its cache is \[\]"),
        (rewritten({"salts": '["", ""]'}), "sequences.1.rows"),
        *((rewritten({"salts": salts}), "its salts are no list of str") for salts in ("[0]", '"a"', "3")),
        (rewritten({"salts": "[" * 100_000}), "recursion"),
        *((rewritten({}, **{"sequences.0.rows": rows + n}), "the rows of sequence 0") for n in (1, -1, -2)),
        (rewritten({}, **{"sequences.0.token_ids": rows[:8].view(4, 2).clone()}), "the rows of sequence 0"),
        (rewritten({}, **{"layers.1.key": tensors["layers.1.key"][1:]}), "a tensor has shape"),
        (rewritten({}, **{"layers.1.key": tensors["layers.1.key"].half()}), "float16"),
    ):
        path.write_bytes(damaged)
        before = snapshot(cache)
        with pytest.raises(ValueError, match=words) as refused:
            cache.load(path)
        assert str(refused.value).startswith("PagedKVCache.load: ") and "\n" not in str(refused.value)
        assert same(snapshot(cache), before)
    path.write_bytes(whole)
    cache.load(path)
    with pytest.raises(OSError, match="there is no file.*; pass the path of a file that save"):
        cache.load(tmp_path / "none")


def test_a_file_is_written_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    cache = paged("cpu")
    one = filled(cache, 10)
    cache.save(path)
    before = path.read_bytes()
    step = cache.extend([one], 1)
    with pytest.raises(ValueError, match=rf"layer 0 .* from position 10 on; .* truncate\({one}, 10\)"):
        cache.save(path)
    for layer in range(LAYERS):
        cache.append(layer, step, torch.randn(1, KV_HEADS, DIM), torch.randn(1, KV_HEADS, VALUE_DIM))
    with OutOfMemory(3), pytest.raises(MemoryError):
        cache.save(path)
    assert path.read_bytes() == before and [*tmp_path.iterdir()] == [path]
    cache.save(path)
    assert path.read_bytes() != before and [*tmp_path.iterdir()] == [path]
    os.mkfifo(tmp_path / "pipe")
    for wrong in (tmp_path, tmp_path / "none" / "file", tmp_path / "pipe"):
        with pytest.raises(OSError, match=r"^PagedKVCache\.save: .* pass the path of a file in a folder"):
            cache.save(wrong)
    for call, long in ((cache.save, "cannot be written"), (cache.load, "cannot be read")):
        with pytest.raises(OSError, match=rf"PagedKVCache\.\w+: .* {long} \(.*\); pass"):
            call(tmp_path / ("x" * 300))  # no file system has such a name


@pytest.mark.host_only
@pytest.mark.parametrize(("saved_size", "loaded_size"), [(1, 4), (2, 8), (4, 1)])
def test_tokens_behind_a_window_are_missing(saved_size: int, loaded_size: int, tmp_path: Path) -> None:
    """A larger block than that of the file holds tokens that the file lacks: no row may see them, and
    no prefix with them is found, also not in a copy of the copy."""
    window = {"window_left": 5, "sink_tokens": 1}
    dense = Dense()
    cut = found = 0
    for length in (13, 19, 22):
        token_ids = list(range(length))
        cache = paged("cpu", num_blocks=40, block_size=saved_size, **window)
        one = cache.allocate()
        for _ in range(length):
            dense.append(cache, cache.extend([one]), [1], "cpu")
        cache.commit(one, token_ids)
        rows = dense.tokens.pop(one)
        for _ in range(2):
            cache.save(tmp_path / "file", [one])
            cache = paged("cpu", num_blocks=40, block_size=loaded_size, **window)
            for tensor in cache._layers.tensors():
                tensor.fill_(torch.nan)
            (one,) = cache.load(tmp_path / "file")
            cache.swap_out(one)
            cache.swap_in(one)
            for kept in range(length + 1):
                other, prefixed = cache.fork(one), cache.allocate([*token_ids[:kept], 99])
                found += cache.length(prefixed) > 0
                try:
                    cache.truncate(other, kept)
                except ValueError as refused:
                    cache.truncate(other, int(str(refused).split("at least ")[1].split()[0]))
                    cut += 1
                for sequence in (other, prefixed):
                    dense.tokens[sequence] = [layer[: cache.length(sequence)] for layer in rows]
                    step = cache.extend([sequence])
                    dense.append(cache, step, [1], "cpu")
                    dense.check(cache, step, "cpu", exact_options=window)
                    cache.free(sequence)
        cache.truncate(one, 0)  # its next tokens are all there
        dense.tokens[one] = [[] for _ in rows]
        dense.append(cache, cache.extend([one], 5), [5], "cpu")
        cache.swap_out(one)
        for tensor in cache._layers.tensors():
            tensor.fill_(torch.nan)
        cache.swap_in(one)
        dense.check(cache, cache.extend([one], 0), "cpu", exact_options=window)
        del dense.tokens[one]
    assert cut > 0 and (found > 0) == (saved_size > loaded_size)


def test_without_safetensors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    true_import = builtins.__import__

    def no_safetensors(name: str, *arguments: Any) -> Any:
        if name.startswith("safetensors"):
            raise ImportError(name)
        return true_import(name, *arguments)

    cache = paged("cpu")
    cache.save(tmp_path / "file")
    monkeypatch.setattr(builtins, "__import__", no_safetensors)
    for call in (cache.save, cache.load):
        with pytest.raises(ImportError, match="safetensors is not installed; pip install safetensors"):
            call(tmp_path / "file")
