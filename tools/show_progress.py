"""Runs a compile command and prints a line for each file instead of its output. If it fails, the end of the
output follows.

Usage: tools/show_progress.py COMMAND...
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

# ninja: [3/35] clang++ ... -c /path/to/csrc/ops/ops.cpp -o ...
COMPILES = re.compile(r" -c (\S+\.(?:cpp|mm))\b")
COUNT = re.compile(r"\[\d+/\d+\] ")
LAST_LINES = 200


def main(command: list[str]) -> int:
    said: list[str] = []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        if (compiled := COMPILES.search(line)) is not None:
            count = COUNT.search(line)
            print(f"  {count[0] if count else ''}{os.path.relpath(compiled[1])}", flush=True)
    if process.wait():
        sys.stderr.writelines(said[-LAST_LINES:])
    return process.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
