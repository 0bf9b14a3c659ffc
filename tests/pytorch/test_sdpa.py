"""torch_fattn.sdpa and the installed kernels mean what F.scaled_dot_product_attention means."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_fattn
from tests.conftest import counted_launches
from tests.helpers.sdpa_calls import SdpaCall, a_call
from torch_fattn.integrations.pytorch import sdpa

ATTENTION = (
    "fattn_prefill",
    "fattn_prefill_wide",
    "fattn_decode",
    "fattn_decode_wide",
    "fattn_decode_vector",
)


@pytest.fixture(autouse=True)
def fresh_report() -> Iterator[None]:
    torch_fattn.reset_report()
    yield
    assert not torch_fattn.report().installed


def attend(way: str, call: SdpaCall) -> Tensor:
    operands, options = call.on("mps")
    return (torch_fattn.sdpa if way == "sdpa" else by_install)(*operands, **options)


def batches(first: int, last: int) -> list[range]:
    return [range(i, i + 10) for i in range(first, last, 10)]


@pytest.mark.parametrize("seeds", batches(1000, 3000), ids=lambda seeds: str(seeds[0]))
def test_more_random_calls(seeds: range) -> None:
    test_random_calls(seeds)


@pytest.mark.parametrize("seeds", batches(0, 80), ids=lambda seeds: str(seeds[0]))
def test_random_calls(seeds: range) -> None:
    for seed in seeds:
        call = a_call(seed)
        exact = call.expected()
        torch_fattn.reset_report()
        with counted_launches() as launches:
            out = attend(("sdpa", "installed")[seed % 2], call)
        assert torch_fattn.report().routed == 1 and torch_fattn.report().fell_back == 0, f"{seed}: {call}"
        query = call.operands[0]
        assert out.dtype == query.dtype and out.shape == exact.shape
        by_token = query.dim() > 2 and query.stride(-3) < query.stride(-2)
        assert (out.transpose(-3, -2) if by_token else out).is_contiguous()
        if exact.numel() == 0:
            continue
        assert sum(launches.get(kernel, 0) for kernel in ATTENTION) >= 1, f"{seed}: {call}"
        error = (out.cpu().double() - exact).abs().max().item()
        assert error <= call.limit(exact), f"seed {seed}: {error:.3g} > {call.limit(exact):.3g} of {call}"


def operands(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = shapes or ((2, 4, 9, 16),) * 3
    return [torch.randn(shape, generator=generator).to("mps", dtype) for shape in shapes]


@pytest.mark.filterwarnings("ignore:torch_fattn.sdpa")
def test_a_sparse_tensor_has_its_own_reason() -> None:
    query = torch.ones(1, 2, 4, 16).to_sparse()
    for mask in (None, torch.ones(4, 4).to_sparse()):
        with pytest.raises(RuntimeError):
            torch_fattn.sdpa(*(3 * [query] if mask is None else operands()), attn_mask=mask)
    report = torch_fattn.report()
    assert report.fallbacks_by_reason() == {"layout": 2}
    assert report.fallbacks[0].example.startswith("query Sparse [1, 2, 4, 16] torch.float32")


@pytest.mark.parametrize("shape", [(9,), (1,), ()])
@pytest.mark.parametrize("q_len", [9, 1])
def test_masks_of_fewer_than_two_dimensions(shape: tuple[int, ...], q_len: int) -> None:
    query, key, value = operands((2, 4, q_len, 16), *[(2, 4, 9, 16)] * 2)
    for mask in (torch.arange(9) % 3 > 0, torch.linspace(-1, 1, 9)):
        small = mask[: shape[0]] if shape else mask[1]
        exact = torch_fattn.reference.prefill(query, key, value, attn_mask=small.expand(q_len, 9))[0]
        out = torch_fattn.sdpa(query, key, value, small.to("mps"))
        assert torch.allclose(out.cpu().double(), exact, atol=1e-5)
    assert torch_fattn.report().routed == 2


@pytest.mark.filterwarnings("ignore:torch_fattn.sdpa")
@pytest.mark.parametrize("lengths", [(0, 9), (9, 0)])
def test_nothing_is_broadcast_to_nothing(lengths: tuple[int, int]) -> None:
    """torch gives an empty call the batch of the query."""
    q_len, kv_len = lengths
    query, key, value = operands((1, 4, q_len, 16), *[(2, 4, kv_len, 16)] * 2)
    theirs = F.scaled_dot_product_attention(query, key, value)
    assert torch_fattn.sdpa(query, key, value).shape == theirs.shape
    assert torch_fattn.report().fallbacks_by_reason() == {"shapes": 1}
    torch_fattn.sdpa(query, key[:1], value[:1])
    assert torch_fattn.report().routed == 1, "the control"


def test_one_row_of_all_keys_is_decodes() -> None:
    query, key, value = operands((1, 4, 1, 64), (1, 2, 300, 64), (1, 2, 300, 64))
    torch_fattn.sdpa(query, key, value, enable_gqa=True)
    assert torch_fattn.report().routed_by["decode"] == 1
    out = torch_fattn.sdpa(query, key, value, enable_gqa=True, is_causal=True)  # sees the first key alone
    assert torch_fattn.report().routed_by["prefill"] == 1
    first = value[:, :, :1].repeat_interleave(2, dim=1)
    assert torch.allclose(out.cpu(), first.cpu(), atol=1e-6)


@pytest.mark.parametrize("way", ["sdpa", "compiled", "installed", "trained"])
def test_flattening_the_result_of_flat_operands_copies_nothing(
    way: str, request: pytest.FixtureRequest
) -> None:
    attention = by_install if way == "installed" else torch_fattn.sdpa
    if way == "compiled":
        attention = torch.compile(attention, backend="aot_eager", fullgraph=True)
    if way == "trained":
        torch_fattn.install(training="fused")
        request.addfinalizer(torch_fattn.uninstall)
    for head_dim in (16, 20):  # of the kernels, and padded to 24
        flat = operands(*[(2, 9, 4 * head_dim)] * 3)
        query, key, value = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in flat)
        exact = F.scaled_dot_product_attention(*(each.cpu().double() for each in (query, key, value)))
        for by_token, rows in ((True, query), (False, query.contiguous())):
            with counted_launches() as launches:
                out = attention(rows.requires_grad_(way == "trained"), key, value)
            assert launches.get("fattn_prefill") == 1 and out.requires_grad == (way == "trained")
            assert torch.allclose(out.cpu().double(), exact, atol=1e-5)
            joined = out.transpose(1, 2).flatten(2)
            assert (joined.data_ptr() == out.data_ptr()) == by_token, "the control is a contiguous query"


def test_rows_that_see_no_key_are_as_torchs() -> None:
    query, key, value = operands()
    keep = torch.ones(9, 9, dtype=torch.bool, device="mps")
    keep[3] = False
    for mask in (keep, torch.zeros(9, 9, device="mps").masked_fill(~keep, -torch.inf)):
        ours = torch_fattn.sdpa(query, key, value, mask).cpu()
        theirs = F.scaled_dot_product_attention(query.cpu(), key.cpu(), value.cpu(), mask.cpu())
        assert torch.all(ours[:, :, 3] == 0) and torch.equal(ours[:, :, 3], theirs[:, :, 3])
        assert not torch.any((ours == 0).all(dim=-1)[:, :, :3]), "the control: other rows see keys"


def _shape(*sizes: int) -> tuple[int, ...]:
    return sizes


SAME = _shape(2, 4, 9, 16)
FALLS_BACK: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "rank 5": (lambda: operands(*[_shape(1, 2, 4, 9, 16)] * 3), {}),
    "rank of the keys": (lambda: operands(SAME, *[_shape(4, 9, 16)] * 2), {}),
    "head_dim 584": (lambda: operands(*[_shape(1, 1, 3, 584)] * 3), {}),
    "dropout": (operands, {"dropout_p": 0.5}),
    "mask_gradient": (operands, {"attn_mask": lambda: operands((9, 9))[0].requires_grad_()}),
    "head_dim_gradient": (lambda: [t.requires_grad_() for t in operands(*[_shape(1, 1, 3, 264)] * 3)], {}),
    "device": (lambda: [t.cpu() for t in operands()], {}),
    "dtype": (lambda: [t.to(torch.int32).cpu().double() for t in operands()], {}),
}


@pytest.mark.parametrize("case", FALLS_BACK)
def test_calls_that_go_to_torch(case: str) -> None:
    """The fallback gives torch's result and gradient, with one warning for each reason in a process."""
    reason = {"dtype": "device"}.get(case, case.split()[0])
    tensors, options = FALLS_BACK[case][0](), dict(FALLS_BACK[case][1])
    options = {name: v() if callable(v) else v for name, v in options.items()}
    sdpa._warned.discard(reason)
    for repetition in range(2):
        torch.manual_seed(repetition)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ours = torch_fattn.sdpa(*tensors, **options)
        words = [str(w.message) for w in caught if "torch_fattn.sdpa" in str(w.message)]
        assert len(words) == (1 if repetition == 0 else 0)
        assert repetition or words[0].startswith("torch_fattn.sdpa: ") and words[0].endswith(" is used")
        torch.manual_seed(repetition)
        theirs = F.scaled_dot_product_attention(*tensors, **options)
        assert torch.equal(ours.cpu(), theirs.cpu())
        assert ours.requires_grad == theirs.requires_grad
    assert torch_fattn.report().fallbacks_by_reason() == {reason: 2}


