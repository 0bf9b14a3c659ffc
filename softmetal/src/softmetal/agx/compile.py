"""Compiles a kernel to machine code of M1 and M2, and reads its cost."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import build, listing, scheduler
from .translate import AgxError, Kernel, to_bitcode, to_ir

THREADGROUP_BYTES = 60 * 1024  # of a core
# Mesa: the most half registers with which a core has room for this many threads (agx_performance.c).
THREADS_BY_REGISTERS = {
    104: 1024, 112: 896, 128: 832, 136: 768, 144: 704, 160: 640, 184: 576, 208: 512, 232: 448, 256: 384,
}  # fmt: skip
_DECIDING = ("translate", "ir", "compile", "listing", "scheduler")  # the modules that decide a cost


@functools.cache
def version() -> str:
    """A digest of this package: costs of the same kernel may differ between versions."""
    sources = hashlib.sha256(build.digest().encode())
    here = Path(__file__).parent
    for path in [*sorted(here.glob("include/*")), *(here / f"{name}.py" for name in _DECIDING)]:
        sources.update(path.read_bytes())
    return sources.hexdigest()[:16]


class NotBuiltError(RuntimeError):
    def __init__(self) -> None:
        super().__init__(
            "the AGX compiler of this version is not built; run `python -m softmetal build --agx`"
        )


@dataclass(frozen=True)
class StepCost:
    """One path of an iteration: see listing.steps."""

    products: int
    product_cycles: int
    other_cycles: int
    simulated: scheduler.Band


@dataclass(frozen=True)
class LoopCost:
    """One iteration, if it runs every block of the loop once."""

    blocks: tuple[int, int]  # the first and the last
    depth: int
    needed: int
    code_bytes: int
    kinds: dict[str, int]
    loaded_bytes: int  # of device memory, by a lane
    product_cycles: int  # in which a scheduler issues products
    other_cycles: int  # and everything else
    simulated: scheduler.Band | None  # cycles, with the resident simdgroups; None if not simulated
    steps: tuple[StepCost, ...]  # its paths, if there are several and it is simulated


@dataclass(frozen=True)
class Cost:
    kernel: str
    threadgroup_threads: int
    needed: int  # half registers per lane, before spilling
    given: int
    spills: int  # instructions that store registers to memory, and that load them
    fills: int
    threads_by_registers: int  # per core
    threadgroup_bytes: int
    resident_threads: int  # per core, whole threadgroups
    code_bytes: int
    kinds: dict[str, int]
    loops: tuple[LoopCost, ...]
    hot: int | None  # the position of the hottest loop, or of the chosen one

    @property
    def instructions(self) -> int:
        return sum(self.kinds.values())

    @property
    def hot_loop(self) -> LoopCost | None:
        return None if self.hot is None else self.loops[self.hot]

    @property
    def cycles_per_product(self) -> scheduler.Band | None:
        """Cycles of the hot loop, simulated; None if it has no products."""
        loop = self.hot_loop
        if loop is None or loop.simulated is None or not loop.kinds.get("product"):
            return None
        products = loop.kinds["product"]
        return scheduler.Band(*(cycles / products for cycles in asdict(loop.simulated).values()))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def compile_kernel(kernel: Kernel, loop: int | None = None) -> Cost:
    """The cost of a kernel. The scheduler is simulated for the hottest loop, or for loop number `loop`.

    Raises NotBuiltError, or AgxError if the kernel cannot be compiled.
    """
    return cost_of(compiled(kernel), kernel, loop)


def compiled(kernel: Kernel) -> str:
    """What Mesa prints: the program after each stage, and its resources."""
    if not build.is_built():
        raise NotBuiltError
    text = to_ir(kernel)
    with tempfile.TemporaryDirectory(prefix="softmetal-agx-") as scratch:
        bitcode, spirv = Path(scratch) / "kernel.bc", Path(scratch) / "kernel.spv"
        to_bitcode(text, bitcode)
        _run([*build.spirv_translator(), "--spirv-max-version=1.4", "-o", str(spirv), str(bitcode)])
        fast = ["--fast-math"] if kernel.fast_math else []
        # Mesa's validation of its own passes takes most of the time.
        settings = {"AGX_MESA_DEBUG": "shaders,shaderdb", "NIR_DEBUG": "novalidate"}
        return _run([str(build.compiler()), str(spirv), *fast], settings)


def _run(command: list[str], settings: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(settings or {})})
    if done.returncode:
        name = Path(command[0]).name
        raise AgxError(f"{name} ended with {done.returncode}: {done.stderr[-2000:].strip()}")
    return done.stdout + done.stderr


def cost_of(text: str, kernel: Kernel, loop: int | None = None) -> Cost:
    resources = re.search(r"^KERNEL: (.*)$", text, re.M)
    demands = re.findall(r"^TOTAL DEMAND: (\d+)", text, re.M)
    if resources is None or not demands:
        raise AgxError(f"Mesa printed no resources for '{kernel.kernel}'")
    given = json.loads(resources[1])
    blocks = listing.read(text, given["code_bytes"])
    found = listing.loops(blocks)
    hottest = listing.hottest(found)
    hot = found.index(hottest) if hottest is not None else None
    if loop is not None:
        if not 0 <= loop < len(found):
            raise AgxError(f"there is no loop {loop}: '{kernel.kernel}' has {len(found)}, from 0")
        hot = loop
    threads = kernel.threads[0] * kernel.threads[1] * kernel.threads[2]
    resident = resident_threads(given["threads"], threads, given["threadgroup_bytes"])
    simdgroups = max(1, resident // (scheduler.SCHEDULERS * scheduler.SIMDGROUP))
    kinds = sum((block.kinds for block in blocks), Counter())
    return Cost(
        kernel=kernel.kernel,
        threadgroup_threads=threads,
        needed=max(map(int, demands)),
        given=given["half_registers"],
        spills=kinds["spill"],
        fills=kinds["fill"],
        threads_by_registers=given["threads"],
        threadgroup_bytes=given["threadgroup_bytes"],
        resident_threads=resident,
        code_bytes=given["code_bytes"],
        kinds=dict(kinds),
        loops=tuple(_loop_cost(one, found, simdgroups if i == hot else 0) for i, one in enumerate(found)),
        hot=hot,
    )


def resident_threads(by_registers: int, threads: int, threadgroup_bytes: int) -> int:
    """Threads of the threadgroups that fit on a core at once."""
    groups = by_registers // threads
    if threadgroup_bytes:
        groups = min(groups, THREADGROUP_BYTES // threadgroup_bytes)
    return max(1, groups) * threads


def _loop_cost(loop: listing.Loop, found: list[listing.Loop], simdgroups: int) -> LoopCost:
    products, others = listing.issue_cycles(loop.kinds)
    inner = {block.index for one in found if one.depth > loop.depth for block in one.blocks}
    paths = listing.steps(loop, inner) if simdgroups else []
    return LoopCost(
        blocks=(loop.blocks[0].index, loop.blocks[-1].index),
        depth=loop.depth,
        needed=loop.needed,
        code_bytes=loop.code_bytes,
        kinds=dict(loop.kinds),
        loaded_bytes=sum(one.accessed_bytes for one in loop.instructions if one.kind == "device_load"),
        product_cycles=products,
        other_cycles=others,
        simulated=scheduler.simulate(loop.instructions, simdgroups) if simdgroups else None,
        steps=tuple(_step_cost(path, simdgroups) for path in paths if len(paths) > 1),
    )


def _step_cost(path: list[listing.Block], simdgroups: int) -> StepCost:
    kinds = sum((block.kinds for block in path), Counter())
    instructions = [one for block in path for one in block.instructions]
    return StepCost(
        kinds["product"], *listing.issue_cycles(kinds), scheduler.simulate(instructions, simdgroups)
    )
