"""Errors of torch_fattn.flash_attn: one sentence that names the function, before anything is launched or
written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.wrong_calls import (
    Arguments,
    Change,
    Fault,
    fault,
    mistyped,
    option,
    refusal,
    unsupported,
    zeros_for,
)
from torch_fattn import flash_attn as fa


def call(device: str = "mps", **changes: Any) -> Tensor:
    """One that is right, but for the changes; it must leave the caches alone if it is refused."""

    def of(dtype: torch.dtype, *values: int) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    q, k, v = (torch.ones(2, 3, 2, 16, device=device) for _ in range(3))
    caches = {name: torch.zeros(2, 12, 2, 16, device=device) for name in ("k_cache", "v_cache")}
    arguments = {"q": q, **caches, "k": k, "v": v, "cache_seqlens": of(torch.int32, 3, 5), "causal": True}
    try:
        return fa.flash_attn_with_kvcache(**arguments | changes)
    except Exception:
        assert not any(cache.any() for cache in caches.values()), "written before it was refused"
        raise


def long(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="mps")


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "mps") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def angles(*shape: int, **options: Any) -> Change:
    return lambda _: dict.fromkeys(ANGLES, zeros(*shape, **options))


def odd(k_cache: Tensor, v_cache: Tensor) -> Arguments:
    """Heads of an odd size, whose caches are padded."""
    return {name: zeros(2, 3, 2, 15) for name in "qkv"} | {"k_cache": k_cache, "v_cache": v_cache}


ANGLES = {"rotary_cos": (12, 4), "rotary_sin": (12, 4)}
# What tests/refusals has no call for; the caches must be unchanged.
REFUSED = [
    unsupported("wide heads",
                lambda _: dict.fromkeys(("q", "k", "v", "k_cache", "v_cache"), zeros(2, 3, 2, 584)),
                "key head_dim 584 is above 576"),
    fault("an odd one expanded",
          lambda _: odd(zeros(2, 12, 2, 15), zeros(1, 12, 2, 15).expand(2, -1, -1, -1)), "v_cache has shape",
          "and strides [0, 30, 15, 1]"),
    fault("table rank", lambda _: {"block_table": long(0, 1)}, "block_table has shape [2]; pass [2, blocks]"),
    fault("wide rotation", angles(12, 9), "rotates 18 of the 16 columns of a head; pass at most 8"),
    mistyped("window of one", option(window_size=(3,)), "window_size is (3,); pass a tuple (a whole number"),
    fault("an expanded out", lambda _: {"out": zeros(1, 3, 2, 16).expand(2, -1, -1, -1)}, "out has shape"),
]  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED, ids=lambda fault: fault.what)
def test_refused_untouched(fault: Fault) -> None:
    with refusal("torch_fattn.flash_attn.flash_attn_with_kvcache", fault.error, *fault.words):
        call(**fault.change({}))


def test_the_same_call_without_the_fault() -> None:
    angles = {name: torch.ones(shape, device="mps") for name, shape in ANGLES.items()}
    assert call(**angles, window_size=[3, -1], cache_leftpad=long(0, 1)).shape == (2, 3, 2, 16)


PACKED = [
    mistyped(
        "two numbers",
        lambda a: {"max_seqlen_q": a["cu_seqlens_q"][:2]},
        "max_seqlen_q is torch.int32 of shape [2]; pass the rows of the longest",
    ),
    mistyped(
        "no longest row", option(max_seqlen_q=None), "max_seqlen_q is None; pass the rows of the longest"
    ),
    fault("sinks of three", zeros_for("s_aux", 3), "s_aux has shape [3]; pass [2]"),
    fault("out of other rows", zeros_for("out", 19, 2, 32), "out has shape [19, 2, 32]; pass [20, 2, 32]"),
    unsupported("a mask", option(mask_mod=max), "mask_mod is not implemented"),
    unsupported("a mask of blocks", option(block_sparse_tensors=()), "block_sparse_tensors is not"),
    unsupported("causal by sequence", option(dynamic_causal=torch.ones(2)), "dynamic_causal is not"),
    unsupported("ranks", option(cp_world_size=2), "cp_world_size is not implemented"),
    fault(
        "a table without pools",
        lambda a: {"block_table": a["cu_seqlens_q"][:2, None]},
        "k has shape [20, 2, 32]; pass [num_blocks",
    ),
]


@pytest.mark.parametrize("fault", PACKED, ids=lambda fault: fault.what)
def test_packed(fault: Fault) -> None:
    q, cu = zeros(20, 2, 32), long(0, 8, 20)
    arguments: dict[str, Any] = {"q": q, "k": q, "v": q, "cu_seqlens_q": cu, "cu_seqlens_k": cu}
    arguments |= {"max_seqlen_q": 12, "max_seqlen_k": 12}
    with refusal("torch_fattn.flash_attn.flash_attn_varlen_func", fault.error, *fault.words):
        fa.flash_attn_varlen_func(**arguments | fault.change(arguments))


CHECKED: dict[str, tuple[Any, str]] = {
    "negative": (lambda: {"cache_seqlens": long(3, -1)}, r"cache_seqlens\[1\] is -1 .* between 0 and 9"),
    "no room": (lambda: {"cache_seqlens": long(3, 10)}, r"cache_seqlens\[1\] is 10 .* between 0 and 9"),
    "padding": (lambda: {"cache_leftpad": long(4, 0)}, r"cache_leftpad\[0\] is 4 .* between 0 and 3"),
    "index": (lambda: {"cache_batch_idx": long(0, 2)}, r"cache_batch_idx\[1\] is 2 .* between 0 and 1"),
    "overlap": (lambda: {"cache_batch_idx": long(1, 1)}, "new keys of sequences 0 and 1 have the same place"),
    "block": (lambda: {"block_table": long(0, -1)[:, None]}, r"block_table\[1, 0\] is -1 .* between 0 and 1"),
    "angle": (
        lambda: {"q": zeros(2, 6, 2, 16), "cache_seqlens": long(7, 3)} | dict.fromkeys(ANGLES, zeros(12, 4)),
        r"cache_seqlens\[0\] is 7 .* between 0 and 6",
    ),
}


@pytest.mark.parametrize("wrong", CHECKED)
def test_numbers_on_the_device_when_asked(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, words = CHECKED[wrong]
    call(**changes())  # the control
    monkeypatch.setenv("FATTN_CHECK", "1")
    with pytest.raises(ValueError, match=f"torch_fattn.flash_attn.flash_attn_with_kvcache: {words}"):
        call(**changes())
    call(cache_leftpad=long(0, 5), cache_batch_idx=long(1, 0))
    # A table that ends with the cache is too short for a row there, and there is none.
    table = dict.fromkeys(ANGLES, zeros(12, 4))
    empty = dict.fromkeys(("q", "k", "v"), zeros(2, 0, 2, 16))
    call(**table, **empty, cache_seqlens=long(12, 3))
