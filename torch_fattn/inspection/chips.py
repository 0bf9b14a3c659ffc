"""Published figures of the chips' GPUs. None was measured by this project.

Sources: philipturner/metal-benchmarks (M1 and M2 families), Apple's specifications (memory), public GPU
databases (clocks of later chips), tzakharko.github.io/apple-neural-accelerators-benchmark (the units of M5
for matrix products), midudev/canirun.ai#26 (M6 and M5 Ultra, second-hand). Every figure is a hardware limit
(units times clock), not the rate of a program. tests/bench/test_apple_bounds.py compares each with the
measurements in published.csv.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

# Per GPU core and cycle, for the M1 and M2 families. Figures of later families are not published.
PRODUCT_FMAS = 102.5  # in 8x8x8 simdgroup products with 16-bit operands; 101.7 in float32
EXPS = 32.0
ON_CORE_BYTES = 64.0  # threadgroup memory and L1 together
L2_BYTES = 32.0
ALU_FMAS = 128.0
PRODUCT_FLOPS = 2 * 8 * 8 * 8
# Tensor operations in 16 bits, per GPU core and cycle: from a microbenchmark of an A19, which has M5's cores
# (7,500 GFLOP/s on 5 cores; Zakharko). All M5 clocks are its author's assumption for an M5 Max.
TENSOR_FLOPS = 1024.0
M5_GIGAHERTZ = 1.75


@dataclass(frozen=True)
class Chip:
    name: str
    cores: int
    ram_gb_s: float | None  # None: not published
    gigahertz: float | None = None  # None: not published, so limits per core and cycle are unknown
    alu_gigahertz: float | None = None  # the clock, if the ALU share of products is unknown
    tensor_gigahertz: float | None = None  # clock of the tensor units; None: no units, or not published (M6)
    # TFLOP/s of the fastest published attention on simdgroup products, where their limit is not published.
    simdgroup_attention: float | None = None
    family: int = 7  # Metal's GPU family, for the planner
    note: str = ""

    @property
    def products(self) -> float | None:
        """The limit of 8x8x8 products in FLOP/s."""
        if self.gigahertz is not None:
            return 2 * PRODUCT_FMAS * self.cores * self.gigahertz * 1e9
        if self.alu_gigahertz is not None:
            return 2 * ALU_FMAS * self.cores * self.alu_gigahertz * 1e9
        return None

    @property
    def tensor_operations(self) -> float | None:
        """The limit of tensor operations in 16 bits, in FLOP/s."""
        if self.tensor_gigahertz is None:
            return None
        return TENSOR_FLOPS * self.cores * self.tensor_gigahertz * 1e9

    def per_cycle(self, amount: float) -> float | None:
        """Converts a figure per core and cycle to one per second for the whole GPU."""
        if self.gigahertz is None:
            return None
        return amount * self.cores * self.gigahertz * 1e9


CHIPS = (
    Chip("M1", 8, 68, 1.278),
    Chip("M1 Pro", 16, 200, 1.296),
    Chip("M1 Max", 32, 400, 1.296),
    Chip("M1 Ultra", 64, 800, 1.296, note="a plain reduction reads 680 GB/s (mlx#3837)"),
    Chip("M2", 10, 100, 1.398, family=8),
    Chip("M2 Pro", 19, 200, 1.398, family=8),
    Chip("M2 Max", 38, 400, 1.398, family=8),
    Chip("M2 Ultra", 76, 800, 1.398, family=8, note="76 cores assumed; some have 60"),
    Chip(
        "M3 Ultra",
        80,
        819,
        family=9,
        alu_gigahertz=1.6,
        note="products: all ALUs of 80 cores at 1.600 GHz, the highest clock of an M3 in public GPU "
        "databases (others: 1.398); MLX's attention reaches 21.6 TFLOP/s (mlx#4330)",
    ),
    Chip(
        "M4",
        10,
        120,
        alu_gigahertz=1.47,
        family=9,
        note="products: all ALUs of 10 cores at 1.470 GHz (public GPU databases); the share that "
        "products can use is not published, and the 80 % of M1 and M2 is too low: MPSGraph's attention "
        "reaches 3.1 TFLOP/s (mps-sdpa 0.2)",
    ),
    Chip(
        "M5",
        10,
        153,
        tensor_gigahertz=M5_GIGAHERTZ,
        family=10,
        note="bandwidth from the specification; 10 cores assumed, for tensor units and the number of splits",
    ),
    Chip(
        "M5 Pro",
        20,
        307,
        tensor_gigahertz=M5_GIGAHERTZ,
        simdgroup_attention=7.1,
        family=10,
        note="bandwidth from the specification: MLX's decode reads 282 GB/s (mlx#4076), more than a copy "
        "(269, mtlattn). Simdgroup products: attention reaches 7.1 TFLOP/s (torch 2.13, by mtlattn), a loop "
        "of float32 products 32.0, one of 16-bit products 21.5 (mtlattn), more than ALUs do by Zakharko's "
        "figures; the limit is not published. Tensor operations: a matrix product reaches 32.2 (pie), MLX's "
        "attention 17 (pie)",
    ),
    Chip(
        "M5 Max",
        40,
        614,
        tensor_gigahertz=M5_GIGAHERTZ,
        simdgroup_attention=13.1,
        family=10,
        note="bandwidth from the specification, 530 GB/s measured (mlx#3837). Simdgroup products: attention "
        "reaches 13.1 TFLOP/s (xwen); the limit is not published. Tensor operations: MLX's attention reaches "
        "50 (mlx#3943), a matrix product 57 (mlx#3838) and about 60 (Draw Things)",
    ),
    Chip(
        "M5 Ultra",
        80,
        1200,
        tensor_gigahertz=M5_GIGAHERTZ,
        family=10,
        note="second-hand: 80 cores and 1.2 TB/s as reported of its specification (canirun.ai#26); clock and "
        "units assumed to be those of M5",
    ),
    Chip(
        "M6",
        12,
        170,
        family=11,
        note="second-hand: 12 cores and 170 GB/s as reported of its specification (canirun.ai#26); family "
        "assumed, and its plans are those of M5",
    ),
)
# The rate of their products is not published. Cores and bandwidth: Apple's specifications, as quoted by the
# press (Gigazine 2023-11-01, Neowin and MacRumors 2024-10-30). Some have fewer cores; an M3 Max of 30 reads
# 300 GB/s (24 of 32 memory controllers) and an M4 Max of 32 reads 410.
UNPUBLISHED = (
    Chip("M3", 10, 100, family=9),
    Chip("M3 Pro", 18, 150, family=9),
    Chip("M3 Max", 40, 400, family=9),
    Chip("M4 Pro", 20, 273, family=9),
    Chip("M4 Max", 40, 546, family=9),
)
NAMES = tuple(sorted(chip.name for chip in (*CHIPS, *UNPUBLISHED)))
FAMILY_OF_GENERATION = {chip.name.partition(" ")[0]: chip.family for chip in CHIPS}
ASSUMED = ("M6",)  # Apple has not published its family; 11 is Metal's next
NEWEST_TUNED = 10  # the newest family for which tiles were chosen


def newer_than_tiles(family: int) -> str | None:
    """A warning about a GPU family for which no tiles were chosen; None for others."""
    if family <= NEWEST_TUNED:
        return None
    known = next(name for name, n in FAMILY_OF_GENERATION.items() if n == NEWEST_TUNED)
    return f"family {family} is newer than the tables of tiles; planned like family {NEWEST_TUNED} ({known})"


def chip_named(name: str, cores: int | None = None) -> Chip | None:
    """The chip of this name ("M2 Max", "M2Max", Metal's "Apple M2 Max"), with this number of cores."""

    def plain(text: str) -> str:
        return text.replace(" ", "").lower().removeprefix("apple")

    found = {plain(chip.name): chip for chip in (*CHIPS, *UNPUBLISHED)}.get(plain(name))
    return found and replace(found, cores=cores or found.cores)
