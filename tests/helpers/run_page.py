"""python -m tests.helpers.run_page PAGE: the python blocks of a page, in order, in one namespace. The
output of a block is compared with the block of output that follows it.

Each page needs its own process, because registering or installing something is permanent.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from tests.helpers.command_line import save_checkpoint
from tests.helpers.documents import Block, blocks_of

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def same_output(wanted: str, printed: str) -> bool:
    """`...` in a document matches any text."""
    return doctest.OutputChecker().check_output(wanted, printed, FLAGS)


def output_of(blocks: list[Block], number: int) -> Block | None:
    """The documented output of a block."""
    after = blocks[number + 1] if number + 1 < len(blocks) else None
    return after if after is not None and after.is_output else None


def run(name: str, markdown: str) -> str | None:
    """The first problem, if there is one."""
    blocks = blocks_of(markdown)
    if "torch" in markdown:
        import torch

        torch.manual_seed(0)  # weights and tokens are drawn
    namespace = {"__name__": "__main__", **names_of_the_reader(markdown)}
    for number, block in enumerate(blocks):
        if block.language not in ("python", "py") or block.not_run:
            continue
        printed = io.StringIO()
        try:
            # The lines of a traceback are those of the page.
            code = compile("\n" * (block.line - 1) + block.text, name, "exec")
            with contextlib.redirect_stdout(printed):
                exec(code, namespace)
        except Exception:
            return f"{name}:{block.line}: the block fails\n{traceback.format_exc(limit=-2)}"
        wanted = output_of(blocks, number)
        if wanted is not None and not same_output(wanted.text, printed.getvalue()):
            return f"{name}:{block.line}: the block prints\n{printed.getvalue()}and not\n{wanted.text}"
    return None


def names_of_the_reader(markdown: str) -> dict[str, Any]:
    """Names that the documents assume: a checkpoint, an operator of an extension."""
    names: dict[str, Any] = {}
    if "(path," in markdown:
        names["path"] = tempfile.mkdtemp()
        save_checkpoint(Path(names["path"]), positions=128)
    if "my_op(x)" in markdown:
        import torch

        import torch_fattn

        names |= {"my_op": torch_fattn.softmax, "x": torch.randn(3, 40, device="mps")}
    return names


if __name__ == "__main__":
    page = Path(sys.argv[1])
    problem = run(page.name, page.read_text(encoding="utf-8"))
    print(problem or f"{page.name}: ok", file=sys.stderr if problem else sys.stdout)
    sys.exit(problem is not None)
