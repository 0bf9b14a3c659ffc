"""`explain`, the plan of a call, and the launch counts."""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..integrations.pytorch.routing import Route, is_torch_version, is_version, route_of
from ..operators import BACKWARDS
from ..runtime.settings import check_settings
from ..runtime.signatures import public, shown
from ..runtime.tensor_units import STATES
from .chips import ASSUMED, FAMILY_OF_GENERATION, NAMES, chip_named, newer_than_tiles
from .compiled import compiled_kernels
from .cost import Cost
from .planning import Planned, planned, plans_of, signature_of
from .sizes import call_of, check_op

__all__ = ["Explanation", "explain", "launch_counts", "reset_launch_counts"]

NAME = "torch_fattn.explain"
FAMILIES = range(1, 21)  # n of MTLGPUFamilyApple<n>; the planner refuses those without kernels
MOST_CORES = 1024


class Explanation:
    """The plan of one call. `str()` has its route and its minimum work and time; `.details` adds the passes.
    `.data` is for programs, `.json` is the planner's text."""

    def __init__(self, op: str, plans: Sequence[Planned], route: Route | None = None) -> None:
        """`op`: the function; `plans`: its operator calls, at least one."""
        self.op = op
        self.route = route  # of the equivalent call of torch's attention, if there is one
        self.cost = sum((each.cost for each in plans), Cost())
        self.blocks = next((each.blocks for each in plans if each.blocks), None)  # of a block mask
        parts = [json.loads(each.text) for each in plans]
        self.data: dict[str, Any] = parts[0]
        self.json = plans[0].text
        if op == "sdpa" and route is not None and route.to == "torch":
            plans, parts = [], []
        if len(parts) != 1:
            self.data = {
                "device": self.data["device"],
                "passes": [launch for part in parts for launch in part["passes"]],
                "scratch_bytes": max((part["scratch_bytes"] for part in parts), default=0),
                "calls": [each.op for each in plans],
            }
            self.json = json.dumps(self.data)
        self._calls = [(each.op, part) for each, part in zip(plans, parts, strict=True)]

    @property
    def passes(self) -> list[dict[str, Any]]:
        """The kernels that are launched, in order."""
        return self.data["passes"]

    @property
    def device_name(self) -> str:
        """Metal's name of the GPU that the plan is for."""
        return self.data["device"]["name"]

    @property
    def least_seconds(self) -> float | None:
        """The minimum time, from this chip's published rates; None for an unknown chip."""
        found = self._least()
        return None if found is None else found[0]

    @property
    def details(self) -> str:
        """The text of `str()`, and each pass with its macros, constants, grid and registers."""
        lines = [str(self)]
        for op, plan in self._calls:
            if len(self._calls) > 1:
                lines.append(f"  call         fattn.{op}")
            for number, launch in enumerate(plan["passes"], start=1):
                lines.append(f"  pass {number}       {launch['kernel']} from {launch['source']}")
                lines += [f"    {label:<11} {text}" for label, text in _facts_of(launch)]
            lines.append(f"  scratch      {plan['scratch_bytes']:,} bytes")
            lines += [f"  {name:<12} {plan[name]}" for name in ("tuning", "launches") if name in plan]
        return "\n".join(lines)

    def __str__(self) -> str:
        device = self.data["device"]
        name = signature_of(self.op).name
        gpu = f"{device['name']} (Apple family {device['family']}, {device['cores']} cores)"
        lines = (f"  {label:<12} {text}" for label, text in self._facts())
        filled = (textwrap.fill(line, width=100, subsequent_indent=" " * 15) for line in lines)
        return "\n".join([f"{name} on {gpu}", *filled])

    def _facts(self) -> Iterator[tuple[str, str]]:
        why = self.route.why if self.route is not None and self.op == "sdpa" else ""
        kernels = ", ".join(launch["kernel"] for launch in self.passes) or "no launch, the result is empty"
        runs = f"fattn: {kernels}; {why}".removesuffix("; ") if self._calls else f"torch: {why}"
        yield "run by", runs
        if newer := newer_than_tiles(self.data["device"]["family"]):
            yield "newer", newer
        if self.route is not None and not why:
            call = "plain call with gradients" if self.op in BACKWARDS else "plain call"
            yield "route", f"a {call} is {self.route}"
        up_to = "up to " if self.cost.is_most else ""
        yield "bytes", f"{up_to}{_rounded(self.cost.bytes)}B, operands and results once each"
        if self.cost.flops:
            yield "products", f"{up_to}{_rounded(self.cost.flops)}FLOP"
        if self.blocks is not None:
            yield "blocks", str(self.blocks)
        if least := self._least():
            us = 1e6 * least[0]
            time = f"{us:.1f} us" if us < 100 else f"{us / 1e3:,.2f} ms"
            yield "least time", f"{time} by {least[1]}"
        else:
            yield "least time", "unknown, as the rates of this GPU are; name its chip, such as M2 Max"
        for _op, plan in self._calls:
            if "kept_bytes" in plan:
                yield "kept", f"{plan['kept_bytes']:,} bytes from the forward"
            if "tensor" in plan:
                yield "tensors", plan["tensor"]

    def __repr__(self) -> str:
        kernels = ", ".join(launch["kernel"] for launch in self.passes)
        return f"<Explanation of {signature_of(self.op).name}: {kernels or 'no launch'}>"

    def _least(self) -> tuple[float, str] | None:
        chip = chip_named(self.device_name, self.data["device"]["cores"])
        on_tensors = any("tensor" in launch["kernel"] for launch in self.passes)
        return None if chip is None else self.cost.least_seconds(chip, on_tensors)


