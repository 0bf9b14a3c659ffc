"""What ours is held to on an NVIDIA GPU, and how far a record of the bench is from it:

python -m bench --backend cuda --shapes standard decode prefill --json results.json
python -m bench aims results.json       # exit 1 if an aim is missed
"""

from __future__ import annotations

import json
from pathlib import Path

from ..cases.arguments import Parser
from . import decode_aims, prefill_aims

AIMS = {"decode": decode_aims.verdicts, "prefill": prefill_aims.verdicts}


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m bench aims", description="Aims beside a record of the bench.")
    parser.add_argument("--of", nargs="+", choices=AIMS, default=list(AIMS), help="default: all")
    parser.add_argument("record", type=Path, metavar="FILE", help="what the bench wrote with --json")
    options = parser.parse_args(arguments)
    try:
        record = json.loads(options.record.read_text())
        found = [verdict for op in options.of for verdict in AIMS[op](record)]
    except (OSError, ValueError, KeyError) as error:
        parser.refuse(
            f"{str(options.record)!r} is no record of the bench ({type(error).__name__}); give a file that "
            "`python -m torch_fattn bench --json` wrote"
        )
    width = max(len(verdict.aim) for verdict in found)
    for one in found:
        print(f"{'met  ' if one.met else 'SHORT'}  {one.aim:{width}}  {one.found:>12}  wanted {one.wanted}")
    short = sum(not one.met for one in found)
    print(f"{short} of {len(found)} aims are missed" if short else f"all {len(found)} aims are met")
    return int(short > 0)
