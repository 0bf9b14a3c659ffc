"""Errors of torch that only their text identifies (csrc/ops/torch_errors.cpp): the installed torch raises
each of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import torch_fattn  # noqa: F401  registers torch.ops.fattn


def call_a_kernel_that_is_gone() -> None:
    definition = torch.library.Library("fattn_test_torch_errors", "DEF")
    definition.define("f(Tensor x) -> Tensor")
    kernels = torch.library.Library("fattn_test_torch_errors", "IMPL")
    kernels.impl("f", torch.clone, "CPU")
    kernel = torch.library.get_kernel("fattn_test_torch_errors::f", "CPU")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    assert kernel.call_boxed(keys, torch.ones(1)) == 1, "the control: it is there"
    kernels._destroy()
    kernel.call_boxed(keys, torch.ones(1))


def error_of(provoke: Callable[[], object]) -> str:
    with pytest.raises((RuntimeError, ValueError)) as caught:
        provoke()
    name: str = torch.ops.fattn._torch_error(str(caught.value))
    return name


@pytest.mark.host_only
def test_an_unregistered_kernel() -> None:
    assert error_of(call_a_kernel_that_is_gone) == "kernel_gone"


@pytest.mark.host_only
@pytest.mark.parametrize("read", [torch.Tensor.cpu, torch.Tensor.item, torch.Tensor.tolist])
def test_a_tensor_without_data(read: Callable[[torch.Tensor], object]) -> None:
    assert error_of(lambda: read(torch.empty(1, device="meta"))) == "no_data"


def test_out_of_memory() -> None:
    assert error_of(lambda: torch.empty(1 << 50, device="mps")) == "out_of_memory"


@pytest.mark.host_only
@pytest.mark.parametrize(
    "provoke",
    [lambda: torch.ones(2, 3) @ torch.ones(2, 3), lambda: torch.ones(2).view(3), lambda: torch.ops.fattn.x],
)
def test_others(provoke: Callable[[], object]) -> None:
    """The control."""
    with pytest.raises((RuntimeError, AttributeError)) as caught:
        provoke()
    assert torch.ops.fattn._torch_error(str(caught.value)) == ""
