"""Prefill and its options at their edges: windows, sink tokens, learned sinks, ALiBi, softcap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torch_fattn
from tests.conftest import counted_launches, needs_emulator
from tests.helpers import direct_launch, problems
from tests.helpers.accuracy import assert_close
from tests.helpers.problems import Problem

fattn = torch.ops.fattn
f16, f32 = torch.float16, torch.float32
DEVICES = ["mps", "cpu"]
LENGTH = 24
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
SINKS = torch.tensor([0.3, -1.0, 2.0, 0.0])


def check(device: str = "mps", dtype: torch.dtype = f16, **fields: Any) -> tuple[Tensor, Tensor]:
    """Builds and runs the problem, NaN wherever nothing may look, and checks it against float64."""
    sizes: dict[str, Any] = {"batch": 1, "q_heads": 2, "kv_heads": 1, "q_len": 70, "kv_len": 150}
    sizes |= {"head_dim": 16, "value_dim": 24} | fields
    case = problems.build(Problem(0, "prefill", dtype, **sizes))
    with counted_launches() as launches:
        out, lse = (result.cpu() for result in fattn.prefill(**case.arguments(device)[0]))
    kernel = "fattn_prefill_wide" if sizes["head_dim"] > 128 else "fattn_prefill"
    assert launches == ({kernel: 1} if device == "mps" else {})
    assert_close(case, out, lse)
    return out, lse


@pytest.mark.parametrize("causality", ["none", "bottom_right"])
@pytest.mark.parametrize("sink_tokens", [0, 1, 33, 400])
@pytest.mark.parametrize("left", [-1, 0, 31, 32, 100])
@pytest.mark.parametrize("right", [-1, 0, 40])
def test_windows_and_sink_tokens(left: int, right: int, sink_tokens: int, causality: str) -> None:
    """Apart, touching and overlapping; sink tokens above the window; a window larger than the sequence."""
    check(window_left=left, window_right=right, sink_tokens=sink_tokens, causality=causality)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offset", [-100, -70, -1, 149, 200])
@pytest.mark.parametrize("options", [{"window_left": 40}, {"window_right": 20}, {"alibi_slopes": True}])
@pytest.mark.parametrize("causality", ["offset", "none"])
def test_rows_far_from_the_keys(causality: str, options: dict[str, Any], offset: int, device: str) -> None:
    """Positions below 0 and beyond the keys: only keys in the window are seen, at their true distance."""
    fields = {"causality": causality, "q_offset": offset, **options}
    case = problems.build(Problem(0, "prefill", f32, 1, 2, 1, 70, 150, 16, 24, sink_tokens=3, **fields))
    arguments = case.arguments(device)[0] | {"q_offset": offset}
    case.options["q_offset"] = offset
    assert_close(case, *(result.cpu() for result in fattn.prefill(**arguments)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("offset", "like"), [(2**63 - 1, 9), (2**63 - 3, 9), (-(2**63), -5)])
def test_an_offset_at_the_end_of_int64(offset: int, like: int, device: str) -> None:
    """All keys are seen, or none, as from the last position that matters."""
    query, key = torch.randn(1, 2, 5, 16).to(device), torch.randn(1, 2, 9, 16).to(device)
    rows, keys, starts = query[0].transpose(0, 1), key[0].transpose(0, 1), [[0, 5], [0, 9]]
    packed = [rows, keys, keys, *(torch.tensor(s, dtype=torch.int32, device=device) for s in starts), 5, 9]
    for op, operands in (("prefill", [query, key, key]), ("varlen_prefill", packed)):
        results = [getattr(fattn, op)(*operands, is_causal=True, q_offset=at)[0] for at in (offset, like)]
        assert torch.equal(*results)
        exact = [
            getattr(torch_fattn.reference, op)(*operands, is_causal=True, q_offset=at)[0]
            for at in (offset, like)
        ]
        assert torch.equal(*exact)


@needs_emulator
def test_the_last_position_of_an_int() -> None:
    """As row 2^30 - 1 from a q_offset of 2^30 has it: it sees every key."""
    case = problems.build(
        Problem(0, "prefill", f32, 1, 2, 1, 70, 150, 16, 24, causality="offset", q_offset=149)
    )
    plan = direct_launch.plan_of("prefill", case.arguments("cpu")[0])
    direct_launch.set_params(plan["passes"][0], {"q_offset": 2**31 - 70})
    assert_close(case, *direct_launch.run(case, plan=plan))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("far", [2**30, 2**31 - 1, 2**31, 10**15])
def test_limits_beyond_every_key_are_ignored(far: int, device: str) -> None:
    """No bit changes, also with sink tokens, which then have no effect."""
    query, key, value = (torch.randn(1, 2, n, 16).to(device) for n in (40, 50, 50))
    for offset in (-30, 10, 2**30 - 1):
        plain = fattn.prefill(query, key, value, q_offset=offset)
        for limits in (
            {"window_left": far},
            {"window_right": far},
            {"window_left": far, "window_right": far, "sink_tokens": far},
        ):
            limited = fattn.prefill(query, key, value, q_offset=offset, **limits)
            if offset + 40 < far:
                assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(plain, limited, strict=True))


def test_a_causal_row_has_no_window_to_its_right() -> None:
    plain = check(causality="bottom_right", window_left=50)
    limited = check(causality="bottom_right", window_left=50, window_right=0)
    assert all(torch.equal(a, b) for a, b in zip(plain, limited, strict=True))


@pytest.mark.parametrize("dtype", problems.DTYPES, ids=problems.SHORT.get)
@pytest.mark.parametrize("head_dim", [64, 128, 200])
def test_whole_steps_on_both_sides_of_the_gap(dtype: torch.dtype, head_dim: int) -> None:
    """Sink tokens, tested steps, none at all, tested, whole, tested."""
    check(
        dtype=dtype,
        q_heads=1,
        q_len=50,
        kv_len=500,
        head_dim=head_dim,
        causality="bottom_right",
        window_left=200,
        sink_tokens=75,
        sinks=True,
        alibi_slopes=True,
        softcap=5.0,
    )


@pytest.mark.parametrize("mask", [torch.bool, f32], ids=problems.SHORT.get)
def test_everything_with_a_mask(mask: torch.dtype) -> None:
    check(
        mask=mask,
        causality="bottom_right",
        window_left=60,
        sink_tokens=5,
        sinks=True,
        alibi_slopes=True,
        softcap=2.0,
    )


@pytest.mark.parametrize(
    ("op", "mask"),
    [("prefill", torch.bool), ("prefill", f32), ("prefill", torch.bfloat16), ("decode", f16)],
)
def test_masks_with_and_without_pairs(op: str, mask: torch.dtype) -> None:
    """Prefill reads two keys of a mask at once where they are an aligned pair: the same bits in any layout.
    Decode does not, so that a mask that grows needs one pipeline."""
    generator = torch.Generator().manual_seed(0)
    rows, keys = (70, 150) if op == "prefill" else (2, 150)
    query = torch.randn(1, 4, rows, 16, generator=generator).half().to("mps")
    key, value = torch.randn(2, 1, 1, keys, 16, generator=generator).half().to("mps")
    seen = torch.rand(1, 4, rows, keys, generator=generator) < 0.5
    terms = seen if mask == torch.bool else torch.where(seen, 0.25, -torch.inf).to(mask)
    padded = torch.zeros(1, 4, rows, keys + 3, dtype=mask)
    layouts = {
        "contiguous": terms.to("mps"),
        "shifted by 2": padded[..., 1:].to("mps")[..., 2:],
        "odd rows": padded.to("mps")[..., 2:-1],
        "keys before rows": torch.empty(1, 4, keys, rows, dtype=mask, device="mps").mT,
    }
    found = {}
    for name, layout in layouts.items():
        arguments = [query, key, value]
        mask_in_layout = layout.copy_(terms)
        plan = torch_fattn.explain(op, *arguments, attn_mask=mask_in_layout)
        result = getattr(fattn, op)(*arguments, attn_mask=mask_in_layout)[0].cpu()
        attend = next(one for one in plan.passes if "mask_pairs" in one["constants"])
        found[name] = attend["constants"]["mask_pairs"], result
    assert {name: pairs for name, (pairs, _) in found.items()} == {
        "contiguous": op == "prefill",
        "shifted by 2": op == "prefill",
        "odd rows": False,
        "keys before rows": False,
    }
    for _, result in found.values():
        assert torch.equal(result, found["contiguous"][1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length", [0, 5, 100])
@pytest.mark.parametrize("logit", [-4.0, 12.0, -torch.inf])
def test_a_sink_counts_once(logit: float, length: int, device: str) -> None:
    """With equal logits lse is log(length + exp(sink)); for a row without keys it is the sink."""
    query, key = torch.zeros(1, 2, 9, 16).to(device), torch.randn(1, 2, length, 16).to(device)
    out, lse = fattn.prefill(query, key, key, sinks=torch.full((2,), logit, device=device))
    exact = torch.log(length + torch.tensor(logit).exp())
    assert torch.allclose(lse.cpu(), exact.expand(1, 2, 9), atol=1e-5)
    assert length or torch.all(out.cpu() == 0)


# ---- each option in other words


def operands() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    query, key, value = (torch.randn(2, 4, LENGTH, 16, generator=generator) for _ in range(3))
    return query, key, value


def distance() -> Tensor:
    return torch.arange(LENGTH) - torch.arange(LENGTH)[:, None]


@pytest.mark.parametrize("device", DEVICES)
def test_windows_are_masks(device: str) -> None:
    tensors = [t.to(device) for t in operands()]
    key_minus_row = distance()
    for left, right, sinks in ((5, -1, 0), (5, 2, 3), (-1, 4, 9), (0, 0, 1)):
        seen = (key_minus_row >= -left if left >= 0 else torch.ones_like(key_minus_row, dtype=torch.bool)) & (
            key_minus_row <= right if right >= 0 else True
        )
        mask = seen | (torch.arange(LENGTH) < sinks)
        options = {"window_left": left, "window_right": right, "sink_tokens": sinks}
        for is_causal in (False, True):
            limited = torch_fattn.prefill(*tensors, is_causal=is_causal, **options)  # type: ignore[call-overload]
            masked = torch_fattn.prefill(*tensors, mask.to(device), is_causal=is_causal)
            assert torch.allclose(limited.cpu(), masked.cpu(), atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_alibi_is_a_mask(device: str) -> None:
    tensors = [t.to(device) for t in operands()]
    out = torch_fattn.prefill(*tensors, alibi_slopes=SLOPES.to(device))
    mask = SLOPES[:, None, None] * distance()
    masked = torch_fattn.prefill(*tensors, mask.to(device))
    assert torch.allclose(out.cpu(), masked.cpu(), atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_a_sink_is_a_factor(device: str) -> None:
    tensors = [t.to(device) for t in operands()]
    plain, lse = (t.cpu() for t in torch_fattn.prefill(*tensors, is_causal=True, return_lse=True))
    out = torch_fattn.prefill(*tensors, is_causal=True, sinks=SINKS.to(device))
    assert torch.allclose(out.cpu(), plain * torch.sigmoid(lse - SINKS[:, None])[..., None], atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_softcap_is_between_product_and_softmax(device: str) -> None:
    query, key, value = operands()
    scores = 3.0 * torch.tanh(query @ key.mT / 4.0 / 3.0)
    exact = scores.masked_fill(distance() > 0, -torch.inf).softmax(-1) @ value
    out = torch_fattn.prefill(*(t.to(device) for t in operands()), is_causal=True, softcap=3.0)
    assert torch.allclose(out.cpu(), exact, atol=1e-5)
