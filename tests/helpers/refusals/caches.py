"""Refusals of caches and shared prefixes; see __init__.py."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torch_fattn
from tests.helpers.public_calls import heads
from tests.helpers.refusals import WRITTEN, Refusal, padded_to, written
from tests.helpers.wrong_calls import Arguments
from torch_fattn import PagedKVCache, StaticKVCache, reference


def _cache(of_what: Any = PagedKVCache, **changes: Any) -> Any:
    sizes: Arguments = {
        "num_layers": 1,
        "num_kv_heads": 2,
        "head_dim": 64,
        "dtype": torch.float32,
        "device": "cpu",
    }
    sizes |= {"num_blocks": 4} if of_what is PagedKVCache else {"batch_size": 1, "capacity": 8}
    return of_what(**(sizes | changes))


def _through_cache(dim: int, value_dim: int, padded: int, padded_values: int) -> Tensor:
    """Four tokens, written to a cache with wider heads."""
    cache = _cache(head_dim=padded, value_dim=padded_values)
    step = cache.extend([cache.allocate()], 4)
    key, value = heads(4, 2, dim), heads(4, 2, value_dim, seed=1)
    cache.append(0, step, padded_to(key, padded), padded_to(value, padded_values))
    out = cache.decode(0, step, padded_to(heads(1, 4, 1, dim, seed=2), padded), scale=dim**-0.5)
    return out[..., :value_dim]


def _without_cache(dim: int, value_dim: int) -> Tensor:
    key, value = (x.transpose(0, 1)[None] for x in (heads(4, 2, dim), heads(4, 2, value_dim, seed=1)))
    return reference.decode(heads(1, 4, 1, dim, seed=2), key, value)[0]


Use = Callable[[Any, Any], Any]  # of a cache that holds the tokens of a step


def _used(use: Use, tokens: int = 4) -> Callable[[], Any]:
    def call() -> Any:
        cache = _cache()
        step = cache.extend([cache.allocate()], tokens)
        cache.append(0, step, heads(tokens, 2, 64), heads(tokens, 2, 64, seed=1))
        return use(cache, step)

    return call


def _committed(cache: Any, token_ids: list[int]) -> None:
    cache.commit(0, list(range(17)))
    cache.commit(0, token_ids)


def _windowed(length: int) -> None:
    cache = _cache(window_left=4)
    sequence = cache.allocate()
    cache.extend([sequence], 30)
    cache.extend([sequence], 1)
    cache.truncate(sequence, length)


def _forked(reset: bool) -> None:
    cache = _cache(StaticKVCache, batch_size=2)
    cache.extend(tokens=[2, 1])
    if reset:
        cache.reset(1)
    cache.fork(0, 1)


def _loaded(*, damaged: bool = False, missing: bool = False, folder: str = "", **changes: Any) -> None:
    """Saves a sequence, and loads it into another cache."""
    cache = _cache()
    step = cache.extend([cache.allocate()], 3)
    cache.append(0, step, heads(3, 2, 64), heads(3, 2, 64))
    with tempfile.TemporaryDirectory() as own:
        path = Path(own + folder) / "cache.safetensors"
        cache.save(path)
        if damaged:
            path.write_bytes(path.read_bytes()[:-1])
        _cache(**changes).load(Path(own) / "other" if missing else path)


ROWS = heads(4, 4, 64, seed=2)


def _rotate(cache: Any, step: Any, table: Tensor) -> Tensor:
    return cache.append_rotated(0, step, ROWS, *heads(2, 4, 2, 64), table, table)


def _latent(apart: bool = False) -> Tensor:
    cache, table = _cache(latent=True), heads(4, 64)
    step = cache.extend([cache.allocate()], 4)
    if not apart:
        return _rotate(cache, step, table)
    rows = (each.transpose(0, 1)[None] for each in (ROWS, heads(4, 2, 64)))
    query, key = torch_fattn.rotary(*rows, table[None], table[None])
    cache.append(0, step, key[0].transpose(0, 1))
    return query


def _prefix(**changes: Any) -> Callable[[], Tensor]:
    prefix, own = heads(1, 2, 6, 16), heads(2, 2, 4, 16, seed=1)
    arguments = {"query": heads(2, 4, 1, 16, seed=2), "prefix_key": prefix, "prefix_value": prefix}
    arguments |= {"key": own, "value": own} | changes
    return lambda: torch_fattn.shared_prefix_decode(**arguments)


BLOCKS: Arguments = dict.fromkeys(("key", "value"), heads(2, 2, 4, 16, seed=1).transpose(1, 2))
BLOCKS["block_tables"] = torch.tensor([[0], [1]], dtype=torch.int32)


def _pool(blocks: int, *lengths: int, of: Any = torch.int32) -> Tensor:
    """Two sequences that have their first two blocks in common."""
    pool = heads(5, 2, 2, 16)
    tables = torch.tensor([[0, 1, 2], [0, 1, 3]], dtype=torch.int32)
    seq_lens = torch.tensor(lengths or (5, 6), dtype=torch.int32).to(of)
    query = heads(2, 4, 1, 16, seed=2)
    return torch_fattn.shared_prefix_paged_decode(query, pool, pool, tables, seq_lens, blocks)


def _forked_once(max_sequences: int) -> None:
    cache = _cache(max_sequences=max_sequences)
    cache.fork(cache.allocate())


def _extended(num_blocks: int) -> None:
    cache = _cache(num_blocks=num_blocks)
    cache.extend([cache.allocate()], 17)


def _grown(cache: Any, step: Any, *, last: bool = True) -> Tensor:
    newest = cache.extend(step.sequences, 2)
    cache.append(0, newest, heads(2, 2, 64), heads(2, 2, 64))
    return cache.decode(0, newest if last else step, heads(1, 4, 1, 64))


def of_step(words: str, wrong: Use, right: Use | None = None, tokens: int = 4) -> Refusal:
    return Refusal(words, _used(wrong, tokens), right and _used(right, tokens))


def of_sizes(words: str, wrong: Arguments, right: Arguments | None = None) -> Refusal:
    """A cache of these sizes is refused, and one of `right` is not."""
    return Refusal(words, partial(_cache, **wrong), None if right is None else partial(_cache, **right))


with torch.inference_mode():
    IN_THE_MODE = WRITTEN["key_cache"].clone()

REFUSALS: list[Refusal] = [
    Refusal("call under torch.inference_mode(), or allocate it outside of the mode",
            written(key_cache=IN_THE_MODE), torch.inference_mode()(written(key_cache=IN_THE_MODE))),
    Refusal("pad keys with zeros to 64 and decode with scale=60 ** -0.5",
            lambda: _cache(head_dim=60), lambda: _through_cache(60, 64, 64, 64),
            lambda: _without_cache(60, 64)),
    Refusal("pad values with zeros to 40 and cut the result to 36 columns", lambda: _cache(value_dim=36),
            lambda: _through_cache(64, 36, 64, 40), lambda: _without_cache(64, 36)),
    of_sizes("keep keys and values for F.scaled_dot_product_attention",
             {"head_dim": 600}),
    of_sizes('use "mps" or "cpu"', {"device": "gpu"}),
    of_sizes("give one of them, and a kv_format to store keys and values in fewer bits",
             {"dtype": torch.int8}, {"dtype": torch.float16, "kv_format": "int8"}),
    of_sizes('use "int8" or "fp8_e4m3"', {"kv_format": "int4", "head_dim": 48},
             {"kv_format": "int8", "head_dim": 48}),
    of_sizes("give 1 or more", {"num_layers": 0}, {"num_layers": 1}),
    of_sizes("give smaller sizes", {"num_blocks": 2**62}),
    of_sizes("give at most 64", {"latent": True, "value_dim": 128}, {"latent": True, "value_dim": 64}),
    of_step("give 0 or more", lambda cache, step: cache.extend(step.sequences, -1),
            lambda cache, step: cache.extend(step.sequences, 0)),
    of_step("give one for each", lambda cache, step: cache.extend(step.sequences, [1, 2]),
            lambda cache, step: cache.extend(step.sequences, [2])),
    of_step("give each once", lambda cache, step: cache.extend(step.sequences * 2)),
    Refusal("free() a sequence, extend fewer, or make the cache larger", partial(_extended, 1),
            partial(_extended, 2)),
    Refusal("free() one, or make it with a larger max_sequences", partial(_forked_once, 1),
            partial(_forked_once, 2)),
    Refusal("make the cache larger, or reset() it", lambda: _cache(StaticKVCache).extend(tokens=9),
            lambda: _cache(StaticKVCache, capacity=9).extend(tokens=9)),
    Refusal("count from 0", lambda: _cache(StaticKVCache).keys(1), lambda: _cache(StaticKVCache).keys(0)),
    Refusal("reset() it first", lambda: _forked(reset=False), lambda: _forked(reset=True)),
    of_step("pass how many to keep", lambda cache, step: cache.truncate(0, 5),
            lambda cache, step: cache.truncate(0, 3)),
    of_step("pass increasing numbers from 0", lambda cache, step: cache.accept(step, [[2, 1]]),
            lambda cache, step: cache.accept(step, [[1, 2]])),
    of_step("from its first on", lambda cache, step: _committed(cache, [4, *range(17)]),
            lambda cache, step: _committed(cache, list(range(17))), tokens=17),
    of_step("use it as it is", lambda cache, step: cache.swap_in(0)),
    of_step("call swap_in(0) first", lambda cache, step: (cache.swap_out(0), cache.fork(0)),
            lambda cache, step: (cache.swap_out(0), cache.swap_in(0), cache.fork(0))),
    Refusal("keep at least 21 tokens, or none", lambda: _windowed(1), lambda: _windowed(21)),
    Refusal("save() the sequences again", partial(_loaded, damaged=True), _loaded),
    Refusal("load it into a cache made as that of save()", partial(_loaded, head_dim=32)),
    Refusal("pass the path of a file that save() wrote", partial(_loaded, missing=True)),
    Refusal("pass the path of a file in a folder", partial(_loaded, folder="/none")),
    of_step("append() them first",
            lambda cache, step: cache.decode(0, cache.extend(step.sequences, 2), heads(1, 4, 1, 64)),
            _grown),
    of_step("use the step of a later extend()", partial(_grown, last=False)),
    of_step("use the one that extend() of this cache returned",
            lambda cache, step: _cache().decode(0, step, heads(1, 4, 1, 64))),
    of_step("pass the rows of each", lambda cache, step: cache.decode(0, step, heads(2, 4, 1, 64))),
    of_step("pass at most 4", lambda cache, step: cache.decode(0, step, heads(1, 4, 5, 64))),
    of_step("pass a tensor, or make the cache with latent=True",
            lambda cache, step: cache.append(0, step, heads(4, 2, 64))),
    Refusal("rotate the key with torch_fattn.rotary, and append() it", _latent,
            partial(_latent, apart=True)),
    of_step("pass one row for each", lambda cache, step: _rotate(cache, step, heads(3, 64)),
            lambda cache, step: _rotate(cache, step, heads(4, 64))),
    of_step("its shape must be [tokens, columns]", lambda cache, step: _rotate(cache, step, heads(1, 4, 64)),
            lambda cache, step: _rotate(cache, step, heads(4, 64))),
    of_step("pass one row for each", lambda cache, step: cache.prefill(0, step, heads(5, 4, 64))),
    of_step('.to("cpu")', lambda cache, step: cache.prefill(0, step, ROWS.to("mps")),
            lambda cache, step: cache.prefill(0, step, ROWS.to("mps").to("cpu"))),
    of_step(".to(torch.float32)", lambda cache, step: cache.prefill(0, step, ROWS.double()),
            lambda cache, step: cache.prefill(0, step, ROWS.double().to(torch.float32))),
    Refusal("its last dimension counts those of the prefix and of the capacity behind it",
            _prefix(attn_mask=torch.ones(4, dtype=torch.bool)), _prefix(attn_mask=heads(10) > 0)),
    Refusal("pass [1, 2, 6, Dv]", _prefix(prefix_value=heads(1, 2, 5, 16)), _prefix()),
    Refusal("pass [1, 2, P, D]", _prefix(prefix_key=heads(1, 1, 6, 16))),
    Refusal("move prefix_key with .to(query.device)", _prefix(prefix_key=heads(1, 2, 6, 16).to("meta"))),
    Refusal("pass the length of every suffix, int32 [B]", _prefix(**BLOCKS),
            _prefix(**BLOCKS, seq_lens=torch.tensor([4, 4], dtype=torch.int32))),
    Refusal("share fewer keys", lambda: _pool(2, 3, 3), lambda: _pool(1), checked=True),
    Refusal("pass as shared_blocks how many they share", lambda: _pool(3, 6, 6), lambda: _pool(2),
            checked=True),
    Refusal("pass how many leading blocks all sequences share", lambda: _pool(4), lambda: _pool(2)),
    Refusal("move query with .to(seq_lens.device)", lambda: _pool(2, of="mps")),
    Refusal("convert it with .to(torch.int32)", lambda: _pool(2, of=torch.int64)),
]  # fmt: skip
