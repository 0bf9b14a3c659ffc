"""Seeded generators of calls of the operators of linear attention. Memory around operands is NaN, and so are
states that no sequence reads."""

from __future__ import annotations

import math
import random
from functools import cached_property
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import torch_fattn
from tests.helpers.cache_problems import EVEN, Arguments, WriteCase, deal
from tests.helpers.layouts import Operand, spread, strided
from tests.helpers.problems import DTYPES, SHORT
from tests.helpers.tensors import same_bits
from torch_fattn import reference

RULE, STEP, CONV = "gated_delta_rule", "gated_delta_step", "causal_conv1d"
STATES, NEW = ("conv_state", "state"), "conv_state_out"
# How hard numbers are: keys that repeat nearly, with beta near 1 or 2; decays of 0 to exp(-60), or of 0 and 1
# side by side.
KINDS = ("random", "random", "repeated", "reflecting", "strong", "mixed", "cleared", "still")
# With beta near 2, transformers' chunked functions are 20 times as far from float64 as their recurrence.
FARTHER = {"reflecting": 8}
SEQUENCES = {
    "length": (1, 2, 7, 8, 9, 13, 16, 17, 24, 40, 61, 100, 0),
    "batch": (1, 2, 3),
    "packed": (False, False, True),
    "states": ("none", "each", "initial", "slots"),
}
# Another choice of these is another kernel module.
COMPILED: dict[str, dict[str, tuple[Any, ...]]] = {
    RULE: {
        "dtype": DTYPES,
        "dims": ((8, 8), (32, 16), (40, 24), (64, 64), (24, 40), (128, 32), (16, 256), (256, 8)),
        "channel_decay": EVEN,
        "raw_gates": EVEN,
        "float_gates": EVEN,
    },
    # Columns of key and value: heads side by side in a threadgroup, a head for each, and heads in rounds of
    # columns.
    STEP: {
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
    },
    CONV: {"dtype": DTYPES, "taps": (4, 2, 3, 8), "float_weights": EVEN},
}
OPTIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    RULE: {
        "use_qk_l2norm_in_kernel": EVEN,
        "scale": (None, None, 0.3),
        "writes_state": (True, True, False),
    },
    STEP: {"gate": ("silu", "sigmoid"), "writes_state": (True, True, False), "eps": (1e-5,)},
    CONV: {"activation": ("none", "silu")},
}
OTHERS: dict[str, dict[str, tuple[Any, ...]]] = {
    RULE: {
        **SEQUENCES,
        "heads": ((1, 1), (2, 1), (1, 3), (2, 2), (3, 1)),
        "kind": KINDS,
        "layout": ("contiguous", "transposed", "offset", "padded_rows", "every_other", "interleaved"),
    },
    STEP: {
        "batch": (1, 2, 3),
        "length": (1, 1, 1, 2, 3, 5, 16),
        "key_heads": (1, 2, 3),
        "layout": ("interleaved", "joined", "contiguous", "every_other"),
        "spare_columns": (0, 1, 5),
        "states": ("each", "slots"),
        "has_counts": EVEN,
        "moves": EVEN,  # has NEW
        "has_bias": EVEN,
        "kind": ("random", "repeated", "still", "cleared"),
    },
    CONV: {
        **SEQUENCES,
        "channels": (1, 31, 64, 100, 300),
        "spare_columns": (0, 1, 3),
        "layout": ("contiguous", "transposed", "offset", "padded_rows", "every_other"),
        "has_bias": EVEN,
    },
}


