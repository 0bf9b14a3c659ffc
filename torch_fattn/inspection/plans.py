"""`explain`, the plan of a call, and the launch counts."""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..integrations.pytorch.routing import Route, check_settings, is_torch_version, is_version, route_of
from ..operators import BACKWARDS, PLANNED
from ..runtime.signatures import SIGNATURES, public, shown
from ..runtime.tensor_units import STATES
from .compiled import compiled_kernels

__all__ = ["Explanation", "explain", "launch_counts", "reset_launch_counts"]

FAMILIES = range(1, 21)  # n of MTLGPUFamilyApple<n>; the planner refuses those without kernels
MOST_CORES = 1024
FAMILY_OF_GENERATION = {"M1": 7, "M2": 8, "M3": 9, "M4": 9, "M5": 10, "M6": 11}
ASSUMED = ("M6",)  # Apple has not said of which family it is; 11 is the next that Metal has
NEWEST_TUNED = 10  # the newest family for which tiles were chosen


def newer_than_tiles(family: int) -> str | None:
    """A sentence about a GPU of a family for which no tiles were chosen."""
    if family <= NEWEST_TUNED:
        return None
    known = next(name for name, n in FAMILY_OF_GENERATION.items() if n == NEWEST_TUNED)
    return f"family {family} is newer than the tables of tiles; planned like family {NEWEST_TUNED} ({known})"


class Explanation:
    """The plan of one call. `str()` is for reading, `.data` for programs, `.json` the text that the planner
    wrote."""

    def __init__(self, op: str, text: str, route: Route | None = None) -> None:
        self.op = op
        self.json = text
        self.data: dict[str, Any] = json.loads(text)
        self.route = route  # of the equivalent plain call of torch's attention, if there is one

    @property
    def passes(self) -> list[dict[str, Any]]:
        """The kernels that are launched, in order."""
        return self.data["passes"]

    @property
    def device_name(self) -> str:
        """Metal's name of the GPU that the plan is for."""
        return self.data["device"]["name"]

    def __str__(self) -> str:
        device = self.data["device"]
        lines = [
            f"fattn.{self.op} on {device['name']} (Apple family {device['family']}, {device['cores']} cores)"
        ]
        if newer := newer_than_tiles(device["family"]):
            lines.append(f"  newer        {newer}")
        for number, launch in enumerate(self.passes, start=1):
            lines.append(f"  pass {number}       {launch['kernel']} from {launch['source']}")
            lines += [f"    {label:<11} {text}" for label, text in _facts_of(launch)]
        if not self.passes:
            lines.append("  no launch    the result is empty")
        lines.append(f"  scratch      {self.data['scratch_bytes']:,} bytes")
        if "kept_bytes" in self.data:
            lines.append(f"  kept         {self.data['kept_bytes']:,} bytes from the forward")
        lines.append(f"  tuning       {self.data['tuning']}")
        if "tensor" in self.data:
            lines.append(f"  tensors      {self.data['tensor']}")
        if "launches" in self.data:
            lines.append(f"  launches     {self.data['launches']}")
        if self.route is not None:
            call = "plain call with gradients" if self.op in BACKWARDS else "plain call"
            text = f"  route        a {call} is {self.route}"
            lines.append(textwrap.fill(text, width=100, subsequent_indent=" " * 15))
        return "\n".join(lines)

    def __repr__(self) -> str:
        return (
            f"<Explanation of fattn.{self.op}: {', '.join(p['kernel'] for p in self.passes) or 'no launch'}>"
        )


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
        yield "registers", f"about {registers['total']} halves per lane, by hand: {parts}"
    for kernel in compiled_kernels():
        if kernel.is_launched_by(launch):
            yield "compiled", f"in {kernel.times}"


def _at_once(registers: dict[str, int]) -> dict[str, int]:
    """The parts of the total. A step either stages or multiplies, unless it stages the next one."""
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


def check_op(asker: str, op: str) -> None:
    if op not in PLANNED:
        raise ValueError(
            f"torch_fattn.{asker}: {shown(op)} is not an operator; use one of {', '.join(PLANNED)}"
        )


