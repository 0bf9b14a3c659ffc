"""rotary and rotary_write: the float64 reference, the bits of transformers' functions and of `cache_write`,
which tokens are written, and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_fattn
from tests.conftest import Checked, counted_launches, needs_emulator
from tests.helpers import rotary_problems
from tests.helpers.rotary_problems import (
    RotaryProblem,
    assert_close,
    assert_same_memory,
    of_rotary,
    valid,
    written,
)
from tests.helpers.tensors import same_bits, tensors_in
from tests.helpers.wrong_calls import refusal
from torch_fattn import reference

PROBLEMS = rotary_problems.draw(60)
ORDERS = ("forward", "reverse", "random")  # of the threads


def run_in_poison(function: Callable[..., Any], arguments: dict[str, Any]) -> list[Tensor]:
    """The results, in memory that held NaN: the allocator returns that of the results of a call before."""
    for each in tensors_in(function(**arguments)):
        each.fill_(torch.nan)
    del each
    return [each.cpu() for each in tensors_in(function(**arguments))]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_problem(problem: RotaryProblem, device: str, checked: Checked) -> None:
    case = rotary_problems.build(problem)
    arguments, bases = case.arguments(device)
    with checked(order=ORDERS[problem.index % 3]), counted_launches() as launches:
        out, key = run_in_poison(torch_fattn.rotary, of_rotary(arguments))
        [again] = run_in_poison(torch_fattn.rotary_write, arguments)
    assert launches == ({"fattn_rotary": 4} if device == "mps" else {})
    on_cpu, of_reference = case.arguments("cpu")
    exact_out, exact_key = reference.rotary(**of_rotary(on_cpu))
    assert_close(out, exact_out, problem, "query_norm" in arguments)
    assert_close(key, exact_key, problem, "key_norm" in arguments)
    assert same_bits(again, out) and again.stride() == out.stride()
    assert_same_memory(bases, written(case, key))
    assert same_bits(reference.rotary_write(**on_cpu), exact_out)
    assert_same_memory(of_reference, written(case, exact_key.to(problem.dtype)))


# ---- transformers' functions


def of_model(name: str) -> Any:
    return pytest.importorskip(f"transformers.models.{name}.modeling_{name}")


# Function, style, share of the columns, whether a column of the table is of a pair.
MODELS = {
    "llama": ("apply_rotary_pos_emb", "halves", 1.0, False),
    "glm4_moe": ("apply_rotary_pos_emb", "halves", 0.5, False),
    "helium": ("apply_rotary_pos_emb", "pairs", 1.0, False),
    "glm4": ("apply_rotary_pos_emb", "pairs", 0.5, False),
    "deepseek_v3": ("apply_rotary_pos_emb_interleave", "pairs_to_halves", 1.0, False),
    "gpt_oss": ("apply_rotary_pos_emb", "halves", 1.0, True),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model", MODELS)
def test_bits_of_transformers(model: str, dtype: torch.dtype, device: str) -> None:
    name, style, share, narrow = MODELS[model]
    dim, width = 64, int(64 * share)
    query, key = (torch.randn(2, h, 5, dim).to(dtype) for h in (4, 2))
    angles = (torch.arange(5)[:, None] + 7) * 1e4 ** -(torch.arange(width // 2) * 2 / width)
    both = angles.mT.contiguous().mT if narrow else torch.cat((angles, angles), -1)  # GPT-OSS transposes it
    for table_dtype in (dtype, torch.float32) if model == "llama" else (dtype,):
        tables = [(table[None] * 1.3).to(table_dtype) for table in (both.cos(), both.sin())]
        expected = getattr(of_model(model), name)(query, key, *tables)
        operands = (each.to(device) for each in (query, key, *tables))
        mine = torch_fattn.rotary(*operands, style=style, rotary_dim=width if narrow else None)
        assert all(torch.equal(a.cpu(), b.to(dtype)) for a, b in zip(mine, expected, strict=True)), (
            table_dtype
        )


@pytest.mark.parametrize(
    ("model", "name", "norm"),
    [
        ("qwen3", "Qwen3RMSNorm", "rounded"),
        ("gemma3", "Gemma3RMSNorm", "plus_one"),
        ("olmo2", "Olmo2RMSNorm", "float"),
        ("gpt_oss", "GptOssRMSNorm", "float"),
    ],
)
def test_norms_of_transformers(model: str, name: str, norm: str, device: str) -> None:
    """Equal but for the last bit of the mean, which moves few roundings."""
    module = getattr(of_model(model), name)(64, eps=1e-5).to(torch.bfloat16)
    query = torch.randn(2, 40, 9, 64).bfloat16()
    with torch.no_grad():
        module.weight.copy_(torch.randn(64))
        expected = module(query)
    cos, sin = torch.ones(1, 9, 64).bfloat16(), torch.zeros(1, 9, 64).bfloat16()
    operands = (each.to(device) for each in (query, query[:, :0], cos, sin))
    weight = module.weight.detach().to(device)
    out, none = torch_fattn.rotary(*operands, query_norm=weight, eps=1e-5, norm=norm)
    assert none.shape == (2, 0, 9, 64) and (out.cpu() != expected).float().mean() < 1e-3
    assert ((out.cpu() - expected).abs() <= 2**-6 * expected.abs()).all()


# ---- which tokens are written, and what they touch


def dense(device: str) -> dict[str, Any]:
    """Caches of nine slots for the two sequences of a valid call."""
    sizes = {"key_cache": 64, "value_cache": 40}
    return {n: torch.full((2, 9, 2, d), 5.0, device=device) for n, d in sizes.items()} | {
        "slot_mapping": None
    }


@pytest.mark.parametrize("slots", [(-1,) * 6, (8, 9, 2**31, -(2**63), 2**63 - 1, 2**32)])
def test_a_dropped_token_still_has_its_query(slots: tuple[int, ...], device: str, checked: Checked) -> None:
    arguments = valid(device=device)
    expected = torch_fattn.rotary_write(**arguments)
    before = [arguments[name].cpu().clone() for name in ("key_cache", "value_cache")]
    with checked():
        arguments["slot_mapping"] = torch.tensor(slots, device=device).view(2, 3)
        assert same_bits(torch_fattn.rotary_write(**arguments), expected)
    assert same_bits(before, [arguments[name] for name in ("key_cache", "value_cache")])


@pytest.mark.parametrize("start", [-(2**63), -1, 6, 7, 2**63 - 1])
def test_starts_beyond_the_cache(start: int, device: str, checked: Checked) -> None:
    """The tokens in front of the end are written: two of three, from slot 7 of 9 on."""
    arguments = valid(device=device) | dense(device)
    with checked():
        torch_fattn.rotary_write(**arguments, starts=torch.tensor(start, device=device))
    _, key = torch_fattn.rotary(**of_rotary(arguments))
    expected = torch.full((2, 9, 2, 64), 5.0)
    for slot in range(9):
        if start >= 0 and 0 <= slot - start < 3:
            expected[:, slot] = key.cpu()[:, :, slot - start]
    assert torch.equal(arguments["key_cache"].cpu(), expected)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_nan_stays_in_its_head(number: float, device: str) -> None:
    arguments = valid(device=device) | {"query_norm": torch.ones(64, device=device)}
    clean = torch_fattn.rotary_write(**arguments)
    arguments["query"][1, 2, 0, 17] = number
    out = torch_fattn.rotary_write(**arguments)
    assert out[1, 2, 0].isnan().any()
    out[1, 2, 0] = clean[1, 2, 0]
    assert same_bits(out, clean)


def test_subnormal_numbers_count_as_0_in_a_quantised_cache(device: str) -> None:
    key = torch.full((1, 2, 3, 64), -(2.0**-130), device=device)
    tables = torch.stack((torch.ones(1, 3, 64), torch.zeros(1, 3, 64))).to(device)
    written = []
    for fused in (True, False):
        caches = torch.zeros(2, 1, 3, 2, 32, dtype=torch.uint8, device=device)
        scales = torch.ones(2, 1, 3, 2, 2, 2, dtype=torch.float16, device=device)
        options = {"key_scales": scales[0], "value_scales": scales[1], "kv_format": "int4"}
        if fused:
            torch_fattn.rotary_write(key, key, key, *tables, *caches, **options)
        else:
            rows = key[0].transpose(0, 1)
            torch_fattn.cache_write(rows, rows, *caches, torch.arange(3, device=device), **options)
        written.append([caches, scales])
    assert same_bits(*written) and not written[0][1].any()


def test_rows_that_lie_in_the_cache(device: str) -> None:
    """They are read before anything is written; and interleaved pools are taken."""
    tables, pool = torch.randn(2, 1, 3, 64).to(device), torch.randn(1, 6, 2, 2, 64).to(device)
    results = []
    for copies in (False, True):
        key_cache, value_cache = pool.clone().unbind(2)
        rows = [cache[:, 1:4].transpose(1, 2) for cache in (key_cache, value_cache)]
        key, value = (x.clone() for x in rows) if copies else rows
        out = torch_fattn.rotary_write(key, key, value, *tables, key_cache, value_cache, start=2)
        results.append([out, key_cache, value_cache])
    assert same_bits(*results) and not torch.equal(results[0][1], pool[:, :, 0])


@needs_emulator
def test_two_tokens_with_one_slot_are_a_race(checked: Checked) -> None:
    """The control of test_problem: the findings are loud."""
    arguments = valid() | {"slot_mapping": torch.tensor([[3, 3, 1], [-1, -1, -1]], device="mps")}
    with pytest.raises(RuntimeError, match="race"), checked():
        torch_fattn.rotary_write(**arguments)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"slot_mapping": [[3, -1, 8], [0, 1, 2]]}, ["slot_mapping[2] is 8", "num_blocks * block_size = 8"]),
        ({"slot_mapping": [[5, -1, 1], [2, 3, 5]]}, ["slot_mapping[0] and [5]", "both 5"]),
        ({"starts": [0, 7]}, ["starts[1] is 7", "between 0 and 6", "capacity of 9"]),
        ({"starts": -1}, ["starts[0] is -1"]),
    ],
)
def test_bad_data_raises_when_asked(
    changes: dict[str, Any], words: list[str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FATTN_CHECK", "1")
    arguments = valid(device=device)
    torch_fattn.rotary_write(**arguments)
    if "starts" in changes:
        arguments |= dense(device)
        torch_fattn.rotary_write(**arguments, starts=torch.tensor([0, 6], device=device))
    before = arguments["key_cache"].cpu().clone()
    arguments |= {name: torch.tensor(each, device=device) for name, each in changes.items()}
    with refusal("fattn.rotary_write", ValueError, *words):
        torch_fattn.rotary_write(**arguments)
    assert torch.equal(arguments["key_cache"].cpu(), before)


def test_gradients(device: str) -> None:
    arguments = valid(device=device)
    cache = arguments["key_cache"]
    arguments["query"].requires_grad_()
    version = cache._version
    out = torch_fattn.rotary_write(**arguments)
    assert cache._version == version + 1 and not cache.requires_grad
    with pytest.raises(
        RuntimeError, match=r"fattn\.rotary_write has no backward; use the model's own rotary"
    ):
        out.sum().backward()
    arguments["value_cache"].requires_grad_()
    with pytest.raises(RuntimeError, match=r"rotary_write: value_cache requires grad.*\.detach\(\)"):
        torch_fattn.rotary_write(**arguments)
    with torch.no_grad():
        assert not torch_fattn.rotary_write(**arguments).requires_grad
