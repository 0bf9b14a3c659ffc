"""The plans of tests/golden. `make golden` rewrites them after a change that is meant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.golden.__main__ import FOLDER, blocks_of, choices_of, difference, file_of, text_of
from tests.golden.calls import GOLDEN_CALLS, OTHER_GOLDEN_CALLS, golden_plan

pytestmark = pytest.mark.host_only
NAMES = [*GOLDEN_CALLS, *OTHER_GOLDEN_CALLS]


@pytest.mark.parametrize("name", NAMES)
def test_golden(name: str) -> None:
    op, plan = golden_plan(name)
    file = file_of(op)
    kept = blocks_of(file.read_text()).get(name, "") if file.exists() else ""
    if lines := difference(kept, text_of(name, plan)):
        pytest.fail(f"{file.name} differs: run `make golden` if the change is meant\n{lines}", pytrace=False)


def test_every_golden_plan_has_a_call() -> None:
    texts = [file.read_text() for file in FOLDER.glob("*.txt")]
    assert sorted(name for text in texts for name in blocks_of(text)) == sorted(NAMES)


def values_of(node: Any) -> Iterator[tuple[Any, Any]]:
    """The places of all values of a plan: a dictionary or list, and the key."""
    for key, value in list(node.items() if isinstance(node, dict) else enumerate(node)):
        if isinstance(value, dict | list):
            yield from values_of(value)
        else:
            yield node, key


@pytest.mark.parametrize("name", ["prefill_documents", "decode_options", "softmax_f16"])
def test_every_change_of_a_plan_shows(name: str) -> None:
    """The control: every choice changes the text, and a new option that is off does not."""
    plan = choices_of(golden_plan(name)[1])
    kept = text_of(name, plan)
    for node, key in values_of(plan):
        value = node[key]
        node[key] = not value if isinstance(value, bool) else value + ("x" if isinstance(value, str) else 1)
        assert difference(kept, text_of(name, plan)), key
        node[key] = value
    step = plan["passes"][-1]
    step["constants"]["new"], step["params"]["new"] = False, {"row": 0, "key": 0}
    assert not difference(kept, text_of(name, plan))
    step["params"]["new"]["row"] = 1
    assert "new(row=1)" in difference(kept, text_of(name, plan))
