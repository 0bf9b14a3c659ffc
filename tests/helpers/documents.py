"""The documents of this repository as tests see them: their fenced blocks, headings and links."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# For processes that run elsewhere.
PYTHONPATH = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
OTHERS = (
    *(
        "README.md",
        "CONTRIBUTING.md",
        "csrc/README.md",
        "softmetal/README.md",
        "softmetal/docs/agx.md",
        "softmetal/docs/cuda.md",
        "softmetal/docs/msl.md",
    ),
    *("bench/NOTES.md", "bench/APPLE.md", "CHANGELOG.md", "SECURITY.md"),
)
PAGES = sorted((ROOT / "docs").rglob("*.md"))
TEMPLATES = sorted((ROOT / ".github").rglob("*.md"))
DOCUMENTS = [*PAGES, *(ROOT / name for name in OTHERS if (ROOT / name).exists()), *TEMPLATES]
# Commands within a sentence.
INLINE = re.compile(
    r"`((?:python -m|python examples|python tools|make|mkdocs|pip install|pip wheel|hf|xcrun) [^`]*)`"
)
SHELL = ("sh", "bash", "shell", "console")
NOT_RUN = re.compile(r"<!-- not run: (\S.*) -->")
EXIT_STATUS = re.compile(r"<!-- exit status: (\d+) -->")
OUTPUT = "<!-- output -->"
# A line that the site replaces with the documentation of a name.
GENERATED = re.compile(r"^::: \S+", re.MULTILINE)
DRAWN = ("nvidia-h200.png", "patterns.png")  # pictures that the site draws, in docs/pictures
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block, and the comment on the line before it."""

    language: str
    text: str
    line: int  # number of its first line of text, from 1
    comment: str

    @property
    def not_run(self) -> str | None:
        """The reason."""
        found = NOT_RUN.fullmatch(self.comment)
        return found[1] if found else None

    @property
    def is_output(self) -> bool:
        """Whether it is the output of the block before."""
        return self.comment == OUTPUT

    @property
    def exit_status(self) -> int:
        found = EXIT_STATUS.fullmatch(self.comment)
        return int(found[1]) if found else 0


def blocks_of(markdown: str) -> list[Block]:
    blocks: list[Block] = []
    lines = iter(enumerate(markdown.splitlines(), start=1))
    comment = ""
    for number, line in lines:
        fence = re.match(r"( *)(```+)\s*([\w+-]*)", line)
        if not fence:
            comment = line.strip() or comment if line.strip().startswith("<!--") or not line.strip() else ""
            continue
        indent, ticks, language = fence.groups()
        text = []
        for _, inner in lines:
            if inner.strip() == ticks:
                break
            text.append(inner.removeprefix(indent))
        else:
            raise ValueError(f"line {number}: the fence has no end")
        blocks.append(Block(language, "\n".join(text) + "\n", number + 1, comment))
        comment = ""
    return blocks


def commands_of(markdown: str) -> Iterator[tuple[str, Block]]:
    """The commands of shell blocks that should run, without comments and prompts, with continued lines
    joined."""
    for block in blocks_of(markdown):
        if block.language not in SHELL or block.not_run:
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            command = re.sub(r"(^|\s)#.*", "", line).strip()
            if block.language == "console":
                if not command.startswith("$ "):
                    continue
                command = command[2:]
            if command:
                yield re.sub(r"\s+", " ", command), block


def inline_commands_of(markdown: str) -> set[str]:
    text = re.sub(r"^( *)```.*?^\1```\s*$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    return {re.sub(r"\s+", " ", command) for command in INLINE.findall(text)}


def prose_of(markdown: str) -> str:
    """The text without fenced blocks and inline code, which hold no links."""
    text = re.sub(r"^( *)```.*?^\1```\s*$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


def links_of(markdown: str) -> list[str]:
    return LINK.findall(prose_of(markdown))


def anchors_of(markdown: str) -> set[str]:
    """The anchors of its headings, as GitHub and mkdocs name them."""
    text = re.sub(r"^( *)```.*?^\1```\s*$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.*?) *#*$", text, flags=re.MULTILINE):
        words = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        found.add(re.sub(r"[\s]", "-", re.sub(r"[^\w\s-]", "", words)))
    return found


def broken_links(path: Path, markdown: str) -> list[str]:
    """Targets within the repository that do not exist or lack the heading."""
    broken = []
    for target in links_of(markdown):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        there = (path.parent / name).resolve() if name else path
        if name and not there.exists():
            if there.parent != ROOT / "docs/pictures" or there.name not in DRAWN:
                broken.append(f"{target}: no such file")
            continue
        if anchor and (there == path or there.suffix == ".md"):
            text = there.read_text(encoding="utf-8") if there != path else markdown
            if not GENERATED.search(text) and anchor not in anchors_of(text):
                broken.append(f"{target}: no such heading")
    return broken
