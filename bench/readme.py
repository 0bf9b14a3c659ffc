"""The measured numbers of the README, written from bench/results and checked by tests/test_readme.py.

python -m bench.readme            # exit 1 if the README says anything else
python -m bench.readme --update
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from .arguments import Parser

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "bench" / "results" / "nvidia-h200.json"
BEGIN = "<!-- MEASURED: written by python -m bench.readme --update -->"
END = "<!-- /MEASURED -->"
PEERS = {
    "torch-metal": "torch 2.13 Metal",
    "mlx-metal": "MLX 0.32 Metal",
    "llama-metal": "llama.cpp Metal",
}


def table(results: dict[str, Any]) -> str:
    """One line per call: ours with its share of the ceiling, then the peers, in milliseconds."""
    calls: dict[str, dict[str, dict[str, Any]]] = {}
    for row in (row for row in results["rows"] if row["dtype"] == "float16"):
        # Of a call that two sets have, the first.
        calls.setdefault(f"{row['op']} {row['call']}", {}).setdefault(row["impl"], row)
    there = {row["impl"] for row in results["rows"]}
    titles = {name: title for name, title in PEERS.items() if name in there}
    lines = [
        "| " + " | ".join(["float16", "fattn", "rate", "of the ceiling", *titles.values()]) + " |",
        "|---" * (4 + len(titles)) + "|",
    ]
    for call, rows in calls.items():
        ours = rows["fattn"]
        if "refused" in ours:
            continue
        peers = [_beside(rows.get(name), ours) for name in titles]
        cells = [
            call,
            f"{ours['ms_median']:.3f} ms",
            f"{ours['rate']:,.0f} {ours['rate_unit']}",
            f"{ours['ceiling_fraction']:.0%}",
            *peers,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    ceilings = results["ceilings"]
    lines.append("")
    lines.append(
        f"{results['machine']}; {results['date']}, commit {results['versions']['commit']}. Ceilings of the "
        f"same run: {ceilings['read']:,.0f} GB/s of pure reading for decode, {ceilings['products']:.0f} "
        "TFLOP/s of 8x8x8 products from registers for prefill."
    )
    return "\n".join(lines)


def _beside(peer: dict[str, Any] | None, ours: dict[str, Any]) -> str:
    if peer is None or "refused" in peer:
        return "–"
    return f"{peer['ms_median']:.3f} ms ({peer['ms_median'] / ours['ms_median']:.2f}x)"


def render(readme: str) -> str:
    head, rest = readme.split(BEGIN)
    tail = rest.split(END)[1]
    return f"{head}{BEGIN}\n{table(json.loads(RESULTS.read_text()))}\n{END}{tail}"


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m bench.readme", description="The README's measured numbers.")
    parser.add_argument("--update", action="store_true", help="write them into the README")
    options = parser.parse_args(arguments)
    current = README.read_text()
    if current.count(BEGIN) != 1 or current.count(END) != 1:
        parser.refuse(f"README.md must hold one line {BEGIN} and one {END}; put them back")
    wanted = render(current)
    if options.update:
        README.write_text(wanted)
    elif wanted != current:
        print("README.md differs from bench/results: run python -m bench.readme --update", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
