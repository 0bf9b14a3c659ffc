"""The rules of tools/check_sources.py: a violation and a permitted neighbour of each."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.host_only

TOOL = Path(__file__).resolve().parents[2] / "tools" / "check_sources.py"


def violations(path: str, text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    spec = importlib.util.spec_from_file_location("check_sources", TOOL)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "check_sources", tool)
    monkeypatch.syspath_prepend(str(TOOL.parent))
    spec.loader.exec_module(tool)
    monkeypatch.setattr(tool, "ROOT", folder)
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_text(text)
    return [line.partition(": ")[2] for line in tool.violations(Path(path))]


SOFTMETAL = "softmetal/src/softmetal/a.py"
KNOWS = "softmetal must not know of attention"
INSIDE = "only `softmetal` and `softmetal.testing` are public"
NIL = "call utf8() of csrc/metal/foundation.h, since the text may be nil"
CONST = "write `constant`, since a function takes `constant T&`"
SUBJECT = "write 'begin with the subject'"


@pytest.mark.parametrize(
    ("path", "line", "said"),
    [
        (SOFTMETAL, "import torch_fattn", KNOWS),
        ("softmetal/README.md", "Decode of one token", KNOWS),
        ("softmetal/tests/test_a.py", "head_dim = 64", KNOWS),
        (SOFTMETAL, "text.decode()", None),
        (SOFTMETAL, "torch.nn.functional.scaled_dot_product_attention(q, k, v)", None),
        ("tests/test_a.py", "    from softmetal.simt.harness import Library", INSIDE),
        ("bench/a.py", "import softmetal.control", INSIDE),
        ("conftest.py", "from softmetal import control, launches", INSIDE),
        ("tests/test_a.py", "from softmetal.testing import Library", None),
        ("bench/a.py", "from softmetal.testing.cuda import Kernel", None),
        ("bench/a.py", "import softmetal", None),
        ("bench/a.py", "from softmetal import record", None),
        ("softmetal/tests/test_a.py", "from softmetal.simt.harness import Library", None),
        ("csrc/a.h", "// softmetal does", "the product must not know of softmetal"),
        ("csrc/metal/a.mm", "std::string name = [[device name] UTF8String];", NIL),
        ("csrc/metal/foundation.h", "const char* bytes = [text UTF8String];", None),
        ("csrc/kernels/a.h", "  const constant Params* params;", CONST),
        ("csrc/kernels/a.h", "  constant Params* params;", None),
        ("tests/test_a.py", "# " + "TO" + "DO", "an unfinished mark"),
        ("docs/a.md", "The keys. O" + "f these, some are hidden.", "'. O" + f"f t': {SUBJECT}"),
        ("docs/a.md", "The last of the rows sees all keys. Often two do.", None),
        ("softmetal/src/a.h", "int n;  // O" + "f this thread.", "'// O" + f"f t': {SUBJECT}"),
        ("softmetal/src/a.h", "int n;  // The count of this thread.", None),
        ("Makefile", "# It hands" + " out blocks.", "'hands" + " out': write 'returns, gives, passes'"),
        ("Makefile", "# It returns hand-written blocks.", None),
    ],
)
def test_rules(
    path: str, line: str, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert violations(path, line + "\n", tmp_path, monkeypatch) == ([] if said is None else [said])
