"""The simulated GPU and macOS, and tensor operations through the Metal framework."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import softmetal

torch = pytest.importorskip("torch")

# Where lane 0 has its third element: in column 2 of an M5's layout, 8 of the older ones.
TENSORS = """
#include <metal_stdlib>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;
using namespace mpp::tensor_ops;
kernel void third(device float* y [[buffer(0)]], uint lane [[thread_index_in_simdgroup]]) {
  typedef tensor<device float, dextents<int, 2>, tensor_inline> Matrix;
  matmul2d<matmul2d_descriptor(16, 16, 16), execution_simdgroup> multiply;
  Matrix a(y, dextents<int, 2>(16, 16));
  auto sums = multiply.get_destination_cooperative_tensor<Matrix, Matrix, float>();
  multiply.run(a, a, sums);
  if (lane == 0) y[0] = sums.get_multidimensional_index(2)[0];
}
"""
SCRIPT = """
import json, sys, torch
torch.ops.load_library(sys.argv[1])
kit = torch.ops.softmetal_kit
found = dict(line.split("=", 1) for line in kit.facts())
y = torch.zeros(256, device="mps")
try:
    kit.run(sys.argv[2], "third", [y], {"KIT_LANGUAGE": "4.0"}, [], [1, 1, 1], [32, 1, 1], 0)
    found["third"] = y[0].item()
except RuntimeError as error:
    found["error"] = str(error)
print(json.dumps(found))
"""


def ask(kit: ModuleType, **environment: str) -> dict[str, Any]:
    library = next(path for path in torch.ops.loaded_libraries if "softmetal_kit" in path)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(Path(library)), TENSORS],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_m5_with_macos_26_2(kit: ModuleType) -> None:
    found = ask(kit, SOFTMETAL_GPU_FAMILY="10", SOFTMETAL_MACOS="26.2")
    assert (found["apple10"], found["metal4"]) == ("1", "1")
    assert found["architecture"] == "applegpu_g17g"
    assert found["system"] == "Darwin 25.2.0"
    assert found["third"] == 2


def test_m3_with_macos_15(kit: ModuleType) -> None:
    found = ask(kit, SOFTMETAL_GPU_FAMILY="9", SOFTMETAL_MACOS="15.6")
    assert (found["apple9"], found["apple10"], found["metal4"]) == ("1", "0", "0")
    assert found["architecture"] == "applegpu_g15g"
    assert found["system"] == "Darwin 24.6.0"
    assert "language version 4.0 which is not supported on this OS" in found["error"]


def test_the_layout_changes_with_the_context(kit: ModuleType) -> None:
    def third(layout: str | None) -> float:
        y = torch.zeros(256, device="mps")
        with softmetal.checks(tensor_layout=layout):
            kit.run(TENSORS, "third", [y], {"KIT_LANGUAGE": "4.0"}, [], [1, 1, 1], [32, 1, 1], 0)
        return float(y[0].item())

    usual = third(None)
    assert (third("m5"), third("blocks8")) == (2, 8)
    assert len({third(f"random:{seed}") for seed in range(12)}) > 3
    assert third(None) == usual
    with pytest.raises(ValueError, match="use 'm5', 'blocks8' or 'random:SEED'"):
        third("m4")


def test_products_are_counted(kit: ModuleType) -> None:
    y = torch.zeros(256, device="mps")
    before = softmetal.counters()["tensor_products"]
    with softmetal.record() as launches, softmetal.checks(count_bytes=True):
        kit.run(TENSORS, "third", [y], {"KIT_LANGUAGE": "4.0"}, [], [1, 1, 1], [32, 1, 1], 0)
    assert launches[0]["counters"]["tensor_products"] == 8
    assert launches[0]["counters"]["products"] == 0
    assert launches[0]["buffers_read"]["0"] == 2 * 4 * 256
    assert softmetal.counters()["tensor_products"] == before + 8


def test_tensors_need_4_0(kit: ModuleType) -> None:
    y = torch.zeros(256, device="mps")
    with pytest.raises(RuntimeError, match="mpp"):
        kit.run(TENSORS, "third", [y], {"KIT_LANGUAGE": "3.2"}, [], [1, 1, 1], [32, 1, 1], 0)
