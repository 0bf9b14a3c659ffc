"""Which tests run: `--tier check`, `test` or `all`, of `make check`, `make test` and `make test-all`.

tests/costs.txt has the seconds of the longest case of each test function that takes more than half a second,
in a line for each file. For each function

- `check` runs the first case, if it takes at most 0.9 seconds, or the function is one of IN_CHECK;
- `test` runs a set of cases in which every value of every parameter occurs, on each device, if they take at
  most half a second; else the first case, if it takes at most 1.2 seconds, or 10 if the file had none. ALWAYS
  has no limit. A random problem counts as its operator with each of its options, and a seed as nothing. Of
  softmetal's tests it runs those of `check`: `make -C softmetal test` runs them all;
- `all`, which is the default, runs every case. Where Metal is software, `make test-all` runs its halves:
  `gpu`, and on a GPU that runs no kernels `host`: all that is marked host_only, and the first case of each
  function that is not, which must skip.

SWEEPS are in no tier: `-m slow` runs them. `--tier first` runs the first case of every function, for
tools/first_mac.py. Workers begin with the files of the longest cases.
"""

from __future__ import annotations

import ast
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.features import features
from tests.helpers.problems import Problem

TIERS = ("check", "first", "test", "all", "gpu", "host")
# A GPU that runs no kernels, like those of hosted runners.
HOSTED_RUNNER = {"SOFTMETAL_GPU_FAMILY": "5", "SOFTMETAL_GPU_CORES": "0"}
# By the beginning of their names: hours of random problems, or what most machines lack.
SWEEPS = {
    "tests/operators/test_random.py::test_sweep": "20,000 random problems",
    "tests/operators/test_backward_random.py::test_sweep": "20,000 random problems",
    "tests/operators/test_linear_problems.py::test_sweep": "60,000 random problems",
    "tests/operators/test_block_mask.py::test_sweep": "20,000 random problems with block masks",
    "tests/pytorch/test_sdpa.py::test_more_random_calls": "2,000 random calls",
    "tests/distributed/test_random.py::test_more_varlen_prefills": "300 random problems",
    "tests/plan/test_tuned_rows.py::test_every_candidate_is_right": "every size that tuning may choose",
    "tests/operators/test_large_offsets.py": "14 GB of memory",
    "tests/transformers/test_serve.py::test_memory_is_flat[32]": "minutes of a server",
    "tests/transformers/test_families.py::test_every_family": "584 model families",
    "tests/transformers/test_families.py::test_every_refused_family": "584 model families",
}
# Catalogues of what must be refused or advised: each entry counts.
CATALOGUES = (
    "tests/refusals/test_bad_input.py::test_wrong_call",
    "tests/refusals/test_advice.py::test_advice_leads_to_the_right_result",
    "tests/refusals/test_public_calls.py::test_a_wrong_type",
    "tests/refusals/test_public_calls.py::test_shapes_that_do_not_fit",
    "tests/refusals/test_public_calls.py::test_missing_and_unknown_arguments_name_the_function",
)
# In `test` whatever they take: every operator with every option, every kind of layout of cooperative tensors,
# every refusal.
ALWAYS = (
    "tests/operators/test_random.py::test_problem",
    "tests/operators/test_backward_random.py::test_problem",
    "tests/operators/test_shared_prefix.py::test_random",
    "tests/operators/test_tensor_prefill.py::test_random_problems",
    "tests/operators/test_cache_write.py::test_problem",
    "tests/operators/test_logits.py::test_problem",
    "tests/operators/test_rms_norm.py::test_problem",
    "tests/operators/test_linear_problems.py::test_problem",
    "tests/operators/test_rotary.py::test_problem",
    *CATALOGUES,
)
# In `check` and `test` whatever they take.
IN_CHECK = ("tests/project/test_without_softmetal.py::test_every_module_is_imported",)
LONGEST = {"check": 0.9, "first": float("inf"), "test": 1.2}
LONGEST_OF_A_SET = 0.5
LONGEST_OF_A_FILE = 10.0
ROOT = Path(__file__).resolve().parents[1]
COSTS = ROOT / "tests" / "costs.txt"
# A field of random problems that has more values than these is a size, of which any will do.
MOST_VALUES = 24

Feature = tuple[str, Any]
COLLECTED = pytest.StashKey[list[pytest.Item]]()  # before any option deselects some


