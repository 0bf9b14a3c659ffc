"""A model of attention across 2 to 8 Macs:

python -m bench distributed [--chip M3Ultra]

It is a model, not a measurement: the time of one Mac is that of `python -m bench model`, the bytes are those
of `torch_fattn.distributed.explain`, and the links carry what is published of them at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from torch_fattn.distributed import Shards, explain
from torch_fattn.inspection.chips import CHIPS, Chip

from ..cases.arguments import Parser
from ..cases.calls import Call
from .model import predicted, print_rows


@dataclass(frozen=True)
class Link:
    name: str
    gigabits: float  # in one direction
    latency_us: float  # of a message over TCP, as gloo sends it
    source: str


LINKS = (
    Link("Thunderbolt 5", 80, 300, "rate: Intel's specification; latency: reports on Apple's TN3205"),
    Link("10 GbE", 10, 300, "rate: IEEE 802.3an; latency: assumed, as over Thunderbolt"),
    Link("Wi-Fi", 2.4, 2000, "rate: 802.11ax, 160 MHz, two streams (MCS 11); latency: assumed"),
)
MACS = (1, 2, 4, 8)
CALLS = (
    Call("decode", 32, 8, 128, 1, 131072),
    Call("decode", 32, 8, 128, 1, 1048576),
    Call("prefill", 32, 8, 128, 8192, 8192, causal=True),
    Call("prefill", 32, 8, 128, 65536, 65536, causal=True),
)
_CHIPS = {chip.name.replace(" ", ""): chip for chip in CHIPS}
NOTES = """\
The times are of attention alone, in one layer. A decode waits for the parts of all ranks; its headers travel
while the GPU is busy. A prefill is a ring of zigzag shards, whose transfers overlap with its attention.
Copies between GPU and host, and what a network achieves of its rate, are not modelled: real times are
longer."""


def seconds(call: Call, macs: int, link: Link, chip: Chip) -> float | None:
    """None: the model of one Mac knows no such call."""
    if macs == 1:
        found = predicted(call, chip)
        return found and found[0]
    own = call.kv_len // macs
    query = torch.empty(1, call.q_heads, 1, call.head_dim, dtype=call.torch_dtype, device="meta")
    key = torch.empty(1, call.kv_heads, own, call.head_dim, dtype=call.torch_dtype, device="meta")
    rate, latency = link.gigabits * 1e9 / 8, link.latency_us * 1e-6
    if call.is_decode:
        found = predicted(replace(call, kv_len=own), chip)
        sent = explain("decode", query, key, key, ranks=macs).data["sent_bytes"]["parts"][0]
        return found and max(found[0], latency) + latency + sent / rate
    found = predicted(call, chip)
    if found is None:
        return None
    shards = Shards.zigzag(call.kv_len, macs)
    rows = query.expand(-1, -1, own, -1)
    plan = explain("prefill", rows, key, key, ranks=macs, shards=shards, is_causal=True, method="ring").data
    steps = macs - 1
    step = found[0] * max(plan["work"]) / macs
    transfer = latency + plan["sent_bytes"]["ring"][0] / steps / rate
    return step + steps * max(step, transfer) + latency


def rows(chip: Chip) -> Iterator[tuple[str, ...]]:
    yield "call", "link", *(f"{macs} Macs" if macs > 1 else "1 Mac" for macs in MACS)
    for call in CALLS:
        for link in LINKS:
            times = (seconds(call, macs, link, chip) for macs in MACS)
            yield f"{call.op} {call}", link.name, *(f"{1e3 * t:.2f} ms" if t else "" for t in times)


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m bench distributed", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--chip", choices=_CHIPS, default="M3Ultra")
    chip = _CHIPS[parser.parse_args(arguments).chip]
    print(f"A model, not a measurement: {chip.name}\n")
    print_rows(rows(chip))
    print_rows(
        ("link", "Gbit/s", "us", "source")
        if link is None
        else (link.name, f"{link.gigabits:g}", f"{link.latency_us:g}", link.source)
        for link in (None, *LINKS)
    )
    print(NOTES)
    return 0
