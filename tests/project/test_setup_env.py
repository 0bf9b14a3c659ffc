"""tools/setup_env.sh on a Mac with fake commands, and what CI depends on."""

from __future__ import annotations

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


def test_a_pull_request_does_not_run_on_our_mac() -> None:
    """Anybody can open one, and its code would run there."""
    yaml = pytest.importorskip("yaml")
    of_ours = []
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        workflow = yaml.safe_load(path.read_text())
        runners = [str(job["runs-on"]) for job in workflow["jobs"].values()]
        if any("self-hosted" in runner for runner in runners):
            of_ours.append(path.name)
            triggers = workflow[True]  # YAML's `on`
            assert set(triggers) == {"push", "workflow_dispatch"}
            assert all("APPLE_SILICON_RUNNER" in job["if"] for job in workflow["jobs"].values())
    assert of_ours == ["mac.yml"]
