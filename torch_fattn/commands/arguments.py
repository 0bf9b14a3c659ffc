"""Arguments of the commands. An invalid one prints a one-sentence error to stderr and exits with status 2."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NoReturn


class ArgumentError(ValueError):
    """Its message names the option, its value, the limit, and what to pass instead."""


class Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        # Otherwise a misspelt option could match another option's abbreviation.
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.refuse(f"{message} ({self.prog} --help lists the arguments)")

    def refuse(self, sentence: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(sentence.split())}\n")


def whole(least: int, most: int) -> Callable[[str], int]:
    """An argparse type: an integer from `least` to `most`."""

    def convert(text: str) -> int:
        shown = repr(text if len(text) <= 24 else f"{text[:20]} ...")
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{shown} is not a whole number; give one from {least:,} to {most:,}"
            ) from None
        if not least <= number <= most:
            side = f"below {least:,}, the least" if number < least else f"above {most:,}, the most"
            raise argparse.ArgumentTypeError(f"{shown} is {side}; give a number from {least:,} to {most:,}")
        return number

    return convert