def check_machine(
    asker: str,
    device_name: str | None,
    family: int | None,
    cores: int | None,
    macos: str | None,
    torch_version: str | None,
    *,
    default: str = "an Apple M1",
    spelled: Callable[[str], str] = str,
) -> None:
    """Raises ValueError for a machine that cannot be planned for. The message begins with `asker`; `spelled`
    maps an argument to the name that its user writes."""
    for what, value, allowed in (("family", family, FAMILIES), ("cores", cores, range(MOST_CORES + 1))):
        if value is not None and value not in allowed:
            raise ValueError(
                f"{asker}{spelled(what)} {shown(value)} is not a whole number from {allowed[0]} to "
                f"{allowed[-1]}; leave it out for {default}"
            )
    _check_device_name(f"{asker}{spelled('device_name')}", device_name, family, cores, spelled)
    for what, version, is_one, example in (
        ("macos", macos, is_version, "26.2"),
        ("torch_version", torch_version, is_torch_version, "2.15"),
    ):
        if version is not None and not is_one(version):
            raise ValueError(
                f"{asker}{spelled(what)} {shown(version)} is not a version like {example!r}; leave it out "
                "for that of this machine"
            )


def _check_device_name(
    named: str, name: str | None, family: int | None, cores: int | None, spelled: Callable[[str], str]
) -> None:
    if name is None:
        return
    if not (name.strip() and name.isprintable()):
        raise ValueError(f"{named} {shown(name)} is not a printable name; write one or leave it out")
    if family is None or cores is None:
        raise ValueError(
            f"{named} {shown(name)} is only a name, and a plan depends on the GPU's figures; give "
            f"{spelled('family')} and {spelled('cores')} with it"
        )
    generation = re.match(r"(?:Apple )?(M\d+)\b", name)
    own = FAMILY_OF_GENERATION.get(generation.group(1)) if generation else None
    if own not in (None, family) and generation and generation.group(1) not in ASSUMED:
        raise ValueError(
            f"{named} {shown(name)} is of Apple family {own}, not {family}; give {spelled('family')} {own} "
            "or another name"
        )


@public("torch_fattn.explain", renames=False)
def explain(
    op: str,
    *operands: Any,
    device_name: str | None = None,
    family: int | None = None,
    cores: int | None = None,
    macos: str | None = None,
    torch_version: str | None = None,
    tensor: str | None = None,
    **options: Any,
) -> Explanation:
    """The plan of `torch_fattn.<op>(*operands, **options)`; nothing is computed and nothing is launched.

    Args:
        op: the name of an operator, such as "prefill".
        operands, options: as for the operator. Tensors on any device will do; those on "meta" cost nothing.
        device_name, family, cores: plan for this GPU (family n of `MTLGPUFamilyApple<n>`; 0 cores where the
            number is unknown, as in a virtual machine: planned as for an M1). The default is the
            GPU of this machine for tensors on "mps", else an Apple M1; with another family or number of
            cores it is called "an Apple GPU", unless you name it. A name needs both figures.
        macos, torch_version: the versions, such as "26.2" and "2.15" or `torch.__version__`, on which
            `.route` depends. The default is those of this machine.
        tensor: the state of the GPU's tensor operations, of Metal 4: "registers", "threadgroup", "untested"
            or "off". The default is that of this machine's GPU, and "off" for another GPU.

    `.route` of the result says whether `sdpa` and `install` run such a call or leave it to torch's own
    attention, and why. It is None for a call that torch's attention cannot express, such as one that returns
    the log-sum-exp. That of "prefill_backward" is the route of calls that need gradients, under the
    `training` of the last `install`. Its limit of memory is that of the GPU of this machine for tensors on
    "mps", else that of an Apple M1 with 8 GB.

    A call that the operator refuses is refused here with the same error.
    """
    check_op("explain", op)
    on_mps = any(isinstance(x, torch.Tensor) and x.is_mps for x in (*operands, *options.values()))
    check_machine(
        "torch_fattn.explain: ",
        device_name,
        family,
        cores,
        macos,
        torch_version,
        default="the GPU of this machine" if on_mps else "an Apple M1",
    )
    check_settings()
    if tensor is not None and tensor not in STATES:
        raise ValueError(
            f"torch_fattn.explain: tensor {shown(tensor)} is not a state of tensor operations; use one of "
            f"{', '.join(STATES)}"
        )
    if device_name is None and (family is not None or cores is not None):
        device_name = "an Apple GPU"
    SIGNATURES[f"fattn.{op}"].check_call(operands, options)
    with_lse = options.pop("return_lse", False)  # this option changes no plan
    plan = getattr(torch.ops.fattn, f"_plan_{op}")
    text = plan(*operands, **options, device_name=device_name, family=family, cores=cores, tensor=tensor)
    plan_family = json.loads(text)["device"]["family"] if device_name is not None else None
    route = None if with_lse else route_of(op, operands, options, plan_family, macos, torch_version, tensor)
    return Explanation(op, text, route)


def launch_counts() -> dict[str, int]:
    """Launches of each kernel function on the GPU since the last `reset_launch_counts()`, in all threads."""
    return dict(torch.ops.fattn._launch_counts())


def reset_launch_counts() -> None:
    torch.ops.fattn._reset_launch_counts()
