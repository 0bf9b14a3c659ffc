"""Which tests run: `--tier check`, `test` or `all`, of `make check`, `make test` and `make test-all`.

tests/costs.txt has the processor seconds of the longest case of each test function. For each function

- `check` runs the first case, if it takes at most 1.5 seconds;
- `test` runs a set of cases in which every value of every parameter occurs, on each device, if they take at
  most half a second; else the first case, if it takes at most 2.5 seconds, or if the file had none. ALWAYS
  has no limit. A random problem counts as its operator with each of its options, and a seed as nothing;
- `all`, which is the default, runs every case.

SWEEPS are in no tier: `-m slow` runs them. `--tier first` runs the first case of every function.
"""

from __future__ import annotations

import resource
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.features import features
from tests.helpers.problems import Problem

TIERS = ("check", "first", "test", "all")
# By the beginning of their names: hours of random problems, or what most machines lack.
SWEEPS = {
    "tests/operators/test_random.py::test_sweep": "20,000 random problems",
    "tests/operators/test_backward_random.py::test_sweep": "20,000 random problems",
    "tests/pytorch/test_sdpa.py::test_more_random_calls": "2,000 random calls",
    "tests/distributed/test_random.py::test_more_varlen_prefills": "300 random problems",
    "tests/plan/test_tuned_rows.py::test_every_candidate_is_right": "every size that tuning may choose",
    "tests/operators/test_large_offsets.py": "14 GB of memory",
    "tests/integrations/test_hub_kernel.py::test_transformers_takes_it_from_a_local_folder": "it builds",
    "tests/project/test_no_gpu.py::test_nothing_fails[no mps]": "one test of each function once more",
    "tests/third_party/": "packages and checkouts that nothing here installs",
    "tests/transformers/test_serve_load.py::test_a_thousand_requests": "minutes of a server",
    "tests/transformers/test_families.py::test_every_family": "584 model families",
    "tests/transformers/test_families.py::test_every_refused_family": "584 model families",
}
# In `test` whatever they take: every operator with every option, every kind of layout of cooperative tensors,
# every check with its faults, the types.
ALWAYS = (
    "tests/operators/test_random.py::test_problem",
    "tests/operators/test_backward_random.py::test_problem",
    "tests/operators/test_shared_prefix.py::test_random",
    "tests/operators/test_tensor_prefill.py::test_random_problems",
    "tests/operators/test_cache_write.py::test_problem",
    "tests/operators/test_logits.py::test_problem",
    "tests/kernels/test_mutants.py::test_mutant_is_reported",
    "tests/pytorch/test_typing.py::test_ten_lines",
)
LONGEST = {"check": 1.5, "first": float("inf"), "test": 2.5}
LONGEST_OF_A_SET = 0.5
COSTS = Path(__file__).parent / "costs.txt"
# A field of random problems that has more values than these is a size, of which any will do.
MOST_VALUES = 24

Feature = tuple[str, Any]


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


def choose(cases: Sequence[dict[str, Any]]) -> list[int]:
    """The numbers of as few cases as a greedy search finds with all features. Each case: its parameters."""
    found = [{feature for name in case for feature in features_of(name, case[name])} for case in cases]
    counts = Counter(name for name, _ in set().union(*found))
    sizes = {name for name, count in counts.items() if "." in name and count > MOST_VALUES}
    wanted = [{feature for feature in one if feature[0] not in sizes} for one in found]
    missing, chosen = set().union(*wanted), {0}
    missing -= wanted[0]
    while missing:
        best = max(range(len(cases)), key=lambda n: (len(wanted[n] & missing), -n))
        chosen.add(best)
        missing -= wanted[best]
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
    lines = (line.split(maxsplit=1) for line in COSTS.read_text().splitlines())
    return {name: float(seconds) for seconds, name in lines}


def select(items: Sequence[pytest.Item], tier: str) -> set[pytest.Item]:
    if tier == "all":
        return set(items)
    chosen: set[pytest.Item] = set()
    longest = costs()
    for cases in grouped(items, lambda item: function_of(item.nodeid)):
        name = function_of(cases[0].nodeid)
        if tier == "test" and (name in ALWAYS or longest.get(name, 0.0) <= LONGEST_OF_A_SET):
            for part in grouped(cases, lambda item: str(parameters(item).get("device"))):
                chosen |= {part[n] for n in choose([*map(parameters, part)])}
        elif longest.get(name, 0.0) <= LONGEST[tier]:
            chosen.add(cases[0])
    if tier == "test":
        for cases in grouped(items, lambda item: file_of(item.nodeid)):
            if not chosen.intersection(cases):
                chosen.add(min(cases, key=lambda item: longest[function_of(item.nodeid)]))
    return chosen


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier", choices=TIERS, default="all", help="which cases run: tests/tiers.py has the rule"
    )
    parser.addoption(
        "--costs", type=Path, help="write the processor seconds of each function here (without -n)"
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Chooses among the cases that no other option deselects."""
    for item in items:
        if item.nodeid.startswith(tuple(SWEEPS)):
            item.add_marker(pytest.mark.slow)
    yield
    chosen = select(items, config.getoption("--tier"))
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def processor_seconds() -> float:
    """Used by this process, by those that it has waited for, and by the ranks of tests/distributed."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    ranks = getattr(sys.modules.get("tests.distributed.pool"), "seconds_of_ranks", 0.0)
    return ranks + sum(usage.ru_utime + usage.ru_stime for usage in usages)


class Recorder:
    """Takes the time of the longest case of each function, with the fixtures that it shares with others."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.longest: dict[str, float] = {}
        self.fixtures: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        start = processor_seconds()
        result = yield
        if fixturedef.scope != "function":
            self.fixtures[fixturedef.argname] = processor_seconds() - start
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before, start = dict(self.fixtures), processor_seconds()
        result = yield
        earlier = sum(before.get(name, 0.0) for name in getattr(item, "fixturenames", ()))
        seconds, name = processor_seconds() - start + earlier, function_of(item.nodeid)
        self.longest[name] = max(self.longest.get(name, 0.0), seconds)
        return result

    def pytest_sessionfinish(self) -> None:
        rows = sorted(self.longest.items(), key=lambda row: (-row[1], row[0]))
        lines = (f"{seconds:5.1f} {name}\n" for name, seconds in rows if seconds > LONGEST_OF_A_SET)
        self.path.write_text("".join(lines))


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--costs"):
        config.pluginmanager.register(Recorder(path))
