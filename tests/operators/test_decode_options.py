"""Decode and its options at their edges: windows, sinks, tree masks, many rows, chunks of keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.conftest import Checked, counted_launches
from tests.helpers import problems
from tests.helpers.accuracy import assert_close
from tests.helpers.problems import Problem
from torch_fattn import reference

fattn = torch.ops.fattn
f16, f32 = torch.float16, torch.float32
OPS = ("decode", "paged_decode")
CHUNK = 256  # keys, for each eight packed rows


def check(device: str, op: str, dtype: torch.dtype = f16, **fields: object) -> tuple[Tensor, Tensor]:
    """Builds and runs the problem, NaN wherever nothing may look, and checks it against float64."""
    sizes: dict[str, object] = {"batch": 1, "q_heads": 4, "kv_heads": 2, "q_len": 1}
    sizes |= {"head_dim": 16, "value_dim": 24} | fields
    if op == "paged_decode":
        sizes["block_size"] = 16
        sizes["kv_len"] = -(-int(sizes["kv_len"]) // 16) * 16  # type: ignore[call-overload]
    case = problems.build(Problem(0, op, dtype, **sizes))  # type: ignore[arg-type]
    out, lse = (result.cpu() for result in getattr(fattn, op)(**case.arguments(device)[0]))
    assert_close(case, out, lse)
    return out, lse


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("window", [0, 1, 31, 32, 300])
@pytest.mark.parametrize("sink_tokens", [0, 1, 33, 400])
def test_windows_and_sink_tokens(op: str, window: int, sink_tokens: int, device: str) -> None:
    """Apart, touching and overlapping, and larger than the sequence."""
    check(
        device,
        op,
        batch=4,
        q_len=3,
        kv_len=340,
        seq_lens=(340, 65, 2, 0),
        window_left=window,
        sink_tokens=sink_tokens,
    )


@pytest.mark.parametrize("window_right", [0, 5])
def test_a_right_window_changes_nothing(window_right: int, device: str) -> None:
    plain = check(device, "decode", q_len=3, kv_len=50, window_left=9)
    limited = check(device, "decode", q_len=3, kv_len=50, window_left=9, window_right=window_right)
    assert all(torch.equal(a, b) for a, b in zip(plain, limited, strict=True))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("kv_format", ["float", "int8", "int4"])
def test_a_value_that_is_the_whole_key(op: str, kv_format: str, checked: Checked, device: str) -> None:
    """The key then has no other columns."""
    with checked(), counted_launches() as launches:
        check(
            device,
            op,
            batch=2,
            kv_len=80,
            seq_lens=(77, 32),
            head_dim=64,
            value_dim=64,
            value_in_key=True,
            kv_format=kv_format,
        )
    assert launches == ({"fattn_decode_wide": 1} if device == "mps" else {})


@pytest.mark.parametrize("device", ["mps", "cpu"])
@pytest.mark.parametrize("capacity", [0, 40, 600])
def test_a_row_without_keys_has_its_sink(device: str, capacity: int) -> None:
    sinks = torch.tensor([-3.0, 0.0, 2.5, -torch.inf])
    query = torch.randn(2, 4, 1, 16).to(device)
    key = torch.full((2, 2, capacity, 16), torch.nan).to(device)
    lengths = torch.zeros(2, dtype=torch.int32).to(device)
    out, lse = fattn.decode(query, key, key, lengths, sinks=sinks.to(device))
    assert torch.all(out.cpu() == 0)
    assert torch.allclose(lse.cpu(), sinks[:, None].expand(2, 4, 1), atol=1e-6)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("length", [5, CHUNK, 3 * CHUNK + 7])
@pytest.mark.parametrize("logit", [-4.0, 12.0])
def test_a_sink_counts_once(op: str, length: int, logit: float, device: str) -> None:
    """However many chunks: with equal logits lse is log(length + exp(sink))."""
    shape = (1, 2, -(-length // 16) * 16, 16)
    query, key = torch.zeros(1, 2, 1, 16), torch.randn(shape)
    options = {"sinks": torch.full((2,), logit, device=device)}
    lengths = torch.tensor([length], dtype=torch.int32, device=device)
    query, key = query.to(device), key.to(device)
    if op == "decode":
        _, lse = fattn.decode(query, key, key, lengths, **options)
    else:
        pool = key[0].transpose(0, 1).reshape(-1, 16, 2, 16)
        table = torch.arange(pool.shape[0], dtype=torch.int32, device=device)[None]
        _, lse = fattn.paged_decode(query, pool, pool, table, lengths, **options)
    exact = torch.log(length + torch.tensor(logit).exp())
    assert torch.allclose(lse.cpu(), exact.expand(1, 2, 1), atol=1e-4)


@pytest.mark.parametrize("device", ["mps", "cpu"])
@pytest.mark.parametrize("length", [3, 35, CHUNK + 2])
def test_a_tree_hides_the_own_token(device: str, length: int) -> None:
    """Rows 0 and 1 do not see draft token 0, whose key is NaN; row 2 sees it: the control. Where no row sees
    it, its value may be NaN too."""
    query, key, value = torch.randn(1, 2, 3, 16), torch.randn(1, 1, length, 16), torch.randn(1, 1, length, 16)
    key[0, 0, length - 3] = torch.nan
    tree = torch.tensor([0b000, 0b010, 0b101])
    operands = [operand.to(device) for operand in (query, key, value)]
    out, lse = (t.cpu() for t in fattn.decode(*operands, tree_mask=tree.to(device)))
    assert out[:, :, :2].isfinite().all() and out[:, :, 2].isnan().all()
    assert torch.all((lse[:, :, 0] == -torch.inf) == (length == 3))
    operands[2][0, 0, length - 3] = torch.nan
    out, _ = fattn.decode(*operands, tree_mask=torch.tensor([0b000, 0b010, 0b100]).to(device))
    assert out.isfinite().all()


@pytest.mark.parametrize("dtype", problems.DTYPES, ids=problems.SHORT.get)
@pytest.mark.parametrize("op", OPS)
def test_most_rows(op: str, dtype: torch.dtype, device: str) -> None:
    """16 query rows of a group of 16: 256 packed rows, in eight threadgroups."""
    check(
        device,
        op,
        dtype,
        q_heads=16,
        kv_heads=1,
        q_len=16,
        kv_len=120,
        seq_lens=(117,),
        tree="shared",
        sinks=True,
    )


LARGE_TREES: dict[str, dict[str, object]] = {
    "17 rows": {"q_len": 17, "kv_len": 120, "seq_lens": (117,), "tree": "shared"},
    "64 rows of each": {
        "batch": 3, "q_len": 64, "kv_len": 160, "seq_lens": (150, 64, 20), "tree": "each", "sinks": True,
        "window_left": 70, "sink_tokens": 5, "softcap": 3.0,
    },
    "int8": {"q_len": 33, "kv_len": 160, "seq_lens": (150,), "tree": "shared", "kv_format": "int8"},
    "int4": {
        "batch": 2, "q_len": 33, "kv_len": 160, "seq_lens": (150, 77), "tree": "each", "kv_format": "int4",
        "head_dim": 64, "value_dim": 32,
    },
    "wide": {
        "q_len": 40, "kv_len": 160, "seq_lens": (150,), "tree": "shared", "head_dim": 192, "value_dim": 128,
        "mask": torch.bool,
    },
    "wide int8": {
        "batch": 2, "q_len": 20, "kv_len": 160, "seq_lens": (150, 90), "tree": "each", "kv_format": "int8",
        "head_dim": 192, "value_dim": 128,
    },
}  # fmt: skip


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", LARGE_TREES)
def test_large_trees(op: str, name: str, device: str) -> None:
    """More rows than a decode has, up to 64: on the kernels of prefill."""
    with counted_launches() as launches:
        check(device, op, **LARGE_TREES[name])
    kernels = {"fattn_prefill" + "_wide" * ("wide" in name)} if device == "mps" else set()
    assert {*launches} - {"fattn_merge"} == kernels


@pytest.mark.parametrize("rows", [3, 64])
def test_trees_of_booleans(rows: int, device: str) -> None:
    shown = torch.rand(2, rows, rows, generator=torch.Generator().manual_seed(0)) < 0.5
    numbers = [[sum(int(on) << t for t, on in enumerate(row)) for row in tree] for tree in shown.tolist()]
    bits = torch.tensor(numbers, dtype=torch.uint64).view(torch.int64)
    query, key = torch.randn(2, 4, rows, 16), torch.randn(2, 2, 90, 24)
    operands = [each.to(device) for each in (query, key[..., :16], key)]
    for tree, of_bits in ((shown, bits), (shown[1], bits[1])):
        masks = (tree.to(device), of_bits.to(device))
        out, wanted = (fattn.decode(*operands, tree_mask=mask)[0].cpu() for mask in masks)
        exact, _ = reference.decode(query, key[..., :16], key, tree_mask=tree)
        assert torch.equal(out, wanted) and torch.allclose(out.double(), exact, atol=1e-5)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("group", "row_groups"), [(1, 1), (16, 2), (32, 4)])
def test_lengths_around_a_chunk(op: str, group: int, row_groups: int, device: str) -> None:
    chunk = CHUNK * row_groups
    lengths = (0, 1, chunk - 1, chunk, chunk + 1, 2 * chunk + 1)
    check(device, op, batch=6, q_heads=group, kv_heads=1, kv_len=2 * chunk + 1, seq_lens=lengths)


def test_many_uneven_sequences(device: str) -> None:
    """More than a simdgroup has lanes, which look for a threadgroup's sequence together."""
    lengths = (600, *[n % 3 for n in range(38)], 513, 0)
    check(
        device,
        "decode",
        batch=41,
        q_heads=1,
        kv_heads=1,
        head_dim=8,
        value_dim=8,
        kv_len=600,
        seq_lens=lengths,
    )


