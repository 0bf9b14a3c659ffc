"""`python -m torch_fattn explain`: prints the plan of a call that is given by sizes."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from ..inspection.chips import NAMES
from ..inspection.planning import FUNCTIONS
from ..inspection.plans import FAMILIES, MOST_CORES, explain
from ..inspection.sizes import SIZES, call_of_sizes
from ..operators import DTYPES
from ..operators.kv_formats import KV_FORMATS
from .arguments import Parser, whole

MOST = 2**31 - 1
_MACHINE = ("chip", "device_name", "family", "cores", "macos")
# Sizes that only some functions have.
_OF_SOME = "kv_heads kv_len head_dim value_dim block_size parts prefix_len top_k".split()


def add_arguments(parser: Parser) -> None:
    size = whole(1, MOST)
    parser.add_argument("op", choices=FUNCTIONS)
    parser.add_argument("--batch", type=size, default=1)
    parser.add_argument("--heads", type=size, default=32, help="query heads")
    parser.add_argument("--kv-heads", type=size, help="key-value heads; default: as many as query heads")
    parser.add_argument("--q-len", type=size, help="query rows; default: 1, for the prefills --kv-len")
    parser.add_argument("--kv-len", type=size, help="keys, or a decode's cache capacity; default: 1024")
    parser.add_argument("--head-dim", type=size, help="default: 128")
    parser.add_argument("--value-dim", type=size, help="default: --head-dim")
    parser.add_argument("--block-size", type=size, help="paged caches: keys per block; default: 16")
    parser.add_argument("--kv-format", choices=KV_FORMATS, help="of a quantised cache; default: --dtype")
    parser.add_argument("--parts", type=size, help="merge: partial results; default: 2")
    parser.add_argument("--prefix-len", type=size, help="shared prefixes: their keys; default: 1024")
    parser.add_argument("--top-k", type=size, help="sparse_decode: selected keys of a row; default: 2048")
    parser.add_argument("--dtype", choices=DTYPES, default="float16")
    parser.add_argument("--causal", action="store_const", const=True, help="prefill: is_causal")
    parser.add_argument(
        "--mask", choices=("bool", *DTYPES), help="dtype of an attn_mask for all heads; of mask_map: bool"
    )
    parser.add_argument("--chip", metavar="NAME", help=f"plan for this chip: {', '.join(NAMES)}")
    parser.add_argument("--family", type=whole(FAMILIES[0], FAMILIES[-1]), help="n of MTLGPUFamilyApple<n>")
    parser.add_argument(
        "--cores", type=whole(1, MOST_CORES), help="figures of the GPU; default: those of an Apple M1"
    )
    parser.add_argument("--device-name", help="name of that GPU; needs --family and --cores")
    parser.add_argument("--macos", metavar="26.2", help="macOS version for the route; default: this system")
    parser.add_argument("--torch", metavar="2.14", help="torch version for the route; default: this torch")
    parser.add_argument("--verbose", action="store_true", help="print the passes with their settings")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(parser: Parser, options: argparse.Namespace) -> int:
    """Prints the plan. A call that the planner refuses is an argument error."""
    every = str(call_of_sizes(options.op))
    for name in _OF_SOME:
        other: dict[str, Any] = {name: 1}
        if getattr(options, name) is not None and str(call_of_sizes(options.op, **other)) == every:
            parser.refuse(f"{options.op} takes no --{name.replace('_', '-')}; leave it out")
    given = {name: getattr(options, name, None) for name in (*SIZES, *_MACHINE)}
    given["torch_version"] = options.torch
    given["is_causal"] = options.causal
    try:
        plan = explain(options.op, **{name: value for name, value in given.items() if value is not None})
    except (RuntimeError, TypeError, ValueError) as refusal:
        parser.refuse(str(refusal).splitlines()[0].removeprefix("torch_fattn.explain: "))
    if options.json:
        print(json.dumps(plan.data | {"route": plan.route and asdict(plan.route), "cost": asdict(plan.cost)}))
    else:
        print(plan.details if options.verbose else plan)
    return 0
