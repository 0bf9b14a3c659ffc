"""Routes `F.scaled_dot_product_attention` on mps tensors to torch_fattn, and back.

The switch is torch's own: "fattn" is one of `torch.nn.attention.list_flash_attention_impls()`, and activating
it registers a pair of kernels in torch's dispatcher (csrc/dropin/install.cpp).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
import torch.compiler.config as compiler_config
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)

from ...runtime.settings import check_settings
from ...runtime.signatures import public, shown
from ...runtime.versions import VERSION

Training = Literal["auto", "fused", "off"]

NAME = "fattn"
# torch.compile caches graphs on disk by the program's text. Graphs compiled while installed contain
# torch_fattn's ops, which other processes may lack, so they need their own cache key, for each `training`.
_CACHE_TAG = f";torch_fattn {VERSION}"
_ANY_CACHE_TAG = re.compile(re.escape(_CACHE_TAG) + r"(, training \w+)?")

# The ops that csrc/dropin implements.
_OPS = ("scaled_dot_product_attention", "_flash_attention_forward", "_flash_attention_backward")

_lock = threading.RLock()
_by_install = False
_by_contexts = 0
_followed = False  # the state last set
_before: str | None = None  # the implementation that was active before the first install


class _Handle:
    """torch's switch calls this when it activates another implementation or none."""

    def remove(self) -> None:
        torch.ops.fattn._uninstall()
        _tag_caches()


def _activate() -> _Handle:
    check_settings()
    torch.ops.fattn._install()
    for op in _OPS:
        # Tracing caches the kernel that it found for a key, here torch's composite one.
        getattr(torch.ops.aten, op).default._dispatch_cache.clear()
    _tag_caches()
    return _Handle()


def _tag_caches() -> None:
    """Sets the cache key in all threads. An assignment to an option of torch.compile is local to its thread,
    so this changes the default, which torch reads from the environment."""
    option: Any = compiler_config._config["cache_key_tag"]  # type: ignore[attr-defined]
    given = option.env_value_default if isinstance(option.env_value_default, str) else option.default
    installed = torch.ops.fattn._is_installed()
    tag = f"{_CACHE_TAG}, training {torch.ops.fattn._training()}" if installed else ""
    option.env_value_default = _ANY_CACHE_TAG.sub("", given) + tag


def register() -> None:
    """Registers the name with torch."""
    register_flash_attention_impl(NAME, register_fn=_activate)


@public("torch_fattn.install")
def install(training: Training = "auto") -> None:
    """Routes `F.scaled_dot_product_attention` on mps tensors to torch_fattn's kernels. This holds in all
    threads and for every caller: models, `nn.MultiheadAttention` with `need_weights=False`, code compiled
    from now on. Calls that the kernels cannot compute run as before, and `report()` lists them with the
    reason. It also implements the packed attention of `torch.nn.attention.varlen`, which torch lacks on mps,
    with its backward.

    Args:
        training: which calls that need gradients run here, also from `sdpa`. "auto": calls for whose backward
            torch's own implementation would keep a matrix (4 bytes per row, key and head) of at least 1/256
            of the memory that the GPU may use, and smaller ones that `python -m torch_fattn tune` found to be
            faster here. "fused": all. "off": none.

    Calling it again changes only `training`.
    """
    global _by_install
    check_settings()
    if not isinstance(training, str) or training not in get_args(Training):
        raise ValueError(f'torch_fattn.install: training is {shown(training)}; pass "auto", "fused" or "off"')
    with _lock:
        _by_install = True
        torch.ops.fattn._set_training(training)
        _follow()
        _tag_caches()


def uninstall() -> None:
    """Undoes `install()`. Inside `with installed():` it takes effect at the end of the block."""
    global _before, _by_install
    with _lock:
        _by_install = False
        torch.ops.fattn._set_training("auto")
        if _before == NAME:  # torch's switch had turned it on
            _before = None
        _follow()


@contextmanager
def installed() -> Iterator[None]:
    """`install()` for the duration of a block, in all threads. Blocks may nest and overlap."""
    global _by_contexts, _by_install
    check_settings()
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
    """Sets torch's switch to the current state, even if other code has changed it."""
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
