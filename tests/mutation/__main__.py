"""The command line of the mutation run; see the package's docstring."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from .judge import SAME, SURVIVED, Verdict, judge, verdicts
from .operators import KERNELS, Key, Mutant, all_mutants

HERE = Path(__file__).parent
OUT = HERE.parents[1] / "out" / "mutants"
# One mutant in forty computes the same: of latency, or of values that nobody reads.
REQUIRED = 0.93


def sample(mutants: list[Mutant], count: int | None, seed: int) -> list[Mutant]:
    """A random order that depends only on each mutant, so that changing a line does not reorder the
    others."""

    def place(mutant: Mutant) -> str:
        return hashlib.sha256(f"{seed} {mutant.key}".encode()).hexdigest()

    return sorted(mutants, key=place)[:count]


def results_file() -> Path:
    """Where the verdicts of these kernels and trials are."""
    files = sorted([*KERNELS.glob("*/*"), *HERE.glob("*.py")])
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    OUT.mkdir(parents=True, exist_ok=True)
    return OUT / f"{digest}.jsonl"


def read_results(path: Path) -> dict[Key, Verdict]:
    entries = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {Key(**entry["key"]): Verdict(**entry["verdict"]) for entry in entries}


def report(found: dict[Key, Verdict]) -> tuple[str, float]:
    """A summary and the score: of those whose code differs, how many are killed."""
    survivors = [key for key, verdict in found.items() if verdict.by == SURVIVED]
    killed_by = Counter(verdict.by for verdict in found.values() if verdict.killed)
    same = sum(verdict.by == SAME for verdict in found.values())
    killed = sum(killed_by.values())
    score = killed / max(killed + len(survivors), 1)
    by = ", ".join(f"{count} by {name}" for name, count in killed_by.most_common())
    summary = (
        f"{len(found)} mutants: {killed} killed ({by}), {same} of the same code, {len(survivors)} survived; "
        f"score {score:.1%}"
    )
    return "\n".join([*(f"survived: {key}" for key in survivors), summary]), score


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--sample", type=int, help="how many mutants, drawn at random (all)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--file", nargs="+", help="mutants of these files only")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)

    path, chosen = results_file(), all_mutants()
    if options.file:
        chosen = [mutant for mutant in chosen if mutant.key.file in options.file]
    chosen = sample(chosen, options.sample, options.seed)
    if (broken := judge(None)).killed:
        print(f"The kernels as they are fail {broken.trial}, by {broken.by}: {broken.words}")
        return 1
    known = read_results(path)
    left = [mutant for mutant in chosen if mutant.key not in known]
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of each job: tensors are small, and waiting is not idle
    start = time.monotonic()
    with path.open("a") as file:
        for done, (mutant, verdict) in enumerate(verdicts(left, options.jobs), start=1):
            known[mutant.key] = verdict
            print(json.dumps({"key": asdict(mutant.key), "verdict": asdict(verdict)}), file=file, flush=True)
            minutes = (time.monotonic() - start) / done * (len(left) - done) / 60
            print(f"{done}/{len(left)}, {minutes:.0f} min left", file=sys.stderr, flush=True)
    text, score = report({mutant.key: known[mutant.key] for mutant in chosen})
    print(text)
    return 0 if score >= REQUIRED else 1


if __name__ == "__main__":
    sys.exit(main())
