"""Arguments of softmetal's commands: an error prints one sentence on standard error and exits with 2."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help lists the arguments)\n")


def positive(text: str) -> int:
    """The type of a count."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 1 <= number < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number; give one")
    return number
