"""Routes plain `F.scaled_dot_product_attention` on mps tensors to torch_fattn, and takes that back.

torch's own switch is used: "fattn" is one of `torch.nn.attention.list_flash_attention_impls()`, and what is
activated there is a pair of kernels in torch's dispatcher (csrc/dropin/install.cpp).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.compiler.config as compiler_config
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)

from ...runtime.versions import VERSION
from .routing import check_policy

__all__ = ["install", "installed", "uninstall"]

NAME = "fattn"
# torch.compile keeps what it compiled on disk, by the program's text. What it compiled while installed holds
# our ops, which a process without torch_fattn does not have; and what it compiled before holds torch's.
_CACHE_TAG = f";torch_fattn {VERSION}"

_lock = threading.RLock()
_by_install = False
_by_contexts = 0
_followed = False  # what was wanted last time
_before: str | None = None  # the implementation that was active when ours was first wanted


class _Handle:
    """What torch's switch calls when another implementation, or none, is to be active."""

    def remove(self) -> None:
        torch.ops.fattn._uninstall()
        _tag_caches("")


def _activate() -> _Handle:
    check_policy()
    torch.ops.fattn._install()
    _tag_caches(_CACHE_TAG)
    return _Handle()


def _tag_caches(tag: str) -> None:
    """In all threads: what is assigned to an option of torch.compile holds in the assigning thread alone, so
    its default is what changes, where torch keeps that of the environment."""
    option: Any = compiler_config._config["cache_key_tag"]  # type: ignore[attr-defined]
    given = option.env_value_default if isinstance(option.env_value_default, str) else option.default
    option.env_value_default = given.replace(_CACHE_TAG, "") + tag


def register() -> None:
    """Makes the name known to torch; nothing else changes."""
    register_flash_attention_impl(NAME, register_fn=_activate)


def install() -> None:
    """From now on `F.scaled_dot_product_attention` on mps tensors runs torch_fattn's kernels where they have
    its meaning, in all threads, for every caller: models, `nn.MultiheadAttention` with `need_weights=False`,
    code that is compiled from now on. Everything else goes where it went before; `report()` says what and
    why. The packed attention of `torch.nn.attention.varlen`, which has no implementation on mps, gets one.

    Calling it again changes nothing.
    """
    global _by_install
    check_policy()
    with _lock:
        _by_install = True
        _follow()


def uninstall() -> None:
    """Undoes `install()`; inside `with installed():` that takes effect at the end of the block."""
    global _before, _by_install
    with _lock:
        _by_install = False
        if _before == NAME:  # torch's switch turned it on, and that is undone too
            _before = None
        _follow()


@contextmanager
def installed() -> Iterator[None]:
    """`install()` for the duration of a block, in all threads. Blocks may nest and overlap."""
    global _by_contexts, _by_install
    check_policy()
    with _lock:
        if _followed and current_flash_attention_impl() != NAME:  # turned off by torch's own switch
            _by_install = False
        _by_contexts += 1
    try:
        with _lock:
            _follow()
        yield
    finally:
        with _lock:
            _by_contexts -= 1
            _follow()


def _follow() -> None:
    """Makes torch's switch say what is wanted. It may have been turned by others."""
    global _before, _followed
    wanted = _by_install or _by_contexts > 0
    active = current_flash_attention_impl()
    if wanted and not _followed:
        _before = active
    if wanted and active != NAME:
        activate_flash_attention_impl(NAME)
    elif not wanted and active == NAME and _before != NAME:
        restore_flash_attention_impl()
        if _before is not None:
            activate_flash_attention_impl(_before)
    _followed = wanted
