"""Errors of torch_fattn.flash_attn: one sentence that names the function, before anything is launched or
written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import counted_launches
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


ANGLES = {"rotary_cos": (12, 4), "rotary_sin": (12, 4)}
VALUE, TYPE, NOT_BUILT = ValueError, TypeError, NotImplementedError
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "no query": (lambda: {"q": None}, TYPE, "q is None; pass a tensor"),
    "a list": (lambda: {"k_cache": [1.0]}, TYPE, "k_cache is of type list; pass a tensor"),
    "rank": (lambda: {"q": zeros(2, 2, 16)}, VALUE, r"q has shape \[2, 2, 16\]; pass \[batch"),
    "integers": (lambda: {"q": zeros(2, 3, 2, 16, dtype=torch.int32)}, TYPE, r"q is torch\.int32"),
    "cache dtype": (
        lambda: {"v_cache": zeros(2, 12, 2, 16, dtype=torch.float16)},
        TYPE,
        r"v_cache is torch\.float16 and q",
    ),
    "cache on the CPU": (
        lambda: {"k_cache": zeros(2, 12, 2, 16, device="cpu")},
        VALUE,
        r"k_cache is on cpu .* move k_cache",
    ),
    "query on the CPU": (
        lambda: {"q": zeros(2, 3, 2, 16, device="cpu")},
        VALUE,
        r"move q with \.to\('mps:0'\)",
    ),
    "heads": (lambda: {"q": zeros(2, 3, 3, 16)}, VALUE, "3 heads of q cannot share 2 of k_cache"),
    "head size": (lambda: {"q": zeros(2, 3, 2, 24)}, VALUE, "q has head size 24 and k_cache 16"),
    "value cache": (lambda: {"v_cache": zeros(2, 11, 2, 16)}, VALUE, "capacity 12 and v_cache 11"),
    "few sequences": (
        lambda: {"q": zeros(3, 3, 2, 16), "cache_seqlens": long(1, 1, 1), "k": None, "v": None},
        VALUE,
        "q has batch size 3 and k_cache 2",
    ),
    "wide heads": (
        lambda: {name: zeros(2, 3, 2, 584) for name in ("q", "k", "v", "k_cache", "v_cache")},
        NOT_BUILT,
        "q has head size 584",
    ),
    "a gradient": (
        lambda: {"k_cache": zeros(2, 12, 2, 16).requires_grad_()},
        RuntimeError,
        r"k_cache requires grad.* pass k_cache\.detach\(\)",
    ),
    "an odd one expanded": (
        lambda: {
            **{name: zeros(2, 3, 2, 15) for name in ("q", "k", "v")},
            **{"k_cache": zeros(2, 12, 2, 15), "v_cache": zeros(1, 12, 2, 15).expand(2, -1, -1, -1)},
        },
        VALUE,
        r"v_cache has shape .* and strides \[0, 30, 15, 1\]",
    ),
    "no value": (lambda: {"v": None}, VALUE, "one of k and v is None"),
    "new batch": (lambda: {"k": zeros(1, 3, 2, 16)}, VALUE, "q has batch size 2 and k 1"),
    "new heads": (lambda: {"v": zeros(2, 3, 1, 16)}, VALUE, "k has head count 2 and v 1"),
    "no lengths": (lambda: {"cache_seqlens": None}, VALUE, "appended at cache_seqlens, which is None"),
    "float lengths": (lambda: {"cache_seqlens": zeros(2)}, TYPE, r"cache_seqlens is torch\.float32"),
    "bool lengths": (
        lambda: {"cache_seqlens": zeros(2, dtype=torch.bool)},
        TYPE,
        r"cache_seqlens is torch\.bool",
    ),
    "a float": (lambda: {"cache_seqlens": 3.0}, TYPE, "cache_seqlens is of type float; pass a whole number"),
    "a string": (lambda: {"cache_seqlens": "x"}, TYPE, "cache_seqlens is of type str; pass a whole"),
    "a bool": (lambda: {"cache_seqlens": True}, TYPE, "cache_seqlens is of type bool"),
    "negative": (lambda: {"cache_seqlens": -1}, VALUE, "cache_seqlens -1 is negative"),
    "too long": (lambda: {"cache_seqlens": 13}, VALUE, "cache_seqlens 13 and 3 new keys .* pass at most 9"),
    "no room for the new keys": (
        lambda: {"cache_seqlens": 10},
        VALUE,
        "cache_seqlens 10 and 3 new keys are above the capacity 12 of the cache; pass at most 9",
    ),
    "one cache for both": (
        lambda: {
            **{name: zeros(2, 3, 2, 15) for name in ("q", "k", "v")},
            **dict.fromkeys(("k_cache", "v_cache"), zeros(2, 12, 2, 15)),
        },
        VALUE,
        "k_cache and v_cache begin at the same memory",
    ),
    "lengths of 3": (
        lambda: {"cache_seqlens": long(1, 2, 3)},
        VALUE,
        r"cache_seqlens has shape \[3\]; pass \[2\]",
    ),
    "lengths on the CPU": (
        lambda: {"cache_seqlens": long(1, 2).cpu()},
        VALUE,
        "cache_seqlens is on cpu and q on mps:0",
    ),
    "float padding": (lambda: {"cache_leftpad": zeros(2)}, TYPE, r"cache_leftpad is torch\.float32"),
    "float index": (lambda: {"cache_batch_idx": zeros(2)}, TYPE, r"cache_batch_idx is torch\.float32"),
    "float table": (lambda: {"block_table": zeros(2, 1)}, TYPE, r"block_table is torch\.float32"),
    "table rank": (
        lambda: {"block_table": long(0, 1)},
        VALUE,
        r"block_table has shape \[2\]; pass \[2, blocks\]",
    ),
    "table and index": (
        lambda: {"block_table": long(0, 1)[:, None], "cache_batch_idx": long(0, 1)},
        VALUE,
        "leave out cache_batch_idx",
    ),
    "no sine": (lambda: {"rotary_cos": zeros(12, 4)}, VALUE, "rotary_cos needs rotary_sin"),
    "no cosine": (lambda: {"rotary_sin": zeros(12, 4)}, VALUE, "rotary_cos needs rotary_sin"),
    "nothing to rotate": (
        lambda: {"k": None, "v": None} | {name: zeros(*shape) for name, shape in ANGLES.items()},
        VALUE,
        "both need k and v",
    ),
    "sine of another shape": (
        lambda: {"rotary_cos": zeros(12, 4), "rotary_sin": zeros(12, 3)},
        VALUE,
        r"\[12, 4\] and rotary_sin \[12, 3\]",
    ),
    "wide rotation": (
        lambda: dict.fromkeys(ANGLES, zeros(12, 9)),
        VALUE,
        "rotates 18 of the 16 columns of a head; pass at most 8",
    ),
    "angles of rank 3": (lambda: dict.fromkeys(ANGLES, zeros(1, 12, 4)), VALUE, "rotary_cos has shape"),
    "integer angles": (
        lambda: dict.fromkeys(ANGLES, zeros(12, 4, dtype=torch.int32)),
        TYPE,
        r"rotary_cos is torch\.int32",
    ),
    "a short rotary table": (
        lambda: dict.fromkeys(ANGLES, zeros(11, 4)),
        VALUE,
        "11 positions and the cache has room for 12 keys",
    ),
    "window": (
        lambda: {"window_size": 3},
        TYPE,
        "window_size is of type int; pass a tuple .a whole number or None, a",
    ),
    "window of one": (
        lambda: {"window_size": (3,)},
        TYPE,
        r"window_size is \(3,\); pass a tuple .a whole number",
    ),
    "no window": (lambda: {"window_size": None}, TYPE, "window_size is None"),
    "window of floats": (lambda: {"window_size": (1.0, 2.0)}, TYPE, r"window_size is \(1\.0, 2\.0\)"),
    "scale": (lambda: {"softmax_scale": "x"}, TYPE, "softmax_scale is of type str; pass a number or None"),
    "infinite scale": (lambda: {"softmax_scale": float("inf")}, VALUE, "softmax_scale inf is not finite"),
    "softcap": (lambda: {"softcap": None}, TYPE, "softcap is None; pass a number"),
    "NaN softcap": (lambda: {"softcap": float("nan")}, VALUE, "softcap nan is negative, not finite"),
    "tiny softcap": (lambda: {"softcap": 1e-300}, VALUE, "softcap 1e-300 is"),
    "causal": (lambda: {"causal": "yes"}, TYPE, "causal is of type str; pass True or False"),
    "slopes": (
        lambda: {"alibi_slopes": zeros(3)},
        VALUE,
        r"alibi_slopes has shape \[3\]; pass .* \[2\], or .* \[2, 2\]",
    ),
    "slopes of a number": (lambda: {"alibi_slopes": 0.5}, TYPE, "alibi_slopes is of type float"),
    "integer slopes": (
        lambda: {"alibi_slopes": zeros(2, dtype=torch.int32)},
        TYPE,
        r"alibi_slopes is torch\.int32",
    ),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_refused_untouched(wrong: str) -> None:
    changes, kind, words = REFUSED[wrong]
    with counted_launches() as launches, pytest.raises(kind, match=words) as refusal:
        call(**changes())
    assert not launches
    check_refusal(refusal, "flash_attn_with_kvcache")


def test_the_same_call_without_the_fault() -> None:
    angles = {name: torch.ones(shape, device="mps") for name, shape in ANGLES.items()}
    assert call(**angles, window_size=[3, -1], cache_leftpad=long(0, 1)).shape == (2, 3, 2, 16)


# Calls of flash_attn_func and flash_attn_varlen_func, whose code the functions with packed operands share.
DENSE: dict[str, tuple[Any, type[Exception], str]] = {
    "no key": (lambda q: (q, None, q), TYPE, "k is None; pass a tensor"),
    "a window of 3": (lambda q: (q, q, q, 0.0, None, False, 3), TYPE, "window_size is of type int"),
    "dropout": (lambda q: (q, q, q, 0.1), NOT_BUILT, r"dropout_p 0\.1 is not 0"),
    "no dropout": (lambda q: (q, q, q, None), TYPE, "dropout_p is None; pass a number"),
    "length": (lambda q: (q, q, q[:, :7]), VALUE, "k has length 20 and v 7"),
    "batch": (lambda q: (q, q[:1], q[:1]), VALUE, "q has batch size 2 and k 1"),
    "dtype": (lambda q: (q, q.half(), q), TYPE, r"k is torch\.float16 and q torch\.float32"),
    "rank": (lambda q: (q, q, q[0]), VALUE, r"v has shape \[20, 2, 32\]"),
    "slopes": (lambda q: (q, q, q, 0.0, None, True, (-1, -1), 0.0, q), VALUE, "alibi_slopes has shape"),
}
PACKED: dict[str, tuple[Any, type[Exception], str]] = {
    "no value": (lambda q, cu: {"v": None}, TYPE, "v is None; pass a tensor"),
    "float lengths": (lambda q, cu: {"cu_seqlens_q": cu.float()}, TYPE, r"cu_seqlens_q is torch\.float32"),
    "float key lengths": (
        lambda q, cu: {"cu_seqlens_k": cu.float()},
        TYPE,
        r"cu_seqlens_k is torch\.float32",
    ),
    "no lengths": (lambda q, cu: {"cu_seqlens_k": None}, TYPE, "cu_seqlens_k is None; pass a tensor"),
    "another batch": (
        lambda q, cu: {"cu_seqlens_k": cu[:2]},
        VALUE,
        r"cu_seqlens_k has shape \[2\]; pass \[3\]",
    ),
    "nothing at all": (lambda q, cu: {"cu_seqlens_q": cu[:0]}, VALUE, "cu_seqlens_q is empty"),
    "a float": (
        lambda q, cu: {"max_seqlen_q": 12.0},
        TYPE,
        "max_seqlen_q is of type float; pass a whole number",
    ),
    "two numbers": (
        lambda q, cu: {"max_seqlen_q": cu[:2]},
        TYPE,
        r"max_seqlen_q is torch\.int32 of shape \[2\]; pass the most rows",
    ),
    "many bits": (lambda q, cu: {"max_seqlen_q": 2**70}, VALUE, "max_seqlen_q is a number of 71 bits"),
    "negative": (lambda q, cu: {"max_seqlen_k": -1}, VALUE, "max_seqlen_k -1 is negative"),
    "float use": (lambda q, cu: {"seqused_k": cu[1:].float()}, TYPE, r"seqused_k is torch\.float32"),
    "bool use": (lambda q, cu: {"seqused_k": cu[1:].bool()}, TYPE, r"seqused_k is torch\.bool"),
    "use of three": (lambda q, cu: {"seqused_k": cu}, VALUE, r"seqused_k has shape \[3\]; pass \[2\]"),
    "slopes": (lambda q, cu: {"alibi_slopes": q[0]}, VALUE, "alibi_slopes has shape"),
    "a table without pools": (
        lambda q, cu: {"block_table": cu[:2, None]},
        VALUE,
        r"k has shape \[20, 2, 32\]; pass \[num_blocks",
    ),
}


def check_refusal(refusal: pytest.ExceptionInfo[Exception], name: str) -> None:
    message = str(refusal.value)
    assert message.startswith(f"torch_fattn.{name}: ") and "\n" not in message


@pytest.mark.parametrize("wrong", DENSE)
def test_dense(wrong: str) -> None:
    arguments, kind, words = DENSE[wrong]
    q = zeros(2, 20, 2, 32)
    with counted_launches() as launches, pytest.raises(kind, match=words) as refusal:
        fa.flash_attn_func(*arguments(q))
    assert not launches
    check_refusal(refusal, "flash_attn_func")


@pytest.mark.parametrize("wrong", PACKED)
def test_packed(wrong: str) -> None:
    changes, kind, words = PACKED[wrong]
    q, cu = zeros(20, 2, 32), long(0, 8, 20)
    arguments: dict[str, Any] = {"q": q, "k": q, "v": q, "cu_seqlens_q": cu, "cu_seqlens_k": cu}
    arguments |= {"max_seqlen_q": 12, "max_seqlen_k": 12}
    with counted_launches() as launches, pytest.raises(kind, match=words) as refusal:
        fa.flash_attn_varlen_func(**arguments | changes(q, cu))
    assert not launches
    check_refusal(refusal, "flash_attn_varlen_func")


@pytest.mark.parametrize("name", [name for name in fa.__all__ if "packed" in name])
def test_packed_operands(name: str) -> None:
    q, cu = zeros(20, 2, 32), long(0, 20)
    rest: tuple[Any, ...] = (cu, 20) if "qkv" in name else (cu, cu, 20, 20)
    rest = rest if "varlen" in name else ()
    rows = () if "qkv" in name else (q,) if "varlen" in name else (q[None],)
    for packed in (None, q, zeros(20, 5, 2, 32), zeros(1, 20, 5, 2, 32)):
        with pytest.raises((TypeError, ValueError), match="qkv|kv") as refusal:
            getattr(fa, name)(*rows, packed, *rest)
        check_refusal(refusal, name)
    right = zeros(20, 3 if "qkv" in name else 2, 2, 32)
    with pytest.raises(NotImplementedError) as refusal:
        getattr(fa, name)(*rows, right if "varlen" in name else right[None], *rest, 0.5)
    check_refusal(refusal, name)


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
    with pytest.raises(ValueError, match=f"torch_fattn.flash_attn_with_kvcache: {words}"):
        call(**changes())
    call(cache_leftpad=long(0, 5), cache_batch_idx=long(1, 0))
    # A table that ends with the cache is too short for a row there, and there is none.
    table = dict.fromkeys(ANGLES, zeros(12, 4))
    empty = dict.fromkeys(("q", "k", "v"), zeros(2, 0, 2, 16))
    call(**table, **empty, cache_seqlens=long(12, 3))
