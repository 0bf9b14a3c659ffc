"""Calls of vLLM's flash-attn and of flash-attn 3, against float64, also compiled."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from tests.conftest import counted_launches, decodes
from tests.helpers.flash_attn_oracle import Options, check
from torch_fattn import flash_attn as fa

SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])


VLLM = {"causal": True, "alibi_slopes": None, "softcap": 0.0, "fa_version": 3, "max_seqlen_k": 30}
VLLM |= {"q_descale": None, "output_scale": None, "cp_world_size": 1, "cp_rank": 0, "dynamic_causal": None}
VLLM |= dict.fromkeys(("mask_mod", "block_sparse_tensors", "aux_tensors", "aux_tensor_leading_dims"))


def vllm_problem(q_lens: tuple[int, ...], rows: int, device: str) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The operands of vLLM's call, and out and lse; rows beyond the sequences are of none."""
    torch.manual_seed(3)
    options, k_lens = Options(causal=True, window=(7, -1), sinks=SINKS), (20, 9, 30)
    q, pools = torch.randn(rows, 4, 32), torch.randn(2, 20, 8, 2, 32)
    table = torch.randperm(20)[:15].view(3, 5).to(torch.int32)
    keys = [pools[:, table[b].long()].flatten(1, 2)[:, :n] for b, n in enumerate(k_lens)]
    results = [options.attend(b, part, *keys[b]) for b, part in enumerate(q[: sum(q_lens)].split(q_lens))]
    exact, exact_lse = torch.zeros(rows, 4, 32).double(), SINKS.double()[:, None].repeat(1, rows)
    exact[: sum(q_lens)] = torch.cat([r[0] for r in results])
    exact_lse[:, : sum(q_lens)] = torch.cat([r[1] for r in results], dim=1)
    operands = {"q": q, "k": pools[0], "v": pools[1], "block_table": table, "s_aux": SINKS}
    for name, numbers in (("cu_seqlens_q", [0, *itertools.accumulate(q_lens)]), ("seqused_k", k_lens)):
        operands[name] = torch.tensor(numbers, dtype=torch.int32)
    return {name: each.to(device) for name, each in operands.items()}, exact, exact_lse


@pytest.mark.parametrize("num_splits", [0, 1])
@pytest.mark.parametrize(
    ("q_lens", "rows"),
    [
        ((1, 1, 1), 3), ((3, 3, 3), 9), ((5, 0, 1), 6), ((1, 1, 0), 3), ((0, 1, 1), 3), ((3, 3, 1), 9),
        ((2, 4, 0), 12),
    ],
    ids=str,
)  # fmt: skip
def test_vllms_call(q_lens: tuple[int, ...], rows: int, num_splits: int, device: str) -> None:
    """Batches of decodes alone are paged_decode's, unless vLLM requests batch-invariant results. Sequences of
    a padded batch are shorter, and it ends with rows of none."""
    operands, exact, exact_lse = vllm_problem(q_lens, rows, device)
    target, scales = torch.empty_like(operands["q"]), torch.rand(3, 2, device=device)
    given = dict.fromkeys(("scheduler_metadata", "k_descale", "v_descale", "cp_tot_seqused_k"), scales)
    with counted_launches() as launches:
        out, lse = fa.flash_attn_varlen_func(
            **VLLM, **operands, **given, max_seqlen_q=max(q_lens), softmax_scale=32**-0.5,
            window_size=[7, -1], num_splits=num_splits, out=target, return_softmax_lse=True,
        )  # fmt: skip
    assert out is target
    check(out, lse, exact, exact_lse)
    if device == "mps":
        assert decodes(launches) == (rows == 3 * max(q_lens) and num_splits == 0) and launches


