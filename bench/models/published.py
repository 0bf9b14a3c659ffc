"""The fastest published measurement of each kind and chip (published.csv), none by this project, to compare
with the bounds.

The rate of a prefill counts the operations on visible pairs (half of a causal square), that of a decode the
bytes of keys and values, once per key-value head. `products` are 8x8x8 simdgroup products, `tensor` those of
tensor operations, `read` is memory.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch_fattn.inspection.chips import Chip

FILE = Path(__file__).parent / "published.csv"
OF_MEMORY = ("decode", "read")
KINDS = ("prefill", "products", "tensor", *OF_MEMORY)


@dataclass(frozen=True)
class Measurement:
    kind: str
    chip: str
    library: str
    call: str
    dtype: str
    rate: float  # TFLOP/s, or GB/s for decode and read
    unit: str
    source: str


def load() -> list[Measurement]:
    with FILE.open(newline="") as file:
        return [Measurement(rate=float(line.pop("rate")), **line) for line in csv.DictReader(file)]


def _figure(chip: Chip, kind: str) -> float | None:
    """What a measurement of this kind cannot exceed. A prefill may use the units of tensor operations."""
    if kind in OF_MEMORY:
        return chip.ram_gb_s
    limit = chip.products
    if kind != "products" and chip.tensor_operations:
        limit = chip.tensor_operations
    return limit / 1e12 if limit else None


def beaten(chips: Iterable[Chip], measurements: Iterable[Measurement]) -> Iterator[str]:
    """Yields a message for each figure that a measurement exceeds."""
    known = {chip.name: chip for chip in chips}
    for measured in measurements:
        chip = known.get(measured.chip)
        if chip is None:
            continue
        figure = _figure(chip, measured.kind)
        if figure is not None and measured.rate > figure:
            yield (
                f"{chip.name}: {figure:.1f} {measured.unit} is not a bound: {measured.library} reaches "
                f"{measured.rate} ({measured.kind} {measured.call}, {measured.source})"
            )
