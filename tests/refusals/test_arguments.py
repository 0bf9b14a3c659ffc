"""Arguments by name (csrc/describe/arguments.h): a name that the schema lacks is an error, and so is an
argument that a kernel does not read. torch compares neither, because it calls such kernels boxed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from torch.utils.cpp_extension import include_paths, library_paths

from tests.plan.test_plan_program import COMPILER

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
#include <iostream>
#include "describe/arguments.h"

template <typename Call>
void print_error(Call call) {
  try {
    call();
    std::cout << "none\\n";
  } catch (const c10::Error& error) {
    std::cout << error.what_without_backtrace() << "\\n";
  }
}

int main() {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::mm", "");  // (self, mat2)
  const torch::jit::Stack stack{at::Tensor(), at::Tensor()};
  const fattn::Arguments arguments(op, stack);
  print_error([&] { arguments["self"]; });
  print_error([&] { arguments["bias"]; });
  print_error([&] { arguments.check_all_read(); });
  arguments["mat2"];
  print_error([&] { arguments.check_all_read(); });
  print_error([&] { fattn::Invocation(op).set("mat2", at::Tensor()); });
  print_error([&] { fattn::Invocation(op).set("bias", at::Tensor()); });
}
"""


@pytest.mark.host_only
def test_names_that_differ_from_the_schema(tmp_path: Path) -> None:
    (tmp_path / "program.cpp").write_text(PROGRAM)
    headers = [f"-I{folder}" for folder in (ROOT / "csrc", *include_paths())]
    libraries = [flag for folder in library_paths() for flag in (f"-L{folder}", f"-Wl,-rpath,{folder}")]
    command = [*COMPILER.split(), "-std=c++20", *headers, "program.cpp", *libraries, "-ltorch_cpu", "-lc10"]
    subprocess.run([*command, "-o", "program"], cwd=tmp_path, check=True)
    done = subprocess.run([tmp_path / "program"], capture_output=True, text=True, check=True)
    errors = [line.partition("aten::mm ")[2] for line in done.stdout.splitlines()]
    unknown = "has no argument bias"
    assert errors == ["", unknown, "does not read mat2", "", "", unknown]
