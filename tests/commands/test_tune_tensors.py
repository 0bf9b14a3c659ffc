"""`python -m torch_fattn tune` and Metal 4's tensor operations, with invented times on simulated machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.commands.test_tune import PREFILL
from tests.conftest import needs_emulator
from tests.helpers.tensor_machines import Machines, Run
from tests.kernels.conftest import machines, passed, tested
from torch_fattn.tuning.choice import faster_on_tensors

__all__ = ["machines", "passed", "tested"]


@pytest.mark.host_only
def test_tensor_operations_gain_at_every_length() -> None:
    def gain(short: float, long: float, noise: float = 0.0) -> list[float]:
        rows = faster_on_tensors(PREFILL.tensors("26.2"), {0: 1.0, 1: 1.0}, {0: short, 1: long}, noise)
        return [row.gain for row in rows]

    assert gain(0.8, 0.8) == [1.25] and gain(0.5, 0.96) == [1.443]
    assert gain(0.5, 1.0) == [] == gain(1.0, 0.5), "sizes with an order of their own may gain at one length"
    assert gain(0.9, 0.9, noise=0.04) == [1.111] and gain(0.9, 0.9, noise=0.06) == []


ON_TENSORS = """
from torch_fattn.tuning.candidates import Subject
from torch_fattn.tuning.timing import Stopwatch
from tests.helpers.tuned import this_chip

wanted = []
class Times(Stopwatch):
    def medians(self, subject, candidates):
        wanted.append(sorted(candidates))
        return {name: {0: 1.0, 1: 1.0} for name in candidates}

for dtype in ("float16", "float32"):
    Times(this_chip(), float("inf"), tiny=True).measure(Subject("prefill", dtype, 1, 64, 64))
found["wanted"] = wanted
"""


@needs_emulator
def test_prefills_on_tensor_operations_have_no_candidates(machines: Machines, tested: Path) -> None:
    """The planner ignores sizes of the other kernels."""
    run = machines.run(tested, Run(python=ON_TENSORS))
    on_tensors, control = run.found["wanted"]
    assert run.state == "registers" and on_tensors == ["base", "base again"] and len(control) > 2


M4 = {"SOFTMETAL_GPU_FAMILY": "9", "SOFTMETAL_TENSOR_LAYOUT": "blocks8", "FATTN_TUNING": "1"}
# `tune` with invented times of prefills on tensor operations; those of the other kernels are a second.
BEFORE_M5 = """
import contextlib, io, json
from tests.helpers.command_line import status_of
from tests.helpers.tuned import this_chip
from torch_fattn import __main__ as command_line
from torch_fattn.tuning import timing
from torch_fattn.tuning.tuned_file import TENSORS, path_of

exact = timing.reference.prefill
timing.reference.prefill = lambda *operands, **options: [{off} * x for x in exact(*operands, **options)]

def medians(stopwatch, subject, wanted):
    found.setdefault("timed", []).append(list(wanted))
    return {{
        name: {{i: {seconds}[i] if any(row.kernel == TENSORS for row in rows) else 1.0 for i in (0, 1)}}
        for name, rows in wanted.items()
    }}

timing.Stopwatch.medians = medians
text = io.StringIO()
fault = softmetal.fault(kernel="fattn_prefill_tensor", fails=True) if {fails} else contextlib.nullcontext()
with contextlib.redirect_stdout(text), fault:
    tune = "tune --anyway --op prefill --dtype {dtype} --head-dim {dim}"
    found["status"] = status_of(command_line.main, tune)
    status_of(command_line.main, "tune --show")
timing.reference.prefill = exact
found["text"] = text.getvalue()
path = path_of(this_chip())
found["rows"] = json.loads(path.read_text())["rows"] if path.exists() else []
"""
LOAD = "from torch_fattn.tuning import tuned_file; tuned_file.load_all(torch_fattn.__version__)"


def before_m5(
    seconds: tuple[float, float],
    dtype: str = "float16",
    dim: int = 64,
    *,
    fails: bool = False,
    off: float = 1.0,
    **other: str,
) -> Run:
    """`fails`: the kernel does not compile. `off`: by this factor, results are wrong. Others: the machine."""
    python = BEFORE_M5.format(seconds=seconds, dtype=dtype, dim=dim, fails=fails, off=off)
    return Run(environment=M4 | other, python=python)


@needs_emulator
def test_tensor_operations_before_m5(machines: Machines, tmp_path: Path) -> None:
    run = machines.run(tmp_path, before_m5((0.5, 0.8)))
    assert run.found["status"] == 0
    (row,) = run.found["rows"]
    assert (row["kernel"], row["dtype"], row["min_dim"], row["max_dim"], row["macos"], row["gain"]) == (
        ("prefill_tensor", "float16", 64, 64, "26.2", 1.581)
    )
    assert run.found["text"].count("1.58 times as fast  tensor operations (macOS 26.2)") == 2
    assert run.found["timed"][1:3] == [["base", "tensors"], ["base", "base tensors"]]
    assert run.launches == {"fattn_prefill_tensor": 1}
    new_process = machines.run(tmp_path, Run(environment=M4, python=LOAD))
    assert new_process.launches == {"fattn_prefill_tensor": 1}

    run = machines.run(tmp_path, before_m5((0.5, 1.0)))
    assert ["base", "tensors"] in run.found["timed"] and run.found["rows"] == []
    assert run.launches == {"fattn_prefill": 1}, "they do not gain at every length"

    run = machines.run(tmp_path, before_m5((0.5, 0.8), off=1.01))
    assert run.found["status"] == 1 and run.found["rows"] == []
    assert "D 1 to 64: the fastest choice, tensor operations (macOS 26.2), is off by" in run.found["text"]


@needs_emulator
@pytest.mark.parametrize(
    "fields",
    [{"fails": True}, {"SOFTMETAL_MACOS": "26.1"}, {"dtype": "float32"}],
    ids=["failed self-test", "macOS 26.1", "float32"],
)
def test_tensor_operations_without_a_candidate(
    machines: Machines, tmp_path: Path, fields: dict[str, Any]
) -> None:
    run = machines.run(tmp_path, before_m5((0.5, 0.5), **fields))
    assert run.found["status"] == 0 and run.found["rows"] == []
    assert len(run.found["timed"]) == 2 and ["base", "tensors"] not in run.found["timed"]
