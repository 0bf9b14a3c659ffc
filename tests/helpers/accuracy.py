"""The accuracy rule: an op may be at most twice as far from float64 as torch's own attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import torch_fattn.reference as reference
from bench.cases.calls import REMAINDER_SCALE
from tests.helpers.problems import TENSORS, Case
from torch_fattn.reference.attention import modified, of_sequence
from torch_fattn.runtime.options import with_defaults

EXTRA_ERROR = 1e-6
LSE_RELATIVE = 1e-5
LSE_ABSOLUTE_16_BIT = 1e-3


def expected(case: Case) -> tuple[Tensor, Tensor]:
    """out and lse in float64, from the clean dense operands (also for the paged op)."""
    problem, clean = case.problem, case.clean
    options = _options(case)
    operands = (clean["query"], clean["key"], clean["value"])
    if problem.q_lens is not None:
        return _expected_of_each(case, options)
    seq_lens = None if problem.seq_lens is None else torch.tensor(problem.seq_lens, dtype=torch.int32)
    if problem.op == "prefill":
        return reference.prefill(*operands, clean.get("attn_mask"), seq_lens=seq_lens, **options)
    return reference.decode(*operands, seq_lens, attn_mask=clean.get("attn_mask"), **options)


def _options(case: Case) -> Any:
    options = {name: case.clean[name] for name in TENSORS if name in case.clean} | case.options
    options.pop("kv_format", None)  # the clean operands are not quantised
    return options


def _expected_of_each(case: Case, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Each sequence of a packed call separately. Missing rows are 0 and -inf."""
    problem, clean = case.problem, case.clean
    left_out = ("max_seqlen_q", "max_seqlen_k", "q_offset")
    options = {name: value for name, value in options.items() if name not in left_out}
    rows = (problem.batch, problem.q_heads, problem.q_len)
    out = torch.zeros(*rows, problem.value_dim, dtype=torch.float64)
    lse = torch.full(rows, -torch.inf, dtype=torch.float64)
    for b, (length, q_len, first) in enumerate(
        zip(problem.lengths, problem.rows, problem.first_positions, strict=True)
    ):
        query = clean["query"][b : b + 1, :, :q_len]
        key, value = (clean[name][b : b + 1, :, :length] for name in ("key", "value"))
        own = of_sequence(with_defaults("prefill", options), b) | {"q_offset": first}
        results = reference.prefill(query, key, value, **own)
        out[b, :, :q_len], lse[b, :, :q_len] = results[0][0], results[1][0]
    return out, lse


