"""Launches the kernels of a plan straight on the emulator's SIMT runtime, with their text changed on the way.

For mutants: a kernel with a seeded fault cannot come through the extension, which carries its own text.
"""

from __future__ import annotations

import functools
import json
import math
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import torch_fattn
from tests.helpers.problems import Case

if TYPE_CHECKING:
    from softmetal.testing import Library

EMBED = Path(__file__).resolve().parents[2] / "tools" / "embed_kernels.py"
# The lists of csrc/kernels/common/params.h: operands and constants by number, and where parameters lie; and
# the struct of parameters of each kernel.
INTERFACE: dict[str, Any] = json.loads(torch.ops.fattn._kernel_interface())
CONSTANTS: list[str] = INTERFACE["constants"]
SLOTS = {name: slot for slot, name in enumerate(INTERFACE["operands"])}
PARAMS: dict[str, str] = INTERFACE["kernels"]
# The results of the backwards.
GRADIENTS = ("grad_query", "grad_key", "grad_value", "grad_sinks", "grad_alibi")
ALL_CHECKS = "race,bounds,uninit"

Mutate = Callable[[str], str]
Counters = dict[str, Any]


@functools.cache
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
    tensor_layout: str | None = None,
) -> tuple[Tensor, Tensor]:
    """out and lse of a problem.

    `mutate` changes the text of kernels by name; `drop_offset_of` binds that operand at the start of its
    storage; `plan` is another one than the extension makes for the smallest GPU. `tensor_layout` is that of
    cooperative tensors (softmetal.checks).
    """
    arguments, bases = case.arguments("cpu")
    if drop_offset_of is not None:
        operand = case.operands[drop_offset_of]
        arguments[drop_offset_of] = bases[drop_offset_of].as_strided(operand.size, operand.stride, 0)
    if plan is None:
        plan = plan_of(case.problem.op, arguments)
    buffers = buffers_of(case.problem.op, arguments, plan)
    for step in plan["passes"]:
        changed = (mutate or {}).get(step["kernel"])
        launch(step, buffers, changed, checks=checks, order=order, tensor_layout=tensor_layout)
    return buffers["out"], buffers["lse"]


def plan_of(op: str, arguments: Mapping[str, Any], family: int = 7, **device: Any) -> dict[str, Any]:
    # Small prefills and backwards fill one core, and have the tiles of calls that fill the GPU.
    cores = 1 if "prefill" in op else 8
    plan: dict[str, Any] = torch_fattn.explain(op, **arguments, family=family, cores=cores, **device).data
    return plan


