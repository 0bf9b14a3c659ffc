"""When prefill makes a map of its mask, and the passes that then are planned."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import torch_fattn
from tests.golden.calls import M1, plan_of
from tests.helpers import problems
from tests.helpers.problems import Problem

pytestmark = pytest.mark.host_only

f32, f16, bf16 = problems.DTYPES
OF_ALL = (True, True, False, False)
# One mask for all heads of a prompt.
PROMPT = Problem(0, "prefill", f16, 1, 32, 8, 1024, 1024, 128, 128, mask=torch.bool, mask_broadcast=OF_ALL)


def kernels(problem: Problem, **device: Any) -> list[str]:
    return [launch["kernel"].removeprefix("fattn_") for launch in plan_of(problem, **device)["passes"]]


def test_a_prompt_whose_heads_share_a_mask() -> None:
    for changes in ({}, {"causality": "bottom_right"}, {"mask": f32}, {"dtype": bf16, "mask": bf16}):
        assert kernels(replace(PROMPT, **changes)) == ["mask_map", "prefill"]
    assert kernels(replace(PROMPT, head_dim=256)) == ["mask_map", "prefill_wide"]
    assert kernels(replace(PROMPT, q_len=20, kv_len=60000)) == ["mask_map", "prefill"]


@pytest.mark.parametrize(
    "changes",
    [
        {"mask": None},
        {"mask_map": True},
        {"q_len": 100, "kv_len": 100, "q_heads": 8},  # over before a second pass would have begun
        {"q_len": 8192, "kv_len": 128},  # next to nothing to leave out
        {"mask": f32, "mask_broadcast": (False,) * 4},  # to read it all takes as long as much of the call
        {"q_len": 0},
        {"kv_len": 0},
    ],
    ids=str,
)
def test_masks_without_a_map(changes: dict[str, Any]) -> None:
    assert kernels(replace(PROMPT, **changes)) == ["prefill"] * (changes.get("q_len") != 0)


def test_the_limits_of_the_rule() -> None:
    """A tenth of a millisecond of products, by cores; a byte for 20 products, at a sixteenth of the call."""
    assert kernels(replace(PROMPT, kv_len=1024, q_len=10), cores=8) == ["mask_map", "prefill"]
    assert kernels(replace(PROMPT, kv_len=1024, q_len=9), cores=8) == ["prefill"]
    assert kernels(replace(PROMPT, kv_len=1024, q_len=10), cores=9) == ["prefill"]
    assert kernels(replace(PROMPT, kv_len=129)) == ["mask_map", "prefill"]
    assert kernels(replace(PROMPT, kv_len=128)) == ["prefill"]
    for dtype, heads in ((torch.bool, 2), (f16, 3), (f32, 5)):  # that share the mask
        shared = replace(PROMPT, q_heads=heads, kv_heads=1, mask=dtype)
        assert kernels(shared) == ["mask_map", "prefill"]
        assert kernels(replace(shared, q_heads=heads - 1)) == ["prefill"]


@pytest.mark.parametrize("bits", range(16))
def test_the_map_is_broadcast_as_the_mask_is(bits: int) -> None:
    broadcast = tuple(bool(bits >> d & 1) for d in range(4))
    problem = replace(PROMPT, batch=3, head_dim=576, value_dim=576, mask_broadcast=broadcast)
    plan = plan_of(problem)
    made, attention = plan["passes"]
    sizes = [1 if one else n for n, one in zip((3, 32, 64, 32), broadcast, strict=True)]
    assert plan["scratch_bytes"] == math.prod(sizes)
    steps = [0 if one else math.prod(sizes[d + 1 :]) for d, one in enumerate(broadcast)]
    assert list(attention["params"]["mask_map"].values()) == steps
    assert (made["params"]["row_cells"], made["params"]["key_cells"]) == (sizes[2], sizes[3])
    assert made["params"]["mask"] == attention["params"]["mask"]
    assert made["bindings"]["mask_map"] == attention["bindings"]["mask_map"]
    assert made["grid"] == [sizes[0] * sizes[1] * sizes[2] * -(-sizes[3] // 8), 1, 1]


def test_an_expanded_mask_is_read_once() -> None:
    query = torch.empty(4, 32, 1024, 128, dtype=f16, device="meta")
    mask = torch.empty(4, 1, 1024, 1024, dtype=torch.bool, device="meta").expand(4, 32, 1024, 1024)
    plan = torch_fattn.explain("prefill", query, query, query, mask, **M1)
    assert plan.passes[0]["grid"] == [4 * 64 * 4, 1, 1] and plan.data["scratch_bytes"] == 4 * 64 * 32


def test_a_large_mask_takes_several_dispatches() -> None:
    mask = torch.empty(1, device="meta").expand(32768, 32768)
    (launch,) = torch_fattn.explain("mask_map", mask, **M1).passes
    assert launch["constants"]["sliced"] and launch["slice"] * 8 * 16 * 32 == 2**28
    assert "4 of up to 65536 threadgroups" in torch_fattn.explain("mask_map", mask, **M1).details.replace(
        "\n", " "
    )
    small = torch_fattn.explain("mask_map", mask[:16384, :16384], **M1).passes[0]
    assert not small["constants"]["sliced"]


def test_no_entries() -> None:
    assert torch_fattn.explain("mask_map", torch.empty(2, 0, device="meta")).passes == []


def test_a_gpu_without_simdgroup_matrices() -> None:
    with pytest.raises(NotImplementedError, match="fattn.mask_map: an Apple GPU is of Apple family 6"):
        torch_fattn.explain("mask_map", torch.empty(2, 2, device="meta"), family=6)
