"""A valid call of each public method of the caches."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_fattn import PagedKVCache, StaticKVCache
from torch_fattn.linear_attention import StateCache

Arguments = dict[str, Any]
_CACHE_SIZES = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 16, "device": "cpu"}
STATE_SIZES: dict[str, Any] = {"num_layers": 1, "num_slots": 3, "num_key_heads": 1, "num_value_heads": 2}
STATE_SIZES |= {"key_dim": 16, "value_dim": 8, "dtype": torch.float32, "device": "cpu"}


def heads(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _paged(filled: bool = True) -> tuple[PagedKVCache, Any]:
    cache = PagedKVCache(1, 8, 2, 16, block_size=2, max_sequences=3, dtype=torch.float32, device="cpu")
    step = cache.extend([cache.allocate(), cache.allocate()], [3, 2])
    if filled:
        cache.append(0, step, heads(5, 2, 16), heads(5, 2, 16))
    return cache, step


def _static(filled: bool = True, reset: int | None = None) -> tuple[StaticKVCache, Any]:
    cache = StaticKVCache(1, 2, 8, 2, 16, dtype=torch.float32, device="cpu")
    step = cache.extend(tokens=[3, 2])
    if filled:
        cache.append(0, step, heads(5, 2, 16), heads(5, 2, 16))
    if reset is not None:
        cache.reset(reset)
    return cache, step


def _append(cache: Any, step: Any) -> Arguments:
    return {"self": cache, "layer": 0, "step": step, "key": heads(5, 2, 16), "value": heads(5, 2, 16)}


def _append_rotated(cache: Any, step: Any) -> Arguments:
    return _append(cache, step) | {"query": heads(5, 4, 16), "cos": heads(5, 16), "sin": heads(5, 16)}


def _decode(cache: Any, step: Any) -> Arguments:
    return {"self": cache, "layer": 0, "step": step, "query": heads(2, 4, 1, 16)}


def _accept(cache: Any, step: Any) -> Arguments:
    return {"self": cache, "step": step, "accepted": [[0, 2], [1]]}


def linear_rows(tokens: int, seed: int = 0) -> Arguments:
    """Projections of a linear layer."""
    shapes = {"query": (1, 16), "key": (1, 16), "value": (2, 8), "z": (2, 8), "a": (2,), "b": (2,)}
    return {name: heads(tokens, *shape, seed=seed + n) for n, (name, shape) in enumerate(shapes.items())}


def linear_weights(seed: int = 0) -> Arguments:
    shapes = {"A_log": (2,), "dt_bias": (2,), "conv_weight": (48, 4), "conv_bias": (48,), "norm_weight": (8,)}
    return {name: heads(*shape, seed=seed + n) for n, (name, shape) in enumerate(shapes.items())}


def _states() -> Arguments:
    states = StateCache(**STATE_SIZES, static=True)
    states.free(2)
    return {"self": states, "sequence": 0}


def _run_states() -> Arguments:
    states = _states()["self"]
    call = {"self": states, "layer": 0, "step": states.extend([1, 0], 2)}
    return call | linear_rows(4) | linear_weights()


def _saved() -> str:
    path = Path(tempfile.gettempdir()) / f"torch-fattn-test-{os.getpid()}.safetensors"
    _paged()[0].save(path, [0])
    return str(path)


def _swapped_out() -> PagedKVCache:
    cache = _paged()[0]
    cache.swap_out(0)
    return cache


# As VALID of public_calls.
OF_CACHES: dict[str, Callable[[], Arguments]] = {
    "PagedKVCache": lambda: {"num_blocks": 2} | _CACHE_SIZES,
    "PagedKVCache.accept": lambda: _accept(*_paged()),
    "PagedKVCache.allocate": lambda: {"self": _paged()[0], "token_ids": [5, 6, 7]},
    "PagedKVCache.append": lambda: _append(*_paged(filled=False)),
    "PagedKVCache.append_rotated": lambda: _append_rotated(*_paged(filled=False)),
    "PagedKVCache.blocks": lambda: {"self": _paged()[0], "sequence": 0},
    "PagedKVCache.blocks_needed": lambda: {"self": _paged()[0], "sequences": [1, 0]},
    "PagedKVCache.clear_prefixes": lambda: {"self": _paged()[0]},
    "PagedKVCache.commit": lambda: {"self": _paged()[0], "sequence": 0, "token_ids": [5, 6, 7]},
    "PagedKVCache.decode": lambda: _decode(*_paged()),
    "PagedKVCache.extend": lambda: {"self": _paged()[0], "sequences": [1, 0]},
    "PagedKVCache.fork": lambda: {"self": _paged()[0], "sequence": 1},
    "PagedKVCache.free": lambda: {"self": _paged()[0], "sequence": 0},
    "PagedKVCache.load": lambda: {"self": _paged()[0], "path": _saved()},
    "PagedKVCache.length": lambda: {"self": _paged()[0], "sequence": 0},
    "PagedKVCache.prefill": lambda: _decode(*_paged()) | {"query": heads(5, 4, 16)},
    "PagedKVCache.save": lambda: {"self": _paged()[0], "path": _saved()},
    "PagedKVCache.swap_in": lambda: {"self": _swapped_out(), "sequence": 0},
    "PagedKVCache.swap_out": lambda: {"self": _paged()[0], "sequence": 0},
    "PagedKVCache.truncate": lambda: {"self": _paged()[0], "sequence": 0, "length": 1},
    "StaticKVCache": lambda: {"batch_size": 2, "capacity": 4} | _CACHE_SIZES,
    "StaticKVCache.append": lambda: _append(*_static(filled=False)),
    "StaticKVCache.append_rotated": lambda: _append_rotated(*_static(filled=False)),
    "StaticKVCache.decode": lambda: _decode(*_static()),
    "StaticKVCache.extend": lambda: {"self": _static()[0], "tokens": 1},
    "StaticKVCache.fork": lambda: {"self": _static(reset=1)[0], "sequence": 0, "target": 1},
    "StaticKVCache.keys": lambda: {"self": _static()[0], "layer": 0},
    "StaticKVCache.prefill": lambda: _decode(*_static()) | {"query": heads(5, 4, 16)},
    "StaticKVCache.reset": lambda: {"self": _static()[0]},
    "StaticKVCache.truncate": lambda: {"self": _static()[0], "sequence": 0, "length": 1},
    "StaticKVCache.values": lambda: {"self": _static()[0], "layer": 0},
    "StateCache": lambda: dict(STATE_SIZES),
    "StateCache.allocate": lambda: _states() | {"sequence": 7},
    "StateCache.extend": lambda: {"self": _states()["self"], "sequences": [1, 0], "tokens": [1, 1]},
    "StateCache.fork": lambda: _states() | {"target": 7},
    "StateCache.free": _states,
    "StateCache.length": _states,
    "StateCache.reset": _states,
    "StateCache.run": _run_states,
    "StateCache.truncate": lambda: _states() | {"length": 0},
}
