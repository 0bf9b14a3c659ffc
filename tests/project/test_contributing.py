"""The examples of CONTRIBUTING.md, applied to a copy of the sources, compiled and run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_fattn
from tests.conftest import needs_emulator
from tests.helpers import direct_launch, problems
from tests.helpers.accuracy import assert_close
from tests.helpers.layouts import flat
from tests.helpers.plan_program import PlanProgram
from tests.helpers.problems import Case, Problem
from tools import rooms

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
f32, f16, _ = problems.DTYPES


@dataclass(frozen=True)
class Change:
    """A piece of a file, and its replacement."""

    path: str
    old: str
    new: str

    def apply(self, root: Path) -> None:
        path = root / self.path
        text = path.read_text()
        assert text.count(self.old) == 1, (
            f"{self.path} has {text.count(self.old)} places like\n{self.old}"
            "; the diff in CONTRIBUTING.md is out of date"
        )
        path.write_text(text.replace(self.old, self.new))


def changes_of(heading: str) -> Iterator[Change]:
    """The pieces of the diff in a section."""
    section = re.split(r"^## ", GUIDE, flags=re.MULTILINE)
    text = next(part for part in section if part.startswith(heading + "\n"))
    (diff,) = re.findall(r"^```diff\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    for piece in re.split(r"^--- ", diff, flags=re.MULTILINE)[1:]:
        path, *lines = piece.splitlines()
        old = [line[1:] for line in lines if line[0] in " -"]
        new = [line[1:] for line in lines if line[0] in " +"]
        yield Change(path, "\n".join(old) + "\n", "\n".join(new) + "\n")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for folder in ("csrc/kernels", "csrc/plan", "tools"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    return tmp_path


def run(root: Path, case: Case, plan: dict[str, Any] | None = None) -> tuple[Tensor, Tensor]:
    """out and lse by the kernels in `root`."""

    def text_of(kernel: str) -> str:
        name = kernel.removeprefix("fattn_")
        command = [sys.executable, str(root / "tools" / "embed_kernels.py"), "--print", name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    kernels = ("fattn_prefill", "fattn_decode", "fattn_decode_wide", "fattn_decode_vector", "fattn_merge")
    # Called when it is launched.
    mutate = {kernel: lambda _, kernel=kernel: text_of(kernel) for kernel in kernels}
    return direct_launch.run(case, mutate, plan=plan)


def is_formatted(path: Path) -> bool:
    beside_python = Path(sys.executable).parent / "clang-format"
    formatter = str(beside_python) if beside_python.exists() else shutil.which("clang-format")
    if formatter is None:
        pytest.skip("clang-format is not installed")
    shutil.copy(ROOT / ".clang-format", path.parent)
    return subprocess.run([formatter, "--dry-run", "-Werror", str(path)]).returncode == 0


PRINT_PLAN = """
#include <cstdio>
#include "plan/plan.h"
using namespace fattn;

