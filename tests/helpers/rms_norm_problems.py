"""A seeded generator of rms_norm calls. Memory around rows, gates and weights is NaN."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.helpers import logits_problems
from tests.helpers.cache_problems import EVEN, deal
from tests.helpers.layouts import Operand, spread
from tests.helpers.problems import DTYPES, SHORT
from torch_fattn import reference

# Columns that share a kernel: vectors and simdgroups of a row. The last are longer than one block.
WIDTHS = (
    *((1, 3, 128), (130, 200, 256), (257, 384, 512), (700, 896, 1021), (2048, 1536, 1025)),
    *((2560, 3584, 4095), (4097, 5376, 8192), (8193, 16384, 40000)),
)
# Another choice of these is another kernel module.
COMPILED: dict[str, tuple[Any, ...]] = {
    "dtype": DTYPES,
    "norm": ("rounded", "plus_one", "float"),
    "float_weight": EVEN,
    "float32_out": EVEN,
    "widths": WIDTHS,
}
CHOICES = COMPILED | {
    "outer": ((), (5,), (2, 3), (3, 1, 2), (2, 2, 3), (2, 1, 3, 2, 2)),
    "layout": logits_problems.LAYOUTS,
    "gate_layout": logits_problems.LAYOUTS,
    "has_weight": (True, True, True, False),
    "activation": ("none", "silu", "sigmoid"),
    "eps": (1e-6, 1e-5, 0.02),
}


class RmsNormProblem(SimpleNamespace):
    """Has an index, and one of each of the choices."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.outer, random.Random(self.index).choice(self.widths))

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.shape))
        return f"{self.index:03}-{SHORT[self.dtype]}-{sizes}-{self.norm}-{self.activation}-{self.layout}"


def draw(count: int, seed: int = 0) -> list[RmsNormProblem]:
    return [RmsNormProblem(**one) for one in deal(CHOICES, COMPILED, count, seed)]


def build(p: RmsNormProblem) -> tuple[dict[str, Operand], dict[str, Any]]:
    """Operands and options."""
    generator = torch.Generator().manual_seed(p.index)

    def randn(*size: int, dtype: torch.dtype = p.dtype) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    x = randn(*p.shape)
    rows = x.view(-1, p.shape[-1])
    rows[1:2], rows[2:3] = 0, rows[2:3] * 1e-4
    for row, number in ((3, torch.nan), (4, torch.inf), (5, torch.finfo(p.dtype).smallest_normal / 4)):
        rows[row : row + 1, -1] = number
    operands = {"x": logits_problems.lay_out(x, p.layout)}
    options = {"norm": p.norm, "eps": p.eps, "float32_out": p.float32_out}
    if p.has_weight:
        operands["weight"] = spread(randn(p.shape[-1], dtype=torch.float32 if p.float_weight else p.dtype))
    if p.activation != "none":
        operands["gate"] = logits_problems.lay_out(3 * randn(*p.shape), p.gate_layout)
        options["activation"] = p.activation
    return operands, options


def assert_close(mine: Tensor, arguments: dict[str, Any]) -> None:
    """Each rounding of the reference may fall differently, once; the result is rounded itself."""
    exact, dtype = reference.rms_norm(**arguments), arguments["x"].dtype
    assert mine.dtype == (torch.float32 if arguments["float32_out"] else dtype)
    assert mine.shape == exact.shape and mine.is_contiguous()
    assert torch.equal(mine.isnan(), exact.isnan())
    roundings = (arguments["norm"] == "rounded") * (1 + ("gate" in arguments))
    relative = roundings * torch.finfo(dtype).eps + torch.finfo(mine.dtype).eps / 2 + 4e-6
    subnormal = 2**-20 if dtype == torch.float16 else 1e-34
    error = (mine.double() - exact).abs().nan_to_num(0)
    assert (error <= relative * exact.abs().nan_to_num(0) + subnormal).all()