class LinearProblem(SimpleNamespace):
    """Has an index, an op, and one of each of its choices."""

    packed = channel_decay = raw_gates = has_counts = moves = False
    writes_state = True
    kind = "random"

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
    def ends(self) -> list[int]:
        """Where packed sequences begin and end. Tokens before the first are of no sequence."""
        return [*accumulate(self.lengths, initial=self.index // 3 % 3 * 9)]

    @property
    def tokens(self) -> tuple[int, int]:
        """Batch and length. Packed tokens are followed by some of no sequence."""
        return (1, self.ends[-1] + self.index % 3) if self.packed else (self.batch, self.length)

    @property
    def value_heads(self) -> int:
        return int(self.key_heads * self.group)

    @property
    def options(self) -> Arguments:
        options = {name: getattr(self, name) for name in OPTIONS[self.op]}
        return options if self.op != STEP or self.has_bias else options | {"conv_bias": None}

    def __str__(self) -> str:
        sizes = "x".join(map(str, (*self.tokens, *getattr(self, "dims", ()))))
        decay = "-kda" if self.channel_decay else ""
        return f"{self.index:03}-{SHORT[self.dtype]}{decay}-{sizes}-{self.kind}-{self.states}-{self.layout}"


def draw(op: str, count: int, seed: int = 0) -> list[LinearProblem]:
    drawn = deal(COMPILED[op] | OTHERS[op] | OPTIONS[op], COMPILED[op], count, seed)
    for one in drawn:
        if op == RULE:
            one["key_heads"], one["group"] = one.pop("heads")
        if one.get("channel_decay"):
            one["group"] = 1
        if op == STEP:
            one["raw_gates"] = True
    return [LinearProblem(op=op, **one) for one in drawn]


class Case(WriteCase):
    @cached_property
    def expected(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The result and the states after the call: in float32, which the CPU runs as a recurrence, and
        exact."""
        op = self.problem.op
        single, double = (self.arguments("cpu")[0] for _ in range(2))
        for name, each in single.items():
            single[name] = each.float() if isinstance(each, Tensor) and each.is_floating_point() else each
        double |= {name: double[name].double() for name in (NEW, *STATES) if name in double}
        single["out"] = getattr(torch_fattn, op)(**single)
        double["out"] = getattr(reference, op)(**double)
        return {name: (single[name], double[name]) for name in ("out", NEW, *STATES) if name in double}

    def check(self, out: Tensor, bases: dict[str, Tensor]) -> None:
        """The result, and all memory of the operands after the call: the states of the sequences are new, and
        nothing else."""
        p = self.problem
        assert out.dtype == p.dtype and out.is_contiguous()
        assert not out[(self.expected["out"][1] == 0).all(-1)].any()
        found = {"out": out}
        for name, operand in self.operands.items():
            base = bases[name].cpu().clone()
            if name in (NEW, *STATES):
                found[name] = operand.of(base).clone()
                if p.writes_state and not (p.moves and name == "conv_state"):
                    operand.of(base).copy_(operand.of(operand.base))
            assert same_bits(base, operand.base), f"{name} was written"
        for name, mine in found.items():
            assert_close(mine, *self.expected[name], FARTHER.get(p.kind, 2))


def build(p: LinearProblem) -> Case:
    generator = torch.Generator().manual_seed(p.index)

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    weights = torch.float32 if getattr(p, "float_weights", False) else p.dtype
    operands: dict[str, Operand] = {}
    pools: dict[str, tuple[Any, ...]] = {}
    if p.op == CONV:
        channels = p.channels
        operands["x"] = _laid_out(randn(*p.tokens, channels).to(p.dtype), p.layout)
    else:
        channels = 2 * p.key_heads * p.dims[0] + p.value_heads * p.dims[1]
        operands |= _tokens(p, randn)
        pools["state"] = (torch.float32, p.value_heads, *p.dims)
    if p.raw_gates:
        rates = randn(p.value_heads).sigmoid().mul(16).log()
        operands["A_log"] = spread(rates.to(torch.float32 if p.float_gates else p.dtype))
        operands["dt_bias"] = spread(randn(p.value_heads, *p.dims[: p.channel_decay]).to(weights))
    if p.op != RULE:
        prefix = "conv_" if p.op == STEP else ""
        operands[f"{prefix}weight"] = spread(randn(channels, p.taps).to(weights))
        if p.has_bias:
            operands[f"{prefix}bias"] = spread(randn(channels).to(weights))
        pools[f"{prefix}state"] = (p.dtype, channels, p.taps - 1 + p.spare_columns)
    if p.moves:
        pools[NEW] = pools["conv_state"]
    if p.op == STEP:
        operands["norm_weight"] = spread(randn(p.dims[1]).to(weights))
    if p.has_counts:
        operands["counts"] = spread(torch.randint(0, p.length + 1, (p.batch,), generator=generator).int())
    if p.packed:
        operands["cu_seqlens"] = spread(torch.tensor(p.ends, dtype=torch.int32))
    if p.states != "none":
        operands |= _states(p, pools, randn)
    return Case(p, operands)


def call_of(op: str, device: str, **changes: Any) -> Arguments:
    """Arguments of a call of two sequences, of its own memory."""
    kept = {"batch": 2, "length": 6, "key_heads": 2, "packed": False, "states": "each", "has_counts": False}
    kept |= {"layout": "joined", "kind": "random", "writes_state": True, "raw_gates": op != CONV}
    kept["moves"] = False
    return build(LinearProblem(**vars(draw(op, 1)[0]) | kept | changes)).arguments(device)[0]


def _states(p: LinearProblem, pools: dict[str, tuple[Any, ...]], randn: Any) -> dict[str, Operand]:
    """Pools of states, and which of them sequences have."""
    operands, rng = dict[str, Operand](), p.rng
    sequences = len(p.lengths)
    count = sequences + 2 * (p.states == "slots")
    slots, begins = [*range(sequences)], [True] * sequences
    if p.states == "slots":
        slots = rng.sample(range(count), sequences)
        skips = p.rng.random() < 0.7
        slots[:skips] = [(-1, -7, count, 2**31 - 1)[p.index % 4]] * skips
        operands["slots"] = spread(torch.tensor(slots, dtype=torch.int32))
    if p.states != "each" and p.op != STEP:
        begins = [rng.random() < 0.6 for _ in slots]
        operands["has_initial_state"] = Operand(torch.tensor(begins), (sequences,), (1,), 0)
    for name, (dtype, *size) in pools.items():
        operands[name] = strided((count, *size), dtype, gaps={1: p.index % 2}, offset=p.index % 3)
        values = torch.full((count, *size), torch.nan)
        for slot, has_state in zip(slots, begins, strict=True):
            if 0 <= slot < count and has_state and name != NEW:
                values[slot] = randn(*size)
        operands[name].holding(values)
    return operands


def _tokens(p: LinearProblem, randn: Any) -> dict[str, Operand]:
    """query, key, value, z of a step, and gates, alone or as views of projections."""
    dim, value_dim = p.dims
    outer, keys, heads = p.tokens, (p.key_heads,), (p.value_heads,)
    if p.layout == "interleaved":  # as in Qwen3-Next: [.., key heads, parts of each]
        outer, keys, heads = (*outer, p.key_heads), (), (p.group,)
    parts: dict[str, tuple[int, ...]] = {"query": (*keys, dim), "key": (*keys, dim)}
    parts["value"] = (*heads, value_dim)
    g, beta = ("a", "b") if p.op == STEP else ("g", "beta")
    if p.op == STEP:
        parts["z"] = parts["value"]
    gates = {beta: heads, g: (*heads, *[dim] * p.channel_decay)}
    values = {name: randn(*outer, *shape) for name, shape in (parts | gates).items()}
    if p.kind in ("repeated", "reflecting"):
        values["key"] = randn(*values["key"].shape[2:]) + 1e-3 * values["key"]
    if p.op == RULE and p.use_qk_l2norm_in_kernel:  # lengths near the epsilon of the norm, too
        values |= {name: values[name] * p.rng.choice((1e-3, 1.0, 30.0)) for name in ("query", "key")}
    elif p.op == RULE:
        values["key"] = torch.nn.functional.normalize(values["key"], dim=-1)
    values |= dict(zip((g, beta), _gates(p, values[g], values[beta]), strict=True))
    for name, x in values.items():
        values[name] = x.to(torch.float32 if p.float_gates and name in gates else p.dtype)
    if p.layout in ("interleaved", "joined"):
        return _views(p, values, parts) | _views(p, values, gates)
    return {name: _laid_out(x, p.layout) for name, x in values.items()}


def _gates(p: LinearProblem, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Makes gates of normal numbers."""
    repeats = p.kind in ("repeated", "reflecting")
    if p.raw_gates:
        raw = {"cleared": torch.where(g > 1, torch.inf, g), "still": 2 * g - 8}
        return raw.get(p.kind, 2 * g), 8 + beta.abs() if repeats else 3 * beta
    decay, beta = -g.sigmoid(), beta.sigmoid()
    if repeats:
        return 1e-3 * decay, (1 if p.kind == "repeated" else 2) - 1e-3 * beta
    of_kind = {
        "strong": decay * 60,
        "mixed": torch.where(g > 0.5, 200 * decay, 0.0),
        "cleared": torch.where(g > 1, -torch.inf, decay),
        "still": decay * 0,
    }
    return of_kind.get(p.kind, decay), beta


def _laid_out(values: Tensor, layout: str) -> Operand:
    """`values`: [batch, length, ..]; transposed, heads or channels lie before tokens."""
    last = values.dim() - 1
    ways: dict[str, dict[str, Any]] = {
        "transposed": {"order": (0, 2, 1, *range(3, values.dim()))},
        "offset": {"offset": 3},
        "padded_rows": {"offset": 8, "gaps": {last: 4}},
        "every_other": {"offset": 1, "step": 2},
    }
    return strided(values.shape, values.dtype, **ways.get(layout, {})).holding(values)


def _views(
    p: LinearProblem, values: dict[str, Tensor], parts: dict[str, tuple[int, ...]]
) -> dict[str, Operand]:
    """Views of one projection. A step, and every other problem, has a NaN behind each row, so that no row
    but the first is aligned."""
    sizes = {name: math.prod(shape) for name, shape in parts.items()}
    width = sum(sizes.values()) + (p.op == STEP or p.index % 2)
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
