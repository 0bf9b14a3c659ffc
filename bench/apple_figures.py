"""Published figures of Apple GPUs, as bench/roofline.py uses them. None was measured by this project.

Sources: philipturner/metal-benchmarks (M1 and M2 families), the README of metal-flash-attention (M4), Apple's
specifications and third-party measurements quoted where they stand.
"""

from __future__ import annotations

from dataclasses import dataclass

# Per GPU core and cycle, M1 and M2 families. Later ones are not published.
PRODUCT_FMAS = 102.5  # of 8x8x8 simdgroup products with 16-bit operands; 101.7 in float32
EXPS = 32.0
ON_CORE_BYTES = 64.0  # threadgroup memory and L1 together
L2_BYTES = 32.0
ALU_FMAS = 128.0


@dataclass(frozen=True)
class Chip:
    name: str
    cores: int
    ram_gb_s: float | None  # None: not in our sources
    gigahertz: float | None = None  # None: unknown; limits per core and cycle are left out
    products_tflop_s: float | None = None  # given instead of computed
    family: int = 7  # Metal's number of the GPU family, for the planner
    per_core_known: bool = True
    note: str = ""

    @property
    def products(self) -> float | None:
        """FLOP/s of 8x8x8 products."""
        if self.products_tflop_s is not None:
            return self.products_tflop_s * 1e12
        if self.gigahertz is None:
            return None
        return 2 * PRODUCT_FMAS * self.cores * self.gigahertz * 1e9

    def per_cycle(self, amount: float) -> float | None:
        """A per-core, per-cycle figure for the whole GPU and a second."""
        if self.gigahertz is None or not self.per_core_known:
            return None
        return amount * self.cores * self.gigahertz * 1e9


CHIPS = (
    Chip("M1", 8, 68, 1.278),
    Chip("M1 Pro", 16, 200, 1.296),
    Chip("M1 Max", 32, 400, 1.296),
    Chip("M1 Ultra", 64, 680, 1.296, note="bandwidth as measured (mlx#3837); the specification says 800"),
    Chip("M2", 10, 100, 1.398, family=8),
    Chip("M2 Pro", 19, 200, 1.398, family=8),
    Chip("M2 Max", 38, 400, 1.398, family=8),
    Chip(
        "M3 Ultra",
        80,
        None,
        family=9,
        products_tflop_s=17.4,
        note="products: the peak of matrix products that MLX measured (Rapid-MLX#258)",
    ),
    Chip(
        "M4",
        10,
        120,
        1.398,
        family=9,
        per_core_known=False,
        note="from 3.58 TFLOP/s of ALU (metal-flash-attention README), products as 80 % of it like M1 and M2",
    ),
    Chip(
        "M5",
        10,
        153,
        family=10,
        note="bandwidth of the specification; 10 cores assumed, which only decides the number of splits",
    ),
    Chip(
        "M5 Pro",
        20,
        269,
        family=10,
        products_tflop_s=21.5,
        note="third-party microbenchmarks (mtlattn): bandwidth, and 16-bit simdgroup products without the "
        "matrix units; 20 cores assumed, which only decides the number of splits",
    ),
    Chip(
        "M5 Max",
        40,
        530,
        family=10,
        note="bandwidth as measured (mlx#3837); no published rate of simdgroup products",
    ),
)
UNPUBLISHED = "M3, M3 Pro, M3 Max, M4 Pro, M4 Max"
