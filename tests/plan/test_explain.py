"""`explain` covers every public function, and says what runs and how much work it is."""

from __future__ import annotations

import inspect
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_fattn
from tests.helpers import public_calls
from torch_fattn import explain
from torch_fattn.inspection import cost
from torch_fattn.inspection.chips import NAMES, chip_named
from torch_fattn.inspection.planning import FUNCTIONS, signature_of

f16 = torch.float16
OLD = {"macos": "15.6", "torch_version": "2.15"}  # where torch has no kernel on matrix units


def not_explained() -> set[str]:
    """The public functions with operands that `explain` does not name."""
    functions = {name: getattr(torch_fattn, name) for name in public_calls.public_names()}
    return {
        name
        for name, function in functions.items()
        if inspect.isfunction(function)
        and any("Tensor" in str(each.annotation) for each in inspect.signature(function).parameters.values())
    } - {*FUNCTIONS}


@pytest.mark.host_only
def test_every_public_function_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not not_explained()

    def twin(query: Tensor) -> Tensor:
        return query

    monkeypatch.setattr(torch_fattn, "twin", twin, raising=False)
    assert not_explained() == {"twin"}


@pytest.mark.host_only
@pytest.mark.parametrize("op", FUNCTIONS)
def test_by_operands_and_by_sizes(op: str) -> None:
    operands = public_calls.VALID[signature_of(op).name]()
    plan = explain(op, **operands, **OLD)
    assert plan.passes and plan.cost.bytes and str(plan).startswith(f"{signature_of(op).name} on Apple M1 (")
    kernels = ", ".join(launch["kernel"] for launch in plan.passes)
    assert f" run by fattn: {kernels}" in " ".join(str(plan).split())
    assert "macros" in plan.details and "macros" not in str(plan) and plan.details.isascii()
    sized = explain(op, heads=8, kv_len=512, dtype="bfloat16", **OLD)
    assert sized.passes and sized.json == explain(op, heads=8, kv_len=512, dtype=torch.bfloat16).json


@pytest.mark.host_only
@pytest.mark.parametrize(
    ("options", "runs"),
    [
        ({}, "fattn: fattn_prefill; baseline"),
        ({"dropout_p": 0.1}, "torch: dropout is not implemented"),
        ({"is_causal": True, "attn_mask": torch.ones(70, 70, dtype=torch.bool)}, "torch: both attn_mask and"),
        ({"macos": "26.2", "family": 10}, "torch: torch's prefill runs on the matrix units"),
        ({"requires_grad": True}, "torch: torch keeps"),
    ],
)
def test_who_runs_sdpa(options: dict[str, Any], runs: str) -> None:
    trains = options.pop("requires_grad", False)
    query = torch.empty(1, 2, 70, 64, dtype=f16, device="meta", requires_grad=trains)
    plan = explain("sdpa", query, query, query, **OLD | options)
    assert f"run by       {runs}" in str(plan) and bool(plan.passes) == runs.startswith("fattn")


@pytest.mark.host_only
def test_pairs_by_counting() -> None:
    """Beside a loop over all pairs, by the rules of docs/options.md."""
    draw = random.Random(0)
    for _ in range(500):
        rows, keys, is_causal = draw.randint(0, 9), draw.randint(0, 12), draw.random() < 0.5
        left, right = draw.choice([-1, 0, 1, 3, 20]), draw.choice([-1, 0, 1, 2])
        sinks, offset = draw.choice([0, 1, 4, 30]), draw.choice([None, 0, -3, 2, 15])
        call = {"window_left": left, "window_right": right, "sink_tokens": sinks, "q_offset": offset}
        first = keys - rows if offset is None else offset
        seen = [
            j
            for p in range(first, first + rows)
            for j in range(keys)
            if (j <= p or not is_causal)
            and (j < sinks or ((left < 0 or p - left <= j) and (right < 0 or j <= p + right)))
        ]
        assert cost.pairs_and_keys(rows, keys, call, is_causal) == (len(seen), len({*seen})), call


@pytest.mark.host_only
def test_least_work_and_time() -> None:
    plan = explain("decode", heads=32, kv_heads=8, kv_len=4096, seq_lens=False, chip="M2 Max")
    keys = 2 * 2 * 8 * 4096 * 128
    assert plan.cost == cost.Cost(keys + 2 * 2 * 32 * 128 + 4 * 32, 2 * 32 * 4096 * 256)
    assert plan.least_seconds == pytest.approx(plan.cost.bytes / 400e9)
    assert "least time   42.0 us by memory at 400 GB/s" in str(plan)
    assert "bytes        up to 16.8 MB" in str(explain("decode", kv_heads=8, kv_len=4096))
    window = explain("decode", heads=32, kv_heads=8, kv_len=4096, seq_lens=False, window_left=511)
    assert 7.5 < plan.cost.bytes / window.cost.bytes < 8
    causal = explain("prefill", kv_len=4096, is_causal=True, chip="m1")
    assert causal.cost.flops == 32 * 4096 * 4097 * 256 and "ms by products at 2.1 TFLOP/s" in str(causal)
    latent = torch.empty(1, 1, 4096, 576, dtype=f16, device="meta")
    assert explain("decode", latent[..., :1, :], latent, latent[..., :512]).cost.bytes < 1.01 * latent.nbytes
    assert "rates of this GPU are; name its chip" in str(explain("prefill", kv_len=64, family=9, cores=10))


@pytest.mark.host_only
def test_chips() -> None:
    for name in NAMES:
        chip = chip_named(f"Apple {name}")
        assert chip is not None and chip.ram_gb_s
        assert explain("decode", chip=name.lower()).device_name == f"Apple {name}"
    assert explain("decode", chip="M3 Max", cores=30).data["device"]["cores"] == 30
    with pytest.raises(
        ValueError, match="^torch_fattn.explain: chip 'M9' is not known; use one of M1, M1 Max"
    ):
        explain("decode", chip="M9")
