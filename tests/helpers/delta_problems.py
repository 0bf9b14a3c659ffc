"""Seeded generators of gated_delta_rule and causal_conv1d calls. Memory around tokens is NaN, and so are
states that no sequence reads."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import torch_fattn
from tests.helpers.cache_problems import EVEN, deal
from tests.helpers.layouts import Operand, lay_out, spread, strided
from tests.helpers.problems import DTYPES, SHORT
from tests.helpers.tensors import same_bits
from torch_fattn import reference

# How hard numbers are: keys that repeat nearly, with beta near 1 or 2; decays of 0 to exp(-60), or of 0 and 1
# side by side.
KINDS = ("random", "random", "repeated", "reflecting", "strong", "mixed", "cleared", "still")
# With beta near 2, transformers' chunked functions are 20 times as far from float64 as their recurrence.
FARTHER = {"reflecting": 8}
LENGTHS = (1, 2, 7, 8, 9, 13, 16, 17, 24, 40, 61, 100, 0)
SEQUENCES = {
    "length": LENGTHS,
    "batch": (1, 2, 3),
    "packed": (False, False, True),
    "states": ("none", "each", "initial", "slots"),
}
# Another choice of these is another kernel module.
RULE_COMPILED: dict[str, tuple[Any, ...]] = {
    "dtype": DTYPES,
    "dims": ((8, 8), (32, 16), (40, 24), (64, 64), (24, 40), (128, 32), (16, 256), (256, 8)),
    "channel_decay": EVEN,
    "raw_gates": EVEN,
    "float_gates": EVEN,
}
RULE_CHOICES = RULE_COMPILED | SEQUENCES | {
    "heads": ((1, 1), (2, 1), (1, 3), (2, 2), (3, 1)),
    "kind": KINDS,
    "layout": ("contiguous", "token_major", "offset", "padded_rows", "every_other", "interleaved"),
    "l2norm": EVEN,
    "scale": (None, None, 0.3),
    "writes_state": (True, True, False),
}  # fmt: skip
CONV_COMPILED: dict[str, tuple[Any, ...]] = {"dtype": DTYPES, "taps": (4, 2, 3, 8), "float_weight": EVEN}
CONV_CHOICES = CONV_COMPILED | SEQUENCES | {
    "channels": (1, 31, 64, 100, 300),
    "spare_columns": (0, 1, 3),
    "layout": ("contiguous", "offset", "padded_rows", "every_other", "channels_first"),
    "biased": EVEN,
    "activation": ("none", "silu"),
}  # fmt: skip


class DeltaProblem(SimpleNamespace):
    """Has an index, an op, and one of each of its choices."""

    @property
    def rng(self) -> random.Random:
        return random.Random(self.index)

    @property
    def lengths(self) -> list[int]:
        """The tokens of each sequence."""
        if not self.packed:
            return [self.length] * self.batch
        return [self.rng.choice((0, 1, self.length // 2, self.length)) for _ in range(self.batch + 1)]

    @property
    def tokens(self) -> tuple[int, int]:
        """Batch and length. Packed tokens are followed by some of no sequence."""
        return (1, sum(self.lengths) + self.index % 3) if self.packed else (self.batch, self.length)

    def __str__(self) -> str:
        sizes = "x".join(map(str, (*self.tokens, *getattr(self, "dims", ()))))
        what = getattr(self, "kind", getattr(self, "activation", ""))
        return f"{self.index:03}-{SHORT[self.dtype]}-{sizes}-{what}-{self.states}-{self.layout}"


def draw(op: str, count: int, seed: int = 0) -> list[DeltaProblem]:
    choices, compiled = {
        "gated_delta_rule": (RULE_CHOICES, RULE_COMPILED),
        "causal_conv1d": (CONV_CHOICES, CONV_COMPILED),
    }[op]
    return [DeltaProblem(op=op, **one) for one in deal(choices, compiled, count, seed)]


def build(p: DeltaProblem) -> tuple[dict[str, Operand], dict[str, Any]]:
    """Operands and options."""
    generator = torch.Generator().manual_seed(p.index)
    operands, options = (_rule if p.op == "gated_delta_rule" else _convolution)(p, generator)
    sequences = len(p.lengths)
    if p.packed:
        ends = torch.tensor([0, *p.lengths]).cumsum(0)
        operands["cu_seqlens"] = spread(ends.to(torch.int32))
    if p.states == "none":
        return operands, options
    state = operands["state"]
    slots = list(range(sequences))
    if p.states == "slots":
        slots = [n if p.rng.random() < 0.8 else -1 for n in p.rng.sample(range(sequences + 2), sequences)]
        operands["slots"] = spread(torch.tensor(slots, dtype=torch.int32))
    begins = [p.states == "each" or p.rng.random() < 0.6 for _ in slots]
    if p.states != "each":
        operands["has_initial_state"] = Operand(torch.tensor(begins), (sequences,), (1,), 0)
    values = torch.full(state.size, torch.nan, dtype=state.base.dtype)
    for slot, has_state in zip(slots, begins, strict=True):
        if slot >= 0 and has_state:
            values[slot] = torch.randn(state.size[1:], generator=generator)
    state.holding(values)
    return operands, options


def _pool(p: DeltaProblem, *size: int, dtype: torch.dtype) -> Operand:
    states = len(p.lengths) + 2 * (p.states == "slots")
    return strided((states, *size), dtype, gaps={1: p.index % 2}, offset=p.index % 3)


def _rule(p: DeltaProblem, generator: torch.Generator) -> tuple[dict[str, Operand], dict[str, Any]]:
    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    (key_heads, group), (dim, value_dim) = p.heads, p.dims
    group = 1 if p.channel_decay else group
    heads = key_heads * group
    query, key = randn(2, *p.tokens, key_heads, dim)
    beta = torch.rand((*p.tokens, heads), generator=generator)
    columns = (dim,) if p.channel_decay else ()
    g = -torch.rand((*p.tokens, heads, *columns), generator=generator)
    if p.kind in ("repeated", "reflecting"):
        key = randn(p.tokens[0], 1, key_heads, dim) + 1e-3 * key
        beta = (1 if p.kind == "repeated" else 2) - 1e-3 * beta
        g = 1e-3 * g
    of_kind = {
        "strong": g * 60,
        "mixed": g * torch.where(torch.rand(g.shape, generator=generator) < 0.3, 200.0, 0.0),
        "cleared": torch.where(torch.rand(g.shape, generator=generator) < 0.2, -torch.inf, g),
        "still": g * 0,
    }
    g = of_kind.get(p.kind, g)
    if p.l2norm:  # lengths near the epsilon of the norm, too
        query, key = query * p.rng.choice((1e-3, 1.0, 30.0)), key * p.rng.choice((1e-3, 1.0, 30.0))
    else:
        key = torch.nn.functional.normalize(key, dim=-1)
    operands: dict[str, Operand] = {}
    if p.raw_gates:
        operands["A_log"] = spread(randn(heads))
        operands["dt_bias"] = spread(randn(heads, *columns))
        g, beta = torch.where(g.isinf(), torch.inf, 2 * randn(*g.shape)), 3 * randn(*beta.shape)
    gates = torch.float32 if p.float_gates else p.dtype
    numbers = {"query": query, "key": key, "value": randn(*p.tokens, heads, value_dim)}
    numbers = {name: each.to(p.dtype) for name, each in numbers.items()}
    numbers |= {"g": g.to(gates), "beta": beta.to(gates)}
    if p.layout == "interleaved":
        operands |= _interleaved(numbers, key_heads, group, gates)
    else:
        operands |= {name: _tokens(each, p.layout) for name, each in numbers.items()}
    if p.states != "none":
        operands["state"] = _pool(p, heads, dim, value_dim, dtype=torch.float32)
    return operands, {
        "scale": p.scale,
        "use_qk_l2norm_in_kernel": p.l2norm,
        "writes_state": p.writes_state,
    }


def _tokens(values: Tensor, layout: str) -> Operand:
    """`values`: [batch, length, heads, columns], or without columns."""
    if values.dim() == 3:
        each = _tokens(values[..., None], layout)
        return Operand(each.base, each.size[:-1], each.stride[:-1], each.offset)
    return lay_out(values.transpose(1, 2), layout).permuted(0, 2, 1, 3)


def _interleaved(
    numbers: dict[str, Tensor], key_heads: int, group: int, gates: torch.dtype
) -> dict[str, Operand]:
    """Views of two projections, [batch, length, key heads, ..], as Qwen3-Next has them: value heads are two
    dimensions."""
    operands = {}
    for names in (("query", "key", "value"), ("beta", "g")):
        parts = {name: numbers[name].unflatten(2, (key_heads, -1)) for name in names}
        joined = torch.cat([each.flatten(3) for each in parts.values()], -1)
        begin = 0
        for name, each in parts.items():
            size = each.shape if name not in ("query", "key") else each.flatten(3).shape
            inner = torch.empty(each.shape[3:]).stride() if name not in ("query", "key") else (1,)
            operands[name] = Operand(joined, tuple(size), (*joined.stride()[:3], *inner), begin)
            begin += each.flatten(3).shape[3]
    return {name: Operand(o.base.flatten(), o.size, o.stride, o.offset) for name, o in operands.items()}


def _convolution(p: DeltaProblem, generator: torch.Generator) -> tuple[dict[str, Operand], dict[str, Any]]:
    def randn(*size: int, dtype: torch.dtype = p.dtype) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    weights = torch.float32 if p.float_weight else p.dtype
    x = randn(*p.tokens, p.channels)
    if p.layout == "channels_first":
        operands = {"x": strided(x.shape, p.dtype, order=(0, 2, 1)).holding(x)}
    else:
        operands = {"x": Operand(*_squeezed(lay_out(x[:, None], p.layout)))}
    operands["weight"] = spread(randn(p.channels, p.taps, dtype=weights))
    if p.biased:
        operands["bias"] = spread(randn(p.channels, dtype=weights))
    if p.states != "none":
        operands["state"] = _pool(p, p.channels, p.taps - 1 + p.spare_columns, dtype=p.dtype)
    return operands, {"activation": p.activation}


def _squeezed(each: Operand) -> tuple[Tensor, tuple[int, ...], tuple[int, ...], int]:
    """Without dimension 1."""
    return each.base, (each.size[0], *each.size[2:]), (each.stride[0], *each.stride[2:]), each.offset


class Case:
    """A call, and what it must compute: in float32, which the CPU runs as a recurrence, and in float64."""

    def __init__(self, p: DeltaProblem) -> None:
        self.problem, (self.operands, self.options) = p, build(p)
        arguments = self.arguments(self.bases())
        single = {n: x.float() if x.is_floating_point() else x for n, x in arguments.items()}
        double = dict(arguments)
        for call, dtype in ((single, torch.float32), (double, torch.float64)):
            if "state" in call:
                call["state"] = call["state"].to(dtype, copy=True)
        recurrent = getattr(torch_fattn, p.op)(**single, **self.options)
        exact = getattr(reference, p.op)(**double, **self.options)
        self.expected = [(recurrent, exact)]
        if "state" in arguments:
            self.expected.append((single["state"], double["state"]))

    def bases(self, device: str = "cpu") -> dict[str, Tensor]:
        return {name: each.base.to(device, copy=True) for name, each in self.operands.items()}

    def arguments(self, bases: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: each.of(bases[name]) for name, each in self.operands.items()}

    def readable(self, arguments: dict[str, Tensor]) -> dict[str, Tensor]:
        """As the kernels are given them."""
        copied = {"A_log", "dt_bias", "weight", "bias", "slots", "cu_seqlens", "has_initial_state"}
        columns = ("query", "key", "value", *(["g"] if getattr(self.problem, "channel_decay", False) else []))
        copied |= {n for n in columns if n in arguments and arguments[n].stride(-1) != 1}
        return {n: x.contiguous() if n in copied else x for n, x in arguments.items()}

    def check(self, out: Tensor, bases: dict[str, Tensor]) -> None:
        """`bases`: after the call."""
        written = self.arguments(bases)
        assert out.dtype == self.problem.dtype
        for mine, expected in zip((out, written.get("state")), self.expected, strict=False):
            assert mine is not None
            assert_close(mine, *expected, FARTHER.get(getattr(self.problem, "kind", ""), 2))
        before = self.bases()
        if "state" in bases and self.options.get("writes_state", True):
            for each in (before, bases):
                self.arguments(each)["state"].fill_(0)
        assert all(same_bits(bases[name], each) for name, each in before.items()), "written elsewhere"


def run_and_check(p: DeltaProblem, device: str) -> None:
    """Runs the call twice, and checks the second result, whose memory was NaN."""
    case = Case(p)
    for _ in range(2):
        bases = case.bases(device)
        result = getattr(torch_fattn, p.op)(**case.arguments(bases), **case.options)
        out = result.cpu().clone()
        result.fill_(torch.nan)
    case.check(out, {name: base.cpu() for name, base in bases.items()})


def assert_close(mine: Tensor, recurrent: Tensor, exact: Tensor, farther: float = 2) -> None:
    """At most this many times as far from the exact numbers as the recurrence in float32 is, but for the
    rounding of the result: both serve the tokens of one generation."""
    assert mine.shape == exact.shape
    if not exact.numel():
        return
    error, other = ((exact - each.double()).abs().nan_to_num(0) for each in (mine, recurrent))
    info = torch.finfo(mine.dtype)
    rounding = exact.abs().nan_to_num(0) * info.eps / 2 + info.smallest_normal / 1024
    limit = farther * other.max() + 1e-6 * exact.abs().nan_to_num(0).max() + rounding
    assert (error <= limit).all(), f"{error.max()} beside {other.max()}"
    assert torch.equal(mine.isnan(), exact.isnan())
