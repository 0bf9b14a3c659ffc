"""Arguments of softmetal's commands: a wrong one prints an error to standard error and exits with status
2."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help lists the arguments)\n")


def positive(text: str) -> int:
    """The type of an option that is a positive integer."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 1 <= number < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number; give one")
    return number
