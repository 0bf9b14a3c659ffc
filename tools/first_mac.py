"""Tests torch_fattn on a Mac in ten minutes: compiles kernels, describes the machine, runs doctor, a
cross-section of the tests, the bench and tune, and collects the GPU messages from macOS' log. Writes one
archive to attach to an issue, without names of users and machines.

Usage: tools/first_mac.py [--out DIR] (in the environment of `make build`; --rehearse: on any machine)
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FATTN = (sys.executable, "-m", "torch_fattn")
# Prints a traceback if a test takes a minute.
PYTEST = (
    *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "--durations=10"),
    *("-o", "faulthandler_timeout=60", "--continue-on-collection-errors"),
)
# Launches nothing, so that what Apple's compiler refuses comes first. Arguments: head size, dtypes.
COMPILE = """
import os, sys
os.environ["FATTN_TENSOR"] = "0"  # its self-test would launch
import torch, torch_fattn
refused = []
for dtype in sys.argv[2:]:
    for op in ("prefill", "decode", "merge", "prefill_backward"):
        try:
            done = torch_fattn.warmup(op, dtype=getattr(torch, dtype), head_dim=int(sys.argv[1]))
            print(f"{op} {dtype}: {done}", flush=True)
        except Exception as error:
            refused.append(f"{op} {dtype}")
            print(f"{op} {dtype}: REFUSED: {error}", flush=True)
kernels = torch_fattn.compiled_kernels()
seconds = sum(kernel.seconds for kernel in kernels)
print(f"compiled {len(kernels)} kernels in {seconds:.1f} s; refused: {', '.join(refused) or 'none'}")
sys.exit(len(refused) > 0)
"""
# Messages of Metal and macOS about GPU faults and timeouts, but not the query that `log` prints.
FAULT = re.compile(
    r"^(?!Filtering the log data).*"
    r"(kIO(GPU|Accel)CommandBuffer\w*Error|command buffer (exited|was aborted)|GPU (restart|reset|hang))",
    re.IGNORECASE,
)

FACTS = r"""
echo "commit       $(git rev-parse --short HEAD), $(git status --short | wc -l) files changed"
python -m torch_fattn --version
python -c 'import platform, torch; print("python", platform.python_version(), "torch", torch.__version__)'
if [ "$(uname -s)" = Darwin ]; then
  echo "macOS        $(sw_vers -productVersion) ($(sw_vers -buildVersion))"
  echo "tools        $(xcode-select -p); $(clang --version | head -1)"
  echo "metal        $(xcrun -sdk macosx metal --version 2>&1 | head -1)"
  system_profiler SPDisplaysDataType | grep -E 'Chipset|Number of Cores|Metal'
  echo "memory       $(($(sysctl -n hw.memsize) >> 30)) GiB"
  echo "mac          $(sysctl -n hw.model), $(sysctl -n machdep.cpu.brand_string)"
else
  uname -srm
