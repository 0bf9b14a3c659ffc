"""Every public function under settings outside of the call: a default device or dtype, deterministic
algorithms, inference mode, FATTN_CHECK, forward-mode tangents."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from tests.helpers.public_calls import VALID, Arguments, Public
from tests.helpers.tensors import tensors_in
from tests.refusals.test_public_calls import PUBLIC, WITH_ARGUMENTS


@contextlib.contextmanager
def switched(switch: Callable[[Any], Any], on: Any, off: Any) -> Iterator[None]:
    switch(on)
    try:
        yield
    finally:
        switch(off)


# Settings of a process or thread that must not affect a call.
SETTINGS: dict[str, Callable[[], Any]] = {
    "default device": lambda: torch.device("meta"),
    "default dtype": lambda: switched(torch.set_default_dtype, torch.float64, torch.float32),
    "deterministic": lambda: switched(torch.use_deterministic_algorithms, True, False),
    "inference mode": torch.inference_mode,
    "FATTN_CHECK": lambda: mock.patch.dict(os.environ, FATTN_CHECK="1"),
}


def results_of(public: Public, arguments: Arguments) -> list[Tensor]:
    """The results, and then the tensors that it may have written."""
    owner = arguments.get("self")
    rest = {name: value for name, value in arguments.items() if name != "self"}
    function = public.made or public.function if owner is None else public.function.__get__(owner)
    return [*tensors_in(function(**rest)), *tensors_in(rest), *tensors_in(vars(owner) if owner else ())]


UNWRITTEN = {"PagedKVCache", "StaticKVCache", "StaticKVCache.keys", "StaticKVCache.values"}  # memory


@pytest.mark.host_only
@pytest.mark.filterwarnings("ignore:torch_fattn.sdpa")
@pytest.mark.parametrize("name", sorted({*WITH_ARGUMENTS} - UNWRITTEN))
def test_process_settings_do_not_change_results(name: str) -> None:
    public, valid = PUBLIC[name], VALID[name]
    expected = results_of(public, valid())
    for setting in SETTINGS.values():
        arguments = valid()
        with setting():
            results = results_of(public, arguments)
        assert len(results) == len(expected)
        for result, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(result, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.host_only
@pytest.mark.parametrize(
    "name",
    sorted(n for n in VALID if n.startswith("fattn.") and n not in ("fattn.cache_write", "fattn.mask_map")),
)
def test_a_forward_mode_tangent_is_refused(name: str) -> None:
    """Dropped, it would be a derivative of 0."""
    public, arguments = PUBLIC[name], VALID[name]()
    with forward_ad.dual_level():
        public.function(**arguments)
        for what, given in arguments.items():
            if isinstance(given, Tensor) and given.is_floating_point():
                dual = forward_ad.make_dual(given, torch.ones_like(given))
                with pytest.raises(NotImplementedError, match=f"^{name}: {what} has a forward-mode tangent"):
                    public.function(**arguments | {what: dual})
