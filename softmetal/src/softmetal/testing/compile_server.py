"""A compile server for a test run: a kernel that misses the cache costs a fork, and starts no Python."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_VARIABLE = "SOFTMETAL_COMPILER"


@contextmanager
def compile_server() -> Iterator[None]:
    """Inside, this process and those that it starts compile through one server, by $SOFTMETAL_COMPILER.

    Does nothing if there is a server already. Its children's processor seconds are in no process's `times`;
    the file $SOFTMETAL_REQUESTS has them.
    """
    if os.environ.get(_VARIABLE):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="softmetal-") as folder:  # a socket's path has 107 characters
        path = Path(folder) / "compiler"
        command = [sys.executable, "-m", "softmetal.msl", "serve", str(path)]
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with server:  # closes its input, which ends it, and waits
            assert server.stdout is not None
            server.stdout.readline()
            os.environ[_VARIABLE] = str(path)
            try:
                yield
            finally:
                del os.environ[_VARIABLE]
