"""The float64 oracle itself: against the contract spelled out key by key, and against PyTorch's own
attention."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.problems import OPTIONS, Problem, Score
from torch_fattn import reference
from torch_fattn.operators.options import ScoreOptions

INF = math.inf
NAN = math.nan
RULES = {name: each.rule for name, each in OPTIONS.items() if each.rule is not None}


@pytest.fixture(scope="session", autouse=True)
def device() -> None:
    """Overrides the skip without a GPU: nothing here needs one."""


def key_by_key(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: list[list[int]],
    lengths: list[int],
    *,
    is_causal: bool,
    attn_mask: Tensor | None = None,
    tree_mask: Tensor | None = None,
    window_left: int = -1,
    window_right: int = -1,
    sink_tokens: int = 0,
    sinks: Tensor | None = None,
    scale: float | None = None,
    **modifiers: Any,
) -> tuple[Tensor, Tensor]:
    """The rules in plain Python, one row and one key at a time."""
    assert modifiers.keys() <= RULES.keys()
    batch, heads, q_len, head_dim = query.shape
    group = heads // key.shape[1]
    out = torch.zeros(batch, heads, q_len, value.shape[-1], dtype=torch.float64)
    lse = torch.full((batch, heads, q_len), -INF, dtype=torch.float64)
    for b, h, i in ((b, h, i) for b in range(batch) for h in range(heads) for i in range(q_len)):
        p = positions[b][i]
        scores: dict[int, float] = {}
        for j in range(lengths[b]):
            in_window = (window_left < 0 or j >= p - window_left) and (
                window_right < 0 or j <= p + window_right
            )
            token = j - (lengths[b] - q_len)
            hidden_by_tree = tree_mask is not None and token >= 0 and not int(tree_mask[b, i]) >> token & 1
            if (is_causal and j > p) or not (in_window or j < sink_tokens) or hidden_by_tree:
                continue
            score = float(query[b, h, i].double() @ key[b, h // group, j].double())
            score *= head_dim**-0.5 if scale is None else scale
            for name, rule in RULES.items():
                if name in modifiers:
                    score = rule(score, modifiers[name], Score(b, h, j - p))
            if attn_mask is not None:
                bias = attn_mask.expand(batch, heads, q_len, key.shape[2])[b, h, i, j]
                if attn_mask.dtype == torch.bool:
                    bias = torch.tensor(0.0 if bias else -INF)
                if bias == -INF:
                    continue
                score += float(bias)
            scores[j] = score
        logits = [*scores.values(), *([] if sinks is None else [float(sinks[h])])]
        if logits:
            lse[b, h, i] = torch.tensor(logits, dtype=torch.float64).logsumexp(0)
        for j, score in scores.items():
            out[b, h, i] += math.exp(score - lse[b, h, i]) * value[b, h // group, j].double()
    return out, lse


def random_options(rng: random.Random, heads: int, q_len: int, kv_len: int) -> dict[str, Any]:
    """Each option present about half of the time. The batch is 2."""
    problem = Problem(rng.randrange(6), "prefill", torch.float32, 2, heads, 2, q_len, kv_len, 8, 6)
    options: dict[str, Any] = {
        "window_left": rng.choice([0, 2, 5]),
        "window_right": rng.choice([0, 1, 4]),
        "sink_tokens": rng.choice([1, 3]),
        "sinks": torch.randn(heads),
        "scale": 0.7,
        "attn_mask": rng.choice([torch.rand(q_len, kv_len) > 0.3, torch.randn(2, 1, 1, kv_len)]),
    }
    for name in RULES:
        each = OPTIONS[name]
        options[name] = each.tensor(problem, torch.default_generator) if each.tensor else each.values[-1]
    return {name: value for name, value in options.items() if rng.random() < 0.5}


def test_every_option_is_drawn() -> None:
    drawn = {name for seed in range(30) for name in random_options(random.Random(seed), 2, 1, 1)}
    missing = {*ScoreOptions.__annotations__} - drawn
    assert not missing, f"{missing}: neither random_options nor tests/helpers/problems.py has a rule"


def assert_equal(result: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for mine, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_prefill_key_by_key(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    q_len, kv_len = rng.choice([(5, 9), (9, 5), (4, 4), (1, 7)])
    query, key, value = (
        torch.randn(2, heads, length, dim)
        for heads, length, dim in ((4, q_len, 8), (2, kv_len, 8), (2, kv_len, 6))
    )
    offset = rng.choice([None, 0, 3, -2])
    options = random_options(rng, 4, q_len, kv_len)
    causal = rng.random() < 0.5
    first = kv_len - q_len if offset is None else offset
    expected = key_by_key(
        query, key, value, [list(range(first, first + q_len))] * 2, [kv_len] * 2, is_causal=causal, **options
    )
    result = reference.prefill(query, key, value, is_causal=causal, q_offset=offset, **options)
    assert_equal(result, expected)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_decode_key_by_key(seed: int, paged: bool) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    q_len, block_size, blocks = 3, 4, 3
    capacity = block_size * blocks
    query = torch.randn(2, 4, q_len, 8)
    key, value = torch.randn(2, 2, capacity, 8), torch.randn(2, 2, capacity, 6)
    lengths = rng.choice([[12, 5], [0, 12], [2, 3]])
    options = random_options(rng, 4, q_len, capacity)
    if rng.random() < 0.5:
        options["tree_mask"] = torch.randint(0, 2**q_len, (2, q_len))
    positions = [[length - q_len + i for i in range(q_len)] for length in lengths]
    expected = key_by_key(query, key, value, positions, lengths, is_causal=True, **options)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    if not paged:
        assert_equal(reference.decode(query, key, value, seq_lens, **options), expected)
        return
    order = torch.randperm(2 * blocks + 1)[: 2 * blocks].view(2, blocks)
    pools = []
    for rows in (key, value):
        pool = torch.full((2 * blocks + 1, block_size, 2, rows.shape[-1]), NAN)
        pool[order] = rows.transpose(1, 2).reshape(2, blocks, block_size, 2, -1)
        pools.append(pool)
    used = torch.arange(blocks) * block_size < seq_lens[:, None]
    tables = torch.where(used, order, -1).int()
    assert_equal(reference.paged_decode(query, *pools, tables, seq_lens, **options), expected)
    if "tree_mask" in options or "attn_mask" in options:
        return
    rows = query.transpose(1, 2).flatten(0, 1)  # of both sequences, one after the other
    starts = torch.tensor([0, q_len, 2 * q_len])
    out, lse = reference.paged_prefill(
        rows, *pools, tables, seq_lens, starts, q_len, is_causal=True, **options
    )
    packed = (out.unflatten(0, (2, q_len)).transpose(1, 2), lse.unflatten(1, (2, q_len)).transpose(0, 1))
    assert_equal(packed, expected)


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("operand", ["key", "value"])
def test_bad_data_reaches_the_rows_that_see_it(operand: str, poison: float) -> None:
    """The causal rows 3, 4 and 5 see key 3. A bad value leaves the other rows of its head undefined."""
    operands = dict(zip(("query", "key", "value"), torch.rand(3, 1, 2, 6, 8), strict=True))
    clean, _ = reference.prefill(**operands, is_causal=True)
    operands[operand][:, 0, 3, 1] = poison
    out, _ = reference.prefill(**operands, is_causal=True)
    changed = (out != clean).any(-1)
    assert changed[0, 0, 3:].all() and (operand == "value" or not changed[0, 0, :3].any())
    assert not changed[0, 1].any(), "the other head has its own keys"
    if operand == "value":
        assert not out[0, 0, 3:, 1].isfinite().any()
        assert out[0, 0].isfinite().sum() == 6 * 7, "only one column of the value is bad"
