"""`run_python(["-m", "torch_fattn", "doctor"])` answers as `subprocess.run` does, in a sixth of the time.

On Linux the process forks from a server that has imported torch, and goes on like a new interpreter, to the
interpreter's own end. It imports torch_fattn itself. Torch was imported with the server's variables and
folders. So a call gets a new interpreter if its variables differ from this process's, except those that
`import torch` does not read, or if its folder has a module that hides an imported one. Every call does on a
Mac, where Metal does not survive a fork. Forked processes have the same hash seed and addresses: what must
not depend on those needs new interpreters, too.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib.machinery
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

# Variables that `import torch` does not read, and PYTHONPATH, which the process applies itself.
LATE = re.compile(
    r"FATTN_\w+|SOFTMETAL_(?!PYTHON)\w+|PYTORCH_MPS_\w+|TORCHINDUCTOR_CACHE_DIR|"
    "TMPDIR|COLUMNS|PYTEST_CURRENT_TEST|PYTHONPATH"
)


def early(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if not LATE.fullmatch(name)}


_turn = threading.Lock()


def run_python(
    arguments: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    input: str = "",
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs `python ARGUMENTS`. Options of the interpreter other than -m and -c need a new one."""
    command = [sys.executable, *map(str, arguments)]
    env = dict(os.environ if env is None else env)
    forks = command[1] in ("-m", "-c") or not command[1].startswith("-")
    same = forks and early(env) == early(os.environ)
    server = _server(frozenset(early(env).items())) if same else None
    if server is not None and server.poll() is None and server.stdin and server.stdout:
        with tempfile.TemporaryDirectory() as folder, _turn:
            Path(folder, "in").write_text(input)
            request = [folder, str(cwd or Path.cwd()), env, timeout or 0, command[1:]]
            print(json.dumps(request), file=server.stdin, flush=True)
            if answer := json.loads(server.stdout.readline() or "[]"):  # nothing from a server that ended
                out, err = (Path(folder, name).read_text() for name in ("out", "err"))
                if timeout is not None and answer[0] == -signal.SIGALRM:
                    raise subprocess.TimeoutExpired(command, timeout, out, err)
                return subprocess.CompletedProcess(command, answer[0], out, err)
    return subprocess.run(
        command, env=env, cwd=cwd, input=input, timeout=timeout, capture_output=True, text=True
    )


@functools.cache
def _server(variables: frozenset[tuple[str, str]]) -> subprocess.Popen[str] | None:
    """It ends when its input does, and so with this process. Some tests and imports change os.environ: then
    there is a second one."""
    if sys.platform != "linux":
        return None
    command, pipe = [sys.executable, __file__], subprocess.PIPE
    server = subprocess.Popen(command, env=dict(variables), stdin=pipe, stdout=pipe, text=True)
    atexit.register(server.communicate)
    return server if server.stdout and server.stdout.readline() == "ready\n" else None


def _serve() -> list[Any]:
    """Forks for each request, and answers with its status, or nothing if that needs a new interpreter.
    Returns in a child, with what it becomes, and at the end."""
    sys.path.remove(str(Path(__file__).parent))
    import torch  # noqa: F401

    if len(os.listdir("/proc/self/task")) > 1:  # threads of OpenMP or BLAS, which a child would lack
        return []
    gc.freeze()  # a child that collects this garbage would copy all memory
    print("ready", flush=True)
    while line := sys.stdin.readline():
        folder, cwd, variables, timeout, (how, *rest) = json.loads(line)
        os.chdir(cwd)
        places = [cwd if how in ("-m", "-c") else os.path.dirname(os.path.realpath(how))]
        if path := variables.get("PYTHONPATH"):
            places += map(os.path.abspath, path.split(os.pathsep))
        importlib.invalidate_caches()
        if any(_hides(places, name) for name in {*sys.modules} - {"__main__"} if "." not in name):
            print([], flush=True)
        elif pid := os.fork():
            _, status = os.waitpid(pid, 0)
            print([os.waitstatus_to_exitcode(status)], flush=True)
        else:
            return [folder, variables, timeout, places, how, rest]
    return []


def _hides(places: list[str], name: str) -> bool:
    found = importlib.machinery.PathFinder.find_spec(name, places)
    return found is not None and found.origin not in (None, getattr(sys.modules[name].__spec__, "origin", ""))


def _become(
    folder: str, variables: dict[str, str], timeout: float, places: list[str], how: str, rest: list[str]
) -> None:
    for descriptor, name in enumerate(("in", "out", "err")):
        file = os.open(Path(folder, name), os.O_RDWR | os.O_CREAT)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.update(variables)  # the server has no others, except those that `import torch` sets
    signal.setitimer(signal.ITIMER_REAL, timeout)  # SIGALRM ends it
    sys.path[:0] = places
    main = sys.modules["__main__"] = ModuleType("__main__")
    what = rest.pop(0) if how in ("-m", "-c") else how
    sys.argv = [how, *rest]
    if how == "-m":
        runpy._run_module_as_main(what)  # type: ignore[attr-defined]
    elif how == "-c":
        sys.path[0] = ""
        exec(compile(what, "<string>", "exec"), vars(main))
    else:
        main.__file__ = os.path.abspath(what)
        exec(compile(Path(what).read_bytes(), main.__file__, "exec"), vars(main))


if __name__ == "__main__":
    if request := _serve():
        _become(*request)
