"""Wheels of other projects, for the tests that compare with what they contain."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

MAC = ("--platform", "macosx_14_0_arm64", "--python-version", "3.11")


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Unpacks the files of a Mac's wheel whose names contain a text; skips without a network."""

    def unpack(requirement: str, part: str) -> Path:
        target = tmp_path_factory.mktemp("wheel")
        with zipfile.ZipFile(_download(requirement)) as wheel:
            wheel.extractall(target, [name for name in wheel.namelist() if part in name])
        return target

    return unpack


def _download(requirement: str) -> Path:
    name, _, version = requirement.partition("==")
    folder = Path(os.environ.get("SOFTMETAL_CACHE") or Path.home() / ".cache" / "softmetal") / "wheels"
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not list(folder.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", requirement, "--no-deps", "--only-binary=:all:"]
        command += [*MAC, "--quiet", "--disable-pip-version-check", "-d", str(folder)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        except (subprocess.SubprocessError, OSError) as error:
            detail = [*(getattr(error, "stderr", "") or str(error)).strip().splitlines(), "no message"]
            pytest.skip(f"cannot download {requirement}: {detail[-2]}")
    return next(folder.glob(pattern))