def buffers_of(op: str, arguments: Mapping[str, Any], plan: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a plan's bindings: the operands, and results and partial results full of NaN."""
    buffers = {name.removesuffix("_cache"): a for name, a in _tensors_of(arguments).items()}
    if op == "merge":  # its operands are partial results
        buffers["partial_out"], buffers["partial_sum"] = arguments["outs"], arguments["lses"]
    on_meta = {name: a.to("meta") if isinstance(a, Tensor) else a for name, a in arguments.items()}
    for name, result in zip(("out", "lse"), getattr(torch.ops.fattn, op)(**on_meta), strict=True):
        buffers[name] = torch.full_like(result, torch.nan, device="cpu")
    scratch_bytes = plan["scratch_bytes"]
    if plan["passes"] and plan["passes"][-1]["kernel"] == "fattn_merge" and op != "merge":
        rows, columns = buffers["lse"].numel(), buffers["out"].shape[-1]
        parts = plan["passes"][-1]["params"]["parts"]
        buffers["partial_out"] = torch.full((parts, rows, columns), torch.nan)
        buffers["partial_sum"] = torch.full((parts, rows, 4), torch.nan)
        scratch_bytes -= 4 * parts * rows * (columns + 4)
    if scratch_bytes:
        buffers["mask_map"] = torch.full((scratch_bytes,), 255, dtype=torch.uint8)
    return buffers


def _tensors_of(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """The operands under the names of their bindings."""
    renamed = {"block_mask": "mask_map"}
    return {renamed.get(name, name): each for name, each in arguments.items() if isinstance(each, Tensor)}


def backward_buffers(op: str, arguments: Mapping[str, Any], plan: dict[str, Any]) -> dict[str, Tensor]:
    """Likewise of a backward: the operands, and full of NaN the gradients and what is known of the rows."""
    buffers = _tensors_of(arguments)
    if "out" in buffers:
        buffers["saved_out"] = buffers.pop("out")
    on_meta = {name: a.to("meta") if isinstance(a, Tensor) else a for name, a in arguments.items()}
    for name, result in zip(GRADIENTS, getattr(torch.ops.fattn, op)(**on_meta), strict=True):
        buffers[name] = torch.full_like(result, torch.nan, device="cpu")
    rows = buffers["lse"].numel()
    buffers["row_states"] = torch.full((rows, 4), torch.nan)
    buffers.setdefault("mask_map", torch.full((plan["scratch_bytes"] - 16 * rows,), 255, dtype=torch.uint8))
    return buffers


def gradients(arguments: Mapping[str, Any], plan: dict[str, Any], **options: Any) -> tuple[Any, ...]:
    """What prefill_backward returns; `options` are those of launches()."""
    buffers = backward_buffers("prefill_backward", arguments, plan)
    for step in plan["passes"]:
        launch(step, buffers, **options)
    return tuple(buffers[name] for name in GRADIENTS)


@functools.lru_cache(maxsize=64)
def _library(text: str, macros: tuple[tuple[str, str], ...], mode: str, cache: Path | None) -> Library:
    from softmetal.testing import Library

    language = "metal4.0" if "<metal_tensor>" in text else "metal3.1"
    return Library(text, defines=dict(macros), mode=mode, cache=cache, std=language)


def library(
    step: dict[str, Any], mutate: Mutate | None = None, *, mode: str = "checked", cache: Path | None = None
) -> Library:
    """The compiled source of a pass. `cache` is where a changed one is kept."""
    text = kernel_text(step["source"])
    changed = mutate(text) if mutate else text
    return _library(changed, tuple(step["macros"].items()), mode, cache if changed != text else None)


def launch(
    step: dict[str, Any], buffers: Mapping[str, Tensor], mutate: Mutate | None = None, **options: Any
) -> Counters:
    """Runs one pass of a plan and returns the emulator's counters, of its last dispatch; `options` are those
    of launches()."""
    *_, counters = launches(step, buffers, mutate, **options)
    return counters


def launches(
    step: dict[str, Any],
    buffers: Mapping[str, Tensor],
    mutate: Mutate | None = None,
    *,
    checks: str = ALL_CHECKS,
    order: str = "forward",
    watchdog: float = 60,
    cache: Path | None = None,
    tensor_layout: str | None = None,
) -> Iterator[Counters]:
    """Runs one pass of a plan, and yields the emulator's counters of each dispatch. `cache` is where a
    changed kernel is kept."""
    compiled = library(step, mutate, mode="checked" if checks else "fast", cache=cache)
    constants = {CONSTANTS.index(name): value for name, value in step["constants"].items()}
    bound: list[Any] = [None] * len(SLOTS)
    for name, slot in step["bindings"].items():
        if name != "slice":
            bound[slot] = bytes.fromhex(step["params_bytes"]) if name == "params" else buffers[name]
    pipeline = compiled.pipeline(step["kernel"], constants)
    declared = pipeline.static_threadgroup_bytes
    assert declared == step.get("threadgroup_bytes", declared), "the plan's bytes of threadgroup memory"
    for first, groups in dispatches(step):
        if "slice" in step:
            bound[step["bindings"]["slice"]] = struct.pack("<q2i", first, *step["grid"][:2])
        yield pipeline.run(
            bound,
            groups,
            step["threads"],
            checks=checks,
            order=order,
            watchdog=watchdog,
            tensor_layout=tensor_layout,
        )


def dispatches(step: Mapping[str, Any]) -> Iterator[tuple[int, list[int]]]:
    """The first threadgroup and the threadgroups of each dispatch of a pass."""
    if "slice" not in step:
        yield 0, step["grid"]
        return
    groups = math.prod(step["grid"])
    for first in range(0, groups, step["slice"]):
        yield first, [min(step["slice"], groups - first), 1, 1]


def set_params(step: dict[str, Any], numbers: Mapping[str, float]) -> None:
    """Changes parameters that a pass is launched with; "span.q_len" is in its CausalSpan, "forward.q_tiles"
    of a backward in its PrefillParams."""
    structs, params = INTERFACE["params"], bytearray.fromhex(step["params_bytes"])
    inner, own = {"span": "CausalSpan", "forward": "PrefillParams"}, PARAMS[step["kernel"]]
    for name, number in numbers.items():
        outer, _, field = name.rpartition(".")
        offset, code = structs[inner.get(outer, own)][field]
        if outer:
            offset += structs[own][outer][0]
        struct.pack_into(f"<{code}", params, offset, number)
    step["params_bytes"] = params.hex()


def cut(plan: dict[str, Any], largest_chunk: int, size: int) -> None:
    """Gives the plan chunks of at most that many keys, or its smallest ones, as it has them for sequences too
    long to be tried here, and slices."""
    decode, merge = plan["passes"]
    span = decode["params"]["span"]
    largest_chunk = max(largest_chunk, span["min_chunk"])
    # Smaller chunks, and so their number, stay as they are.
    parts = max(-(-span["capacity"] // largest_chunk), merge["params"]["parts"])
    set_params(decode, {"span.largest_chunk": largest_chunk})
    set_params(merge, {"span.largest_chunk": largest_chunk, "parts": parts})
    plan["scratch_bytes"] = plan["scratch_bytes"] // merge["params"]["parts"] * parts
    merge["params"]["parts"] = parts
    cut_into_slices(decode, size)


def cut_prefill(plan: dict[str, Any], parts: int, min_part: int, simdgroups: int = 4) -> None:
    """Gives the plan of a prefill that many parts, of that many steps at least, and the pass that merges
    them, as it has them where keys are too many to be tried here."""
    (step,) = plan["passes"]
    set_params(step, {"parts": parts, "max_parts": parts, "min_part": min_part})
    step["grid"][step["params"]["heads_first"]] = step["params"]["q_tiles"] * parts
    step["constants"]["split"] = True
    del step["bindings"]["out"], step["bindings"]["lse"]
    step["bindings"] |= {name: SLOTS[name] for name in ("partial_out", "partial_sum")}

    packed = step["constants"]["packed"]
    heads, tokens = (step["params"][name] for name in ("q_heads", "q_len"))
    rows = heads * tokens * (1 if packed else step["params"]["batch"])
    columns = int(step["macros"]["FATTN_VALUE_DIM"])
    outs, lses = (torch.empty(parts, 1, 1, rows, *last, device="meta") for last in ((columns,), ()))
    (merge,) = plan_of("merge", {"outs": outs, "lses": lses})["passes"]
    merge["macros"] |= {"FATTN_OUT_T": step["macros"]["FATTN_T"], "FATTN_SIMDGROUPS": str(simdgroups)}
    merge["threads"] = [32 * simdgroups, 1, 1]
    del merge["threadgroup_bytes"]  # of one simdgroup
    set_params(merge, {"rows_per_sequence": heads * tokens, "span.q_len": tokens})
    merge["constants"] |= {"token_major_out": packed, "split": True}
    plan["passes"].append(merge)
    plan["scratch_bytes"] = 4 * parts * rows * (columns + 4)


def cut_into_slices(step: dict[str, Any], size: int) -> None:
    """Gives a pass dispatches of at most that many threadgroups."""
    step["constants"]["sliced"] = True
    step["bindings"]["slice"] = SLOTS["slice"]
    step["slice"] = size
