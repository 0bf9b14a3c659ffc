"""Launches the kernels of a plan straight on the emulator's SIMT runtime, with their text changed on the way.

For mutants: a kernel with a seeded fault cannot come through the extension, which carries its own text.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torch_fattn
from tests.problems import Case

EMBED = Path(__file__).resolve().parent.parent / "tools" / "embed_kernels.py"
# The function constants by index, as in params.h.
CONSTANTS = (
    *("mask", "causal", "vector_loads", "split", "has_seq_lens", "block_size"),
    *("window", "softcap", "alibi", "sinks", "tree", "one_row", "scales", "packed"),
)
ALL_CHECKS = "race,bounds,uninit"
SLOTS = 17

Mutate = Callable[[str], str]


@cache
def kernel_text(source: str) -> str:
    """A .metal file with its includes in place, as the extension embeds it."""
    command = [sys.executable, str(EMBED), "--print", source.removesuffix(".metal")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def run(
    case: Case,
    mutate: Mapping[str, Mutate] | None = None,
    *,
    drop_offset_of: str | None = None,
    checks: str = ALL_CHECKS,
    order: str = "forward",
    plan: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """out and lse of a problem.

    `mutate` changes the text of kernels by name; `drop_offset_of` binds that operand at the start of its
    storage; `plan` is another one than the extension makes for the smallest GPU.
    """
    arguments, bases = case.arguments("cpu")
    if drop_offset_of is not None:
        operand = case.operands[drop_offset_of]
        arguments[drop_offset_of] = bases[drop_offset_of].as_strided(operand.size, operand.stride, 0)
    if plan is None:
        plan = torch_fattn.explain(case.problem.op, **arguments, family=7, cores=8).data
    buffers = _buffers(case, arguments, plan)
    for launch in plan["passes"]:
        _launch(launch, buffers, (mutate or {}).get(launch["kernel"]), checks, order)
    return buffers["out"], buffers["lse"]


def _buffers(case: Case, arguments: dict[str, Any], plan: dict[str, Any]) -> dict[str, Tensor]:
    p = case.problem
    buffers = {name.removesuffix("_cache"): a for name, a in arguments.items() if isinstance(a, Tensor)}
    if p.q_lens is not None:
        total = arguments["query"].shape[0]
        buffers["out"] = torch.full((total, p.q_heads, p.value_dim), torch.nan, dtype=p.dtype)
        buffers["lse"] = torch.full((p.q_heads, total), torch.nan)
        return buffers
    rows = (p.batch, p.q_heads, p.q_len)
    buffers["out"] = torch.full((*rows, p.value_dim), torch.nan, dtype=p.dtype)
    buffers["lse"] = torch.full(rows, torch.nan)
    if len(plan["passes"]) > 1:
        parts = plan["passes"][1]["params"]["parts"]
        buffers["partial_out"] = torch.full((parts, *rows, p.value_dim), torch.nan)
        buffers["partial_lse"] = torch.full((parts, *rows), torch.nan)
    return buffers


def _launch(
    launch: dict[str, Any], buffers: dict[str, Tensor], mutate: Mutate | None, checks: str, order: str
) -> None:
    from softmetal.simt.harness import Library

    text = kernel_text(launch["source"])
    mode = "checked" if checks else "fast"
    library = Library(mutate(text) if mutate else text, defines=launch["macros"], mode=mode)
    constants = {CONSTANTS.index(name): value for name, value in launch["constants"].items()}
    bound: list[Any] = [None] * SLOTS
    for name, slot in launch["bindings"].items():
        bound[slot] = bytes.fromhex(launch["params_bytes"]) if name == "params" else buffers[name]
    library.pipeline(launch["kernel"], constants).run(
        bound, launch["grid"], launch["threads"], checks=checks, order=order
    )
