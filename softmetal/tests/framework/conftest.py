"""Builds the test extension like a user: with `python -m softmetal config` and torch's cpp_extension."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def kit(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """torch.ops.softmetal_kit."""
    torch = pytest.importorskip("torch")
    from torch.utils import cpp_extension

    from softmetal.paths import BUILD, LIBRARY
    from softmetal.testing import build_environment

    if not LIBRARY.exists():
        pytest.skip("libsoftmetal.so is not built (python -m softmetal build)")
    flags = build_environment()
    patch = pytest.MonkeyPatch()
    patch.setenv("CXX", flags["CXX"])
    patch.setenv("TORCH_EXTENSIONS_DIR", str(BUILD / "test_extensions"))
    cpp_extension.load(
        "softmetal_kit",
        [str(HERE / name) for name in ("kit.mm", "misuse.mm", "archives.mm")],
        extra_cflags=[*shlex.split(flags["CPPFLAGS"]), "-O1", "-Wno-unused-command-line-argument"],
        extra_ldflags=shlex.split(flags["LDFLAGS"]),
        is_python_module=False,
    )
    patch.undo()
    ops: ModuleType = torch.ops.softmetal_kit
    return ops
