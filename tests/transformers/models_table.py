"""Writes the list of models in docs/models.md and its summary in the README from families.txt;
test_models_table.py checks them.

python -m tests.transformers.models_table            # exit 1 if one of them differs
python -m tests.transformers.models_table --update
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.transformers.family_table import all_recorded

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "models.md"
PREFACE = """# Models

With `attn_implementation="fattn"` a model computes what it computes with `"eager"`, or raises an error with
the reason. This page lists the results of every family of transformers that builds from a small generic
config. Each was run without padding, padded left and right, with a batch of one, and through `generate`
(`python -m tests.transformers.sweep`).

Outputs at padding tokens may differ: a row that sees no key is 0 here, as under `"sdpa"`, and a mean under
`"eager"`. Layers that were replaced after the model was built are not detected. Gemma 2, 3 and 4, Qwen3.5,
GPT-OSS, T5, Whisper, Qwen2-VL, Qwen2.5-VL and Qwen3-VL were also run with the head sizes of their
checkpoints, including images and sound ([real_heads.py](../tests/transformers/real_heads.py)).
"""
BEGIN = "<!-- MODELS: written by python -m tests.transformers.models_table --update -->"
END = "<!-- /MODELS -->"
WORDS = {
    "matches": "matches",
    "refuses": "refused",
    "not used": "not used",
    "not built": "not tried",
    "gone": "no longer there",
}
KINDS = {"causal": "causal LM", "masked": "masked LM", "seq2seq": "sequence to sequence", "base": "other"}
REASONS = {
    "no loaded model class": "a part has a config without a model class",
    "attention interface": "does not go through transformers' attention interface",
    "table of classes": "picks its attention from a table of classes",
}


def summary(document: dict[str, Any]) -> str:
    families = document["families"]
    verdicts = [found["verdict"] for group in families.values() for found in group.values()]
    counts = {v: verdicts.count(v) for v in ("matches", "refuses", "not used", "not built")}
    return (
        f"The Auto mappings of transformers {document['transformers']} have {len(verdicts)} entries: "
        f"{counts['matches']} match eager attention, {counts['refuses']} are refused, "
        f"{counts['not used']} run as under eager without using `fattn`, and {counts['not built']} do not "
        "build or run from a small generic config and inputs; "
        f"{len(verdicts) - sum(counts.values())} differ. "
        f"{sum(len(names) for names in document['under_sdpa'].values())} of the refused ones match under "
        '`register(on_unsupported="sdpa")`, through other attention.'
    )


def render(readme: str) -> str:
    head, rest = readme.split(BEGIN)
    tail = rest.split(END)[1]
    summaries = [summary(document) for document in reversed(all_recorded())]
    return "\n".join((f"{head}{BEGIN}", "\n\n".join(summaries), f"{END}{tail}"))


def page() -> str:
    """The whole list of the newest version, and the differences of older versions."""
    *older, newest = all_recorded()
    families = newest["families"]
    parts = [PREFACE.rstrip(), summary(newest)]
    for kind, title in KINDS.items():
        parts += _section(f"{title[0].upper()}{title[1:]}: match", _named(families[kind], "matches"))
    refused: dict[str, set[str]] = {}
    for group in families.values():
        for name, found in group.items():
            if found["verdict"] == "refuses":
                refused.setdefault(_reason(found["why"]), set()).add(name)
    for reason, names in refused.items():
        parts += _section(f"Refused: {reason}", sorted(names))
    for verdict, title in (("not used", "`fattn` is not used"), ("not built", "Not tried")):
        parts += _section(title, sorted({n for group in families.values() for n in _named(group, verdict)}))
    for document in reversed(older):
        parts += [f"## With transformers {document['transformers']}", summary(document)]
        parts.append(_differences(document, newest))
    return "\n\n".join(parts) + "\n"


def _section(title: str, names: list[str]) -> list[str]:
    return [f"## {title} ({len(names)})", ", ".join(names)]


def _differences(document: dict[str, Any], newest: dict[str, Any]) -> str:
    found = []
    for kind, verdicts in document["families"].items():
        for name, then in verdicts.items():
            now = newest["families"][kind].get(name, {"verdict": "gone"})["verdict"]
            if then["verdict"] != now:
                found.append(f"{name} ({WORDS[then['verdict']]}; with the newer version {WORDS[now]})")
    return f"Different from the list above: {', '.join(found)}." if found else "All are as above."


def _named(group: dict[str, dict[str, str]], verdict: str) -> list[str]:
    return [name for name, found in group.items() if found["verdict"] == verdict]


def _reason(why: str) -> str:
    return next((reason for word, reason in REASONS.items() if word in why), "another reason")


def main(arguments: list[str]) -> int:
    different = 0
    for file, wanted in ((README, render(README.read_text())), (PAGE, page())):
        if arguments == ["--update"]:
            file.write_text(wanted)
        elif not file.exists() or file.read_text() != wanted:
            different = 1
            print(
                f"{file.relative_to(ROOT)} differs from tests/transformers/families.txt: "
                "run python -m tests.transformers.models_table --update",
                file=sys.stderr,
            )
    return different


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