@pytest.mark.parametrize("libraries", [None, {"torch"}])
def test_a_warning_names_the_line_of_the_call(
    libraries: set[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin takes this package for the program."""
    if libraries:
        monkeypatch.setattr("torch_fattn.runtime.warn._LIBRARIES", libraries)
    sdpa._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch_fattn.sdpa(*(t.cpu() for t in operands()))
    (filename,) = [w.filename for w in caught if "torch_fattn.sdpa" in str(w.message)]
    assert (filename == __file__) == (libraries is None)


def test_a_call_that_runs_warns_of_nothing() -> None:
    """The control."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_fattn.sdpa(*operands())
        torch_fattn.sdpa(*(torch.nn.Parameter(t, requires_grad=False) for t in operands()))
        with torch.no_grad():
            torch_fattn.sdpa(*(torch.nn.Parameter(t) for t in operands()))
    assert torch_fattn.report().routed == 3


def by_install(*operands: Tensor, **options: Any) -> Tensor:
    with torch_fattn.installed():
        return F.scaled_dot_product_attention(*operands, **options)


@pytest.mark.parametrize("attention", [torch_fattn.sdpa, by_install])
@pytest.mark.filterwarnings("ignore:torch_fattn.sdpa")
def test_forward_mode_gradients_match_torch(attention: Callable[..., Tensor]) -> None:
    import torch.autograd.forward_ad as forward

    query, key, value = operands()
    tangents = []
    for function in (attention, F.scaled_dot_product_attention):
        with forward.dual_level():
            dual = forward.make_dual(query, torch.ones_like(query))
            tangents.append(forward.unpack_dual(function(dual, key, value)).tangent)
    assert torch.allclose(tangents[0].cpu(), tangents[1].cpu())
    assert torch_fattn.report().fallbacks_by_reason() == {"forward_mode": 1}


REFUSED_BY_TORCH: dict[str, tuple[Callable[[], list[Tensor]], dict[str, Any]]] = {
    "head sizes": (lambda: operands(SAME, _shape(2, 4, 9, 8), SAME), {}),
    "lengths": (lambda: operands(SAME, SAME, _shape(2, 4, 8, 16)), {}),
    "batches": (lambda: operands(SAME, _shape(3, 4, 9, 16), _shape(3, 4, 9, 16)), {}),
    "heads": (lambda: operands(SAME, *[_shape(2, 3, 9, 16)] * 2), {}),
    "grouped heads": (lambda: operands(SAME, *[_shape(2, 3, 9, 16)] * 2), {"enable_gqa": True}),
    "mask shape": (operands, {"attn_mask": lambda: torch.ones(9, 8, dtype=torch.bool, device="mps")}),
    "mask and causal": (
        operands,
        {"attn_mask": lambda: torch.ones(9, 9, dtype=torch.bool, device="mps"), "is_causal": True},
    ),
    "dtypes": (lambda: [*[t.cpu() for t in operands()[:2]], operands(dtype=torch.float16)[2].cpu()], {}),
    "devices": (lambda: [*operands()[:2], operands()[2].cpu()], {}),
}


@pytest.mark.filterwarnings("ignore:torch_fattn.sdpa")
@pytest.mark.parametrize("case", REFUSED_BY_TORCH)
def test_torch_refuses_in_its_own_words(case: str) -> None:
    tensors, options = REFUSED_BY_TORCH[case][0](), dict(REFUSED_BY_TORCH[case][1])
    options = {name: v() if callable(v) else v for name, v in options.items()}
    with pytest.raises(Exception) as theirs:  # noqa: PT011 - whatever it is
        F.scaled_dot_product_attention(*tensors, **options)
    for attention in (torch_fattn.sdpa, F.scaled_dot_product_attention):
        with (
            torch_fattn.installed(),
            counted_launches() as launches,
            pytest.raises(type(theirs.value)) as ours,
        ):
            attention(*tensors, **options)
        assert str(ours.value) == str(theirs.value) and not launches
    assert torch_fattn.report().routed == 0


def test_signature() -> None:
    """Positions and names are torch's."""
    mask = torch.rand(9, 9, device="mps") < 0.7
    given = [*operands(), mask, 0.0, False, 0.3, True]
    names = "query key value attn_mask dropout_p is_causal scale enable_gqa".split()
    by_name = torch_fattn.sdpa(**dict(zip(names, given, strict=True)))
    assert torch.equal(torch_fattn.sdpa(*given).cpu(), by_name.cpu())


@pytest.mark.parametrize("to", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_matches_torch(to: torch.dtype) -> None:
    query, key, value = operands()
    mask = torch.where(torch.rand(9, 9, device="mps") < 0.7, 0.0, -1e5)  # -1e5 is -inf in float16
    with torch.autocast("mps", dtype=to):
        ours = torch_fattn.sdpa(query, key.to(to), value, mask)
        theirs = F.scaled_dot_product_attention(query, key.to(to), value, mask)
        with torch_fattn.installed():
            plain = F.scaled_dot_product_attention(query, key.to(to), value, mask)
    assert ours.dtype == theirs.dtype == to and torch_fattn.report().routed == 2
    assert torch.equal(ours.cpu(), plain.cpu())
    assert torch.allclose(ours.cpu().float(), theirs.cpu().float(), atol=2e-2)


def test_a_jagged_tensor_goes_to_torch() -> None:
    nested = torch.nested.nested_tensor(
        [torch.randn(3, 4, 16), torch.randn(5, 4, 16)], layout=torch.jagged
    ).transpose(1, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = torch_fattn.sdpa(nested, nested, nested)
    assert torch.equal(out.values(), F.scaled_dot_product_attention(nested, nested, nested).values())
    assert torch_fattn.report().fallbacks_by_reason() == {"nested": 1}


@pytest.mark.filterwarnings("ignore:torch_fattn.sdpa", "ignore:There is a performance drop")
def test_vmap() -> None:
    stacked = [torch.randn(3, 2, 4, 9, 16) for _ in range(3)]
    ours = torch.func.vmap(torch_fattn.sdpa)(*stacked)
    assert torch.allclose(ours, torch.func.vmap(F.scaled_dot_product_attention)(*stacked), atol=1e-6)
