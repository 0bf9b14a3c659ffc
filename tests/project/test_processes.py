"""A forked process answers as a new interpreter does, and a call that must not fork gets one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.processes import run_python

pytestmark = [
    pytest.mark.host_only,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the server"),
]
PROGRAM = """
import __main__, atexit, ctypes, os, signal, sys, threading
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
atexit.register(print, "at exit", file=sys.stderr)
threading.Thread(target=lambda: (threading.main_thread().join(), print("waited for"))).start()
print(sys.argv, sys.path, sys.flags, os.getcwd(), __name__, globals().get("__file__"), sys.stdin.read())
print(vars(__main__) is globals(), sorted(os.listdir("/proc/self/fd")), signal.getsignal(signal.SIGINT))
print(sorted(os.environ.items()), libc.getenv(b"FATTN_TENSOR"), libc.getenv(b"FATTN_NONE"), flush=True)
os.system("echo of a grandchild; echo and its errors >&2")
"""
ENDS = ["", "sys.exit()", "sys.exit(3)", "sys.exit('words')", "1 / 0", "os._exit(4)"]
ENDS += ["os.kill(os.getpid(), signal.SIGKILL)", "os.kill(os.getpid(), signal.SIGINT)", "os.abort()"]


@pytest.mark.parametrize(("how", "end"), [*(("-c", end) for end in ENDS), ("-m", "1 / 0"), ("x.py", "1 / 0")])
def test_it_answers_as_a_new_interpreter(how: str, end: str, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(PROGRAM + end)
    arguments = {"-c": [how, PROGRAM + end], "-m": [how, "x"], "x.py": [how]}[how]
    env = {**os.environ, "FATTN_TENSOR": "ä\n", "PYTHONPATH": f"{tmp_path}/a::b"}
    options: dict[str, Any] = {"env": env, "cwd": tmp_path, "input": "of stdin\n"}
    command = [sys.executable, *arguments, "-c", "of it"]
    ours = run_python(command[1:], **options)
    theirs = subprocess.run(command, capture_output=True, text=True, **options)
    assert (ours.args, ours.returncode, ours.stdout) == (command, theirs.returncode, theirs.stdout)
    errors = ours.stderr.splitlines(), theirs.stderr.splitlines()
    # The frames of a traceback begin with those of processes.py.
    without_frames = [[line for line in lines if not line.startswith("  ")] for lines in errors]
    assert without_frames[0] == without_frames[1] and errors[0][-1:] == errors[1][-1:]


def forks(*options: str, env: dict[str, str] | None = None, **others: Any) -> bool:
    done = run_python([*options, "-c", "import sys; print('torch' in sys.modules)"], env=env, **others)
    return done.stdout == "True\n"


def test_which_calls_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not forks():
        pytest.skip("this torch starts threads, which a fork would lack: every call has a new interpreter")
    assert forks(cwd=tmp_path, env={**os.environ, "FATTN_CACHE": "x"})
    (tmp_path / "numpy.py").touch()
    assert not forks(cwd=tmp_path) and not forks("-W", "ignore")
    for name, value in {"OMP_NUM_THREADS": "2", "SOFTMETAL": "0", "PYTHONPATH": str(tmp_path)}.items():
        assert not forks(env={**os.environ, name: value}), name
    monkeypatch.setenv("MPLBACKEND", "agg")  # as some imports do
    assert forks()
    with pytest.raises(FileNotFoundError):
        forks(cwd=tmp_path / "none")  # which ends the server
    assert run_python(["-c", "print(1)"]).stdout == "1\n"


def test_it_does_not_wait_forever() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run_python(["-c", "import time; time.sleep(60)"], timeout=0.1)
