"""Errors give advice that is right: a call that follows it gives the reference's result."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.conftest import counted_launches
from tests.helpers import refusals
from tests.helpers.refusals import (
    Refusal,
    caches,
    derivatives,
    distributed,
    flash_attn,
    flex_attention,
    plans,
    rotary,
    shapes,
    sources,
    sparse,
)

REFUSALS = [
    *refusals.REFUSALS,
    *caches.REFUSALS,
    *derivatives.REFUSALS,
    *distributed.REFUSALS,
    *flash_attn.REFUSALS,
    *flex_attention.REFUSALS,
    *plans.REFUSALS,
    *rotary.REFUSALS,
    *shapes.REFUSALS,
    *sparse.REFUSALS,
]
RANKS = "tests/distributed, with several ranks"
LIMIT = "states the limit, not another call"
HUGE = "takes tensors of 2^30 elements and more"
FIRST = "another check refuses the same before"
FILES = "tests/caches/test_files.py"
HISTORIES = "tests/caches/test_histories.py"
OVER_PAGED = "tests/transformers/test_paged_cache.py"
VARLEN = "torch's own entry point, called so in tests/pytorch/test_varlen_attn.py"
NOT_FOLLOWED = {
    "all three must have the same dtype": LIMIT,
    "lses must have the shape of outs without its last dimension": LIMIT,
    "it must be contiguous": LIMIT,
    "its last entry must not be above that": LIMIT,
    "both must have the same dtype": LIMIT,
    "its shape must be": LIMIT,
    'pass "auto", "fused" or "off"': LIMIT,
    "pass the sums that the overloads part return": LIMIT,
    "the first three sizes must be equal": LIMIT,
    "they must be equal": LIMIT,
    "its shape must be [batch, heads, length, head_dim]": LIMIT,
    "its shape must be [batch, heads, rows, head_dim] or [tokens, heads, head_dim]": LIMIT,
    "its shape must be [tokens, heads, head_dim]": LIMIT,
    "pass a number that allocate() or fork() returned and free() has not released": LIMIT,
    "pass rows [..., D] of a floating dtype": LIMIT,
    "pass {} rows": LIMIT,
    "pass at least one, and for int4 groups of": LIMIT,
    "pass a tensor with data": LIMIT,
    "pass ids of tokens": LIMIT,
    "append() the rest of their step, or drop them with truncate({}, {})": HISTORIES,
    "drop it with truncate({}, {}) and append it again": "tests/caches/test_refusals.py",
    "pass all new tokens of the step to {}.prefill, packed as its keys are": HISTORIES,
    "pass the packed rows of such a step to prefill()": "tests/caches/test_caches.py",
    "pip install safetensors": FILES,
    "pass heads of at least one column": LIMIT,
    "pass up to {} printable characters": LIMIT,
    "make a cache for each batch": OVER_PAGED,
    "crop() all tokens of that forward, or reset() the PagedCache": OVER_PAGED,
    "make the PagedCache with a larger num_blocks, or pass fewer tokens": OVER_PAGED,
    "use DynamicCache for it": OVER_PAGED,
    "use DynamicCache for them": OVER_PAGED,
    "to drop n tokens, pass -n": OVER_PAGED,
    "pass the mask of all tokens in every forward, or use DynamicCache": OVER_PAGED,
    "pad on the left, or use DynamicCache": OVER_PAGED,
    'load the model with attn_implementation="fattn", or use DynamicCache for it': OVER_PAGED,
    "pass a ModelPatcher, which ComfyUI's loaders return": "tests/integrations/test_comfyui.py",
    'pass "error" or "sdpa"': "tests/transformers/test_unsupported.py",
    "pass a tensor": FIRST,
    "use float32, float16 or bfloat16": FIRST,
    "use larger blocks": HUGE,
    "use shorter sequences": HUGE,
    "split the sequence and merge the parts with fattn.merge{}, or leave out columns of block_tables that no "
    "sequence fills": HUGE,
    "split the rows, each part with its q_offset": HUGE,
    "merge in pieces": HUGE,
    "write them in pieces": HUGE,
    "pass them in pieces": HUGE,
    "split the rows and join the parts by their sums": HUGE,
    "split the tensor": HUGE,
    "split the mask": HUGE,
    "call it with dropout_p=0.0": VARLEN,
    "torch_fattn.install() provides one": VARLEN,
    "use F.scaled_dot_product_attention for training": "dropout is random",
    "pass this rank's part of it, attn_mask.to_local()": RANKS,
    "pass this rank's part of it, {}.to_local()": RANKS,
    "pass all three as DTensors": RANKS,
    "pass query, key and value on one mesh of one dimension": RANKS,
    "redistribute it to": RANKS,
    "their placements say it": RANKS,
    'pass the one over which the sequence is sharded, such as mesh["cp"]': RANKS,
    "call it on the group's ranks only": RANKS,
    "see the error on that rank": RANKS,
    "they must be equal on every rank": RANKS,
    "start all ranks of the group again": RANKS,
    "call the same one, in the same order, on every rank": RANKS,
    "call torch.distributed.init_process_group first": RANKS,
    "install another build": "it needs another torch",
    "see torch_fattn.": LIMIT,
    'use attn_implementation="fattn", on one process': RANKS,
    "pass past_key_values=ShardedCache()": RANKS,
    "pass each in a row of its own": RANKS,
    'pass {"kv_format": "int8"}, "fp8_e4m3" or "int4" for a quantised cache': "test_paged_cache.py",
    "use a new cache": RANKS,
    "pass the padding, [batch, length]": RANKS,
    "call model.eval()": "dropout is random",
    "pass the whole keys of each sequence to torch_fattn.decode": "future options: test_shared_prefix.py",
    "unset it for auto": "tests/pytorch/test_route.py, in processes of their own",
}


@pytest.fixture(autouse=True)
def no_process_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def advice_of(case: Refusal, patch: pytest.MonkeyPatch) -> str:
    """The error after its first semicolon."""
    if case.checked:
        patch.setenv("FATTN_CHECK", "1")
    with counted_launches() as launches, pytest.raises(Exception) as refused:  # noqa: PT011 - of any kind
        case.wrong()
    sentence = str(refused.value)
    assert not launches and "\n" not in sentence, sentence
    return sentence.partition("; ")[2]


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=f"{i}-{case.words[:40]}") for i, case in enumerate(REFUSALS)]
)
def test_advice_leads_to_the_right_result(case: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    assert case.words in (advice := advice_of(case, monkeypatch)), advice
    assert agrees(case.right(), case.expected())


def agrees(result: Any, expected: Any) -> bool:
    if not isinstance(result, Tensor):
        return bool(result == expected)
    tolerance = 1e-3 if result.dtype == torch.float16 else 2e-5
    same = result.shape == expected.shape
    return same and torch.allclose(
        result.detach().cpu().double(), expected.detach().cpu().double(), atol=tolerance
    )


@pytest.mark.host_only
def test_padding_without_the_scale_is_noticed() -> None:
    """The control: padding without the scale, which the advice once omitted."""
    case = next(case for case in REFUSALS if "scale=60" in case.words)
    assert agrees(case.right(), case.expected())
    odd = {name: refusals.of("prefill")[name][..., :60] for name in ("query", "key")}
    padded = refusals.run("prefill", **{n: refusals._padded(one, 64) for n, one in odd.items()})
    assert not agrees(padded(), case.expected())


def source_of(advice: str, found: list[str]) -> str:
    """The text in the sources with the most letters that the advice has in their order."""

    def letters(text: str) -> int:
        pattern = ".+?".join(map(re.escape, text.split("{}")))
        return len(text.replace("{}", "")) if re.search(pattern, advice) else -1

    return max(found, key=letters)


def test_every_advice_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = sources.find()
    followed = set()
    for case in REFUSALS:
        with monkeypatch.context() as patch:
            followed |= {source_of(one, [*found]) for one in advice_of(case, patch).split("; ")}
    left = {text: file for text, file in found.items() if text not in {*NOT_FOLLOWED, *followed}}
    assert not left, f"follow these in tests/helpers/refusals, or say why not: {left}"
    assert not [known for known in NOT_FOLLOWED if known not in "".join(found)], "stale"


@pytest.mark.host_only
def test_the_scan_finds_advice() -> None:
    """The control, in both languages."""
    cpp = 'return refuse(Kind::kValue, op, "size ", n, " is odd; use ",\n   n + 1, " ", "in"\n "stead");\n'
    assert sources._advice_in(next(sources.of_cpp(cpp))) == ["use {} instead"]
    python = 'raise ValueError(f"{name}: {n} is odd; " "use an even one")'
    assert sources._advice_in(next(sources.of_python(python))) == ["use an even one"]
