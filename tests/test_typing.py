"""The wrappers as a type checker sees them: what comes back depends on `return_lse`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

api = pytest.importorskip("mypy.api")

HEADER = """
from typing import assert_type
from torch import Tensor
import torch_fattn as f

def calls(x: Tensor, flag: bool) -> None:
"""
CALLS = {
    "prefill": "x, x, x, None, is_causal=True, scale=1.0",
    "decode": "x, x, x, x, attn_mask=x",
    "paged_decode": "x, x, x, x, x",
    "paged_prefill": "x, x, x, x, x, x, 9",
    "varlen_prefill": "x, x, x, x, x, 9, 9, q_offset=0",
    "merge": "x, x",
    "shared_prefix_decode": "x, x, x, x, x, softcap=1.0",
    "shared_prefix_paged_decode": "x, x, x, x, x, 3, attn_mask=None",
}
RIGHT = "".join(
    f"""
    assert_type(f.{op}({arguments}), Tensor)
    assert_type(f.{op}({arguments}, return_lse=False), Tensor)
    assert_type(f.{op}({arguments}, return_lse=True), tuple[Tensor, Tensor])
    assert_type(f.{op}({arguments}, return_lse=flag), Tensor | tuple[Tensor, Tensor])
    f.{op}({arguments}).sum()
    out_{op}, lse_{op} = f.{op}({arguments}, return_lse=True)
    lse_{op}.exp()
"""
    for op, arguments in CALLS.items()
)
WRONG = {
    "    f.merge(x, x, return_lse=True).sum()": "no attribute",
    "    f.prefill(x, x, x, return_lse=flag).sum()": "no attribute",
    "    f.prefill(x, x, x, is_causal=x)": "No overload variant",
    "    f.decode(x, x)": "No overload variant",
}


@pytest.mark.host_only
def test_overloads(tmp_path: Path) -> None:
    (tmp_path / "snippet.py").write_text(HEADER + RIGHT + "\n".join(WRONG))
    report, errors, _ = api.run([str(tmp_path / "snippet.py"), "--python-version", "3.11"])
    found = {int(n): text for n, text in re.findall(r"snippet\.py:(\d+): error: (.*)", report)}
    first_wrong = (HEADER + RIGHT).count("\n") + 1
    assert sorted(found) == [first_wrong + i for i in range(len(WRONG))], report + errors
    for text, words in zip(found.values(), WRONG.values(), strict=True):
        assert words in text
