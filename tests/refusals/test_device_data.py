"""Lengths and indices on the device that are out of range: ignored, and refused under FATTN_CHECK."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_fattn
from tests.conftest import Checked
from tests.helpers.accuracy import assert_lse_close
from tests.helpers.wrong_calls import refusal, valid
from tests.refusals.test_bad_input import call

BEYOND = [
    ("decode", {"seq_lens": (20, 33)}, ["seq_lens", "33", "32"]),
    ("decode", {"seq_lens": (-1, 32)}, ["seq_lens", "-1"]),
    ("paged_decode", {"seq_lens": (20, 33)}, ["seq_lens", "33", "32"]),
    ("paged_decode", {"seq_lens": (20, 2**31 - 1)}, ["seq_lens", "2147483647"]),
    ("paged_decode", {"block_tables": ((3, 5), (0, 4))}, ["block_tables", "5", "4"]),
    ("paged_decode", {"block_tables": ((3, 1), (-1, 4))}, ["block_tables", "-1"]),
    ("paged_decode", {"block_tables": ((2**31 - 1, 1), (0, -(2**31)))}, ["block_tables", "2147483647"]),
    ("paged_prefill", {"seq_lens": (20, 33)}, ["seq_lens", "33", "32"]),
    ("paged_prefill", {"block_tables": ((3, 5), (0, 4))}, ["block_tables", "5", "4"]),
    ("paged_prefill", {"cu_seqlens_q": (1, 8, 9)}, ["cu_seqlens_q[0]", "1", "0"]),
    ("paged_prefill", {"cu_seqlens_q": (0, 8, 7)}, ["cu_seqlens_q[2]", "7", "8"]),
    ("paged_prefill", {"cu_seqlens_q": (0, 8, 10)}, ["cu_seqlens_q", "10", "9 rows"]),
    ("paged_prefill", {"cu_seqlens_q": (0, 0, 9)}, ["sequence 1", "9", "max_seqlen_q is 8"]),
    ("paged_prefill", {"cu_seqlens_q": (0, 8, 2**31 - 1)}, ["sequence 1", "2147483639"]),
    ("paged_prefill", {"cu_seqlens_q": (-5, -7, 4)}, ["cu_seqlens_q[0]", "-5"]),
    ("varlen_prefill", {"cu_seqlens_q": (0, 8, 7)}, ["cu_seqlens_q[2]", "7", "8"]),
    ("varlen_prefill", {"cu_seqlens_q": (0, 8, 2**31 - 1)}, ["sequence 1", "2147483639"]),
    ("varlen_prefill", {"cu_seqlens_k": (1, 12, 20)}, ["cu_seqlens_k[0]", "1", "0"]),
    ("varlen_prefill", {"cu_seqlens_k": (0, 12, 11)}, ["cu_seqlens_k[2]", "11", "12"]),
    ("varlen_prefill", {"cu_seqlens_k": (0, 12, 23)}, ["cu_seqlens_k ends at 23", "22 rows"]),
    ("varlen_prefill", {"cu_seqlens_k": (0, 2, 20)}, ["sequence 1", "18 key rows", "max_seqlen_k is 12"]),
    ("varlen_prefill", {"cu_seqlens_k": (-(2**31), 2**31 - 1, -9)}, ["cu_seqlens_k[0]", "-2147483648"]),
    ("varlen_prefill", {"cu_seqlens_k": (22, 2**31 - 1, 5)}, ["cu_seqlens_k[0]", "22"]),
]


@pytest.mark.parametrize(("op", "values", "words"), BEYOND)
def test_out_of_range_numbers_raise_when_asked(
    op: str, values: dict[str, Any], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FATTN_CHECK", "1")
    call(op, valid(op))
    arguments = valid(op) | {n: torch.tensor(v, dtype=torch.int32).to("mps") for n, v in values.items()}
    with refusal(f"fattn.{op}", ValueError, *words):
        call(op, arguments)


@pytest.mark.parametrize(
    ("op", "name", "values", "words"),
    [
        ("gated_delta_rule", "slots", (0, 2), ["slots[1] is 2", "the number of states = 2"]),
        ("causal_conv1d", "slots", (1, 1), ["slots[0] and [1] are both 1"]),
        ("gated_delta_step", "slots", (7, -1), ["slots[0] is 7"]),
        ("gated_delta_step", "counts", (4, 0), ["counts[0] is 4", "the length 3; pass the number"]),
        ("gated_delta_step", "counts", (0, -1), ["counts[1] is -1"]),
        ("causal_conv1d", "cu_seqlens", (-3, 5, 6), ["cu_seqlens[0] is -3"]),
        ("causal_conv1d", "cu_seqlens", (0, 4, 3), ["cu_seqlens[2]"]),
        ("causal_conv1d", "cu_seqlens", (0, 7, 7), ["cu_seqlens ends at 7"]),
    ],
)
def test_numbers_of_linear_attention_raise_when_asked(
    op: str, name: str, values: Any, words: list[str], monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setenv("FATTN_CHECK", "1")
    arguments = valid(op, device)
    call(op, arguments)
    if name == "cu_seqlens":
        arguments["x"] = arguments["x"].flatten(0, 1)[None]
        call(op, arguments | {name: torch.tensor((3, 5, 6), dtype=torch.int32, device=device)})
    with refusal(f"fattn.{op}", ValueError, *words):
        call(op, arguments | {name: torch.tensor(values, dtype=torch.int32, device=device)})


@pytest.mark.parametrize(("op", "values", "words"), BEYOND)
def test_out_of_range_numbers_read_nothing_outside(
    op: str, values: dict[str, Any], words: list[str], checked: Checked
) -> None:
    """Without FATTN_CHECK: lengths are clamped, a block outside the pool holds no key."""
    arguments = valid(op) | {n: torch.tensor(v, dtype=torch.int32).to("mps") for n, v in values.items()}
    with checked():
        out, lse = call(op, arguments)
    exact_out, exact_lse = getattr(torch_fattn.reference, op)(**arguments)
    assert torch.allclose(out.cpu().double(), exact_out, atol=1e-5)
    assert_lse_close(lse.cpu(), exact_lse, torch.float32)


def test_unused_table_entries_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FATTN_CHECK", "1")
    arguments = valid("paged_decode")
    arguments["seq_lens"] = torch.tensor([16, 0], dtype=torch.int32).to("mps")
    arguments["block_tables"] = torch.tensor([[3, -1], [-1, 99]], dtype=torch.int32).to("mps")
    call("paged_decode", arguments)
