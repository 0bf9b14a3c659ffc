"""A progress bar on standard error; silent when that is not a terminal."""

from __future__ import annotations

import shutil
import sys
import time

WIDTH = 28


class Progress:
    def __init__(self, total: int) -> None:
        self._total = total
        self._done = -1
        self._start = time.monotonic()
        self._shown = sys.stderr.isatty()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._write("")

    def step(self, label: str) -> None:
        """Ends the previous step and begins this one."""
        self._done += 1
        filled = WIDTH * self._done // self._total
        seconds = time.monotonic() - self._start
        left = f", {seconds / self._done * (self._total - self._done):.0f} s left" if self._done else ""
        bar = "█" * filled + "░" * (WIDTH - filled)
        self._write(f"{bar} {self._done}/{self._total}{left}  {label}")

    def _write(self, text: str) -> None:
        if self._shown:
            columns = shutil.get_terminal_size().columns
            sys.stderr.write("\r\x1b[K" + text[: columns - 1])
            sys.stderr.flush()