def test_a_max_seqlen_q_that_is_too_small(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all rows together have the number of a decode's."""
    operands, exact, exact_lse = vllm_problem((4, 1, 1), 6, device)
    exact[:2], exact_lse[:, :2] = torch.nan, torch.nan
    call = partial(
        fa.flash_attn_varlen_func, **VLLM, **operands, window_size=[7, -1], return_softmax_lse=True
    )
    check(*call(max_seqlen_q=2), exact, exact_lse)
    monkeypatch.setenv("FATTN_CHECK", "1")
    with pytest.raises(ValueError, match=r"cu_seqlens_q.diff\(\)\[0\] is 4 and must be between 0 and 2"):
        call(max_seqlen_q=2)
    assert not call(max_seqlen_q=4)[0].isnan().any()


@pytest.mark.parametrize(("rows", "dynamic"), [(6, None), (9, True)])  # paged_prefill, paged_decode
def test_vllms_call_is_compiled(rows: int, dynamic: bool | None, device: str) -> None:
    """`out` is a part of a larger tensor."""

    def call(flat: Tensor, **operands: Tensor) -> None:
        out = flat.view(-1, 4, 32)[:rows]
        fa.flash_attn_varlen_func(**VLLM, **operands, max_seqlen_q=3, window_size=[7, -1], out=out)

    operands, exact, _ = vllm_problem((3, 2, 1), rows, device)
    flat = torch.full((12, 128), 5.0, device=device)
    torch.compiler.reset()
    torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)(flat, **operands)
    assert torch.allclose(flat[:rows].cpu().double(), exact.flatten(1), atol=2e-5)
    assert (flat[rows:] == 5).all()


@pytest.mark.host_only
@pytest.mark.parametrize("function", ["dense", "packed", "decode", "cache"])
def test_batches_are_compiled_once(function: str) -> None:
    """`out` and slopes of each sequence included: two graphs, the second of any size."""
    counter = CompileCounter()

    def operands_of(batch: int) -> dict[str, Any]:
        rows, keys, slopes = torch.randn(batch, 4, 16), torch.randn(batch, 8, 2, 16), torch.rand(batch, 4)
        given = {"alibi_slopes": slopes, "causal": True, "q": rows, "out": torch.empty_like(rows)}
        if function in ("dense", "cache"):
            given |= {"q": rows[:, None], "out": torch.empty(batch, 1, 4, 16)}
        if function == "dense":
            return given | {"k": keys, "v": keys}
        lens = torch.arange(batch, dtype=torch.int32) % 5 + 1
        if function == "cache":
            return given | {"k_cache": keys, "v_cache": keys, "cache_seqlens": lens}
        starts = torch.arange(batch + 1, dtype=torch.int32)
        given |= {"cu_seqlens_q": starts, "max_seqlen_q": 1, "max_seqlen_k": 8}
        if function == "packed":
            return given | {"k": keys.flatten(0, 1), "v": keys.flatten(0, 1), "cu_seqlens_k": starts * 8}
        return given | {"k": keys, "v": keys, "seqused_k": lens, "block_table": starts[:-1, None]}

    named = {"dense": fa.flash_attn_func, "cache": fa.flash_attn_with_kvcache}
    called: Any = named.get(function, fa.flash_attn_varlen_func)
    torch.compiler.reset()
    compiled = torch.compile(lambda **given: called(**given), backend=counter, fullgraph=True)
    for batch in range(2, 13):
        operands = operands_of(batch)
        assert torch.equal(compiled(**operands), called(**operands))
    assert counter.frame_count == 2


@pytest.mark.parametrize("slopes", [None, torch.tensor([0.5, 0.1, 0.03, 0.2])], ids=["", "slopes"])
def test_flash_attn_3s_call_of_a_cache(slopes: Tensor | None, device: str) -> None:
    """Slopes of later keys take two calls, which count a sink once."""
    torch.manual_seed(4)
    options, pools = Options(slopes=slopes, sinks=SINKS), torch.randn(2, 4, 8, 2, 32)
    q, table, lens = (
        torch.randn(2, 3, 4, 32),
        torch.tensor([[3, 0], [2, 1]]).int(),
        torch.tensor([13, 9]).int(),
    )
    keys = [pools[:, table[b].long()].flatten(1, 2)[:, : lens[b]] for b in range(2)]
    exact, exact_lse = zip(*(options.attend(b, q[b], *keys[b]) for b in range(2)), strict=True)
    rows, k, v, table, lens = (each.to(device) for each in (q, *pools, table, lens))
    scheduler = {
        "pack_gqa": True,
        "sm_margin": 2,
        "num_splits": 3,
        "scheduler_metadata": lens,
        "max_seqlen_q": 3,
    }
    given: dict[str, Any] = options.arguments(device) | {"out": torch.empty_like(rows)}
    out, lse = fa.flash_attn_with_kvcache(
        rows, k, v, cache_seqlens=lens, page_table=table, return_softmax_lse=True, **given, **scheduler
    )
    assert out is given["out"]
    check(out, lse, torch.stack(exact), torch.stack(exact_lse))
