"""tools/setup_env.sh on a Mac with fake commands, and the targets of the Makefile."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.host_only

# A fake Python that runs the code of -c and prints the arguments of -m.
PYTHON = """#!/bin/sh
[ "$1" = -c ] || { echo "ran $*"; exit; }
code=$2
shift 2
exec @REAL@ -c "import platform
platform.machine = lambda: '@MACHINE@'
$code" "$@"
"""


def script(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(text)
    path.chmod(0o755)


def python(path: Path, machine: str) -> None:
    script(path, PYTHON.replace("@REAL@", sys.executable).replace("@MACHINE@", machine))


def set_up(
    folder: Path,
    system: str = "14.0",
    machine: str = "arm64",
    translated: str = "0",
    compiler: bool = True,
    python_machine: str = "arm64",
    venv_machine: str = "arm64",
    versions: str = "oldest.txt",
) -> subprocess.CompletedProcess[str]:
    """Runs it on that Mac, into an environment that is there already."""
    commands = folder / "bin"
    script(commands / "uname", f'#!/bin/sh\n[ "$1" = -s ] && echo Darwin || echo {machine}\n')
    script(commands / "sw_vers", f"#!/bin/sh\necho {system}\n")
    script(commands / "sysctl", f"#!/bin/sh\n[ -n '{translated}' ] && echo {translated}\n")
    script(commands / "xcrun", f"#!/bin/sh\nexit {0 if compiler else 1}\n")
    python(commands / "python3", python_machine)
    python(folder / "venv" / "bin" / "python", venv_machine)
    return subprocess.run(
        [
            "bash",
            str(ROOT / "tools/setup_env.sh"),
            str(folder / "venv"),
            str(ROOT / "requirements" / versions),
        ],
        env={"PATH": f"{commands}:/usr/bin:/bin", "PYTHON": "python3"},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("system", ["14.0", "15.6.1", "26.1"])
def test_a_suitable_mac(system: str, tmp_path: Path) -> None:
    """torch comes first, and nothing comes that only the tests, the demo or the documentation need."""
    done = set_up(tmp_path, system)
    assert (done.returncode, done.stderr) == (0, "")
    says, torch, others = done.stdout.splitlines()
    assert "installing torch==2.13" in says and "torch==2.13" in torch
    wanted = others.partition("--quiet ")[2].split()
    assert {name.partition(">")[0] for name in wanted} == {"setuptools", "ninja", "numpy"}


@pytest.mark.parametrize(
    ("mac", "message", "instead"),
    [
        ({"system": "13.7.8"}, "this is macOS 13.7.8", "update macOS"),
        ({"machine": "x86_64", "translated": "1"}, "under Rosetta", "run arch -arm64 make build"),
        ({"machine": "x86_64", "translated": ""}, "Intel processor (x86_64)", "use Linux"),
        (
            {"machine": "x86_64", "translated": "", "system": "13.7.8"},
            "Intel processor (x86_64)",
            "use Linux",
        ),
        (
            {"machine": "x86_64", "translated": "1", "system": "13.7.8"},
            "under Rosetta",
            "run arch -arm64 make build",
        ),
        ({"compiler": False}, "the compiler is missing", "run xcode-select --install"),
        ({"python_machine": "x86_64"}, "bin/python3 is a Python for Intel", "set PYTHON=/path/to/python3"),
        ({"versions": "no.txt"}, "no.txt names no version of torch", "pass a file of requirements/"),
        ({"venv_machine": "x86_64"}, "venv was made with a Python for Intel", "remove it"),
    ],
    ids=str,
)
def test_a_mac_that_cannot_build(mac: dict[str, object], message: str, instead: str, tmp_path: Path) -> None:
    """It stops before anything is installed."""
    done = set_up(tmp_path, **mac)  # type: ignore[arg-type]
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.startswith("setup_env: ") and done.stderr.count("\n") == 1
    assert message in done.stderr and instead in done.stderr


def make(target: str) -> str:
    """The commands that it would run in a clone that has no environment yet."""
    # The tests may run under make themselves, which hands its variables (TIER=test) to the makes below it.
    env = os.environ | {"MAKEFLAGS": ""}
    command = ["make", "-n", "VENV=/nowhere", target]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("target", "extras"),
    [
        ("build", []),
        ("demo", ["demo"]),
        ("docs", ["docs"]),
        ("lint", ["test"]),
        ("pytest", ["test"]),
        ("first-mac", ["test"]),
    ],
)
def test_a_target_installs_what_it_needs(target: str, extras: list[str]) -> None:
    commands = make(target)
    assert [name for name in ("demo", "docs", "test") if f"'torch-fattn[{name}]'" in commands] == extras
    assert commands.count("--no-build-isolation -e .\n") == 1, "the extension is built once"


COMPILE = """
import sys
for i, name in enumerate(("ops.cpp", "metal/launch.mm")):
    print(f"[{i + 1}/2] clang++ -MMD -I/usr/include -c {sys.argv[1]}/csrc/{name} -o {name}.o -O2")
    print("warning: a long one")
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize("status", [0, 3])
def test_progress(status: int) -> None:
    """Prints a line for each file, and the compiler's output only if it failed."""
    shown = [sys.executable, "tools/show_progress.py", sys.executable, "-c", COMPILE, str(ROOT), str(status)]
    done = subprocess.run(shown, cwd=ROOT, capture_output=True, text=True, env=os.environ)
    assert done.returncode == status
    assert done.stdout == "  [1/2] csrc/ops.cpp\n  [2/2] csrc/metal/launch.mm\n"
    assert ("a long one" in done.stderr) == (status != 0)


