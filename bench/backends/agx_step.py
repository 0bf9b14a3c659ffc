"""What a fragment costs in a step of a backward pass, on M1 and M2.

A step has a loop over fragments of eight rows or keys, or two if simdgroups divide the columns: before and
after they exchange what they have. The counts of the hottest loop alone would miss the other one, and the
rest of the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from softmetal.testing import agx as compiler


def costs(kernel: compiler.Kernel, fragments: int) -> tuple[compiler.Cost, dict[str, Any]]:
    """The cost of the kernel, and that of one of `fragments` fragments: its loops, and its share of the rest
    of the step, in the second walk over the keys if there are two."""
    from softmetal.testing import agx as compiler

    text = compiler.compiled(kernel)
    cost = compiler.cost_of(text, kernel)
    loops = cost.loops
    last = max(
        (one for one in loops if _has_products(one) and not _inner(loops, one)), key=lambda one: one.blocks
    )
    around = [one for one in loops if _is_inside(last, one)]
    if not around:  # a step has one fragment, and no loop
        return compiler.cost_of(text, kernel, loops.index(last)), {}
    step = max(around, key=lambda one: one.depth)
    within = [one for one in loops if _is_inside(one, step)]
    nested = [one for one in within if not any(_is_inside(one, other) for other in within)]
    chosen = [one for one in nested if _has_products(one)]
    rest = (step.other_cycles - sum(one.other_cycles for one in nested)) / fragments
    simulated = (compiler.cost_of(text, kernel, i).loops[i].simulated for i in map(loops.index, chosen))
    bands = [(one.best, one.likely, one.worst) for one in simulated if one is not None]
    return cost, {
        "loop_needed": step.needed,
        "loop_spills": step.kinds.get("spill", 0) + step.kinds.get("fill", 0),
        "loop_bytes": step.code_bytes,
        "loaded": step.loaded_bytes,
        "products": sum(one.kinds["product"] for one in chosen),
        "issue": [
            sum(one.product_cycles for one in chosen),
            round(sum(one.other_cycles for one in chosen) + rest),
        ],
        "cycles": [round(sum(cycles) + rest, 1) for cycles in zip(*bands, strict=True)],
        "steps": [],
    }


def _has_products(loop: compiler.LoopCost) -> bool:
    return loop.kinds.get("product", 0) > 0


def _is_inside(inner: compiler.LoopCost, outer: compiler.LoopCost) -> bool:
    begins_later = inner.blocks[0] >= outer.blocks[0]
    return inner.depth > outer.depth and begins_later and inner.blocks[1] <= outer.blocks[1]


def _inner(loops: tuple[compiler.LoopCost, ...], outer: compiler.LoopCost) -> bool:
    return any(_is_inside(one, outer) and _has_products(one) for one in loops)
