"""torch.nn.attention.varlen on mps, which only torch_fattn implements."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn, varlen_attn_out
from torch.utils.checkpoint import checkpoint

import torch_fattn
from tests.conftest import counted_launches
from tests.helpers.dense import dense_sequences
from torch_fattn import reference

WINDOWS = ((-1, -1), (-1, 0), (3, 0), (2, 4), (0, 0))


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    torch_fattn.reset_report()
    with torch_fattn.installed():
        yield


def packed(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def expected(
    query: Tensor, keys: list[Tensor], values: list[Tensor], q_lens: list[int], **options: Any
) -> Tensor:
    """Each sequence alone, in float64."""
    outs, first = [], 0
    for q_len, key, value in zip(q_lens, keys, values, strict=True):
        rows = query[first : first + q_len]
        batched = (t.transpose(0, 1)[None] for t in (rows, key, value))
        outs.append(reference.prefill(*batched, **options)[0][0].transpose(0, 1))
        first += q_len
    return torch.cat(outs)


@pytest.mark.parametrize("seed", range(12))
def test_random_calls(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype = rng.choice((torch.float16, torch.bfloat16, torch.float32))
    sequences = rng.randint(1, 4)
    heads, kv_heads = rng.choice(((4, 4), (4, 2), (3, 1)))
    dim, window = rng.choice((32, 64, 72)), rng.choice(WINDOWS)
    k_lens = [rng.choice((0, 1, 5, 17, 40)) for _ in range(sequences)]
    q_lens = [rng.choice((0, 1, 7, 20)) for _ in range(sequences)]
    cu_q, cu_k = packed(q_lens), packed(k_lens)
    query = torch.randn(int(cu_q[-1]), heads, dim).to(dtype)
    key, value = (torch.randn(int(cu_k[-1]), kv_heads, dim).to(dtype) for _ in range(2))
    options: dict[str, Any] = {"window_size": window, "enable_gqa": heads != kv_heads}
    if rng.random() < 0.5:
        options["scale"] = 0.2
    used = None
    if rng.random() < 0.5:
        used = [rng.randint(0, length) for length in k_lens]
        options["seqused_k"] = torch.tensor(used, dtype=torch.int32, device="mps")
    most = (1, 1) if rng.random() < 0.3 else (max(q_lens), max(k_lens))
    with counted_launches() as launches:
        out = varlen_attn(*(t.to("mps") for t in (query, key, value, cu_q, cu_k)), *most, **options)
    assert bool(launches) == (query.numel() > 0)
    lengths = used or k_lens
    keys, values = (
        [t[a : a + n] for a, n in zip(cu_k.tolist(), lengths, strict=False)] for t in (key, value)
    )
    exact = expected(
        query, keys, values, q_lens, window_left=window[0], window_right=window[1], scale=options.get("scale")
    )
    assert out.shape == exact.shape
    assert torch.allclose(out.cpu().double(), exact, atol=1e-5 if dtype == torch.float32 else 2e-2)


def operands(dtype: torch.dtype = torch.float16) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    return [torch.randn(17, 4, 32, device="mps", dtype=dtype) for _ in range(3)], packed([5, 9, 0, 3]).to(
        "mps"
    )


def test_a_block_table() -> None:
    (query, _, _), cu = operands()
    pools = [torch.randn(12, 4, 4, 32, device="mps", dtype=torch.float16) for _ in range(2)]
    table = torch.tensor([[3, 1, -1], [0, 7, 9], [-1] * 3, [5, -1, -1]], dtype=torch.int32)
    used = [6, 11, 0, 3]
    out = varlen_attn(
        query, *pools, cu, None, 9, 12, window_size=(-1, 0), block_table=table.to("mps"),
        seqused_k=torch.tensor(used, dtype=torch.int32, device="mps"),
    )  # fmt: skip
    keys, values = (
        [pool.cpu()[row.clamp(min=0)].flatten(0, 1)[:n] for row, n in zip(table, used, strict=True)]
        for pool in pools
    )
    exact = expected(query.cpu(), keys, values, [5, 9, 0, 3], is_causal=True)
    assert torch.allclose(out.cpu().double(), exact, atol=5e-3)
    assert torch_fattn.report().routed_by["paged"] == 1


def test_lse_and_out() -> None:
    tensors, cu = operands()
    out, lse = varlen_attn(*tensors, cu, cu, 9, 9, return_aux=AuxRequest(lse=True))
    assert lse.dtype == torch.float32 and lse.shape == (4, 17)
    into = torch.empty_like(out)
    varlen_attn_out(into, *tensors, cu, cu, 9, 9)
    assert torch.equal(into.cpu(), out.cpu())
    assert torch_fattn.report().routed_by["packed"] == 2


def test_the_result_has_the_order_of_the_query() -> None:
    """The same layout as torch's own, which its fake kernel declares to torch.compile."""
    (query, key, value), cu = operands()
    by_head = query.transpose(0, 1).contiguous().transpose(0, 1)
    torch.compiler.reset()

    def model(query: Tensor) -> Tensor:
        return varlen_attn(query, key, value, cu, cu, 9, 9).transpose(0, 1).view(4, 17 * 32)

    with torch.no_grad():
        for call in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
            out = call(by_head).view(4, 17, 32).transpose(0, 1)
            assert torch.equal(out.cpu(), varlen_attn(query, key, value, cu, cu, 9, 9).cpu())
    with pytest.raises(RuntimeError, match="view size is not compatible"):  # the control
        model(query)


