"""python -m tests.docs.update_outputs: runs the commands of the documents and updates the blocks of their
output. Read the differences before you commit them; an output that changed loses its `...`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.docs.test_commands import run
from tests.helpers.document_commands import COMMANDS, Run
from tests.helpers.documents import DOCUMENTS, Block, blocks_of, commands_of
from tests.helpers.run_page import output_of, same_output


def with_output(markdown: str, block: Block, printed: str) -> str:
    """The text of that block exchanged."""
    lines = markdown.splitlines(keepends=True)
    first, count = block.line - 1, block.text.count("\n")
    return "".join((*lines[:first], printed.rstrip() + "\n", *lines[first + count :]))


def update(path: Path) -> bool:
    """Whether anything was written."""
    markdown = before = path.read_text(encoding="utf-8")
    for number in range(len(blocks_of(markdown))):
        blocks = blocks_of(markdown)
        wanted = output_of(blocks, number)
        commands = [command for command, block in commands_of(markdown) if block == blocks[number]]
        if wanted is None or len(commands) != 1 or not isinstance(COMMANDS.get(commands[0]), Run):
            continue
        with tempfile.TemporaryDirectory() as folder:
            message = run(commands[0], Path(folder))
        if not same_output(wanted.text, message.stdout + message.stderr):
            markdown = with_output(markdown, wanted, message.stdout + message.stderr)
    path.write_text(markdown, encoding="utf-8")
    return markdown != before


if __name__ == "__main__":
    for document in DOCUMENTS:
        if update(document):
            print(f"{document.name} was updated", file=sys.stderr)
