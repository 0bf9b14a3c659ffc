"""A seeded generator of gated_delta_step calls. Memory around operands, and the states of no sequence, are
NaN."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import torch_fattn
from tests.helpers.cache_problems import EVEN, Arguments, WriteCase, deal
from tests.helpers.delta_problems import assert_close
from tests.helpers.layouts import Operand, flat, spread, strided
from tests.helpers.problems import DTYPES, SHORT
from tests.helpers.tensors import same_bits
from torch_fattn import reference

STATES = ("conv_state", "state")
# Another choice of these is another kernel module. Columns of key and value: heads side by side in a
# threadgroup, a head for each, and heads in rounds of columns.
COMPILED: dict[str, tuple[Any, ...]] = {
    "dtype": DTYPES,
    "dims": (
        *((8, 8), (16, 40), (64, 64), (128, 128), (72, 56)),
        *((96, 136), (64, 256), (136, 96), (256, 256)),
    ),
    "taps": (2, 3, 4, 4, 4, 8),
    "channel_decay": EVEN,
    "float_gates": EVEN,
    "float_weights": EVEN,
    "group": (1, 2, 3, 4, 4),
}
CHOICES = COMPILED | {
    "batch": (1, 2, 3),
    "length": (1, 1, 1, 2, 3, 5, 16),
    "key_heads": (1, 2, 3),
    "layout": ("interleaved", "packed", "contiguous", "every_other"),
    "spare_columns": (0, 1, 5),
    "state_layout": ("contiguous", "padded", "offset"),
    "has_slots": EVEN,
    "has_counts": EVEN,
    "has_bias": EVEN,
    "gate": ("silu", "sigmoid"),
    "writes_state": (True, True, False),
    "kind": ("random", "repeated", "slow", "cleared"),
}


class StepProblem(SimpleNamespace):
    """Has an index, and one of each of the choices."""

    @property
    def options(self) -> Arguments:
        options = {"gate": self.gate, "eps": 1e-5, "writes_state": self.writes_state}
        return options if self.has_bias else options | {"conv_bias": None}

    @property
    def value_heads(self) -> int:
        return int(self.key_heads * self.group)

    def __str__(self) -> str:
        dims = "x".join(map(str, self.dims))
        heads = f"B{self.batch}T{self.length}H{self.key_heads}x{self.group}W{self.taps}"
        kind = "kda" if self.channel_decay else "gdn"
        return f"{self.index:03}-{kind}-{SHORT[self.dtype]}-{dims}-{heads}-{self.layout}-{self.kind}"


def draw(count: int, seed: int = 0) -> list[StepProblem]:
    drawn = deal(CHOICES, COMPILED, count, seed)
    for one in drawn:
        one["group"] = 1 if one["channel_decay"] else one["group"]
    return [StepProblem(**one) for one in drawn]


def build(p: StepProblem) -> WriteCase:
    generator = torch.Generator().manual_seed(p.index)

    def randn(*shape: int, in_float: bool = True) -> Tensor:
        return torch.randn(shape, generator=generator).to(torch.float32 if in_float else p.dtype)

    dim, value_dim = p.dims
    heads, channels = p.value_heads, 2 * p.key_heads * dim + p.value_heads * value_dim
    operands = _tokens(p, randn)
    operands["A_log"] = spread(torch.rand(heads, generator=generator).mul(16).log())
    operands["dt_bias"] = spread(randn(heads, *[dim] * p.channel_decay))
    operands["conv_weight"] = flat(randn(channels, p.taps, in_float=p.float_weights))
    if p.has_bias:
        operands["conv_bias"] = flat(randn(channels, in_float=p.float_weights))
    operands["norm_weight"] = spread(randn(value_dim, in_float=p.float_weights))

    states = p.batch + 2 * p.has_slots
    slots = torch.randperm(states, generator=generator)[: p.batch].int()
    ways: dict[str, dict[str, Any]] = {"padded": {"gaps": {1: 1}}, "offset": {"offset": 1}}
    sizes = {
        "conv_state": (p.dtype, channels, p.taps - 1 + p.spare_columns),
        "state": (torch.float32, heads, dim, value_dim),
    }
    for name, (dtype, *size) in sizes.items():
        operands[name] = strided((states, *size), dtype, **ways.get(p.state_layout, {}))
        values = torch.full((states, *size), torch.nan)
        of_sequences = slots.long() if p.has_slots else slice(None)
        values[of_sequences] = randn(p.batch, *size)
        operands[name].holding(values)
    if p.has_slots:
        slots[p.index % (p.batch + 1) :][:1] = (-1, -7, states, 2**31 - 1)[p.index % 4]  # skips one, or none
        operands["slots"] = spread(slots)
    if p.has_counts:
        counts = torch.randint(0, p.length + 1, (p.batch,), generator=generator)
        operands["counts"] = spread(counts.int())
    return WriteCase(p, operands)


def _tokens(p: StepProblem, randn: Any) -> dict[str, Operand]:
    """query, key, value, z, a and b, alone or as views of projections."""
    dim, value_dim = p.dims
    split = p.layout == "interleaved"  # as in Qwen3-Next: [.., key heads, parts of each]
    heads = (p.group,) if split else (p.value_heads,)
    keys = () if split else (p.key_heads,)
    parts: dict[str, tuple[int, ...]] = {"query": (*keys, dim), "key": (*keys, dim)}
    parts |= {"value": (*heads, value_dim), "z": (*heads, value_dim)}
    gates = {"b": heads, "a": (*heads, *[dim] * p.channel_decay)}
    values = {}
    for name, shape in (parts | gates).items():
        x = randn(p.batch, p.length, *[p.key_heads] * split, *shape)
        if p.kind == "repeated" and name in ("key", "b"):  # nearly the same keys, beta near 1
            x = randn(*x.shape[2:]) + 1e-3 * x if name == "key" else 8 + x.abs()
        if p.kind == "slow" and name == "a":
            x = -8 + x
        if p.kind == "cleared" and name == "a":
            x[x > 1] = math.inf  # g is -inf
        values[name] = x.to(torch.float32 if p.float_gates and name in gates else p.dtype)
    if p.layout in ("contiguous", "every_other"):
        step = 2 if p.layout == "every_other" else 1
        return {
            name: strided(x.shape, x.dtype, step=step, offset=step - 1).holding(x)
            for name, x in values.items()
        }
    return _views(values, parts) | _views(values, gates)


def _views(values: dict[str, Tensor], parts: dict[str, tuple[int, ...]]) -> dict[str, Operand]:
    """Views of one projection, with a NaN behind each row, so that no row but the first is aligned."""
    sizes = {name: math.prod(shape) for name, shape in parts.items()}
    width = sum(sizes.values()) + 1
    first = values[[*parts][0]]
    outer = first.shape[: first.dim() - len(parts[[*parts][0]])]
    base = torch.full((math.prod(outer) * width,), torch.nan, dtype=first.dtype)
    found, offset = {}, 0
    for name, shape in parts.items():
        strides = torch.empty(outer, device="meta").stride(), torch.empty(shape, device="meta").stride()
        stride = (*(width * step for step in strides[0]), *strides[1])
        found[name] = Operand(base, (*outer, *shape), stride, offset).holding(values[name])
        offset += sizes[name]
    return found


Expected = dict[str, tuple[Tensor, Tensor]]


def expected(case: WriteCase) -> Expected:
    """The result and the states after the call: by the recurrence in float32, and exact."""
    single, double = (case.arguments("cpu")[0] for _ in range(2))
    for name, each in single.items():
        single[name] = each.float() if isinstance(each, Tensor) and each.is_floating_point() else each
    double |= {name: double[name].double() for name in STATES}
    single["out"] = torch_fattn.gated_delta_step(**single)
    double["out"] = reference.gated_delta_step(**double)
    return {name: (single[name], double[name]) for name in ("out", *STATES)}


def check(case: WriteCase, out: Tensor, memory: dict[str, Tensor], right: Expected) -> None:
    """The result, and all memory of the operands after the call: the states of the sequences are new, and
    nothing else."""
    assert out.dtype == case.problem.dtype and out.is_contiguous()
    assert not out[(right["out"][1] == 0).all(-1)].any()
    found = {"out": out}
    for name, operand in case.operands.items():
        base = memory[name].cpu().clone()
        if name in STATES:
            found[name] = operand.of(base).clone()
            operand.of(base).copy_(operand.of(operand.base))
        assert same_bits(base, operand.base), name
    for name, mine in found.items():
        assert_close(mine, *right[name])