int main() {
  Problem p;
  p.op = Op::kDecode;
  p.dtype = DType::kFloat16;
  p.batch = p.kv_heads = p.q_len = 1;
  p.q_heads = 4;
  p.kv_len = 203;
  p.head_dim = p.value_dim = 64;
  p.query = {256, 64, 64};
  p.key = p.value = {203 * 64, 203 * 64, 64};
  p.vector_aligned = true;
  p.scale = 0.125;
  for (const int family : {8, 9}) {
    DeviceFacts device;
    device.family = family;
    std::printf("%s\\n", to_json(std::get<Plan>(plan(p, device)), device).c_str());
  }
}
"""


def planned(root: Path) -> list[dict[str, Any]]:
    """The plans of a decode by the planner in `root`, for an M2 and an M3."""
    main = root / "main.cpp"
    main.write_text(PRINT_PLAN)
    with tempfile.TemporaryDirectory() as folder:
        program = PlanProgram(root / "csrc", main, Path(folder)).link()
        lines = subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()
    return [json.loads(line) for line in lines]


@needs_emulator
def test_a_tile_size(copy: Path) -> None:
    for change in changes_of("A tile size"):
        change.apply(copy)
    assert is_formatted(copy / "csrc/plan/tuning.h")
    before, after = planned(copy)
    assert [plan["passes"][0]["macros"]["FATTN_TILE_KEYS"] for plan in (before, after)] == ["32", "16"]
    assert after["tuning"] == "float16, D <= 64, M3 and later: 16 keys per step"
    case = problems.build(Problem(0, "decode", f16, 1, 4, 1, 1, 203, 64, 64))
    as_built = torch_fattn.explain("decode", **case.arguments("cpu")[0]).data
    assert before["passes"] == as_built["passes"], "the control: other GPUs keep theirs"
    assert_close(case, *run(copy, case, after))


@needs_emulator
@pytest.mark.parametrize("kv_format", ["fp8_e4m3", "fp8_e4m3_unscaled"])
def test_a_cache_format(kv_format: str, copy: Path) -> None:
    """Numbers plus 128 instead of e4m3, and the number of the new format instead of the old one."""
    for change in changes_of("A cache format"):
        change.apply(copy)
    for name in ("keys.h", "formats.h"):
        assert is_formatted(copy / "csrc/kernels/common" / name)
    case = problems.build(Problem(0, "decode", f32, 2, 4, 2, 2, 75, 40, 24, kv_format=kv_format))
    generator = torch.Generator().manual_seed(0)
    for name in ("key", "value"):
        numbers = (torch.randn(case.clean[name].shape, generator=generator) * 3).round()
        numbers[0, 0, 3, :4] = torch.tensor([-128.0, 127.0, 0.0, 1.0])
        case.operands[name] = flat((numbers + 128).to(torch.uint8))
        scales = case.operands.get(f"{name}_scales")
        factor = scales.of(scales.base).double()[..., None] if scales else 1.0
        case.clean[name] = numbers.double() * factor
    plan = torch_fattn.explain("decode", **case.arguments("cpu")[0], family=7, cores=8).data
    with pytest.raises(AssertionError):  # the control: taken for e4m3
        assert_close(case, *run(copy, case, plan))
    (attention,) = (p for p in plan["passes"] if p["kernel"] == "fattn_decode")
    attention["macros"]["FATTN_KV_FORMAT"] = "7"
    assert_close(case, *run(copy, case, plan))


@needs_emulator
def test_a_format_without_its_branches(copy: Path) -> None:
    """Kernels whose chains lack a format of the list do not compile."""
    row, *_ = changes_of("A cache format")
    case = problems.build(Problem(0, "decode", f32, 1, 1, 1, 1, 9, 8, 8, kv_format="fp8_e4m3"))
    plan = torch_fattn.explain("decode", **case.arguments("cpu")[0], family=7, cores=8).data
    row.apply(copy)
    plan["passes"][0]["macros"]["FATTN_KV_FORMAT"] = "7"
    with pytest.raises(Exception, match="stored_pair lacks this format"):
        run(copy, case, plan)


@pytest.mark.host_only
def test_the_files_that_it_names() -> None:
    named = set(re.findall(r"`((?:csrc|torch_fattn|tests|tools)/[\w./]*\w)`", GUIDE))
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
    kernels = [*(ROOT / "csrc/kernels").glob("*/*")]
    table = GUIDE.split("| `csrc/kernels/` |")[1].split("\n\n")[0]
    assert {*re.findall(r"^\| `(\w+)/`", table, re.MULTILINE)} == {path.parent.name for path in kernels}
    assert [path.name for path in kernels if not path.read_text().startswith("// ")] == []


@pytest.mark.host_only
@pytest.mark.parametrize("house", ["csrc", "torch_fattn"])
def test_the_rooms_of_a_house(house: str) -> None:
    """Highest first in csrc, lowest first in torch_fattn."""
    table = GUIDE.split(f"| `{house}/` |")[1].split("\n\n")[0]
    named = re.findall(r"^\| `(\w+)/`", table, re.MULTILINE)
    floors = rooms.floors_in_order(rooms.FLOORS[house])
    numbers = [floors[room] for room in named]
    assert numbers == sorted(numbers, reverse=house == "csrc")
    folders = {path.name for path in (ROOT / house).iterdir() if path.is_dir()}
    assert {*named} == {*floors} - {"__init__", "__main__"} == folders - {"generated", "__pycache__"}


@pytest.mark.host_only
def test_the_rooms_of_tests() -> None:
    table = GUIDE.split("| `tests/` |")[1].split("\n\n")[0]
    named = re.findall(r"`(\w+)/`", table)
    assert {*named} == {path.parent.name for path in (ROOT / "tests").glob("*/__init__.py")}
    for path in (ROOT / "tests").rglob("*.py"):
        room = path.relative_to(ROOT / "tests").parts[0]
        imported = re.findall(r"^\s*from tests\.(\w+)\.test_\w+ import", path.read_text(), re.MULTILINE)
        assert {*imported} <= {room}, f"{path.relative_to(ROOT)} imports tests of {imported}"


# Where an option must be, beside its places in layers that only pass it on.
OF_AN_OPTION = (
    "csrc",
    "torch_fattn/operators",
    "torch_fattn/reference",
    "tests/helpers/problems.py",
    "docs/options.md",
)


def files_naming(word: str, *places: str) -> set[str]:
    paths = (
        path for place in places for path in (ROOT / place, *(ROOT / place).rglob("*")) if path.is_file()
    )
    sources = (path for path in paths if path.suffix in (".cpp", ".h", ".mm", ".metal", ".py", ".md"))
    found = (path for path in sources if re.search(rf"\b{word}\b", path.read_text()))
    return {str(path.relative_to(ROOT)) for path in found if path.name != "README.md"}


@pytest.mark.host_only
@pytest.mark.parametrize("option", ["sink_tokens", "alibi_slopes", "token_major_out"])
def test_the_files_of_an_option(option: str) -> None:
    table = GUIDE.split(f"| file of `{option}` |")[1].split("\n\n")[0]
    listed = re.findall(r"^\| `([\w./]+)` \|", table, re.MULTILINE)
    assert {*listed} == files_naming(option, *OF_AN_OPTION)
    (count,) = re.findall(rf"`{option}`[^:]*: (\d+) files", GUIDE)
    assert int(count) == len(listed)
