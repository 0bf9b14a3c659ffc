"""Arguments of the bench's commands: a wrong argument prints an error to standard error and exits with status
2.

This does not use torch_fattn's arguments: a machine that times an NVIDIA GPU need not have torch_fattn.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any, NoReturn


class WrongArgumentError(ValueError):
    """The message names the option, its value, the limit, and a value that works."""


class Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.refuse(f"{message} (--help lists the arguments)")

    def refuse(self, sentence: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(sentence.split())}\n")


def output_file(text: str) -> Path:
    """The type of an option that names an output file, checked before the run."""
    path = Path(text)
    if not path.name or text.endswith(os.sep):
        raise argparse.ArgumentTypeError(f"{text!r} names no file; give a path that ends in a name")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; give the path of a file in it")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text!r} is in a folder that does not exist; create {path.parent} first"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} is not writable; give a writable path")
    return path


def picture_stem(text: str) -> Path:
    """The type of an option that names two output files, STEM.png and STEM.svg. Drops an ending."""
    stem = text.removesuffix(".png").removesuffix(".svg")
    for ending in (".png", ".svg"):
        output_file(stem + ending if Path(stem).name and not stem.endswith(os.sep) else stem)
    return Path(stem)


def positive(text: str) -> int:
    """The type of an option that is a positive integer."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 1 <= number < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number; give one")
    return number


def pattern(text: str) -> re.Pattern[str]:
    """The type of an option that is a regular expression."""
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a regular expression ({error}); write a backslash before a character that is "
            "meant literally"
        ) from None