def packed(case: Case, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The padded results of a packed call as it returns them: `[T, Hq, Dv]` and `[Hq, T]`."""
    problem = case.problem
    no_key = case.clean.get("sinks", torch.full((problem.q_heads,), -torch.inf)).to(lse.dtype)
    outs = [out[b, :, :rows].transpose(0, 1) for b, rows in enumerate(problem.rows)]
    lses = [lse[b, :, :rows] for b, rows in enumerate(problem.rows)]
    outs.append(out.new_zeros(problem.spare_rows, *out.shape[1::2]))
    lses.append(no_key[:, None].expand(-1, problem.spare_rows))
    return torch.cat(outs), torch.cat(lses, dim=1)


def _unpacked(case: Case, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The results [T, Hq, Dv] and [Hq, T] of a packed call as those of the padded one. Rows of no sequence
    must have seen no key."""
    problem = case.problem
    rows = (problem.batch, problem.q_heads, problem.q_len)
    padded_out = torch.zeros(*rows, problem.value_dim, dtype=out.dtype)
    padded_lse = torch.full(rows, -torch.inf)
    first = 0
    for b, q_len in enumerate(problem.rows):
        padded_out[b, :, :q_len] = out[first : first + q_len].transpose(0, 1)
        padded_lse[b, :, :q_len] = lse[:, first : first + q_len]
        first += q_len
    assert out.shape == (first + problem.spare_rows, problem.q_heads, problem.value_dim)
    assert lse.shape == (problem.q_heads, first + problem.spare_rows)
    assert torch.all(out[first:] == 0), "rows of no sequence are 0"
    no_key = case.clean.get("sinks", torch.full((problem.q_heads,), -torch.inf))
    assert torch.allclose(lse[:, first:], no_key[:, None].float(), atol=1e-5)
    return padded_out, padded_lse


def sdpa_error(case: Case, exact: Tensor) -> float:
    """How far F.scaled_dot_product_attention, in the operands' dtype, is from the float64 result.

    A sink is one more key, of zeros, whose mask is the logit. Under options that change scores the mask is
    the whole score, computed in float32, and the query zero.
    """
    problem, clean = case.problem, case.clean
    group = problem.q_heads // problem.kv_heads
    query = clean["query"]
    key = clean["key"].to(query.dtype).repeat_interleave(group, dim=1)
    value = clean["value"].to(query.dtype).repeat_interleave(group, dim=1)
    bias = torch.zeros(case.visible.shape, dtype=torch.float32)
    scale = problem.head_dim**-0.5 if problem.scale is None else problem.scale
    scores = query.float() @ key.float().mT * scale
    positions = torch.tensor(problem.first_positions)[:, None] + torch.arange(problem.q_len)
    changed = modified(scores, positions, with_defaults(problem.op, _options(case)))
    if not torch.equal(changed, scores):
        bias += changed
        query = torch.zeros_like(query)
    mask = clean.get("attn_mask")
    if mask is not None and mask.dtype != torch.bool:
        bias += mask
    bias.masked_fill_(~case.visible, -torch.inf)
    if "sinks" in clean:
        sinks = clean["sinks"][:, None, None].expand(*bias.shape[:3], 1)
        bias = torch.cat([bias, sinks], dim=-1)
        key, value = (F.pad(operand, (0, 0, 0, 1)) for operand in (key, value))
    sees_a_key = (bias > -torch.inf).any(dim=-1)
    if not sees_a_key.any():
        return 0.0
    result = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=problem.scale)
    return (result.double() - exact).abs()[sees_a_key].max().item()


def assert_close(case: Case, out: Tensor, lse: Tensor, remainder: Tensor | None = None) -> None:
    """Checks an op's result (CPU tensors) against the rule. The remainder takes away most of the error of
    out, which rounding made."""
    exact_out, exact_lse = expected(case)
    in_memory = out.transpose(1, 2) if case.problem.token_major_out else out
    assert out.dtype == case.problem.dtype and in_memory.is_contiguous()
    assert lse.dtype == torch.float32 and lse.is_contiguous()
    if case.problem.q_lens is not None:
        remainder = None if remainder is None else _unpacked(case, remainder, lse)[0]
        out, lse = _unpacked(case, out, lse)
    assert out.shape == exact_out.shape and lse.shape == exact_lse.shape

    limit = 2 * sdpa_error(case, exact_out) + EXTRA_ERROR
    error = (out.double() - exact_out).abs()
    assert not error.isnan().any(), f"NaN at {error.isnan().nonzero()[:4].tolist()}"
    assert error.max() <= limit, f"error {error.max():.3g} > {limit:.3g} at {_where_max(error)}"
    assert_lse_close(lse, exact_lse, case.problem.dtype)
    if remainder is not None:
        left = (out.double() + remainder.double() / REMAINDER_SCALE - exact_out).abs().max()
        limit = error.max() / 8 + EXTRA_ERROR
        assert left <= limit, f"error {left:.3g} with the remainder, {error.max():.3g} without"

    no_key = (exact_out == 0).all(dim=-1)  # lse is -inf, or the sink's logit
    assert torch.all(out[no_key] == 0), "a row that sees no key must be exactly 0"


def assert_lse_close(lse: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    empty = exact == -torch.inf
    assert torch.equal(lse == -torch.inf, empty), "lse is -inf exactly where a row sees no key"
    error = (lse.double() - exact).abs().masked_fill(empty, 0)
    limit = LSE_RELATIVE * exact.abs().masked_fill(empty, 0).clamp(min=1)
    if dtype != torch.float32:  # past 100 the relative limit is the wider one; a float32 has no 1e-3 at 1e4
        limit = limit.clamp(min=LSE_ABSOLUTE_16_BIT)
    assert torch.all(error <= limit), f"lse is off by {error.max():.3g} at {_where_max(error - limit)}"


def _where_max(values: Tensor) -> list[int]:
    return [int(i) for i in torch.unravel_index(values.argmax(), values.shape)]