def function_of(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def is_drawn(value: object) -> bool:
    """Whether it is a random problem: one of a numbered list."""
    return is_dataclass(value) and hasattr(value, "index")


def features_of(name: str, value: Any) -> Iterator[Feature]:
    """A value of a parameter: itself, or of a random problem its operator with each field and feature."""
    if is_drawn(value):
        if isinstance(value, Problem):
            found = features(value).items()
            yield from ((f"{name}.{value.op} {axis}", one) for axis, one in found if axis != "dims")
        for field in fields(value):
            part = getattr(value, field.name)
            of = f"{name}.{getattr(value, 'op', '')}.{field.name}"
            if isinstance(part, tuple) and all(type(one) is int for one in part):  # lengths
                yield of, 0 in part
            elif field.name != "index":
                for n, one in enumerate(part if isinstance(part, tuple) else (part,)):
                    yield from features_of(f"{of}.{n}", one)
    elif "seed" not in name:
        yield name, repr(value)


def compiled_for(value: Any) -> tuple[Any, ...]:
    """What decides which kernels a random problem compiles, nearly: problems with the same share most."""
    call = getattr(value, "forward", getattr(value, "whole", value))  # of a backward, of a shared prefix
    names = ("is_decode", "dtype", "head_dim", "value_dim", "kv_format")
    return tuple(getattr(call, name, None) for name in names)


def choose(cases: Sequence[dict[str, Any]]) -> list[int]:
    """The numbers of few cases with all features: those that have a feature alone, and then by a greedy
    search, in which a case whose kernels no other has compiled counts as two. Each case: its parameters."""
    found = [{feature for name in case for feature in features_of(name, case[name])} for case in cases]
    counts = Counter(name for name, _ in set().union(*found))
    sizes = {name for name, count in counts.items() if "." in name and count > MOST_VALUES}
    wanted = [{feature for feature in one if feature[0] not in sizes} for one in found]
    kernels = [{compiled_for(value) for value in case.values() if is_drawn(value)} for case in cases]
    cases_with = Counter(feature for one in wanted for feature in one)
    chosen = {0} | {n for n, one in enumerate(wanted) if any(cases_with[feature] == 1 for feature in one)}
    missing = set().union(*wanted).difference(*(wanted[n] for n in chosen))
    compiled = set().union(*(kernels[n] for n in chosen))

    def worth(n: int) -> tuple[float, int]:
        return len(wanted[n] & missing) / (1 + (not kernels[n] <= compiled)), -n

    while missing:
        best = max(range(len(cases)), key=worth)
        chosen.add(best)
        missing -= wanted[best]
        compiled |= kernels[best]
    return sorted(chosen)


def parameters(item: pytest.Item) -> dict[str, Any]:
    callspec = getattr(item, "callspec", None)
    return dict(callspec.params) if callspec else {}


def grouped(items: Iterable[pytest.Item], key: Callable[[pytest.Item], Any]) -> Iterable[list[pytest.Item]]:
    groups: dict[Any, list[pytest.Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups.values()


def costs() -> dict[str, float]:
    """Seconds of each function, longest first."""
    found = {}
    for file, *rows in map(str.split, COSTS.read_text().splitlines()):
        for name, seconds in (row.split("=") for row in rows):
            found[f"{file}::{name}"] = float(seconds)
    return dict(sorted(found.items(), key=lambda row: -row[1]))


def is_host_only(item: pytest.Item) -> bool:
    return item.get_closest_marker("host_only") is not None


def select(items: Sequence[pytest.Item], tier: str) -> set[pytest.Item]:
    if tier == "all":
        return set(items)
    if tier == "gpu":
        return {item for item in items if not is_host_only(item)}
    chosen: set[pytest.Item] = set()
    if tier == "host":
        chosen = {item for item in items if is_host_only(item) and item.get_closest_marker("slow") is None}
        others = [item for item in items if item not in chosen and ROOT / "tests" in item.path.parents]
        return chosen.union(cases[0] for cases in grouped(others, lambda item: function_of(item.nodeid)))
    longest = costs()
    for cases in grouped(items, lambda item: function_of(item.nodeid)):
        name = function_of(cases[0].nodeid)
        in_sets = tier == "test" and not name.startswith("softmetal/")
        if in_sets and (name in ALWAYS or longest.get(name, 0.0) <= LONGEST_OF_A_SET):
            for part in grouped(cases, lambda item: str(parameters(item).get("device"))):
                chosen |= {part[n] for n in choose([*map(parameters, part)])}
        elif name in IN_CHECK or longest.get(name, 0.0) <= LONGEST[tier]:
            chosen.add(cases[0])
    if tier == "test":
        for cases in grouped(items, lambda item: file_of(item.nodeid)):
            if not chosen.intersection(cases):
                shortest = min(cases, key=lambda item: longest[function_of(item.nodeid)])
                if longest[function_of(shortest.nodeid)] <= LONGEST_OF_A_FILE:
                    chosen.add(shortest)
    return chosen


def imports(path: Path) -> Iterator[Path]:
    """The files of the tests that it imports. Each could import conftest.py, which says nothing about it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = f"{node.module or ''}." if isinstance(node, ast.ImportFrom) else ""
            for name in (module, *(module + alias.name for alias in node.names)):
                file = name.strip(".").replace(".", "/") + ".py"
                found = (folder / file for folder in (ROOT, path.parent))
                yield from (one for one in found if one.is_file() and one.name != "conftest.py")


def names(path: Path, words: re.Pattern[str], seen: set[Path]) -> bool:
    """Whether the file, or one that it imports, has one of the words, be it in a program that it starts."""
    seen.add(path)
    return words.search(path.read_text()) is not None or any(
        file not in seen and names(file, words, seen) for file in imports(path)
    )


def longest_first(items: Iterable[pytest.Item], workers: int) -> list[pytest.Item]:
    """xdist cuts the list in a part for each worker, and later gives the end of one to another: files with
    the longest cases come first in each part."""
    known, shares = costs(), [list[pytest.Item]() for _ in range(workers)]

    def longest(cases: list[pytest.Item]) -> tuple[float, int]:
        return max(known.get(function_of(item.nodeid), 0.0) for item in cases), len(cases)

    for cases in sorted(grouped(items, lambda item: file_of(item.nodeid)), key=longest, reverse=True):
        min(shares, key=len).extend(cases)
    return [item for share in shares for item in share]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier", choices=TIERS, default="all", help="which cases run: tests/tiers.py has the rule"
    )
    parser.addoption(
        "--naming", metavar="WORDS", help="only files that have one of these words, or import one that has"
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Chooses among the cases that no other option deselects."""
    for item in items:
        if item.nodeid.startswith(tuple(SWEEPS)):
            item.add_marker(pytest.mark.slow)
    config.stash[COLLECTED] = [*items]
    yield
    chosen = select(items, config.getoption("--tier"))
    if config.getoption("--naming"):
        words = re.compile(rf"\b({config.getoption('--naming').replace(',', '|')})\b")
        naming = {path for path in {item.path for item in chosen} if names(path, words, set())}
        chosen = {item for item in chosen if item.path in naming}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]
    if worker := getattr(config, "workerinput", None):
        items[:] = longest_first(items, worker["workercount"])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    assert item.config.getoption("--tier") != "host" or is_host_only(item), "it runs, so a GPU is here"


def without_costs(reports: Iterable[pytest.TestReport]) -> dict[str, float]:
    """Functions that tests/costs.txt lacks although a case of them took long, with its seconds."""
    seconds: Counter[str] = Counter()
    for report in reports:
        seconds[report.nodeid] += report.duration
    known, found = costs(), dict[str, float]()
    for nodeid, taken in seconds.items():
        if (
            taken > LONGEST["test"]
            and function_of(nodeid) not in known
            and not nodeid.startswith(tuple(SWEEPS))
        ):
            found[function_of(nodeid)] = max(taken, found.get(function_of(nodeid), 0.0))
    return found


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = (report for kind in terminalreporter.stats.values() for report in kind)
    found = without_costs(report for report in reports if isinstance(report, pytest.TestReport))
    if found:
        terminalreporter.section("tests/costs.txt lacks")
        for name, seconds in sorted(found.items(), key=lambda row: -row[1]):
            terminalreporter.write_line(f"{seconds:5.1f} {name}")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--tier") == "host":
        os.environ.update(HOSTED_RUNNER)
        config.option.markexpr = ""  # one case of each sweep