def test_lengths_that_are_not_int32_are_refused_by_their_name() -> None:
    tensors, cu = operands()
    used = torch.tensor([5, 9, 0, 3], device="mps")
    with pytest.raises(TypeError, match="cum_seq_q is torch.int64 and must be torch.int32"):
        varlen_attn(*tensors, cu.long(), cu, 9, 9)
    with pytest.raises(TypeError, match="cum_seq_k is torch.int64"):
        varlen_attn(*tensors, cu, cu.long(), 9, 9, seqused_k=used.int())
    with pytest.raises(TypeError, match="seqused_k is torch.int64"):
        varlen_attn(*tensors, cu, cu, 9, 9, seqused_k=used)
    varlen_attn(*tensors, cu, cu, 9, 9, seqused_k=used.int())


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (2, 1)], ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_backward(window: tuple[int, int], compiled: bool) -> None:
    tensors, cu = operands()
    given = [t.detach().clone().requires_grad_() for t in tensors]
    factors = torch.randn(tensors[0].shape)

    def model(query: Tensor, key: Tensor, value: Tensor, cu: Tensor) -> Tensor:
        return varlen_attn(query, key, value, cu, cu, 9, 9, window_size=window)

    torch.compiler.reset()
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    (run(*given, cu) * factors.to("mps")).sum().backward()
    exact = [t.detach().cpu().double().requires_grad_() for t in tensors]
    seen = {"is_causal": window[1] == 0, "window_left": window[0], "window_right": window[1]}
    lens = {"cu_seqlens_q": cu.cpu(), "cu_seqlens_k": cu.cpu()}
    out, _ = dense_sequences(*exact, **lens, **seen)
    (out * factors).sum().backward()
    for mine, theirs in zip(given, exact, strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert torch.allclose(mine.grad.cpu().double(), theirs.grad, atol=3e-3)  # float16


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "checkpoint"])
def test_backward_after_the_installation(recomputed: bool) -> None:
    tensors, cu = operands()

    def model(*given: Tensor) -> Tensor:
        return varlen_attn(*given, cu, cu, 9, 9)

    found = []
    for ends_before in (False, True):
        given = [t.detach().clone().requires_grad_() for t in tensors]
        out = checkpoint(model, *given, use_reentrant=False) if recomputed else model(*given)
        if ends_before:
            torch.nn.attention.restore_flash_attention_impl()
        out.sum().backward()
        found.append([each.grad.cpu() for each in given if each.grad is not None])
    assert len(found[0]) == 3 and all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    with pytest.raises(NotImplementedError, match="_flash_attention_forward"):
        model(*tensors)


def test_dropout_and_lonely_block_tables_are_refused() -> None:
    tensors, cu = operands()
    forward = torch.ops.aten._flash_attention_forward
    with pytest.raises(NotImplementedError, match="has no dropout"):
        forward(*tensors, cu, cu, 9, 9, 0.5, False, False)
    with pytest.raises(ValueError, match="needs seqused_k"):
        forward(*tensors, cu, cu, 9, 9, 0.0, False, False, block_table=cu[None])
    with pytest.raises(NotImplementedError, match="alibi_slopes only with is_causal"):
        forward(*tensors, cu, cu, 9, 9, 0.0, False, False, alibi_slopes=torch.ones(4, device="mps"))
    assert torch_fattn.report().routed == 0
    forward(*tensors, cu, cu, 9, 9, 0.0, True, False, alibi_slopes=torch.ones(4, device="mps"))
    assert torch_fattn.report().routed == 1


def test_rows_without_packing() -> None:
    (query, key, value) = (torch.randn(2, 9, 4, 32, device="mps") for _ in range(3))
    out, lse = torch.ops.aten._flash_attention_forward(query, key, value, None, None, 9, 9, 0.0, True, False)[
        :2
    ]
    exact, exact_lse = reference.prefill(
        *(t.cpu().transpose(1, 2) for t in (query, key, value)), is_causal=True
    )
    assert torch.allclose(out.cpu().double(), exact.transpose(1, 2), atol=1e-5)
    assert torch.allclose(lse.cpu().double(), exact_lse, atol=1e-5)
