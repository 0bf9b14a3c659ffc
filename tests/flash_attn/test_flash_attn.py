"""torch_fattn.flash_attn: flash-attn's functions of dense and packed tensors, against float64, and their
signatures."""

from __future__ import annotations

import inspect
import itertools
import random
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.conftest import Checked, counted_launches
from tests.helpers.flash_attn_oracle import LIMITS, bits, check, draw_options
from torch_fattn import flash_attn as fa


def on(device: str, *tensors: Tensor | None) -> list[Any]:
    return [None if tensor is None else tensor.to(device) for tensor in tensors]


def check_dense(seed: int, device: str) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype = rng.choice(list(LIMITS))
    batch, (heads, kv_heads) = rng.choice((1, 2)), rng.choice(((4, 4), (4, 2), (3, 1)))
    q_len, kv_len, dim = rng.choice((1, 5, 16, 30)), rng.choice((1, 8, 33)), rng.choice((32, 64, 20))
    q = torch.randn(batch, q_len, heads, dim).to(dtype)
    kv = torch.randn(batch, kv_len, 2, kv_heads, dim).to(dtype)
    options = draw_options(rng, batch, heads)
    results = [options.attend(b, q[b], kv[b, :, 0], kv[b, :, 1]) for b in range(batch)]
    exact, exact_lse = (torch.stack([r[i] for r in results]) for i in (0, 1))
    arguments = options.arguments(device)
    rows, packed = on(device, q, kv)
    out, lse, empty = fa.flash_attn_kvpacked_func(rows, packed, **arguments, return_attn_probs=True)
    assert empty.numel() == 0
    check(out, lse, exact, exact_lse)
    assert torch.equal(fa.flash_attn_func(rows, *packed.unbind(2), **arguments).cpu(), out.cpu())
    if heads == kv_heads and q_len == kv_len:
        qkv = torch.cat([rows[:, :, None], packed], dim=2)
        assert torch.equal(fa.flash_attn_qkvpacked_func(qkv, **arguments).cpu(), out.cpu())
    assert torch.equal(bits(rows), bits(q)) and torch.equal(bits(packed), bits(kv))


@pytest.mark.parametrize("seed", range(24))
def test_dense(seed: int) -> None:
    with counted_launches() as launches:
        check_dense(seed, "mps")
    assert launches


@pytest.mark.host_only
def test_dense_on_the_cpu() -> None:
    for seed in range(100, 220):
        check_dense(seed, "cpu")


