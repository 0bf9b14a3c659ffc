"""Checks rules that no linter has: file length, machine paths, unfinished marks, layers, rooms, and phrases
that are not plain English.

Prints one line per violation and exits with 1 if there is any.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import rooms

ROOT = Path(__file__).resolve().parent.parent
SOURCE_ENDINGS = {
    ".py",
    ".cpp",
    ".h",
    ".hpp",
    ".mm",
    ".m",
    ".metal",
    ".S",
    ".cu",
    ".sh",
    ".yml",
    ".toml",
    ".md",
}
SKIPPED_FOLDERS = {".git", ".venv", ".newest", "build", "_build", "dist", "out", "generated", "__pycache__"}
MAX_LINES = 450
LONGER = {
    Path("torch_fattn/operators/attention.py"): 480,  # six operators, each with its documentation
}

# The pattern must not match this file.
MACHINE_PATH = re.compile("/" + r"(work|farm|tmp|root|home|Users)/\w")
UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")
PRODUCT_FOLDERS = ("csrc", "torch_fattn")
EMULATOR = re.compile("softmetal", re.IGNORECASE)
# softmetal runs any Metal program. Names of torch's operators and of cited files are allowed.
ATTENTION = re.compile(
    r"attention|attn|prefill|(?<![.\w])decod(?:e|ing)\b|head_?dim|\bsdpa|kv_?cache|softmax weight",
    re.IGNORECASE,
)
NOT_OURS = re.compile(
    r"\w*scaled_dot_product_attention\w*|\battn_mask\b|\b(?:Prefill|Decode|Mpp)Attention\.h\b|\bsteel/attn\b"
    r"|\bsteel_attention_nax\.h\b|\battention_nax\b|\bprefill_attention_mpp_"
)
# Forms in csrc that softmetal takes, and Apple's system may not.
UNSURE = {
    re.compile(r"\bUTF8String\]"): "call utf8() of csrc/metal/foundation.h, since the text may be nil",
    re.compile(r"\bconst constant\b"): "write `constant`, since a function takes `constant T&`",
}
# Tests and tools use only softmetal's public modules.
EMULATOR_USERS = ("tests", "bench", "tools", "examples", "conftest.py", "setup.py")
INSIDE_EMULATOR = re.compile(
    r"^\s*(?:from|import) softmetal\.(?!testing\b)"
    r"|^\s*from softmetal import .*\b(?:__main__|arguments|autoload|control|cuda|msl|native|paths|simt)\b"
)

# Markdown, and all text in these folders, must not contain these phrases. The patterns must not match this
# file.
PROSE_FOLDERS = ("bench", "csrc", "docs", "examples", "softmetal", "tests", "tools", "torch_fattn")
PHRASES = {
    re.compile(r'(?:^\s*(?:#\s|[-*]\s)?|[.:;?!|]\s|"""|#\s|//\s)Of\s[a-z]'): "begin with the subject",
    re.compile(r"\b[Ww]ho[e]ver\b|\bto whom it\b"): "name the person or the program",
    re.compile(r"\b(?:in|with) (?:one|a)\ssentence\b"): "quote the message, or name the error",
    re.compile(r"\bgo(?:es)?\sby the\b|\bgoes\sby\b"): "depends on, is derived from",
    re.compile(r"\bstands?\s(?:aside|for|in the place)\b"): "means, represents, replaces",
    re.compile(r"\bask(?:s|ed)\sfor\b|\bwant[s]\b"): "requests, needs, requires",
    re.compile(r"\bfor want\sof\b|\bwithout a\sword\b"): "without, silently",
    re.compile(r"\bin the place\sof\b"): "instead of",
    re.compile(r"(?<![Tt]here\s)\bis\sno\s(?!longer|more|less|such|better|worse|\w+er\b)[a-z]"): "is not a",
    re.compile(r"\bare no multiples?\sof\b"): "are not multiples of",
    re.compile(r"\banew\b"): "again",
    re.compile(r"\bhand(?:s|ed|ing)\s(?:out|on)\b"): "returns, gives, passes",
    re.compile(r"\b(?:stand|lie)s?\sbehind\b"): "follows, is in, is after",
    re.compile(r"\bspeaks?\sof\b"): "describes, mentions",
    re.compile(r"\bC\+\+ face\sof\b"): "the C++ interface of",
    re.compile(r"\b[Ww]hile it\slives\b|\bcomes? into\sbeing\b"): "during its lifetime, is created",
}


def source_files() -> Iterator[Path]:
    for path in sorted(ROOT.rglob("*")):
        relative = path.relative_to(ROOT)
        hidden = any(
            part in SKIPPED_FOLDERS or part.endswith((".egg-info", "_cache")) for part in relative.parts
        )
        if not hidden and path.is_file() and (path.suffix in SOURCE_ENDINGS or path.name == "Makefile"):
            yield relative


def violations(path: Path) -> Iterator[str]:
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    most = LONGER.get(path, MAX_LINES)
    if path.suffix != ".md" and len(lines) > most:
        yield f"{path}: {len(lines)} lines, more than {most}: split it by meaning"
    for number, line in enumerate(lines, start=1):
        if MACHINE_PATH.search(line):
            yield f"{path}:{number}: a path of one machine"
        if UNFINISHED.search(line):
            yield f"{path}:{number}: an unfinished mark"
        if path.parts[0] in PRODUCT_FOLDERS and EMULATOR.search(line):
            yield f"{path}:{number}: the product must not know of softmetal"
        if path.parts[0] == "csrc" and path.name != "foundation.h":
            yield from (f"{path}:{number}: {advice}" for form, advice in UNSURE.items() if form.search(line))
        if path.parts[0] == "softmetal" and ATTENTION.search(NOT_OURS.sub("", line)):
            yield f"{path}:{number}: softmetal must not know of attention"
        if path.parts[0] in EMULATOR_USERS and INSIDE_EMULATOR.search(line):
            yield f"{path}:{number}: only `softmetal` and `softmetal.testing` are public"
        if path.suffix == ".md" or len(path.parts) == 1 or path.parts[0] in PROSE_FOLDERS:
            yield from (f"{path}:{number}: {fault}" for fault in phrases(line))


def phrases(line: str) -> Iterator[str]:
    for pattern, advice in PHRASES.items():
        if found := pattern.search(line):
            yield f"{found[0].strip()!r}: write {advice!r}"


def main() -> int:
    found = [line for path in source_files() for line in violations(path)] + rooms.check()
    print("\n".join(found) if found else "check_sources: ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
