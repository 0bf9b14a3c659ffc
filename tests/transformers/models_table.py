"""The list of models in docs/models.md and its summary in the README, written from families.json and checked
by test_models_table.py.

python -m tests.transformers.models_table            # exit 1 if one of them says anything else
python -m tests.transformers.models_table --update
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.transformers.sweep import recorded

ROOT = Path(__file__).resolve().parents[2]
README, MODELS = ROOT / "README.md", ROOT / "docs" / "models.md"
BEGIN = "<!-- MODELS: written by python -m tests.transformers.models_table --update -->"
END = "<!-- /MODELS -->"
KINDS = {"causal": "causal LM", "masked": "masked LM", "seq2seq": "sequence to sequence", "base": "other"}
REASONS = {
    "no loaded model class": "a part has a config without a model class",
    "attention interface": "does not go through transformers' attention interface",
    "KeyError": "transformers' own table of attention classes does not take other names",
    "indices": "sparse selection of keys",
}


def summary(document: dict[str, Any]) -> str:
    families = document["families"]
    verdicts = [found["verdict"] for group in families.values() for found in group.values()]
    counts = {v: verdicts.count(v) for v in ("matches", "refuses", "not used", "not built")}
    return (
        f"Of {len(verdicts)} entries of the Auto mappings of transformers {document['transformers']}, "
        f"{counts['matches']} match eager attention, {counts['refuses']} are refused, "
        f"{counts['not used']} run as under eager without using `fattn`, and {counts['not built']} do not "
        "build or run from a small generic config and inputs; "
        f"{len(verdicts) - sum(counts.values())} differ."
    )


def table(document: dict[str, Any]) -> str:
    families = document["families"]
    lines = [summary(document), ""]
    for kind, title in KINDS.items():
        lines += _details(f"{title}: match", _named(families[kind], "matches"))
    refused: dict[str, set[str]] = {}
    for group in families.values():
        for name, found in group.items():
            if found["verdict"] == "refuses":
                refused.setdefault(_reason(found["why"]), set()).add(name)
    for reason, names in refused.items():
        lines += _details(f"refused: {reason}", sorted(names))
    for verdict, title in (("not used", "<code>fattn</code> is not used"), ("not built", "not tried")):
        lines += _details(title, sorted({n for group in families.values() for n in _named(group, verdict)}))
    return "\n".join(lines).rstrip()


def render(text: str, what: Callable[[dict[str, Any]], str] = table) -> str:
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    return f"{head}{BEGIN}\n{what(recorded())}\n{END}{tail}"


def _named(group: dict[str, dict[str, str]], verdict: str) -> list[str]:
    return [name for name, found in group.items() if found["verdict"] == verdict]


def _reason(why: str) -> str:
    return next((reason for word, reason in REASONS.items() if word in why), "another reason")


def _details(title: str, names: list[str]) -> list[str]:
    return [
        f"<details markdown><summary>{title} ({len(names)})</summary>",
        "",
        ", ".join(names),
        "",
        "</details>",
        "",
    ]


def main(arguments: list[str]) -> int:
    status = 0
    for path, what in ((README, summary), (MODELS, table)):
        current = path.read_text()
        wanted = render(current, what)
        if arguments == ["--update"]:
            path.write_text(wanted)
        elif wanted != current:
            command = "python -m tests.transformers.models_table --update"
            print(f"{path.name} differs from families.json: run {command}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
