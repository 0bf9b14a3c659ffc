"""The buffers of a case on any device, and its reference result in float64.

Needs torch alone: the NVIDIA machine has neither torch_fattn nor a compiler.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from .case import PREFILLS

# Up to this many scores, every head is compared with the reference; above, four heads.
MOST_SCORES = 1 << 20
OUTPUTS = {"out", "out_float32", "grad_query", "grad_key", "grad_value"}
# The largest relative error (L2 norm, against float64) of a correct implementation.
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.2e-2, "float32": 2e-5}

Buffers = dict[str, Tensor]
Case = Mapping[str, Any]  # the fields of case.py's Case, and its scale


def make(case: Case, names: Collection[str], scratch: Mapping[str, int], device: str, seed: int) -> Buffers:
    """Makes random operands, and the derived buffers in `names`. Outputs and scratch are NaN, which exposes
    elements that were never written."""
    buffers = _operands(case, torch.Generator(device).manual_seed(seed))
    outputs = ("query", "key", "value") if case["op"] == "prefill_backward" else ()
    buffers |= {f"grad_{name}": torch.full_like(buffers[name], math.nan) for name in outputs}
    if not outputs:
        columns = case["latent_dim"] or case["head_dim"]
        buffers["out"] = torch.full_like(buffers["query"][..., :columns], math.nan)
    for name, size in scratch.items():
        buffers[name] = torch.full((size,), 255, dtype=torch.uint8, device=device)
    for name in names:
        if name in _DERIVED:
            buffers[name] = _DERIVED[name](case, buffers)
    return buffers


def _operands(case: Case, generator: torch.Generator) -> Buffers:
    device, dtype = generator.device, getattr(torch, case["dtype"])
    batch, heads, length, dim = case["batch"], case["kv_heads"], case["kv_len"], case["head_dim"]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    buffers = {"query": normal(batch, case["q_heads"], case["q_len"], dim)}
    shape: tuple[int, ...] = (batch, heads, length, dim)
    if case["block_size"]:
        blocks = -(-length // case["block_size"])
        shape = (batch * blocks, case["block_size"], heads, dim)
        order = torch.randperm(batch * blocks, generator=generator, device=device)
        buffers["block_tables"] = order.reshape(batch, blocks).to(torch.int32)
    if case["op"] == "prefill_backward":
        buffers["grad_out"] = normal(*buffers["query"].shape)
    for name in ("key",) if case["latent_dim"] else ("key", "value"):
        if case["kv_format"]:
            buffers[name], buffers[f"{name}_scales"] = _quantised(shape, generator)
        else:
            buffers[name] = normal(*shape)
    if case["latent_dim"]:
        buffers["value"] = buffers["key"][..., : case["latent_dim"]]
        if case["kv_format"]:
            buffers["value_scales"] = buffers["key_scales"]
    lengths = case["lengths"] or [length] * batch
    buffers["seq_lens"] = torch.tensor(lengths, dtype=torch.int32, device=device)
    return buffers


def _quantised(shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns int8 elements and a float32 scale per row. Every scale is a float16 value, which the peers'
    formats can hold."""
    device = generator.device
    elements = torch.randint(-127, 128, shape, generator=generator, device=device, dtype=torch.int8)
    scales = 0.01 + 0.01 * torch.rand(shape[:-1], generator=generator, device=device)
    return elements, scales.half().float()


# ---- derived operands, which some peers take ---------------------------------------------------------------


def _blocks_of_32(case: Case, elements: Tensor, scales: Tensor) -> Tensor:
    """Returns ggml's q8_0: a float16 scale before each 32 elements. Every block has the scale of its row, so
    the values are the same."""
    blocks = elements.shape[-1] // 32
    heads = scales.half()[..., None, None].expand(*scales.shape, blocks, 1).contiguous().view(torch.uint8)
    return torch.cat([heads, elements.unflatten(-1, (blocks, 32)).view(torch.uint8)], -1)


