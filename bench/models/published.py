"""Published measurements on Apple GPUs (published.csv), none by this project, to compare with the bounds.

The rate of a prefill counts the operations on visible pairs (half of a causal square), that of a decode the
bytes of keys and values, once per key-value head. `products` are 8x8x8 simdgroup products, `tensor` those of
tensor operations, `read` is memory.

`timing` says what a time holds: "queued" (many calls without a wait), "waited" (one call, and the wait for
it) or "difference" (of two times of a program, so no launch). `unusable` says why a row cannot check the
model in cost.py. Both follow from the source, and were written before any error was known.
"""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from torch_fattn.inspection.chips import Chip

from ..cases.calls import Call

FILE = Path(__file__).parent / "published.csv"
OF_MEMORY = ("decode", "read")
KINDS = ("prefill", "products", "tensor", *OF_MEMORY)
TIMINGS = ("queued", "waited", "difference")
_CALL = re.compile(
    r"B(\d+) (\d+)/(\d+)x(\d+) (?:(?P<rows>\d+)x(?P<all>\d+)|(?:q=(?P<last>\d+) )?N=(?P<keys>\d+))( causal)?"
)
DTYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}


@dataclass(frozen=True)
class Measurement:
    kind: str
    chip: str
    library: str
    call: str
    dtype: str
    rate: float  # TFLOP/s, or GB/s for decode and read
    unit: str
    timing: str
    unusable: str
    source: str

    @property
    def name(self) -> str:
        return f"{self.kind} {self.chip} {self.library} {self.call} {self.dtype}"

    @property
    def held_out(self) -> bool:
        """Half of the rows, chosen by a digest of their names: no figure of the model is fitted to them."""
        return hashlib.sha256(self.name.encode()).digest()[0] % 2 == 1

    @property
    def attention(self) -> Call:
        """The call of a usable row."""
        match = _CALL.fullmatch(self.call)
        if match is None:
            raise ValueError(f"{self.name}: the call is not like 'B1 32/8x128 N=4096'; write it so")
        batch, q_heads, kv_heads, head_dim = map(int, match.groups()[:4])
        rows, keys = match["rows"] or match["last"] or 1, match["all"] or match["keys"]
        heads = (q_heads, kv_heads, head_dim, int(rows), int(keys), batch)
        return Call(self.kind, *heads, DTYPES[self.dtype], causal=self.call.endswith("causal"))

    @property
    def seconds(self) -> float:
        call = self.attention
        if self.kind == "prefill":
            pairs = call.q_len * call.kv_len * (0.5 if call.causal else 1.0)
            return 4 * call.batch * call.q_heads * pairs * call.head_dim / self.rate / 1e12
        return (call.least_bytes - call.row_bytes) / self.rate / 1e9


def load() -> list[Measurement]:
    with FILE.open(newline="") as file:
        return [Measurement(rate=float(line.pop("rate")), **line) for line in csv.DictReader(file)]


def read_share(chips: Iterable[Chip]) -> float:
    """The median share of the specified bandwidth that programs which only read or copy achieve."""
    specified = {chip.name: chip.ram_gb_s for chip in chips}
    shares = [one.rate / (specified[one.chip] or 1) for one in load() if one.kind == "read"]
    return median(shares)


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
