"""`token_major_out`: results in memory by batch, row and head. Operands that lie so cost the same. Random
problems have it, too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torch_fattn
from tests.conftest import needs_emulator


@pytest.mark.parametrize("device", ["mps", "cpu", "meta"])
@pytest.mark.parametrize(
    "sizes",
    [(0, 4, 3, 9), (2, 0, 3, 9), (2, 4, 0, 9), (2, 4, 3, 0), (1, 1, 1, 9), (2, 4, 1, 9), (2, 1, 3, 9)],
    ids=str,
)
@pytest.mark.parametrize("op", ["prefill", "decode"])
def test_strides(op: str, sizes: tuple[int, int, int, int], device: str) -> None:
    """The strides of the transposed view of a fresh tensor, including sizes of 0 and 1."""
    batch, heads, q_len, kv_len = sizes
    query = torch.randn(batch, heads, q_len, 16, device=device)
    key, value = (torch.randn(batch, heads, kv_len, dim, device=device) for dim in (16, 24))
    as_view = torch.empty(batch, q_len, heads, 24).transpose(1, 2)
    out, lse = getattr(torch.ops.fattn, op)(query, key, value, token_major_out=True)
    assert out.shape == as_view.shape and out.stride() == as_view.stride()
    plain, same_lse = getattr(torch.ops.fattn, op)(query, key, value)
    assert plain.stride() == torch.empty(batch, heads, q_len, 24).stride()
    if device != "meta":
        assert torch.equal(out.cpu(), plain.cpu()) and torch.equal(lse.cpu(), same_lse.cpu())


@pytest.mark.host_only
@pytest.mark.parametrize(("heads", "q_len", "same"), [(8, 1, True), (1, 4, True), (8, 4, False)])
@pytest.mark.parametrize("kv_len", [100, 4096])
def test_one_row_takes_the_same_kernels(heads: int, q_len: int, same: bool, kv_len: int) -> None:
    """One row, or one head, is the same memory in both layouts."""
    query = torch.empty(2, heads, q_len, 64, device="meta")
    key = torch.empty(2, heads, kv_len, 64, device="meta")
    plain, token_major = (
        torch_fattn.explain("decode", query, key, key, token_major_out=yes).passes for yes in (False, True)
    )
    assert (plain == token_major) == same
    if not same:  # the pass that writes the result is another
        assert [launch["constants"]["token_major_out"] for launch in token_major] == (
            [True] if kv_len == 100 else [False, True]
        )


def operands(layout: str, head_dim: int) -> list[Tensor]:
    """Query, key and value `[2, 4, 70, D]`: by batch, head and row in memory; by batch, row and head; or the
    latter with rows that no vector fits."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for values in torch.randn(3, 2, 4, 70, head_dim, generator=generator).half():
        tensor = values.to("mps")
        if layout != "BHLD":
            row = head_dim + (layout == "odd")
            rows = torch.zeros(2, 70, 4, row, dtype=torch.float16, device="mps")[..., :head_dim]
            tensor = rows.copy_(tensor.transpose(1, 2)).transpose(1, 2)
        found.append(tensor)
    return found


@needs_emulator
@pytest.mark.parametrize("head_dim", [64, 136])
def test_operands_in_either_layout_cost_the_same(head_dim: int) -> None:
    """The same kernels with the same loads, counted; only strides differ."""
    import softmetal

    plans, counts, results = [], [], []
    for layout in ("BHLD", "BLHD", "odd"):
        tensors = operands(layout, head_dim)
        (launch,) = torch_fattn.explain("prefill", *tensors, is_causal=True).passes
        plans.append({name: fact for name, fact in launch.items() if not name.startswith("params")})
        with softmetal.checks(count_bytes=True), softmetal.record() as launches:
            results.append(torch_fattn.prefill(*tensors, is_causal=True).cpu())
        ours = launches[-1]
        assert ours["kernel"] == launch["kernel"]
        counts.append((ours["buffers_read"], ours["buffers_written"], ours["counters"]))
    assert plans[0] == plans[1] and plans[0]["constants"]["vector_loads"]
    assert counts[0] == counts[1]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert not plans[2]["constants"]["vector_loads"], "the control: rows of 65 elements"
    assert counts[2][2] != counts[0][2]