def operators_within(op: str, arguments: dict[str, Tensor]) -> set[str]:
    """The operators of torch that a call runs."""
    with torch.profiler.profile() as profile:
        getattr(fattn, op)(**arguments)
    return {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("op", ["prefill", "decode"])
@pytest.mark.parametrize("head_dim", [64, 192])
@pytest.mark.parametrize("dtype", [f16, torch.bfloat16])
def test_numbers_of_heads_are_read_in_their_own_dtype(
    op: str, head_dim: int, dtype: torch.dtype, device: str
) -> None:
    """Bit for bit as their float32 copies, and on the GPU without making one."""
    generator = torch.Generator().manual_seed(5)
    operands = {name: torch.randn(2, 4, 9, head_dim, generator=generator) for name in ("key", "value")}
    operands["query"] = torch.randn(2, 4, 2, head_dim, generator=generator)
    operands = {name: tensor.to(f16).to(device) for name, tensor in operands.items()}
    sinks, slopes = torch.randn(8, generator=generator), torch.rand(2, 4, generator=generator)
    numbers = {"sinks": sinks.to(dtype).to(device)[1::2], "alibi_slopes": slopes.to(dtype).to(device)}
    copies = {name: tensor.float() for name, tensor in numbers.items()}
    own, of_copies = (getattr(fattn, op)(**operands, **given) for given in (numbers, copies))
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(own, of_copies, strict=True))
    if device == "mps":
        assert "aten::_to_copy" not in operators_within(op, operands | numbers)
        strided = operands | {"query": torch.cat([operands["query"]] * 2, -1)[..., ::2]}
        assert "aten::contiguous" in operators_within(op, strided), "the control"
