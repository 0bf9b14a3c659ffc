"""The buffers of a call on any device, and its reference result in float64.

Needs torch alone: the NVIDIA machine has neither torch_fattn nor a compiler.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import Tensor

from . import delta
from .calls import MASK_BLOCK, Call

# Up to this many scores, every head is compared with the reference; above, four heads.
MOST_SCORES = 1 << 20
OUTPUTS = {
    *{"out", "out_float32", "grad_query", "grad_key", "grad_value", "key_cache", "value_cache"},
    *{delta.STATE, delta.NEW, "transposed_state"},
}
_ROWS = 8192  # of a reference at once
# The largest relative error (L2 norm, against float64) of a correct implementation.
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.2e-2, "float32": 2e-5}

Buffers = dict[str, Tensor]


def make(call: Call, names: Collection[str], scratch: Mapping[str, int], device: str, seed: int) -> Buffers:
    """Makes random operands, and the derived buffers in `names`. Outputs and scratch are NaN, which exposes
    elements that were never written."""
    buffers = _operands(call, torch.Generator(device).manual_seed(seed))
    outputs = ("query", "key", "value") if call.is_backward else ()
    buffers |= {f"grad_{name}": torch.full_like(buffers[name], math.nan) for name in outputs}
    if not outputs:
        like = buffers["value"] if call.is_delta else buffers["query"][..., : call.value_dim]
        buffers["out"] = torch.full_like(like, math.nan)
    if call.is_delta:
        buffers["initial_state"] = buffers[delta.STATE].clone()
    for name, size in scratch.items():
        buffers[name] = torch.full((size,), 255, dtype=torch.uint8, device=device)
    for name in names:
        if name in _DERIVED:
            buffers[name] = _DERIVED[name](call, buffers)
    return buffers


def reset(buffers: Buffers) -> None:
    """Makes results NaN again, and states the initial ones."""
    for name in OUTPUTS & buffers.keys():
        initial = buffers.get(f"initial_{name}")
        buffers[name].fill_(math.nan) if initial is None else buffers[name].copy_(initial)


def _operands(call: Call, generator: torch.Generator) -> Buffers:
    device = generator.device
    if call.is_rotary or call.is_delta:
        return call.operands(device, generator.initial_seed())
    batch, heads, length, dim = call.batch, call.kv_heads, call.kv_len, call.head_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=call.torch_dtype)

    buffers = {"query": normal(batch, call.q_heads, call.q_len, dim)}
    shape: tuple[int, ...] = (batch, heads, length, dim)
    if call.block_size:
        blocks = -(-length // call.block_size)
        shape = (batch * blocks, call.block_size, heads, dim)
        order = torch.randperm(batch * blocks, generator=generator, device=device)
        buffers["block_tables"] = order.reshape(batch, blocks).to(torch.int32)
    if call.is_backward:
        buffers["grad_out"] = normal(*buffers["query"].shape)
    for name in ("key",) if call.latent_dim else ("key", "value"):
        if call.kv_format:
            buffers[name], buffers[f"{name}_scales"] = _quantised(shape, generator)
        else:
            buffers[name] = normal(*shape)
    if call.latent_dim:
        buffers["value"] = buffers["key"][..., : call.latent_dim]
        if call.kv_format:
            buffers["value_scales"] = buffers["key_scales"]
    if call.density:
        buffers["mask_map"] = call.blocks.to(device)
    lengths = call.lengths or [length] * batch
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


def _blocks_of_32(call: Call, elements: Tensor, scales: Tensor) -> Tensor:
    """Returns ggml's q8_0: a float16 scale before each 32 elements. Every block has the scale of its row, so
    the values are the same."""
    blocks = elements.shape[-1] // 32
    heads = scales.half()[..., None, None].expand(*scales.shape, blocks, 1).contiguous().view(torch.uint8)
    return torch.cat([heads, elements.unflatten(-1, (blocks, 32)).view(torch.uint8)], -1)


def _mask(call: Call, buffers: Buffers) -> Tensor:
    """Additive float16 [B, Lq, mask_pitch]: 0 where a row sees a key, -inf elsewhere."""
    return _pitched(call, torch.stack([_hidden(call, buffers, n) for n in range(call.batch)]).half())


def _seen(call: Call, buffers: Buffers) -> Tensor:
    """bool [Lq, mask_pitch]: whether a row of sequences of kv_len keys sees a key."""
    return _pitched(call, _hidden(call, buffers, 0) == 0)


def _pitched(call: Call, mask: Tensor) -> Tensor:
    return torch.nn.functional.pad(mask, (0, call.mask_pitch - call.kv_len))


def _of_scores(call: Call, buffers: Buffers, result_of: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """float32 [B, H, ...]: of each head, from its scores and values."""
    results = []
    for batch, head in itertools.product(range(call.batch), range(call.q_heads)):
        key, value = (buffers[name][batch, head // call.group_size].float() for name in ("key", "value"))
        scores = buffers["query"][batch, head].float() @ key.T * call.scale
        scores = scores + _hidden(call, buffers, batch) if call.causal else scores
        results.append(result_of(scores, value))
    return torch.stack(results).unflatten(0, (call.batch, call.q_heads))


def _result(call: Call, buffers: Buffers) -> Tensor:
    return _of_scores(call, buffers, lambda scores, value: scores.softmax(-1) @ value)


def _with_spare(elements: Tensor) -> Tensor:
    """Appends room for reads past the last row."""
    return torch.cat([elements.flatten(), elements.new_zeros(64)])


_DERIVED: dict[str, Callable[[Call, Buffers], Tensor]] = {
    **{
        f"{name}_float32": lambda call, buffers, name=name: buffers[name].float()  # type: ignore[misc]
        for name in ("query", "key", "value", "beta", "out")
    },
    "key_q8_0": lambda call, buffers: _blocks_of_32(call, buffers["key"], buffers["key_scales"]),
    "value_q8_0": lambda call, buffers: _blocks_of_32(call, buffers["value"], buffers["value_scales"]),
    "value_with_spare": lambda call, buffers: _with_spare(buffers["value"]),
    "mask": _mask,
    "seen": _seen,
    "lse": lambda call, buffers: _of_scores(call, buffers, lambda scores, _value: scores.logsumexp(-1)),
    "lse_log2": lambda call, buffers: _DERIVED["lse"](call, buffers) / math.log(2),
    "saved_out": lambda call, buffers: _result(call, buffers).to(call.torch_dtype),
    "out_remainder": lambda call, buffers: call.remainder_of(_result(call, buffers))["out_remainder"],
    **delta.DERIVED,
}


# ---- reference --------------------------------------------------------------------------------------------


def _hidden(call: Call, buffers: Buffers, batch: int) -> Tensor:
    """[Lq, N]: -inf where a row does not see a key. Causal rows are the last rows of their sequence."""
    length, device = int(buffers["seq_lens"][batch]), buffers["query"].device
    keys = torch.arange(call.kv_len, device=device)
    end = torch.full((call.q_len, 1), length, device=device)
    if call.causal or call.is_decode:
        end = torch.arange(call.q_len, device=device)[:, None] + length - call.q_len + 1
    hidden = torch.zeros(call.q_len, call.kv_len, device=device).masked_fill_(keys >= end, -math.inf)
    if call.density:
        blocks = buffers["mask_map"][0, 0]
        for dim in (0, 1):
            blocks = blocks.repeat_interleave(MASK_BLOCK, dim)
        hidden.masked_fill_(~blocks[: call.q_len, : call.kv_len], -math.inf)
    return hidden


def _rows(call: Call, buffers: Buffers, name: str, batch: int, head: int) -> Tensor:
    """The keys or values of one sequence and head, in float64."""
    stored, scales = buffers[name], buffers.get(f"{name}_scales")
    if call.block_size:
        table = buffers["block_tables"][batch].long()
        rows = stored[table, :, head].flatten(0, 1)[: call.kv_len].double()
        return rows if scales is None else rows * scales[table, :, head].flatten()[: len(rows), None].double()
    rows = stored[batch, head].double()
    return rows if scales is None else rows * scales[batch, head, :, None].double()


def reference(call: Call, buffers: Buffers, batch: int, head: int, device: str) -> Tensor:
    kv_head = head // call.group_size
    query = buffers["query"][batch, head].to(device, torch.float64)
    key, value = (_rows(call, buffers, name, batch, kv_head).to(device) for name in ("key", "value"))
    hidden = _hidden(call, buffers, batch).to(device)
    pieces = zip(query.split(_ROWS), hidden.split(_ROWS), strict=True)
    return torch.cat([torch.softmax(rows @ key.T * call.scale + seen, -1) @ value for rows, seen in pieces])


def gradients(call: Call, buffers: Buffers, batch: int, kv_head: int, device: str) -> Buffers:
    """The gradients of the query rows that share a head of key and value, and of that head."""
    group = call.group_size
    key, value = (buffers[name][batch, kv_head].to(device, torch.float64) for name in ("key", "value"))
    hidden = _hidden(call, buffers, batch).to(device)
    grad_query, grad_key, grad_value = [], torch.zeros_like(key), torch.zeros_like(value)
    for head in range(kv_head * group, (kv_head + 1) * group):
        query, grad_out = (
            buffers[name][batch, head].to(device, torch.float64) for name in ("query", "grad_out")
        )
        weights = torch.softmax(query @ key.T * call.scale + hidden, -1)
        grad_value += weights.T @ grad_out
        grad_scores = grad_out @ value.T
        grad_scores -= (weights * grad_scores).sum(-1, keepdim=True)
        grad_scores *= weights * call.scale
        grad_key += grad_scores.T @ query
        grad_query.append(grad_scores @ key)
    return {"grad_query": torch.stack(grad_query), "grad_key": grad_key, "grad_value": grad_value}


Pairs = Iterator[tuple[Tensor, Tensor]]  # what was found and what is exact


def _largest_errors(pairs: Pairs) -> tuple[float, float]:
    """The largest absolute error, and the largest relative error in the L2 norm. Infinite after a NaN."""
    largest = relative = 0.0
    for found, exact in pairs:
        if found.isnan().any():
            return math.inf, math.inf
        error = found.to(exact.device, torch.float64) - exact
        largest = max(largest, error.abs().max().item())
        relative = max(relative, (error.norm() / exact.norm()).item())
    return largest, relative


def _gradients(call: Call, buffers: Buffers, device: str) -> Pairs:
    batches, heads, group = call.batch, call.kv_heads, call.group_size
    chosen = {(0, 0), (batches - 1, heads - 1)}
    if batches * call.q_heads * call.kv_len * call.q_len <= MOST_SCORES:
        chosen = {(batch, head) for batch in range(batches) for head in range(heads)}
    for batch, head in chosen:
        for name, exact in gradients(call, buffers, batch, head, device).items():
            mine = slice(head * group, (head + 1) * group) if name == "grad_query" else head
            yield buffers[name][batch, mine], exact


def _rotated(call: Call, buffers: Buffers, device: str) -> Pairs:
    """out and the rows in the caches."""
    made = {name: one.to(device) for name, one in buffers.items()}
    slots = made.get("slot_mapping", torch.arange(call.q_len, device=device)).flatten()

    def rotated(name: str) -> Tensor:
        x = made[name].double()
        if call.norms:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * made[f"{name}_norm"].double()
        y, z = x.chunk(2, -1)
        return x * made["cos"].double() + torch.cat((-z, y), -1) * made["sin"].double()

    yield made["out"], rotated("query")
    for name, exact in (("key", rotated("key")), ("value", made["value"].double())):
        yield made[f"{name}_cache"].flatten(0, 1)[slots].transpose(0, 1)[None], exact


def errors(call: Call, buffers: Buffers, out_rows_first: bool, device: str) -> tuple[float, float]:
    """Returns the largest absolute error, and the relative error in the L2 norm."""
    if call.is_backward:
        return _largest_errors(_gradients(call, buffers, device))
    if call.is_rotary:
        return _largest_errors(_rotated(call, buffers, device))
    batches, heads = call.batch, call.q_heads
    chosen = {(0, 0), (batches - 1, heads - 1), (batches // 2, heads // 2), (0, heads - 1)}
    if batches * heads * call.kv_len * call.q_len <= MOST_SCORES:
        chosen = {(batch, head) for batch in range(batches) for head in range(heads)}
    if call.is_delta:
        return _largest_errors(delta.compared(buffers, chosen, device))
    out = buffers.get("out_float32", buffers["out"])
    if out_rows_first:
        out = out.view(batches, call.q_len, heads, call.head_dim).transpose(1, 2)
    if out.isnan().any():
        return math.inf, math.inf
    largest = difference = norm = 0.0
    for batch, head in chosen:
        expected = reference(call, buffers, batch, head, device)
        error = out[batch, head].to(device, torch.float64) - expected
        largest = max(largest, error.abs().max().item())
        difference += error.square().sum().item()
        norm += expected.square().sum().item()
    return largest, math.sqrt(difference / norm)
