"""`make test` tries every operator, dtype, option, refusal and integration that `make test-all` tries."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiers
from tests.conftest import EMULATED
from tests.helpers import drawing, features, problems, shared_prefix_problems
from tests.helpers.documents import ROOT
from tests.helpers.kv_formats import KV_FORMATS
from tests.helpers.problems import Problem
from torch_fattn.operators import LOGITS_OPERATORS

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
    assert len(chosen) < 0.6 * len(every)


def test_every_value_of_every_parameter(every: Items, chosen: Items) -> None:
    long = {name for name, seconds in tiers.costs().items() if seconds > tiers.LONGEST_OF_A_SET}
    names = {name for name in names_of(every) - long if name.startswith("tests/")}
    short = [item for item in every if tiers.function_of(item.nodeid) in names]
    of_them = [item for item in chosen if tiers.function_of(item.nodeid) in names]
    assert values_of(short) == values_of(of_them)
    lost = next(item for item in of_them if "dtype" in tiers.parameters(item))
    assert values_of(item for item in of_them if item is not lost) != values_of(short), "the control"


@pytest.mark.parametrize("name", tiers.CATALOGUES)
def test_every_refusal(every: Items, chosen: Items, name: str) -> None:
    counts = [sum(tiers.function_of(item.nodeid) == name for item in items) for items in (every, chosen)]
    assert counts[0] == counts[1] > 10


def test_every_integration(chosen: Items) -> None:
    """Some file of the tests that are chosen imports each of them."""
    text = "".join((ROOT / file).read_text() for file in files_of(chosen))
    folder = ROOT / "torch_fattn" / "integrations"
    rooms = {f"integrations.{path.stem}" for path in folder.iterdir() if not path.name.startswith("_")}
    for room in rooms | {"flash_attn", "PagedKVCache", "StaticKVCache", "varlen_attn", "installed", "sdpa"}:
        assert re.search(rf"\b{room}\b", text.replace("integrations import ", "integrations.")), room


def drawn(items: Items, function: str, name: str, device: str) -> list[Any]:
    cases = [tiers.parameters(item) for item in items if tiers.function_of(item.nodeid) == function]
    return [case[name] for case in cases if case["device"] == device]


def met(found: Iterable[Problem]) -> set[tuple[str, str, Any]]:
    """Each operator with each feature. The two head dims count apart: there are too many pairs."""
    return {
        (problem.op, axis, value)
        for problem in found
        for axis, value in (
            *features.features(problem).items(),
            ("head_dim", problem.head_dim),
            ("value_dim", problem.value_dim),
        )
        if axis != "dims"
    }


def options(found: Iterable[Problem], op: str) -> set[str]:
    """Arguments of the operator that some of the problems give."""
    calls = (problems.build(problem).arguments("cpu")[0] for problem in found if problem.op == op)
    return {name for call in calls for name, value in call.items() if value is not None}


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_every_operator_with_every_dtype_and_option(chosen: Items, device: str) -> None:
    found = drawn(chosen, "tests/operators/test_random.py::test_problem", "problem", device)
    assert met(found) == met(drawing.draw(600))
    assert {problem.dtype for problem in found} == set(problems.DTYPES)
    for op in problems.OPS:
        schema = getattr(torch.ops.fattn, op).default._schema
        assert options(found, op) == {argument.name for argument in schema.arguments}, op
    without = [problem for problem in found if not problem.sinks]
    assert met(without) != met(found) and "sinks" not in options(without, "prefill"), "the control"

    shared = drawn(chosen, "tests/operators/test_shared_prefix.py::test_random", "shared", device)
    assert {one.kind for one in shared} == set(shared_prefix_problems.KINDS)
    writes = drawn(chosen, "tests/operators/test_cache_write.py::test_problem", "problem", device)
    assert {one.kv_format for one in writes} == set(KV_FORMATS)
    assert {one.dtype for one in writes} == set(problems.DTYPES)
    logits = drawn(chosen, "tests/operators/test_logits.py::test_problem", "problem", device)
    assert {(one.op, one.dtype) for one in logits} == {
        (op, dtype) for op in LOGITS_OPERATORS for dtype in problems.DTYPES
    }


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


def test_a_long_function_without_a_cost_is_named() -> None:
    known = next(iter(tiers.costs()))
    cases = {"t.py::new[x]": (1.0, 2.0), f"{known}[x]": (1.0, 2.0), "t.py::short": (0.5, 0.6)}
    reports = [
        pytest.TestReport(name, ("", 0, ""), {}, "passed", None, "call", duration=duration)
        for name, durations in cases.items()
        for duration in durations
    ]
    assert tiers.without_costs(reports) == {"t.py::new": 3.0}


TWIN = """
import time
import pytest

@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("b", ["x", "y"])
@pytest.mark.parametrize("a", [1, 2, 3])
def test_grid(a, b, seed):
    pass

def test_that_hangs():
    time.sleep(60)
"""


def run(folder: Path, *arguments: str) -> str:
    (folder / "test_twin.py").write_text(TWIN)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.tiers"]
    done = subprocess.run(
        [*command, "--rootdir", str(folder), *arguments, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize(("tier", "cases"), [("first", 1), ("check", 1), ("test", 3), ("all", 18)])
def test_a_tier_of_other_tests(tier: str, cases: int, tmp_path: Path) -> None:
    said = run(tmp_path, "--collect-only", "--tier", tier)
    assert len(re.findall(r"::test_grid\[", said)) == cases and "::test_that_hangs" in said, said


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
        (tmp_path / f"{name}.py").write_text(f"{text}\ndef test(): pass\n")
    said = run(tmp_path, "--collect-only", "--naming", "numpy,torch")
    assert re.findall(r"^(\w+)\.py::", said, re.MULTILINE) == ["test_a"], said


def test_each_worker_begins_with_the_longest(every: Items) -> None:
    order, costs = tiers.longest_first(every, 2), tiers.costs()
    assert {*order} == {*every}
    longest = [*dict.fromkeys(tiers.file_of(name) for name in costs if name in names_of(every))]
    middle = len(order) // 2
    first = order[0], *order[middle - 20 : middle + 20]
    assert {*longest[:2]} <= files_of(first) and longest[2] not in files_of(first)


def test_a_test_that_hangs_fails_and_the_others_run(tmp_path: Path) -> None:
    pytest.importorskip("pytest_timeout")
    said = run(tmp_path, "-n", "1", "--timeout", "1", "--timeout-method", "thread")
    assert "1 failed, 18 passed" in said and "test_that_hangs" in said, said
