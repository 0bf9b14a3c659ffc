"""CI runs every case, and `make test` every value of every parameter."""

from __future__ import annotations

import contextlib
import io
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from tests import tiers
from tests.conftest import EMULATED
from tests.helpers import problems
from tests.helpers.documents import ROOT
from tests.helpers.problems import Problem

pytestmark = pytest.mark.host_only

Items = list[pytest.Item]


@pytest.fixture(scope="module")
def every(request: pytest.FixtureRequest) -> Items:
    """All cases of the suite, without the sweeps."""
    suites = {ROOT / name for name in ("tests", *(("softmetal/tests",) if EMULATED else ()))}
    config, plugin = request.config, Collected()
    if {config.invocation_params.dir / name for name in config.args} == suites:  # this run has them
        items = config.stash[tiers.COLLECTED]
    else:
        arguments = ["--collect-only", "-qq", "-n", "0", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
        with contextlib.redirect_stdout(io.StringIO()) as said:
            status = pytest.main([*arguments, *map(str, suites)], plugins=[plugin])
        assert status == 0, said.getvalue()[-2000:]
        items = plugin.items
    return [item for item in items if item.get_closest_marker("slow") is None]


class Collected:
    def __init__(self) -> None:
        self.items: Items = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items[:] = session.items


@pytest.fixture(scope="module")
def chosen(every: Items) -> Items:
    selection = tiers.select(every, "test")
    return [item for item in every if item in selection]


def names_of(items: Iterable[pytest.Item]) -> set[str]:
    return {tiers.function_of(item.nodeid) for item in items}


def values_of(items: Iterable[pytest.Item]) -> dict[tuple[str, str, str], set[str]]:
    """By function, device and parameter."""
    found = defaultdict(set)
    for item in items:
        case = tiers.parameters(item)
        for name, value in case.items():
            if not tiers.is_drawn(value) and "seed" not in name:
                found[tiers.function_of(item.nodeid), str(case.get("device")), name].add(repr(value))
    return found


def files_of(items: Iterable[pytest.Item]) -> set[str]:
    return {tiers.file_of(item.nodeid) for item in items}


def test_every_file_and_every_short_function(every: Items, chosen: Items) -> None:
    costs = tiers.costs()
    in_short_files = {
        item for item in every if costs.get(tiers.function_of(item.nodeid), 0.0) <= tiers.LONGEST_OF_A_FILE
    }
    assert files_of(in_short_files) == files_of(chosen)
    assert all(costs[name] > tiers.LONGEST["test"] for name in names_of(every) - names_of(chosen))
    assert names_of(chosen) >= {*tiers.ALWAYS, *tiers.IN_CHECK}
    assert names_of(tiers.select(every, "check")) >= {*tiers.IN_CHECK}
    for name in tiers.CATALOGUES:
        counts = [sum(tiers.function_of(item.nodeid) == name for item in items) for items in (every, chosen)]
        assert counts[0] == counts[1] > 10, name
    assert len(chosen) < 0.6 * len(every)


def test_every_value_of_every_parameter(every: Items, chosen: Items) -> None:
    long = {name for name, seconds in tiers.costs().items() if seconds > tiers.LONGEST_OF_A_SET}
    names = {name for name in names_of(every) - long if name.startswith("tests/")}
    short = [item for item in every if tiers.function_of(item.nodeid) in names]
    of_them = [item for item in chosen if tiers.function_of(item.nodeid) in names]
    assert values_of(short) == values_of(of_them)
    lost = next(item for item in of_them if "dtype" in tiers.parameters(item))
    assert values_of(item for item in of_them if item is not lost) != values_of(short), "the control"


def options(found: Iterable[Problem], op: str) -> set[str]:
    """Arguments of the operator that some of the problems give."""
    calls = (problems.build(problem).arguments("cpu")[0] for problem in found if problem.op == op)
    return {name for call in calls for name, value in call.items() if value is not None}


@pytest.mark.parametrize("op", problems.OPS)
def test_every_argument_of_every_operator(chosen: Items, op: str) -> None:
    function = "tests/operators/test_random.py::test_problem"
    cases = [tiers.parameters(item) for item in chosen if tiers.function_of(item.nodeid) == function]
    found = [case["problem"] for case in cases if case["device"] == "mps"]
    schema = getattr(torch.ops.fattn, op).default._schema
    assert options(found, op) == {argument.name for argument in schema.arguments}
    assert "sinks" not in options([one for one in found if not one.sinks], op), "the control"


def test_the_names_of_the_tables_are_there(every: Items) -> None:
    files = files_of(every)  # without softmetal, none about it
    costs = {name for name in tiers.costs() if EMULATED or tiers.file_of(name) in files}
    missing = sorted(costs - names_of(every))
    assert not missing, f"remove these lines of tests/costs.txt: {missing}"
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    for name in tiers.SWEEPS:
        file, _, function = tiers.function_of(name).partition("::")
        assert any(path.startswith(file) and f"def {function}" in text for path, text in sources.items()), (
            name
        )


def test_the_halves_of_all(every: Items) -> None:
    """Besides, `host` has one case of each function of `gpu`, but of softmetal's, which need no GPU."""
    gpu, host = (tiers.select(every, tier) for tier in ("gpu", "host"))
    assert gpu | host == {*every}
    assert not any(map(tiers.is_host_only, gpu)) and len(host - gpu) > 1000
    functions = {name for name in names_of(gpu) if name.startswith("tests/")}
    assert sorted(tiers.function_of(item.nodeid) for item in gpu & host) == sorted(functions)


def test_files_that_name_a_word(tmp_path: Path) -> None:
    """Themselves, or one that they import."""
    files = {"test_a": "import b", "b": "import c", "c": "'import torch'", "test_d": "import e"}
    files["e"] = "torches = 1"
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    words = re.compile(r"\b(numpy|torch)\b")
    assert tiers.names(tmp_path / "test_a.py", words, set())
    assert not tiers.names(tmp_path / "test_d.py", words, set())