def _mask(case: Case, buffers: Buffers) -> Tensor:
    """Additive float16 [B, Lq, N]: 0 where a row sees a key, -inf elsewhere."""
    return torch.stack([_hidden(case, buffers, batch) for batch in range(case["batch"])]).half()


def _seen(case: Case, buffers: Buffers) -> Tensor:
    """bool [Lq, N]: whether a row of sequences of kv_len keys sees a key."""
    return _hidden(case, buffers, 0) == 0


def _lse(case: Case, buffers: Buffers) -> Tensor:
    """float32 [B, H, Lq]: the log-sum-exp of each row's scores."""
    group = case["q_heads"] // case["kv_heads"]
    result = torch.empty(buffers["query"].shape[:-1], device=buffers["query"].device)
    for batch, head in itertools.product(range(case["batch"]), range(case["q_heads"])):
        query, key = buffers["query"][batch, head], buffers["key"][batch, head // group]
        scores = query.float() @ key.float().T * case["scale"]
        if case["causal"]:
            scores += _hidden(case, buffers, batch)
        result[batch, head] = torch.logsumexp(scores, -1)
    return result


def _forward_out(case: Case, buffers: Buffers) -> Tensor:
    """The result of the forward that a backward belongs to."""
    group = case["q_heads"] // case["kv_heads"]
    result = torch.empty_like(buffers["query"])
    for batch, head in itertools.product(range(case["batch"]), range(case["q_heads"])):
        key, value = (buffers[name][batch, head // group].float() for name in ("key", "value"))
        scores = buffers["query"][batch, head].float() @ key.T * case["scale"]
        if case["causal"]:
            scores += _hidden(case, buffers, batch)
        result[batch, head] = (torch.softmax(scores, -1) @ value).to(result.dtype)
    return result


def _with_spare(elements: Tensor) -> Tensor:
    """Appends room for reads past the last row."""
    return torch.cat([elements.flatten(), elements.new_zeros(64)])


_DERIVED: dict[str, Callable[[Case, Buffers], Tensor]] = {
    "query_float32": lambda case, buffers: buffers["query"].float(),
    "out_float32": lambda case, buffers: buffers["out"].float(),
    "key_q8_0": lambda case, buffers: _blocks_of_32(case, buffers["key"], buffers["key_scales"]),
    "value_q8_0": lambda case, buffers: _blocks_of_32(case, buffers["value"], buffers["value_scales"]),
    "value_with_spare": lambda case, buffers: _with_spare(buffers["value"]),
    "mask": _mask,
    "seen": _seen,
    "lse": _lse,
    "lse_log2": lambda case, buffers: _lse(case, buffers) / math.log(2),
    "forward_out": _forward_out,
}


# ---- reference --------------------------------------------------------------------------------------------


def _hidden(case: Case, buffers: Buffers, batch: int) -> Tensor:
    """[Lq, N]: -inf where a row does not see a key. Causal rows are the last rows of their sequence."""
    length, device = int(buffers["seq_lens"][batch]), buffers["query"].device
    keys = torch.arange(case["kv_len"], device=device)
    end = torch.full((case["q_len"], 1), length, device=device)
    if case["causal"] or case["op"] not in PREFILLS:
        end = torch.arange(case["q_len"], device=device)[:, None] + length - case["q_len"] + 1
    return torch.zeros(case["q_len"], case["kv_len"], device=device).masked_fill_(keys >= end, -math.inf)


def _rows(case: Case, buffers: Buffers, name: str, batch: int, head: int) -> Tensor:
    """The keys or values of one sequence and head, in float64."""
    stored, scales = buffers[name], buffers.get(f"{name}_scales")
    if case["block_size"]:
        table = buffers["block_tables"][batch].long()
        rows = stored[table, :, head].flatten(0, 1)[: case["kv_len"]].double()
        return rows if scales is None else rows * scales[table, :, head].flatten()[: len(rows), None].double()
    rows = stored[batch, head].double()
    return rows if scales is None else rows * scales[batch, head, :, None].double()


def reference(case: Case, buffers: Buffers, batch: int, head: int, device: str) -> Tensor:
    kv_head = head // (case["q_heads"] // case["kv_heads"])
    query = buffers["query"][batch, head].to(device, torch.float64)
    key, value = (_rows(case, buffers, name, batch, kv_head).to(device) for name in ("key", "value"))
    scores = query @ key.T * case["scale"] + _hidden(case, buffers, batch).to(device)
    return torch.softmax(scores, -1) @ value


def gradients(case: Case, buffers: Buffers, batch: int, kv_head: int, device: str) -> Buffers:
    """The gradients of the query rows that share a head of key and value, and of that head."""
    group = case["q_heads"] // case["kv_heads"]
    key, value = (buffers[name][batch, kv_head].to(device, torch.float64) for name in ("key", "value"))
    hidden = _hidden(case, buffers, batch).to(device)
    grad_query, grad_key, grad_value = [], torch.zeros_like(key), torch.zeros_like(value)
    for head in range(kv_head * group, (kv_head + 1) * group):
        query, grad_out = (
            buffers[name][batch, head].to(device, torch.float64) for name in ("query", "grad_out")
        )
        weights = torch.softmax(query @ key.T * case["scale"] + hidden, -1)
        grad_value += weights.T @ grad_out
        grad_scores = grad_out @ value.T
        grad_scores -= (weights * grad_scores).sum(-1, keepdim=True)
        grad_scores *= weights * case["scale"]
        grad_key += grad_scores.T @ query
        grad_query.append(grad_scores @ key)
    return {"grad_query": torch.stack(grad_query), "grad_key": grad_key, "grad_value": grad_value}


def _gradient_errors(case: Case, buffers: Buffers, device: str) -> tuple[float, float]:
    """The largest errors of the three gradients."""
    batches, heads, group = case["batch"], case["kv_heads"], case["q_heads"] // case["kv_heads"]
    chosen = {(0, 0), (batches - 1, heads - 1)}
    if batches * case["q_heads"] * case["kv_len"] * case["q_len"] <= MOST_SCORES:
        chosen = {(batch, head) for batch in range(batches) for head in range(heads)}
    largest = relative = 0.0
    for batch, head in chosen:
        for name, expected in gradients(case, buffers, batch, head, device).items():
            mine = slice(head * group, (head + 1) * group) if name == "grad_query" else head
            found = buffers[name][batch, mine].to(device, torch.float64)
            if found.isnan().any():
                return math.inf, math.inf
            error = found - expected
            largest = max(largest, error.abs().max().item())
            relative = max(relative, (error.norm() / expected.norm()).item())
    return largest, relative


def errors(case: Case, buffers: Buffers, out_rows_first: bool, device: str) -> tuple[float, float]:
    """Returns the largest absolute error, and the relative error in the L2 norm."""
    if case["op"] == "prefill_backward":
        return _gradient_errors(case, buffers, device)
    batches, heads = case["batch"], case["q_heads"]
    out = buffers.get("out_float32", buffers["out"])
    if out_rows_first:
        out = out.view(batches, case["q_len"], heads, case["head_dim"]).transpose(1, 2)
    if out.isnan().any():
        return math.inf, math.inf
    chosen = {(0, 0), (batches - 1, heads - 1), (batches // 2, heads // 2), (0, heads - 1)}
    if batches * heads * case["kv_len"] * case["q_len"] <= MOST_SCORES:
        chosen = {(batch, head) for batch in range(batches) for head in range(heads)}
    largest = difference = norm = 0.0
    for batch, head in chosen:
        expected = reference(case, buffers, batch, head, device)
        error = out[batch, head].to(device, torch.float64) - expected
        largest = max(largest, error.abs().max().item())
        difference += error.square().sum().item()
        norm += expected.square().sum().item()
    return largest, math.sqrt(difference / norm)