def _rounded(amount: int) -> str:
    """Rounds to three digits with an SI prefix: "16.8 M"."""
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if amount >= 0.9995 * factor:
            return f"{amount / factor:.3g} {prefix}"
    return f"{amount} "


def _facts_of(launch: dict[str, Any]) -> Iterator[tuple[str, str]]:
    x, y, z = launch["grid"]
    yield "macros", _settings(launch["macros"])
    if features := {name: value for name, value in launch["constants"].items() if value}:
        yield "constants", _settings(features)
    yield "grid", f"{x} x {y} x {z} threadgroups of {math.prod(launch['threads'])} threads"
    if "slice" in launch:
        dispatches = -(-math.prod(launch["grid"]) // launch["slice"])
        yield "dispatches", f"{dispatches} of up to {launch['slice']} threadgroups"
    yield "threadgroup", f"{launch['threadgroup_bytes']:,} bytes of memory"
    if registers := launch.get("registers"):
        parts = "  ".join(f"{name} {n}" for name, n in _at_once(registers).items())
        yield "registers", f"~{registers['total']} half registers per lane (estimate): {parts}"
    for kernel in compiled_kernels():
        if kernel.is_launched_by(launch):
            yield "compiled", f"in {kernel.times}"


def _at_once(registers: dict[str, int]) -> dict[str, int]:
    """The registers that are live together. A step stages or multiplies, and does both only if it stages the
    next step."""
    parts = {name: n for name, n in registers.items() if n and name != "total"}
    if sum(parts.values()) > registers["total"]:
        multiplies = registers["scores"] + registers["operands"]
        for name in ("staged",) if registers["staged"] <= multiplies else ("scores", "operands"):
            del parts[name]
    return parts


def _settings(values: dict[str, Any]) -> str:
    return textwrap.fill(
        "  ".join(f"{name}={value}" for name, value in values.items()),
        width=94,
        subsequent_indent=" " * 16,
        break_long_words=False,
    )


def _check_machine(
    device_name: str | None,
    family: int | None,
    cores: int | None,
    macos: str | None,
    torch_version: str | None,
    default: str,
) -> None:
    for what, value, allowed in (("family", family, FAMILIES), ("cores", cores, range(MOST_CORES + 1))):
        if value is not None and value not in allowed:
            raise ValueError(
                f"{NAME}: {what} {shown(value)} is not a whole number from {allowed[0]} to {allowed[-1]}; "
                f"leave it out for {default}"
            )
    if device_name is not None:
        _check_device_name(f"{NAME}: device_name {shown(device_name)}", device_name, family, cores)
    for what, version, is_one, example in (
        ("macos", macos, is_version, "26.2"),
        ("torch_version", torch_version, is_torch_version, "2.15"),
    ):
        if version is not None and not is_one(version):
            raise ValueError(
                f"{NAME}: {what} {shown(version)} is not a version like {example!r}; leave it out for that "
                "of this machine"
            )


def _check_device_name(given: str, name: str, family: int | None, cores: int | None) -> None:
    if not (name.strip() and name.isprintable()):
        raise ValueError(f"{given} is not a printable name; write one or leave it out")
    if family is None or cores is None:
        raise ValueError(
            f"{given} is only a name, and a plan depends on the GPU's figures; give family and cores with it"
        )
    generation = re.match(r"(?:Apple )?(M\d+)\b", name)
    own = FAMILY_OF_GENERATION.get(generation[1]) if generation and generation[1] not in ASSUMED else None
    if own not in (None, family):
        raise ValueError(f"{given} is of Apple family {own}, not {family}; give family {own} or another name")


@public(NAME, renames=False)
def explain(
    op: str,
    *operands: Any,
    chip: str | None = None,
    device_name: str | None = None,
    family: int | None = None,
    cores: int | None = None,
    macos: str | None = None,
    torch_version: str | None = None,
    tensor: str | None = None,
    **options: Any,
) -> Explanation:
    """The plan of `torch_fattn.<op>(*operands, **options)`. Nothing is computed or launched.

        print(explain("decode", query, key, value))
        print(explain("decode", heads=32, kv_heads=8, kv_len=4096, chip="M2 Max").details)

    Args:
        op: the name of a torch_fattn function, such as "prefill" or "sparse_decode".
        operands, options: as for the function. Tensors on any device will do; those on "meta" cost nothing.
            Without tensors also sizes: dtype (float16; its name will do), batch (1), heads (32), kv_heads (as
            heads), head_dim (128), value_dim (as head_dim), q_len (1, or as kv_len), kv_len (1024),
            block_size (16), kv_format, parts (2), prefix_len (1024) and top_k (2048) of the functions that
            have them, seq_lens (True of decode, else False), mask (of prefill: dtype of an attn_mask; none).
        chip: plan for this chip, such as "M2 Max"; `cores` if yours has fewer.
        device_name, family, cores: plan for this GPU (family n of `MTLGPUFamilyApple<n>`; 0 cores where the
            number is unknown, as in a virtual machine: planned as for an M1). The default is the
            GPU of this machine for tensors on "mps", else an Apple M1; with another family or number of
            cores it is called "an Apple GPU", unless you name it. A name needs both figures.
        macos, torch_version: versions such as "26.2" and "2.15" or `torch.__version__`, on which `.route`
            depends. Default: this machine's.
        tensor: the state of Metal 4's tensor operations: "registers", "threadgroup", "untested" or "off".
            Default: the state on this machine's GPU; "off" for another GPU.

    `.route` of the result tells whether `sdpa` and `install` run such a call here or in torch's own
    attention, and why. It is None for a call that torch's attention cannot express, such as one that returns
    the log-sum-exp. The route of "prefill_backward" is that of calls that need gradients, under the
    `training` of the last `install`; its memory limit is that of this machine's GPU for tensors on "mps",
    else of an Apple M1 with 8 GB.

    `.cost` has the bytes of operands and results and the FLOPs of all pairs visible by position, for full
    caches. A block_mask is read, and seq_lens beside it: `.blocks` has the density and the visible pairs.
    `.least_seconds` divides the cost by published rates: a lower bound for any kernel.

    Raises the function's own errors. A call that `sdpa` leaves to torch has no passes.
    """
    check_op(NAME, op)
    on_mps = any(isinstance(x, torch.Tensor) and x.is_mps for x in (*operands, *options.values()))
    if chip is not None:
        figures = chip_named(chip)
        if figures is None:
            raise ValueError(
                f"{NAME}: chip {shown(chip)} is not known; use one of {', '.join(NAMES)}, or give family and "
                "cores"
            )
        device_name = device_name or f"Apple {figures.name}"
        family = figures.family if family is None else family
        cores = figures.cores if cores is None else cores
    default = "the GPU of this machine" if on_mps else "an Apple M1"
    _check_machine(device_name, family, cores, macos, torch_version, default)
    check_settings()
    if tensor is not None and tensor not in STATES:
        raise ValueError(
            f"{NAME}: tensor {shown(tensor)} is not a mode of tensor operations; use one of "
            f"{', '.join(STATES)}"
        )
    if device_name is None and (family is not None or cores is not None):
        device_name = "an Apple GPU"
    call = call_of(NAME, op, operands, options)
    machine: dict[str, Any] = {"device_name": device_name, "family": family, "cores": cores, "tensor": tensor}
    if on_mps and device_name is None:
        machine["device"] = torch.device("mps")
    try:
        plans = plans_of(op, call, **machine)
    except (RuntimeError, TypeError, ValueError) as refusal:
        if op != "sdpa":
            raise
        nothing = torch.empty(1, 0, 1, 1, 8, device="meta")
        plan = planned("merge", {"outs": nothing, "lses": nothing[..., 0]}, **machine)
        return Explanation(op, [plan], Route("torch", str(refusal).splitlines()[0]))
    device = json.loads(plans[0].text)["device"] if device_name is not None else {}
    route = route_of(op, call, device.get("family"), device.get("cores"), macos, torch_version, tensor)
    return Explanation(op, plans, None if call.get("return_lse") else route)


class _Counts(dict[str, int]):
    def __missing__(self, kernel: str) -> int:
        return 0


def launch_counts() -> dict[str, int]:
    """Launches per kernel function on the GPU, in all threads, since the last `reset_launch_counts()`.
    Kernels without launches are not listed; looking one up gives 0."""
    return _Counts({kernel: n for kernel, n in torch.ops.fattn._launch_counts().items() if n})


def reset_launch_counts() -> None:
    torch.ops.fattn._reset_launch_counts()
