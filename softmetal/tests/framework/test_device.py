"""torch's "mps" device on softmetal, after `import torch` alone."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import softmetal.control

torch = pytest.importorskip("torch")
functional = torch.nn.functional
if not softmetal.control.LIBRARY.exists():
    pytest.skip("libsoftmetal.so is not built (python -m softmetal build)", allow_module_level=True)


def both(make: Callable[..., Any], *tensors: Any) -> None:
    """Checks that `make` gives the same result on the CPU and on mps."""
    expected = make(*tensors)
    actual = make(*(t.to("mps") for t in tensors))
    assert actual.device.type == "mps"
    assert torch.equal(actual.cpu(), expected)


def test_is_there() -> None:
    assert torch.backends.mps.is_built() and torch.backends.mps.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("mps")
    assert torch.backends.mps.get_name().startswith("Software Metal on ")
    assert torch.backends.mps.get_core_count() == 8


def test_arithmetic() -> None:
    """Operators that run on the CPU: their results, an argument that they write, a list, another dtype."""
    a, b = torch.randn(9, 9), torch.randn(9, 9)
    both(lambda x, y: x @ y - x / 3, a, b)
    both(lambda x, y: x.clone().mul_(2).add_(y), a, b)
    both(lambda x: (x > 0).sum(0), a)
    both(lambda x, y: torch.cat([x, y], 1)[:, 3:12].contiguous(), a, b)
    both(lambda x: x.half(), a)


def test_views_write_through() -> None:
    def change(x: Any) -> Any:
        x = x.clone().view(2, 3, 4)
        x[:, 1, ::2].add_(100)
        x.permute(2, 0, 1)[0] = 7
        first, second = x.split(1, 0)
        first.zero_()
        x.unfold(2, 2, 1)[1, 1, 1] += 1
        return x.reshape(-1)

    both(change, torch.arange(24.0))


def test_data_pointers_are_buffer_objects() -> None:
    m = torch.arange(8.0, device="mps")
    assert m[3:].storage_offset() == 3
    assert m.untyped_storage().data_ptr() == m[3:].untyped_storage().data_ptr()
    assert m[3:].data_ptr() - m.data_ptr() == 12
    assert torch.empty(0, device="mps").data_ptr() == 0


def test_pinned_memory() -> None:
    plain = torch.arange(6.0)
    pinned = plain.pin_memory()
    assert pinned.is_pinned() and not plain.is_pinned() and pinned.device.type == "cpu"
    both(lambda x: x * 2, pinned)


def test_results_are_not_copied() -> None:
    """A reduction of views and an elementwise op make one new buffer each, not copies of their operands."""
    a = torch.zeros(1 << 20, device="mps")
    before = torch.mps.current_allocated_memory()
    b = a + 1
    assert torch.mps.current_allocated_memory() - before == b.nbytes
    b.view(1024, -1).t()
    b.add_(a)
    assert torch.mps.current_allocated_memory() - before == b.nbytes
    del b
    assert torch.mps.current_allocated_memory() == before


def test_out_and_resize() -> None:
    a = torch.randn(4, 5)
    out = torch.empty(0, device="mps")
    torch.add(a.to("mps"), 1, out=out)
    assert torch.equal(out.cpu(), a + 1)
    grown = torch.arange(4.0, device="mps").resize_(2, 4)
    assert grown.shape == (2, 4) and grown[0].tolist() == [0, 1, 2, 3]
    view = grown[1:]
    view.fill_(5)
    assert grown[1].tolist() == [5] * 4


def test_float64_is_refused() -> None:
    for make in (
        lambda: torch.zeros(2, dtype=torch.float64, device="mps"),
        lambda: torch.zeros(2, dtype=torch.float64).to("mps"),
        lambda: torch.zeros(2, device="mps").double(),
        lambda: torch.zeros(2, device="mps").sum(dtype=torch.float64),
    ):
        with pytest.raises(TypeError, match="doesn't support float64"):
            make()


def test_mixed_devices_are_refused() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device="mps") + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        torch.cat([torch.ones(3), torch.ones(3, device="mps")])
    assert torch.ones(3, device="mps")[torch.tensor([0, 1])].tolist() == [1, 1]
    assert (torch.ones(3, device="mps") + torch.tensor(1.0)).tolist() == [2] * 3


def test_generators() -> None:
    def draw(generator: Any = None) -> Any:
        return torch.randn(5, device="mps", generator=generator).cpu()

    generator = torch.Generator(device="mps").manual_seed(3)
    first = draw(generator)
    assert torch.equal(first, draw(generator.manual_seed(3))) and not torch.equal(first, draw(generator))
    for seed in (torch.manual_seed, torch.mps.manual_seed):
        seed(5)
        first = draw()
        seed(5)
        assert torch.equal(first, draw())
    state = torch.mps.get_rng_state()
    first = draw()
    torch.mps.set_rng_state(state)
    assert torch.equal(first, draw())


def test_save_load_copy() -> None:
    m = torch.randn(4, device="mps")
    file = io.BytesIO()
    torch.save({"m": m, "view": m[1:]}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded["m"].device.type == "mps" and torch.equal(loaded["m"].cpu(), m.cpu())
    assert torch.equal(copy.deepcopy(m).cpu(), m.cpu())
    linear = torch.nn.Linear(2, 2).to("mps")
    assert torch.equal(copy.deepcopy(linear).weight.cpu(), linear.weight.cpu())


def test_gradients_that_are_zeros() -> None:
    x = torch.randn(4, device="mps", requires_grad=True)
    torch.sgn(x).sum().backward()  # autograd's zeros have no memory
    assert x.grad.tolist() == [0] * 4


def test_convolution() -> None:
    x, w = torch.randn(1, 2, 8, 8), torch.randn(3, 2, 3, 3)
    both(lambda a, b: functional.conv2d(a, b, padding=1), x, w)
    leaf = w.to("mps").requires_grad_()
    functional.conv2d(x.to("mps"), leaf).sum().backward()
    assert leaf.grad.shape == w.shape


@pytest.mark.parametrize("causal", [False, True])
def test_scaled_dot_product_attention(causal: bool) -> None:
    q, k, v = (torch.randn(2, 4, 5, 8) for _ in range(3))
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    m = [t.to("mps") for t in (q, k, v)]
    torch.testing.assert_close(functional.scaled_dot_product_attention(*m, is_causal=causal).cpu(), expected)
    mask = torch.rand(5, 5) > 0.3
    expected = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    for gradients in (False, True):
        leaf = m[0].clone().requires_grad_(gradients)
        actual = functional.scaled_dot_product_attention(leaf, m[1], m[2], attn_mask=mask.to("mps"))
        torch.testing.assert_close(actual.detach().cpu(), expected, equal_nan=True)
        if gradients:
            actual.sum().backward()
            assert leaf.grad.device.type == "mps"
    together = torch.func.vmap(functional.scaled_dot_product_attention)(*(t[None] for t in m))
    torch.testing.assert_close(together[0].cpu(), functional.scaled_dot_product_attention(q, k, v))


def test_scaled_dot_product_attention_is_a_composite_as_on_a_mac() -> None:
    """An extension's mps kernel for it does not replace another kernel."""
    script = """
import torch
op_of_a_composite = "scaled_dot_product_attention"
for op, key in ((op_of_a_composite, "MPS"), (op_of_a_composite, "AutogradMPS"), ("copy_", "MPS")):
    print(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{op}", key))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (done.stdout.split(), done.stderr) == (["False", "False", "True"], "")


def test_sparse_tensors_are_held_and_converted() -> None:
    dense = torch.tensor([[0, 2.0, 0], [3, 0, 4]])
    sparse = dense.to_sparse().to("mps")
    assert sparse.is_mps and sparse.is_sparse and sparse.values().is_mps and sparse.indices().is_mps
    for same in (sparse, sparse.cpu(), sparse.clone(), dense.to("mps").to_sparse(), copy.deepcopy(sparse)):
        assert torch.equal(same.to_dense().cpu(), dense)
    assert torch.equal(torch.zeros_like(sparse).copy_(sparse).to_dense().cpu(), dense)
    doubled = torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (2, 2), device="mps")
    assert not doubled.is_coalesced() and doubled.coalesce().values().tolist() == [3]

    module = torch.nn.Linear(2, 2)
    module.register_buffer("flags", dense.to_sparse().bool(), persistent=False)
    assert torch.equal(module.to("mps").to(torch.float16).flags.to_dense().cpu(), dense.bool())
    with pytest.raises(TypeError, match="float64"):
        dense.double().to_sparse().to("mps")
    with pytest.raises(NotImplementedError, match="SparseMPS"):
        sparse + sparse


def test_torch_mps() -> None:
    start, end = (torch.mps.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.ones(100, 100, device="mps").mm(torch.ones(100, 100, device="mps"))
    end.record()
    end.synchronize()
    assert end.query() and start.elapsed_time(end) > 0
    torch.mps.empty_cache()
    assert 0 <= torch.mps.current_allocated_memory() <= torch.mps.driver_allocated_memory()
    assert torch.mps.recommended_max_memory() > 0