def check_packed(seed: int, device: str) -> None:
    """The keys of a sequence in one tensor with those of the others, or in blocks; some of them used."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype = rng.choice(list(LIMITS))
    (heads, kv_heads), dim = rng.choice(((4, 4), (4, 2))), rng.choice((32, 32, 20))
    k_lens = [rng.choice((0, 1, 9, 33)) for _ in range(3)]
    self_attention = rng.random() < 0.3 and heads == kv_heads
    q_lens = k_lens if self_attention else [rng.choice((0, 1, 6, 20)) for _ in range(3)]
    cu_q, cu_k = (torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32) for n in (q_lens, k_lens))
    q = torch.randn(sum(q_lens), heads, dim).to(dtype)
    kv = torch.randn(sum(k_lens), 2, kv_heads, dim).to(dtype)
    options = draw_options(rng, 3, heads)
    used = [rng.choice((-2, 0, 5, n, n + 3)) for n in k_lens] if rng.random() < 0.4 else k_lens
    seqused = torch.tensor(used, dtype=torch.int32) if used is not k_lens else None
    results = []
    for b, (first, end, begin) in enumerate(zip(cu_q, cu_q[1:], cu_k, strict=False)):
        count = min(max(used[b], 0), k_lens[b])
        kv[int(begin) + count : int(cu_k[b + 1])] = torch.nan  # not used, and without influence
        keys = kv[int(begin) : int(begin) + count]
        results.append(options.attend(b, q[first:end], keys[:, 0], keys[:, 1]))
    exact, exact_lse = torch.cat([r[0] for r in results]), torch.cat([r[1] for r in results], dim=1)

    rows, packed, starts, key_starts, lens = on(device, q, kv, cu_q, cu_k, seqused)
    most = (max(q_lens), max(k_lens))
    arguments = options.arguments(device)
    out, lse, _ = fa.flash_attn_varlen_func(
        rows, *packed.unbind(1), starts, key_starts, *most, **arguments, return_attn_probs=True,
        seqused_k=lens,
    )  # fmt: skip
    check(out, lse, exact, exact_lse)
    if device == "cpu":
        again = fa.flash_attn_varlen_func(
            rows, *packed.unbind(1), starts, key_starts, 1, 2, **arguments, seqused_k=lens
        )
        assert torch.equal(again, out), "bounds that are too small"
    if seqused is None:
        again = fa.flash_attn_varlen_kvpacked_func(rows, packed, starts, key_starts, *most, **arguments)
        assert torch.equal(again.cpu(), out.cpu())
        if self_attention:
            qkv = torch.cat([rows[:, None], packed], dim=1)
            again = fa.flash_attn_varlen_qkvpacked_func(qkv, starts, most[0], **arguments)
            assert torch.equal(again.cpu(), out.cpu())

    # The same keys in blocks of 8, as a server has them: vLLM gives no cu_seqlens_k.
    pools = torch.full((20, 8, 2, kv_heads, dim), torch.nan, dtype=dtype)
    table = torch.randperm(20)[:15].view(3, 5).to(torch.int32)
    for b, (begin, end) in enumerate(itertools.pairwise(cu_k.tolist())):
        flat = pools[table[b].long()].flatten(0, 1)
        flat[: end - begin] = kv[begin:end]
        pools[table[b].long()] = flat.unflatten(0, (5, 8))
        table[b, -(-(end - begin) // 8) :] = -1
    blocks, tables = on(device, pools, table)
    if seqused is not None:
        lens = lens.minimum(key_starts.diff())  # more of them are in the last block
    out, lse, _ = fa.flash_attn_varlen_func(
        q=rows, k=blocks[:, :, 0], v=blocks[:, :, 1], cu_seqlens_q=starts, max_seqlen_q=most[0],
        cu_seqlens_k=key_starts if seqused is None else None, seqused_k=lens, max_seqlen_k=most[1],
        block_table=tables, **arguments | {"window_size": list(options.window)}, return_attn_probs=True,
    )  # fmt: skip
    check(out, lse, exact, exact_lse)


@pytest.mark.parametrize("seed", range(16))
def test_packed(seed: int) -> None:
    check_packed(seed, "mps")


@pytest.mark.host_only
def test_packed_on_the_cpu() -> None:
    for seed in range(100, 220):
        check_packed(seed, "cpu")


def test_packed_and_padded_again() -> None:
    x, mask = torch.randn(2, 5, 3, requires_grad=True), torch.tensor([[1, 1, 0, 1, 0], [0, 1, 0, 0, 0]])
    unused = torch.tensor([[0, 0, 0, 0, 1], [0] * 5])
    tokens, indices, starts, longest, used = fa.bert_padding.unpad_input(x, mask, unused)
    assert indices.tolist() == [0, 1, 3, 4, 6] and torch.equal(tokens, x.flatten(0, 1)[indices])
    assert (starts.tolist(), starts.dtype, longest, used.tolist()) == ([0, 4, 5], torch.int32, 4, [3, 1])
    padded = fa.bert_padding.pad_input(tokens, indices, 2, 5)
    assert torch.equal(padded, x * (mask + unused)[..., None])
    padded.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, (mask + unused)[..., None].expand_as(x).float())


def test_sequences_packed_in_padded_rows() -> None:
    x = torch.randn(2, 6, 3)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]])
    tokens, indices, starts, longest = fa.bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert indices.tolist() == [0, 1, 2, 3, 4, 6] and torch.equal(tokens, x.flatten(0, 1)[indices])
    assert (starts.tolist(), starts.dtype, longest) == ([0, 2, 5, 6], torch.int32, 3)


def test_the_first_axis() -> None:
    x, indices = torch.randn(5, 2, requires_grad=True), torch.tensor([3, 1])
    kept, residual = fa.bert_padding.index_first_axis_residual(x, indices)
    put = fa.bert_padding.index_put_first_axis(kept, indices, 5)
    assert torch.equal(put[indices], kept) and not put[[0, 2, 4]].any() and torch.equal(residual, x)
    (put.sum() + residual.sum()).backward()
    assert x.grad is not None and x.grad[:, 0].tolist() == [1, 2, 1, 2, 1]


@pytest.mark.host_only
def test_libraries_that_import_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/drop-in.md registers it."""
    for name in ("flash_attn", "flash_attn.flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, fa)
    monkeypatch.setitem(sys.modules, "flash_attn.bert_padding", fa.bert_padding)
    for statement in (
        "from flash_attn import flash_attn_func as found",
        "from flash_attn.flash_attn_interface import flash_attn_func as found",
        "from flash_attn import flash_attn_interface; found = flash_attn_interface.flash_attn_func",
        "import flash_attn.flash_attn_interface as module; found = module.flash_attn_func",
        "import flash_attn; found = flash_attn.flash_attn_interface.flash_attn_func",
    ):
        names: dict[str, Any] = {}
        exec(statement, names)
        assert names["found"] is fa.flash_attn_func
    exec("import flash_attn.bert_padding; from flash_attn.bert_padding import index_put_first_axis", {})


def test_alibi_of_rows_of_no_sequence(checked: Checked) -> None:
    """Before the first sequence and behind the last, and where there is none."""
    q = torch.randn(12, 2, 16, device="mps")
    for starts in ([2, 5, 9], [0]):
        cu = torch.tensor(starts, dtype=torch.int32, device="mps")
        slopes = torch.rand(len(starts) - 1, 2, device="mps")
        for causal in (True, False):
            with checked():
                out = fa.flash_attn_varlen_func(q, q, q, cu, cu, 4, 4, causal=causal, alibi_slopes=slopes)
                owned = out.flatten(1).any(1).cpu()
            assert owned.tolist() == [2 <= row < 9 and len(starts) > 1 for row in range(12)]


def test_alibi_needs_no_mask() -> None:
    """Memory is linear in the length: a mask of 4096 rows and keys would be 64 MB for each head."""
    q = torch.randn(1, 4096, 1, 8, device="mps", dtype=torch.float16)
    seen: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = op(*args, **(kwargs or {}))
            seen.extend(t.numel() for t in tree_leaves(result) if isinstance(t, Tensor))
            return result

    with Sizes():
        fa.flash_attn_func(q[:, :512], q, q, alibi_slopes=torch.ones(1, device="mps"), window_size=(64, 64))
    assert seen and max(seen) <= q.numel()


def test_numbers_on_the_device_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(6, 2, 16, device="mps")
    cu, table = (torch.tensor(n, dtype=torch.int32, device="mps") for n in ([0, 6], [[0]]))

    def call(used: int, **arguments: Any) -> None:
        lens = torch.tensor([used], dtype=torch.int32, device="mps")
        k = q[None] if arguments else q
        fa.flash_attn_varlen_func(q, k, k, cu, cu, 6, 6, seqused_k=lens, **arguments)

    call(7)
    monkeypatch.setenv("FATTN_CHECK", "1")
    call(6)
    call(6, block_table=table)
    with pytest.raises(ValueError, match=r"varlen_func: seqused_k\[0\] is 7 and must be between 0 and 6"):
        call(7)
    with pytest.raises(ValueError, match=r"varlen_func: seqused_k\[0\] is -1 and must be between 0 and 6"):
        call(-1, block_table=table)
    with pytest.raises(
        ValueError, match=r"varlen_func: block_table\[0, 0\] is 1 and must be between 0 and 0"
    ):
        call(6, block_table=table + 1)


# Names and defaults of flash-attn 2.8, and seqused_k as vLLM has it; then those of newer versions.
TAIL = "dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None "
TAIL += "deterministic=False return_attn_probs=False"
NEWER = " out=None learnable_sink=None s_aux=None qv=None q_descale=None k_descale=None v_descale=None "
NEWER += "attention_chunk=0 fa_version=None pack_gqa=None sm_margin=0"
PAGED = NEWER + " page_table=None scheduler_metadata=None q_v=None seqused_q=None"
PARALLEL = " cp_world_size=1 cp_rank=0 cp_tot_seqused_k=None mask_mod=None block_sparse_tensors=None "
PARALLEL += "aux_tensors=None aux_tensor_leading_dims=None dynamic_causal=None output_scale=None"
SIGNATURES = {
    "flash_attn_func": "q k v " + TAIL + " num_splits=0" + NEWER,
    "flash_attn_qkvpacked_func": "qkv " + TAIL,
    "flash_attn_kvpacked_func": "q kv " + TAIL,
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k=None max_seqlen_q=None max_seqlen_k=None "
    + TAIL + " block_table=None seqused_k=None return_softmax_lse=False num_splits=0" + PAGED + PARALLEL,
    "flash_attn_varlen_qkvpacked_func": "qkv cu_seqlens max_seqlen " + TAIL,
    "flash_attn_varlen_kvpacked_func": "q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k " + TAIL,
    "flash_attn_with_kvcache": "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None "
    "cache_seqlens=None cache_batch_idx=None cache_leftpad=None block_table=None softmax_scale=None "
    "causal=False window_size=(-1,-1) softcap=0.0 rotary_interleaved=True alibi_slopes=None num_splits=0 "
    "return_softmax_lse=False" + PAGED + " cu_seqlens_q=None cu_seqlens_k_new=None max_seqlen_q=None "
    "rotary_seqlens=None",
}  # fmt: skip


@pytest.mark.host_only
@pytest.mark.parametrize("name", fa.__all__)
def test_signatures(name: str) -> None:
    parameters = inspect.signature(getattr(fa, name)).parameters.values()
    ours = [
        p.name if p.default is p.empty else f"{p.name}={str(p.default).replace(' ', '')}" for p in parameters
    ]
    assert ours == SIGNATURES[name].split()


def test_alibi_on_both_sides_rounds_once() -> None:
    """The keys before a row and those behind it are two calls."""
    randn = partial(torch.randn, generator=torch.Generator().manual_seed(2))
    query, key, value = (randn(2, length, 2, 64).half() for length in (20, 33, 33))
    slopes = torch.tensor([0.5, 0.1])
    out = fa.flash_attn_func(*(t.to("mps") for t in (query, key, value)), alibi_slopes=slopes.to("mps"))
    distance = (torch.arange(20)[:, None] + 13 - torch.arange(33)).abs()
    scores = torch.einsum("blhd,bkhd->bhlk", query.double(), key.double()) / 8
    weights = (scores - slopes.double()[:, None, None] * distance).softmax(-1)
    exact = torch.einsum("bhlk,bkhd->blhd", weights, value.double())
    assert (out.cpu() - exact).abs().max() <= 1.1 * (exact.half() - exact).abs().max()


def test_none_means_no_limit() -> None:
    q = torch.randn(1, 5, 2, 16, device="mps")
    limited = fa.flash_attn_func(q, q, q, window_size=(2, -1))
    assert torch.equal(fa.flash_attn_func(q, q, q, window_size=(2, None)), limited)
    assert torch.equal(fa.flash_attn_func(q, q, q, window_size=None), fa.flash_attn_func(q, q, q))


@pytest.mark.host_only
def test_the_most_keys_as_a_tensor_and_far_too_many() -> None:
    q, cu = torch.randn(7, 2, 16), torch.tensor([0, 4, 7], dtype=torch.int32)
    for used in ({}, {"seqused_k": torch.tensor([2, 3], dtype=torch.int32)}):
        right = fa.flash_attn_varlen_func(q, q, q, cu, cu, 4, 4, **used)
        for most in (cu.diff().max(), 2**50):
            assert torch.equal(fa.flash_attn_varlen_func(q, q, q, cu, cu, most, most, **used), right)
