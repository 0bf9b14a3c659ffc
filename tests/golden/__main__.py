"""The golden plans: tests/golden has a text file for each operator, with a block for each plan.

    python -m tests.golden      rewrites them from the planner as it is now (`make golden`)

A block has the choices of the planner. It leaves out what is off: macros, constants and parameters that are 0
or false, and windows without a limit. So a new option changes only the plans that use it. It also leaves out
what follows from the call, where a mistake gives wrong results: bindings, strides, sizes and dtypes. The row
of the tuning tables shows in the macros.
"""

from __future__ import annotations

import difflib
import textwrap
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.golden.calls import GOLDEN_CALLS, OTHER_GOLDEN_CALLS, golden_plan

FOLDER = Path(__file__).parent
WIDTH = 110
STRIDES = (["batch", "head", "row"], ["batch", "token", "group"])  # of an operand
FOLLOWS = (
    *("device", "bindings", "registers", "params_bytes", "tuning", "source"),
    *("FATTN_T", "FATTN_OUT_T", "FATTN_HEAD_DIM", "FATTN_VALUE_DIM", "batch", "q_heads", "group_size"),
    *("q_len", "kv_len", "capacity", "head_dim", "score_scale", "slope_scale", "seq_lens_stride"),
)
# kNoWindow and kNoLimit of params.h.
UNLIMITED = {"window_left": (2**30, 2**31 - 1), "window_right": (2**31 - 1,)}


def choices_of(node: Any) -> Any:
    """A plan without what follows from its call."""
    if isinstance(node, list):
        return [choices_of(each) for each in node]
    if not isinstance(node, Mapping):
        return node
    return {
        name: choices_of(value)
        for name, value in node.items()
        if name not in FOLLOWS and not (isinstance(value, Mapping) and [*value][:3] in STRIDES)
    }


def text_of(name: str, plan: Mapping[str, Any]) -> str:
    """A block: the name of the plan, its fields, and its passes with theirs."""
    plan = choices_of(plan)
    fields = (item for item in plan.items() if item[0] != "passes" and not _is_off(*item))
    lines = [name, *_wrapped("; ".join(f"{field}: {_words(value)}" for field, value in fields), "  ")]
    for step in plan["passes"]:
        lines += _lines_of_pass(step)
    return "\n".join(lines) + "\n"


def _lines_of_pass(step: Mapping[str, Any]) -> list[str]:
    """How it is launched on the first line, then macros, constants and parameters."""
    words = {field: _words(value) for field, value in step.items()}
    launch = [f"{field} {words[field]}" for field, value in step.items() if not isinstance(value, Mapping)]
    lines = _wrapped("; ".join(launch), "  ")
    for field, value in step.items():
        if isinstance(value, Mapping) and words[field]:
            lines += _wrapped(f"{field}: {words[field]}", "    ")
    return lines


def _wrapped(line: str, indent: str) -> list[str]:
    wrapper = textwrap.TextWrapper(
        WIDTH, indent, indent + "    ", break_long_words=False, break_on_hyphens=False
    )
    return wrapper.wrap(line)


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(_word(*item) for item in value.items() if not _is_off(*item))
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _word(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{name}({','.join(_word(*item) for item in value.items() if not _is_off(*item))})"
    return name if value is True else f"{name}={value}"


def _is_off(name: str, value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_off(*item) for item in value.items())
    return value in (0, "0", "false") or value in UNLIMITED.get(name, ())


def file_of(op: str) -> Path:
    return FOLDER / f"{op}.txt"


def blocks_of(text: str) -> dict[str, str]:
    """The blocks of a file by the names of their plans."""
    return {block.split("\n", 1)[0]: block.rstrip("\n") + "\n" for block in text.split("\n\n")}


def difference(kept: str, now: str) -> str:
    """The lines that differ between two blocks, or nothing."""
    lines = difflib.unified_diff(kept.splitlines(), now.splitlines(), "tests/golden", "now", lineterm="")
    return "\n".join(lines)


def golden_texts() -> dict[str, str]:
    """The expected text of each file, by operator."""
    blocks: dict[str, list[str]] = defaultdict(list)
    for name in (*GOLDEN_CALLS, *OTHER_GOLDEN_CALLS):
        op, plan = golden_plan(name)
        blocks[op].append(text_of(name, plan))
    return {op: "\n".join(found) for op, found in blocks.items()}


def main() -> None:
    texts = golden_texts()
    for old in FOLDER.glob("*.txt"):
        old.unlink()
    for op, text in texts.items():
        file_of(op).write_text(text)
    print(f"wrote {len(texts)} files in {FOLDER.name}")


if __name__ == "__main__":
    main()
