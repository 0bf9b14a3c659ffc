"""The command line of the mutation run; see the package's docstring."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from . import equivalents
from .judge import COUNTS, SURVIVED, Judge, Verdict, write_counts
from .operators import Key, Mutant, mutants_of
from .pool import verdicts
from .source import KERNELS, kernel_sources
from .trials import all_trials

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "out" / "mutants.jsonl"
REQUIRED = 0.95


def all_mutants() -> list[Mutant]:
    return [mutant for source in kernel_sources() for mutant in mutants_of(source)]


def sample(mutants: list[Mutant], count: int | None, seed: int) -> list[Mutant]:
    """A random order that depends only on each mutant, so that changing a line does not reorder the
    others."""

    def place(mutant: Mutant) -> str:
        return hashlib.sha256(f"{seed} {mutant.key}".encode()).hexdigest()

    return sorted(mutants, key=place)[:count]


def update_counts() -> None:
    write_counts({trial.name: trial.run() for trial in all_trials() if trial.counted})
    print(f"wrote {COUNTS.name}")


def _digest(files: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()[:16]


class Results:
    """Verdicts on disk. They hold for the kernels by which they were found, and a survivor's for the trials
    that it survived."""

    def __init__(self, path: Path = RESULTS) -> None:
        self._path = path
        self._kernels = _digest(KERNELS.glob("*/*"))
        self._trials = _digest([*Path(__file__).parent.glob("*trial*.py"), COUNTS])
        self.known: dict[Key, Verdict] = {}
        self.last: dict[Key, Verdict] = {}  # by whatever kernels and trials
        for line in path.read_text().splitlines() if path.exists() else []:
            entry = json.loads(line)
            key, verdict = Key(**entry["key"]), Verdict(**entry["verdict"])
            self.last[key] = verdict
            if entry["kernels"] == self._kernels and (verdict.killed or entry["trials"] == self._trials):
                self.known[key] = verdict

    def add(self, mutant: Mutant, verdict: Verdict) -> None:
        self.known[mutant.key] = verdict
        self._path.parent.mkdir(exist_ok=True)
        entry = {
            "kernels": self._kernels,
            "trials": self._trials,
            "key": asdict(mutant.key),
            "verdict": asdict(verdict),
        }
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def _progress(found: Iterable[tuple[Mutant, Verdict]], total: int) -> Iterator[tuple[Mutant, Verdict]]:
    start, killed, done = time.monotonic(), 0, 0
    for done, (mutant, verdict) in enumerate(found, start=1):
        yield mutant, verdict
        killed += verdict.killed
        left = (time.monotonic() - start) / done * (total - done)
        bar = "#" * (30 * done // total)
        line = f"[{bar:30}] {done}/{total}, {killed} killed, {left / 60:.0f} min left"
        if sys.stderr.isatty():
            print(line, end="\n" if done == total else "\r", file=sys.stderr, flush=True)
        elif done % 20 == 0 or done == total:
            print(line, file=sys.stderr, flush=True)


def report(found: dict[Key, Verdict], reasons: dict[Key, str]) -> tuple[str, float]:
    """A summary and the score: killed / (all - equivalent)."""
    survivors = [key for key, verdict in found.items() if not verdict.killed and key not in reasons]
    killed_by = Counter(verdict.by for verdict in found.values() if verdict.killed)
    killed = sum(killed_by.values())
    equivalent = len(found) - killed - len(survivors)
    score = killed / max(killed + len(survivors), 1)
    lines = [f"survived: {key}" for key in survivors]
    by = ", ".join(f"{count} by {name}" for name, count in killed_by.most_common())
    lines.append(
        f"{len(found)} mutants: {killed} killed ({by}), {equivalent} equivalent, {len(survivors)} survived; "
        f"score {score:.1%}"
    )
    return "\n".join(lines), score


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--sample", type=int, help="how many mutants, drawn at random (all)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--file", nargs="+", help="mutants of these files only")
    parser.add_argument("--survivors", action="store_true", help="those that survived when last tried")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--update-counts", action="store_true", help="write counts.txt, and do nothing else")
    options = parser.parse_args(arguments)
    if options.update_counts:
        update_counts()
        return 0

    mutants, reasons, results = all_mutants(), equivalents.load(), Results()
    for key in equivalents.stale(reasons, mutants):
        print(f"stale entry of {equivalents.FILE.name}: {key}")
        return 1
    if (broken := Judge().judge_kernels()).killed:
        print(f"The kernels as they are fail {broken.trial}, by {broken.by}: {broken.words}")
        return 1
    chosen = [mutant for mutant in mutants if not options.file or mutant.key.file in options.file]
    if options.survivors:
        chosen = [m for m in chosen if results.last.get(m.key, Verdict(SURVIVED)).by == SURVIVED]
        chosen = [m for m in chosen if m.key not in reasons and m.key in results.last]
    chosen = sample(chosen, options.sample, options.seed)
    left = [mutant for mutant in chosen if mutant.key not in results.known]
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of each job: tensors are small, and waiting is not idle
    for mutant, verdict in _progress(verdicts(left, options.jobs), len(left)):
        results.add(mutant, verdict)
    text, score = report({mutant.key: results.known[mutant.key] for mutant in chosen}, reasons)
    print(text)
    return 0 if score >= REQUIRED else 1


if __name__ == "__main__":
    sys.exit(main())
