"""The README's list of models, written from families.json and checked by test_models_table.py.

python -m tests.transformers.models_table            # exit 1 if the README says anything else
python -m tests.transformers.models_table --update
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.transformers.sweep import recorded

README = Path(__file__).resolve().parents[2] / "README.md"
BEGIN = "<!-- MODELS: written by python -m tests.transformers.models_table --update -->"
END = "<!-- /MODELS -->"
KINDS = {"causal": "causal LM", "masked": "masked LM", "seq2seq": "sequence to sequence", "base": "other"}
REASONS = {
    "no loaded model class": "a part has a config without a model class",
    "attention interface": "does not go through transformers' attention interface",
    "KeyError": "transformers' own table of attention classes does not take other names",
    "indices": "sparse selection of keys",
}


def table(document: dict[str, Any]) -> str:
    families = document["families"]
    verdicts = [found["verdict"] for group in families.values() for found in group.values()]
    counts = {v: verdicts.count(v) for v in ("matches", "refuses", "not used", "not built")}
    lines = [
        f"Of {len(verdicts)} entries of the Auto mappings of transformers {document['transformers']}, "
        f"{counts['matches']} match eager attention, {counts['refuses']} are refused, "
        f"{counts['not used']} run as under eager without using `fattn`, and {counts['not built']} do not "
        "build or run from a small generic config and inputs; "
        f"{len(verdicts) - sum(counts.values())} differ.",
        "",
    ]
    for kind, title in KINDS.items():
        lines += _details(f"{title}: match", _named(families[kind], "matches"))
    refused: dict[str, set[str]] = {}
    for group in families.values():
        for name, found in group.items():
            if found["verdict"] == "refuses":
                refused.setdefault(_reason(found["why"]), set()).add(name)
    for reason, names in refused.items():
        lines += _details(f"refused: {reason}", sorted(names))
    for verdict, title in (("not used", "`fattn` is not used"), ("not built", "not tried")):
        lines += _details(title, sorted({n for group in families.values() for n in _named(group, verdict)}))
    return "\n".join(lines).rstrip()


def render(readme: str) -> str:
    head, rest = readme.split(BEGIN)
    tail = rest.split(END)[1]
    return f"{head}{BEGIN}\n{table(recorded())}\n{END}{tail}"


def _named(group: dict[str, dict[str, str]], verdict: str) -> list[str]:
    return [name for name, found in group.items() if found["verdict"] == verdict]


def _reason(why: str) -> str:
    return next((reason for word, reason in REASONS.items() if word in why), "another reason")


def _details(title: str, names: list[str]) -> list[str]:
    return [f"<details><summary>{title} ({len(names)})</summary>", "", ", ".join(names), "", "</details>", ""]


def main(arguments: list[str]) -> int:
    current = README.read_text()
    wanted = render(current)
    if arguments == ["--update"]:
        README.write_text(wanted)
    elif wanted != current:
        print(
            "README.md differs from families.json: run python -m tests.transformers.models_table --update",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
