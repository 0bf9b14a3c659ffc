"""A compile server: one process that has this package imported, and forks for every program.

`python -m softmetal.msl serve SOCKET` listens until its standard input closes, so it ends with the process
that started it. A request is two lists, each closed by an empty entry; a zero byte ends an entry. The first
has the folder of the client's package and the arguments of `compile`, the second the client's environment:
NAME=VALUE. The answer is a digit, 0 for success, and the text that the command would print.
"""

from __future__ import annotations

import contextlib
import io
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

# Variables that the compiler reads, by the beginnings of their names; framework/compiler.cpp sends them.
VARIABLES = ("SOFTMETAL_", "HOME=", "TMPDIR=", "PATH=")


def serve(path: Path, compile_: Callable[[list[str]], int]) -> int:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the process that started this one
    imported = _times()
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as waiting:
        listener.bind(str(path))
        listener.listen(64)
        waiting.register(listener, selectors.EVENT_READ)
        waiting.register(sys.stdin, selectors.EVENT_READ)
        print("ready", flush=True)
        while True:
            ready = {key.fileobj for key, _ in waiting.select()}
            if sys.stdin in ready and not os.read(sys.stdin.fileno(), 4096):
                path.unlink(missing_ok=True)
                return 0
            if listener in ready:
                connection, _ = listener.accept()
                if os.fork() == 0:
                    try:
                        listener.close()
                        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # clang is waited for
                        _answer(connection, compile_, imported)
                    finally:
                        os._exit(0)
                connection.close()


def _answer(connection: socket.socket, compile_: Callable[[list[str]], int], imported: list[int]) -> None:
    (package, *arguments), variables = _request(connection)
    if Path(package) != Path(__file__).resolve().parents[2] or _times() != imported:
        return  # no answer: the client starts its own compiler
    for name in [name for name in os.environ if f"{name}=".startswith(VARIABLES)]:
        del os.environ[name]
    os.environ.update(dict(variable.split("=", 1) for variable in variables))
    os.environ.pop("SOFTMETAL_REQUESTS", None)  # the client names the module
    status, out, err = 1, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = compile_(arguments)
        except BaseException as error:  # the client gets every fault
            print(repr(error), file=err)
    connection.sendall(f"{status}{err.getvalue() if status else out.getvalue()}".encode())


def _times() -> list[int]:
    """When each of the translator's files changed. This process imported them as they were when it began."""
    return [path.stat().st_mtime_ns for path in sorted(Path(__file__).parent.glob("*.py"))]


def _request(connection: socket.socket) -> tuple[list[str], list[str]]:
    data = b""
    while chunk := connection.recv(65536):  # the client shuts its side down
        data += chunk
    lists: list[list[str]] = [[]]
    for entry in data.decode().split("\0")[:-1]:
        if entry:
            lists[-1].append(entry)
        else:
            lists.append([])
    return lists[0], lists[1]
