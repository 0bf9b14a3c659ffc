"""Refusals of caches and shared prefixes; see __init__.py."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import torch_fattn
from tests.helpers.public_calls import heads
from tests.helpers.refusals import WRITTEN, Refusal, written
from tests.helpers.wrong_calls import Arguments
from torch_fattn import PagedKVCache, StaticKVCache, reference


def _padded(operand: Tensor, columns: int) -> Tensor:
    return F.pad(operand, (0, columns - operand.shape[-1]))


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
    cache.append(0, step, _padded(key, padded), _padded(value, padded_values))
    out = cache.decode(0, step, _padded(heads(1, 4, 1, dim, seed=2), padded), scale=dim**-0.5)
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


def _committed(cache: Any, token_ids: list[int]) -> int:
    """How many tokens a second prompt finds."""
    cache.commit(0, list(range(17)))
    cache.commit(0, token_ids)
    return int(cache.length(cache.allocate(token_ids)))


def _windowed(length: int) -> int:
    cache = _cache(window_left=4)
    sequence = cache.allocate()
    cache.extend([sequence], 30)
    cache.extend([sequence], 1)
    cache.truncate(sequence, length)
    return int(cache.length(sequence))


def _forked(reset: bool) -> int:
    cache = _cache(StaticKVCache, batch_size=2)
    cache.extend(tokens=[2, 1])
    if reset:
        cache.reset(1)
    cache.fork(0, 1)
    return int(cache.lengths[1])


def _loaded(*, damaged: bool = False, missing: bool = False, folder: str = "", **changes: Any) -> int:
    """How many tokens a saved sequence has in another cache."""
    cache = _cache()
    step = cache.extend([cache.allocate()], 3)
    cache.append(0, step, heads(3, 2, 64), heads(3, 2, 64))
    with tempfile.TemporaryDirectory() as own:
        path = Path(own + folder) / "cache.safetensors"
        cache.save(path)
        if damaged:
            path.write_bytes(path.read_bytes()[:-1])
        other = _cache(**changes)
        return int(other.length(other.load(Path(own) / "other" if missing else path)[0]))


ROWS = heads(4, 4, 64, seed=2)


def _prefilled(cache: Any, step: Any) -> Tensor:
    return cache.prefill(0, step, ROWS)  # type: ignore[no-any-return]


def _decoded(cache: Any, step: Any) -> Tensor:
    return cache.decode(0, step, ROWS.transpose(0, 1)[None])[0].transpose(0, 1)  # type: ignore[no-any-return]


def _prefilled_exactly() -> Tensor:
    key, value = (heads(4, 2, 64, seed=seed).transpose(0, 1)[None] for seed in (0, 1))
    out, _ = reference.prefill(ROWS.transpose(0, 1)[None], key, value, is_causal=True)
    return out[0].transpose(0, 1)


def _prefix(**changes: Any) -> Callable[[], Tensor]:
    prefix, own = heads(1, 2, 6, 16), heads(2, 2, 4, 16, seed=1)
    arguments = {"query": heads(2, 4, 1, 16, seed=2), "prefix_key": prefix, "prefix_value": prefix}
    arguments |= {"key": own, "value": own} | changes
    return lambda: torch_fattn.shared_prefix_decode(**arguments)


def _prefix_exactly(keys: int = 10, mask: Tensor | None = None) -> Tensor:
    whole = torch.cat((heads(1, 2, 6, 16).expand(2, -1, -1, -1), heads(2, 2, 4, 16, seed=1)), 2)[:, :, :keys]
    return reference.decode(heads(2, 4, 1, 16, seed=2), whole, whole, attn_mask=mask)[0]


def _pool(blocks: int, *lengths: int, of: Any = torch.int32) -> Tensor:
    """Two sequences that have their first two blocks in common."""
    pool = heads(5, 2, 2, 16)
    tables = torch.tensor([[0, 1, 2], [0, 1, 3]], dtype=torch.int32)
    seq_lens = torch.tensor(lengths or (5, 6), dtype=torch.int32).to(of)
    query = heads(2, 4, 1, 16, seed=2)
    return torch_fattn.shared_prefix_paged_decode(query, pool, pool, tables, seq_lens, blocks)


def _pool_exactly() -> Tensor:
    pool = heads(5, 2, 2, 16)
    tables = torch.tensor([[0, 1, 2], [0, 1, 3]])
    return reference.paged_decode(heads(2, 4, 1, 16, seed=2), pool, pool, tables, torch.tensor([5, 6]))[0]


def _blocks(**changes: Any) -> Callable[[], Tensor]:
    own = heads(2, 2, 4, 16, seed=1).transpose(1, 2)
    tables = torch.tensor([[0], [1]], dtype=torch.int32)
    return _prefix(key=own, value=own, block_tables=tables, **changes)


def _fork_of_full() -> int:
    cache = _cache(max_sequences=1)
    return cache.fork(cache.allocate())


def _grown(cache: Any, step: Any, *, last: bool = True) -> Tensor:
    newest = cache.extend(step.sequences, 2)
    cache.append(0, newest, heads(2, 2, 64), heads(2, 2, 64))
    return cache.decode(0, newest if last else step, heads(1, 4, 1, 64))  # type: ignore[no-any-return]


def _grown_exactly() -> Tensor:
    key, value = (
        torch.cat((heads(4, 2, 64, seed=seed), heads(2, 2, 64))).transpose(0, 1)[None] for seed in (0, 1)
    )
    return reference.decode(heads(1, 4, 1, 64), key, value)[0]


def of_step(
    words: str, wrong: Use, right: Use = _prefilled, expected: Any = _prefilled_exactly, tokens: int = 4
) -> Refusal:
    """`expected` is a function of the result, or the result."""
    exact = expected if callable(expected) else lambda: expected
    return Refusal(words, _used(wrong, tokens), _used(right, tokens), exact)


def of_sizes(words: str, wrong: Arguments, right: Arguments | None = None) -> Refusal:
    """A cache of these sizes is refused; with `right` it has its four blocks."""
    return Refusal(words, lambda: _cache(**wrong), lambda: _cache(**right or {}).free_blocks, lambda: 4)


with torch.inference_mode():
    IN_THE_MODE = WRITTEN["key_cache"].clone()

REFUSALS: list[Refusal] = [
    *(
        Refusal(
            "call under torch.inference_mode(), or allocate it outside of the mode",
            written(key_cache=IN_THE_MODE),
            followed,
            lambda: WRITTEN["key"][[0, 2]],
        )
        for followed in (torch.inference_mode()(written(key_cache=IN_THE_MODE)), written())
    ),
    Refusal("pad keys with zeros to 64 and decode with scale=60 ** -0.5",
            lambda: _cache(head_dim=60), lambda: _through_cache(60, 64, 64, 64),
            lambda: _without_cache(60, 64)),
    Refusal("pad values with zeros to 40 and cut the result to 36 columns",
            lambda: _cache(value_dim=36), lambda: _through_cache(64, 36, 64, 40),
            lambda: _without_cache(64, 36)),
    Refusal("keep keys and values for F.scaled_dot_product_attention",
            lambda: _cache(head_dim=600),
            lambda: F.scaled_dot_product_attention(heads(1, 2, 1, 600), *heads(2, 1, 2, 5, 600, seed=1)),
            lambda: reference.prefill(heads(1, 2, 1, 600), *heads(2, 1, 2, 5, 600, seed=1))[0]),
    of_sizes('use "mps" or "cpu"', {"device": "gpu"}),
    of_sizes("give one of them, and a kv_format to store keys and values in fewer bits",
             {"dtype": torch.int8}, {"dtype": torch.float16, "kv_format": "int8"}),
    of_sizes('use "int8" or "fp8_e4m3"', {"kv_format": "int4", "head_dim": 48},
             {"kv_format": "int8", "head_dim": 48}),
    of_sizes("give 1 or more", {"num_layers": 0}, {"num_layers": 1}),
    of_sizes("give smaller sizes", {"num_blocks": 2**62}),
    Refusal("give at most 64", lambda: _cache(latent=True, value_dim=128),
            lambda: _cache(latent=True, value_dim=64).block_size, lambda: 16),
    of_step("give 0 or more", lambda cache, step: cache.extend(step.sequences, -1),
            lambda cache, step: cache.extend(step.sequences, 0).lengths, (4,)),
    of_step("give one for each", lambda cache, step: cache.extend(step.sequences, [1, 2]),
            lambda cache, step: cache.extend(step.sequences, [2]).lengths, (6,)),
    of_step("give each once", lambda cache, step: cache.extend(step.sequences * 2),
            lambda cache, step: cache.extend(step.sequences).lengths, (5,)),
    Refusal("free() a sequence, extend fewer, or make the cache larger",
            lambda: (cache := _cache(num_blocks=1)).extend([cache.allocate()], 17),
            lambda: (cache := _cache(num_blocks=2)).extend([cache.allocate()], 17).lengths, lambda: (17,)),
    Refusal("free() one, or make it with a larger max_sequences", _fork_of_full,
            lambda: (cache := _cache(max_sequences=2)).fork(cache.allocate()), lambda: 1),
    Refusal("make the cache larger, or reset() it", lambda: _cache(StaticKVCache).extend(tokens=9),
            lambda: _cache(StaticKVCache, capacity=9).extend(tokens=9).lengths, lambda: (9,)),
    Refusal("count from 0", lambda: _cache(StaticKVCache).keys(1),
            lambda: _cache(StaticKVCache).keys(0).shape, lambda: (1, 2, 8, 64)),
    Refusal("reset() it first", lambda: _forked(reset=False), lambda: _forked(reset=True), lambda: 2),
    of_step("pass how many to keep", lambda cache, step: cache.truncate(0, 5),
            lambda cache, step: (cache.truncate(0, 3), cache.length(0))[1], 3),
    of_step("pass increasing numbers from 0", lambda cache, step: cache.accept(step, [[2, 1]]),
            lambda cache, step: (cache.accept(step, [[1, 2]]), cache.length(0))[1], 2),
    of_step("from its first on", lambda cache, step: _committed(cache, [4, *range(17)]),
            lambda cache, step: _committed(cache, list(range(17))), 16, tokens=17),
    of_step("use it as it is", lambda cache, step: cache.swap_in(0), lambda cache, step: cache.length(0), 4),
    of_step("call swap_in(0) first", lambda cache, step: (cache.swap_out(0), cache.fork(0)),
            lambda cache, step: (cache.swap_out(0), cache.swap_in(0), cache.fork(0))[2], 1),
    Refusal("keep at least 21 tokens, or none", lambda: _windowed(1), lambda: _windowed(21), lambda: 21),
    *(
        Refusal(words, functools.partial(_loaded, **changes), _loaded, lambda: 3)
        for words, changes in (
            ("save() the sequences again", {"damaged": True}),
            ("load it into a cache made as that of save()", {"head_dim": 32}),
            ("pass the path of a file that save() wrote and that you may read", {"missing": True}),
            ("pass the path of a file in a folder with the permission and the space for it",
             {"folder": "/none"}),
        )
    ),
    of_step("append() them first",
            lambda cache, step: cache.decode(0, cache.extend(step.sequences, 2), heads(1, 4, 1, 64)),
            _grown, _grown_exactly),
    of_step("use the step of a later extend()", functools.partial(_grown, last=False), _grown,
            _grown_exactly),
    of_step("use the one that extend() of this cache returned",
            lambda cache, step: _cache().decode(0, step, heads(1, 4, 1, 64)), _grown, _grown_exactly),
    of_step("pass the rows of each", lambda cache, step: cache.decode(0, step, heads(2, 4, 1, 64)), _grown,
            _grown_exactly),
    of_step("pass at most 4", lambda cache, step: cache.decode(0, step, heads(1, 4, 5, 64)), _decoded),
    of_step("pass a tensor, or make the cache with latent=True",
            lambda cache, step: cache.append(0, step, heads(4, 2, 64))),
    of_step("pass one row for each", lambda cache, step: cache.prefill(0, step, heads(5, 4, 64))),
    of_step('.to("cpu")', lambda cache, step: cache.prefill(0, step, ROWS.to("mps")),
            lambda cache, step: cache.prefill(0, step, ROWS.to("mps").to("cpu"))),
    of_step(".to(torch.float32)", lambda cache, step: cache.prefill(0, step, ROWS.double()),
            lambda cache, step: cache.prefill(0, step, ROWS.double().to(torch.float32))),
    Refusal("its last dimension counts those of the prefix and of the capacity behind it",
            _prefix(attn_mask=torch.ones(4, dtype=torch.bool)), _prefix(attn_mask=heads(10) > 0),
            lambda: _prefix_exactly(mask=heads(10) > 0)),
    Refusal("pass a value for every key", _prefix(prefix_value=heads(1, 2, 5, 16)),
            _prefix(prefix_value=heads(1, 2, 6, 16)), _prefix_exactly),
    Refusal("pass [1, 2, P, dim]", _prefix(prefix_key=heads(1, 1, 6, 16)),
            _prefix(), _prefix_exactly),
    Refusal("move both to one device", _prefix(prefix_key=heads(1, 2, 6, 16).to("meta")), _prefix(),
            _prefix_exactly),
    Refusal("pass the length of every suffix, int32 [B]", _blocks(),
            _blocks(seq_lens=torch.tensor([4, 4], dtype=torch.int32)), _prefix_exactly),
    Refusal("share fewer keys", lambda: _pool(2, 3, 3), lambda: _pool(1), _pool_exactly, checked=True),
    Refusal("pass as shared_blocks how many they share", lambda: _pool(3, 6, 6), lambda: _pool(2),
            _pool_exactly, checked=True),
    Refusal("pass how many leading blocks all sequences share", lambda: _pool(4), lambda: _pool(2),
            _pool_exactly),
    Refusal("move it with .to(query.device)", lambda: _pool(2, of="mps"), lambda: _pool(2), _pool_exactly),
    Refusal("convert it with .to(torch.int32)", lambda: _pool(2, of=torch.int64), lambda: _pool(2),
            _pool_exactly),
]  # fmt: skip
