"""The package around the operators: loading, the command line, the doctor."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch

import torch_fattn
from tests.conftest import counted_launches
from torch_fattn import __main__ as command_line
from torch_fattn.commands import doctor
from torch_fattn.inspection.planning import FUNCTIONS
from torch_fattn.runtime import extension, versions

ROOT = Path(__file__).resolve().parents[2]


def test_extension_of_another_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModuleType("torch_fattn._C")
    other.torch_version = "2.1.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_fattn._C", other)
    monkeypatch.setattr(extension.importlib.util, "find_spec", lambda _: object())
    with pytest.raises(ImportError, match=r"built against torch 2\.1\.0 .*pip install --no-build-isolation"):
        extension.load()


@pytest.mark.parametrize("version", ["2.12.1", "2.16.0.dev20270101+cpu", "3.0.0"])
def test_torch_outside_the_range(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(ImportError) as caught:
        extension.load()
    assert str(caught.value) == (
        f"torch_fattn {torch_fattn.__version__} is made for torch 2.13 to 2.15, and this is torch {version}: "
        "run `pip install 'torch>=2.13,<2.16'`"
    )


def test_versions_are_stated_once() -> None:
    """pyproject.toml cannot read them from the package."""
    extras = re.findall(r'"transformers(?:\[serving\])?(>[^"]*)"', (ROOT / "pyproject.toml").read_text())
    assert {"transformers" + extra for extra in extras} == {
        versions.requirement("transformers", versions.TRANSFORMERS)
    }
    assert len(extras) == 1
    oldest, newest = map(versions.text, versions.TRANSFORMERS)
    for page in (ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")):
        named = re.findall(r"\b5\.\d+ to\s+5\.\d+\b", page.read_text())
        assert {" ".join(each.split()) for each in named} <= {f"{oldest} to {newest}"}, page
    for name in ("torch", "transformers"):
        tested = []
        for file in ("oldest.txt", "newest.txt"):
            pinned = re.findall(rf"^{name}==(\S+)$", (ROOT / "requirements" / file).read_text(), re.MULTILINE)
            tested += [versions.minor(version) for version in pinned]
        assert tuple(tested) == getattr(versions, name.upper())
    assert f"## {versions.VERSION}" in (ROOT / "CHANGELOG.md").read_text()


def test_version_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command_line.main(["--version"])
    assert caught.value.code == 0
    message = f"torch_fattn {torch_fattn.__version__}, built for torch {torch_fattn.built_for_torch}\n"
    assert capsys.readouterr().out == message


def test_extension_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> None:
        raise ImportError("undefined symbol: _ZN3c10")

    monkeypatch.setattr(extension.importlib, "import_module", fail)
    with pytest.raises(ImportError, match=r"does not load into torch .*undefined symbol"):
        extension.load()


def test_extension_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match="torch_fattn is not built"):
        extension.load()


def test_extension_of_this_torch() -> None:
    """The control of the three tests above."""
    assert torch.__version__.startswith(extension.load().rsplit(".", 1)[0])


def test_doctor_is_content(capsys: pytest.CaptureFixture[str]) -> None:
    with counted_launches() as launches:
        assert doctor.main() == 0
    said = capsys.readouterr().out
    assert "No problems found." in said and "\n              not kept for the next run" in said
    assert len({line.rindex(" ms ") for line in said.splitlines() if line.endswith(" ms")}) == 1, "columns"
    assert {"fattn_prefill", "fattn_decode", "fattn_merge", "fattn_cache_write"} <= launches.keys()


def test_kernels_without_a_launch_are_not_listed() -> None:
    torch_fattn.reset_launch_counts()
    torch_fattn.softmax(torch.ones(3, 8, device="mps"))
    counts = torch_fattn.launch_counts()
    assert counts == {"fattn_softmax": 1} and counts["fattn_merge"] == 0


@pytest.mark.parametrize("op", FUNCTIONS)
def test_planned_kernels_are_launched(op: str) -> None:
    case = doctor.case_of(op, torch.float32)
    with counted_launches() as planning:
        plan = torch_fattn.explain(op, **case.on("mps"))
    with counted_launches() as launches:
        case.run("mps")
    on_mps = torch.ones(1, 1, 1, 1, 8, device="mps")
    assert plan.device_name == torch_fattn.explain("merge", on_mps, on_mps[..., 0]).device_name
    assert Counter(launch["kernel"] for launch in plan.passes) == launches
    assert not planning


@pytest.mark.parametrize(("factor", "message"), [(1.01, "a wrong result"), (1.0, "no launch of the kernel")])
def test_doctor_notices_another_result(
    factor: float, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "FUNCTIONS", ("prefill", "decode"))
    monkeypatch.setattr(doctor.Case, "run", lambda case, _: tuple(factor * x for x in case.exact()))
    assert doctor.main() == 1
    assert f"-> {message} in prefill float32" in capsys.readouterr().out


def test_doctor_notices_that_a_kernel_was_given_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second run writes nothing, into memory that held the results of the first one."""
    prefill, results = torch.ops.fattn.prefill, {}

    def given_up(query: torch.Tensor, *rest: torch.Tensor, **options: object) -> tuple[torch.Tensor, ...]:
        if query.is_meta:  # to be planned
            return prefill(query, *rest, **options)
        if query.dtype not in results:
            results[query.dtype] = prefill(query, *rest, **options)
        return results[query.dtype]

    given_up.default = prefill.default  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.ops.fattn, "prefill", given_up)
    monkeypatch.setattr(doctor, "FUNCTIONS", ("prefill", "decode"))
    assert doctor.main() == 1
    message = capsys.readouterr().out
    assert "-> results that differ from run to run in prefill float32" in message
    assert doctor.FIND_FAULTS in message and "in decode" not in message


@pytest.mark.parametrize(("version", "silent"), [("2.13.0", True), ("2.14.1+cpu", True), ("2.15.0", False)])
def test_doctor_names_a_torch_that_hides_faults(
    version: str, silent: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert not doctor.report_device()
    assert ("raises no error when the GPU faults" in capsys.readouterr().out) == silent


def test_doctor_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: False)
    assert doctor.main() == 1
    assert "arm64 wheel" in capsys.readouterr().out