ENDINGS = (".cpp", ".h", ".mm", ".cu", ".metal")


HALVES = "gpu host" if sys.platform == "linux" else "all"


@pytest.mark.parametrize(("target", "tiers"), [("check", "check"), ("test", "test"), ("test-all", HALVES)])
def test_a_target_runs_its_tiers(target: str, tiers: str) -> None:
    commands = make(target)
    assert re.findall(r"pytest -n 2 .*?--tier (\w+) .*?tests", commands) == tiers.split()
    assert commands.index("-m pytest") < commands.index("-m mypy"), "what lint says is read last"


@pytest.mark.parametrize(("tests", "lint"), [("true", "true"), ("false", "true"), ("true", "false")])
def test_a_target_fails_if_tests_or_lint_fail(tests: str, lint: str, tmp_path: Path) -> None:
    for program in ("actionlint", "clang-format"):
        script(tmp_path / "bin" / program, "#!/bin/sh\n")
    command = ["make", "check", f"VENV={tmp_path}", "FOR_TEST=", f"PYTEST={tests}", f"PY={lint}"]
    env = os.environ | {"MAKEFLAGS": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert (done.returncode == 0) == (tests == lint == "true")
    assert f"{lint} -m ruff check ." in done.stdout, "all that lint says"
    passed = "exit status of the tests: 0, of lint: 0"
    assert (passed in done.stdout) == (done.returncode == 0)


def test_pre_commit_runs_what_make_lint_runs() -> None:
    yaml = pytest.importorskip("yaml")
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    entries = {hook["entry"].removesuffix(" --force-exclude") for hook in local["hooks"]}
    commands = make("lint").replace("/nowhere", ".venv")
    first = commands.index(".venv/bin/python -m ruff")
    lint = re.findall(r"^\.venv/bin/.*$", commands[first:], re.MULTILINE)
    programs = {line.partition(" -Werror ")[0].removesuffix(" .") for line in lint}
    assert programs == {entry.removesuffix(" -Werror") for entry in entries}

    (hook,) = (hook for hook in local["hooks"] if hook["id"] == "clang-format")
    files = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.suffix in ENDINGS}
    built = re.compile(r"(^|/)(_build|generated|build|out|\..*)/")
    chosen = {name for name in files if re.search(hook["files"], name) and not built.search(name)}
    (formatted,) = (line.partition(" -Werror ")[2].split() for line in lint if "clang-format" in line)
    assert {name for name in chosen if not re.search(hook["exclude"], name)} == set(formatted)


WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


@pytest.mark.parametrize("path", [ROOT / ".ci/run", *WORKFLOWS], ids=lambda path: path.name)
def test_the_targets_that_ci_makes_are_there(path: Path) -> None:
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony
    target = r"(?:run: |^|^exec )make (?:--no-print-directory )?([a-z][a-z-]*)"
    made = set(re.findall(target, path.read_text(), re.MULTILINE))
    assert made <= set(phony[1].split())
    assert made or path.name == "wheels.yml"


def test_git_in_a_container_takes_the_checkout_of_another_user() -> None:
    yaml = pytest.importorskip("yaml")

    def refused(text: str) -> list[str]:
        jobs = {name: job for name, job in yaml.safe_load(text)["jobs"].items() if "container" in job}
        return [name for name, job in jobs.items() if "--add safe.directory" not in str(job["steps"])]

    texts = {path.name: path.read_text() for path in WORKFLOWS}
    assert not [name for text in texts.values() for name in refused(text)]
    assert refused(texts["ci.yml"].replace("safe.directory", "x")) == ["linux", "coverage", "softmetal"]


def test_a_pull_request_does_not_run_on_our_mac() -> None:
    """Anybody can open one, and its code would run there."""
    yaml = pytest.importorskip("yaml")
    of_ours = []
    for path in WORKFLOWS:
        workflow = yaml.safe_load(path.read_text())
        runners = [str(job["runs-on"]) for job in workflow["jobs"].values()]
        if any("self-hosted" in runner for runner in runners):
            of_ours.append(path.name)
            triggers = workflow[True]  # YAML's `on`
            assert set(triggers) == {"push", "workflow_dispatch"}
            assert all("APPLE_SILICON_RUNNER" in job["if"] for job in workflow["jobs"].values())
    assert of_ours == ["mac.yml"]