fi
"""


@dataclass(frozen=True)
class Step:
    name: str
    command: tuple[str, ...]
    seconds: int  # the limit

    def run(self, folder: Path) -> Result:
        """Writes the output to NAME.txt. A failure or timeout of the step does not end this program."""
        path, start = folder / f"{self.name}.txt", time.monotonic()
        path_of_programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FATTN_")}
        environment |= {"PATH": path_of_programs, "FATTN_CACHE": str(folder), "COLUMNS": "110"}
        with path.open("w") as output:
            try:
                process = subprocess.Popen(
                    self.command,
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                status = process.wait(self.seconds)
                outcome = "ok" if status == 0 else f"exit status {status}"
            except OSError as error:
                outcome = f"not started: {error.strerror}"
            except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
                late = isinstance(error, subprocess.TimeoutExpired)
                outcome = f"stopped after {self.seconds} s" if late else "interrupted"
                for stop in (
                    signal.SIGINT,
                    signal.SIGKILL,
                ):  # pytest reports its results when it is interrupted
                    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                        os.killpg(process.pid, stop)
                        process.wait(10)  # a process that waits for a hung GPU may never end
        said = path.read_text(errors="replace")
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        faults = sum(FAULT.search(line) is not None for line in lines)
        return Result(self.name, outcome, time.monotonic() - start, lines[-1] if lines else "", faults)


@dataclass(frozen=True)
class Result:
    name: str
    outcome: str
    seconds: float
    last_line: str
    faults: int  # lines that mention a GPU fault


def steps(folder: Path, since: datetime.datetime, rehearse: bool) -> list[Step]:
    """With `rehearse`, each step does as little as possible, in software if there is no GPU."""
    tests = ["tests/operators/test_edges.py", "-k", "huge_sinks"] if rehearse else ["tests"]
    bench = ["--shapes", "whisper", "--backend", "counts", "--peers"] if rehearse else []
    tune = ["--anyway", "--op", "prefill", "--dtype", "float16", "--head-dim", "64", "--seconds", "1"]
    logged = ["log", "show", "--style", "compact", "--start", f"{since:%Y-%m-%d %H:%M:%S}", "--predicate"]
    sizes = ("64", "float16") if rehearse else ("128", "float16", "bfloat16", "float32")
    found = [
        Step("compile", (sys.executable, "-c", COMPILE, *sizes), 300),
        Step("facts", ("sh", "-c", FACTS), 60),
        Step("doctor", (*FATTN, "doctor", *([] if rehearse else ["--report"])), 300),
        Step("tests", (*PYTEST, "--tier", "first", "-m", "not host_only and not slow", *tests), 300),
        Step("bench", (*FATTN, "bench", *bench, "--json", str(folder / "bench.json")), 300),
        Step("tune", (*FATTN, "tune", *(tune if rehearse else [])), 300),
    ]
    if sys.platform == "darwin":
        messages = ("kIOGPU", "kIOAccel", "command buffer", "GPU restart", "GPU reset", "GPU hang")
        predicate = " OR ".join(f'eventMessage CONTAINS[c] "{message}"' for message in messages)
        found.append(Step("log", (*logged, predicate), 120))
    return found


def anonymous(text: str) -> str:
    """Removes the names of this user and this machine, and paths that contain them."""
    for path in (ROOT, Path(tempfile.gettempdir()), Path.home()):
        name = {ROOT: ".", Path.home(): "~"}.get(path, "TMP")
        for form in {str(path.resolve()), str(path)} - {"/"}:
            text = text.replace(form, name)
    text = re.sub(r"(/Users|/home)/[^/\s:'\"]+", r"\1/USER", text)
    host = socket.gethostname()
    for secret, name in ((host, "HOST"), (host.partition(".")[0], "HOST"), (getpass.getuser(), "USER")):
        if secret:
            text = re.sub(rf"(?<![\w.-]){re.escape(secret)}(?![\w-])", name, text)
    return text


def summary(results: list[Result], facts: str) -> str:
    """The report's summary, in Markdown, to paste into an issue."""
    faults = sum(result.faults for result in results)
    rows = [
        f"| {r.name} | {r.outcome} | {r.seconds:.0f} s | {r.last_line[:100].replace('|', '/')} |"
        for r in results
    ]
    lines = [
        "```text",
        facts.strip(),
        "```",
        "",
        "| step | | time | its last line |",
        "|---|---|---|---|",
        *rows,
        "",
    ]
    return anonymous("\n".join([*lines, f"Lines that name a fault of the GPU: {faults}"]) + "\n")


def pack(folder: Path, results: list[Result]) -> Path:
    """Writes the archive: the summary first, then all output files."""
    facts = folder / "facts.txt"
    (folder / "summary.md").write_text(
        summary(results, facts.read_text(errors="replace") if facts.exists() else "")
    )
    archive = folder.with_name(f"{folder.name}.zip")
    others = sorted(path for path in folder.iterdir() if path.suffix in (".txt", ".json"))
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for path in (folder / "summary.md", *others):
            file.writestr(f"{folder.name}/{path.name}", anonymous(path.read_text(errors="replace")))
    return archive


def fault_of(folder: Path) -> str:
    """Returns why the folder cannot be used, or "". A folder with anything other than an earlier run is not
    removed."""
    ours = re.compile(r"(\w+\.txt|bench\.json|summary\.md|tuned-.*|\.tuned-.*|\.DS_Store)")
    try:
        others = sorted(path.name for path in folder.iterdir() if not ours.fullmatch(path.name))
        if others:
            return f"contains {others[0]}, which is not from an earlier run"
        if any(folder.iterdir()) and not (folder / "facts.txt").exists():
            return "contains files but no facts.txt, so they are not from an earlier run"
    except FileNotFoundError:
        pass
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"cannot be written to ({error.strerror})"


def run_all(folder: Path, wanted: list[Step]) -> int:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    results: list[Result] = []
    for step in wanted:
        print(f"{step.name:8} (at most {step.seconds} s) ...", end=" ", flush=True)
        results.append(step.run(folder))
        print(f"{results[-1].outcome}, {results[-1].seconds:.0f} s: {results[-1].last_line[:90]}", flush=True)
        if results[-1].outcome == "interrupted":
            break
    archive = pack(folder, results)
    print(f"\n{(folder / 'summary.md').read_text()}")
    print(f"Please open an issue with the lines above, and attach {os.path.relpath(archive)}.")
    return 0 if all(result.outcome == "ok" for result in results) else 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="first_mac", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "out/first-mac", help="default: out/first-mac")
    parser.add_argument("--rehearse", action="store_true", help="as little as possible of each step")
    options = parser.parse_args(arguments)
    if sys.platform != "darwin" and not options.rehearse:
        parser.exit(2, "first_mac: this is not a Mac; give --rehearse to try the steps in software\n")
    folder = options.out.resolve()
    if fault := fault_of(folder):
        parser.exit(2, f"first_mac: --out {folder} {fault}; give a new folder\n")
    return run_all(folder, steps(folder, datetime.datetime.now(), options.rehearse))


if __name__ == "__main__":
    sys.exit(main())
