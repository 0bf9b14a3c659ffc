"""Downloads the Metal sources in Python packages, for `python -m softmetal corpus`.

    python softmetal/tools/fetch_corpus.py DIR

writes one folder per package, with its .metal files and headers. Installs nothing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_SUFFIXES = {".metal", ".h", ".hpp"}
_MAC = ("--platform", "macosx_14_0_arm64", "--only-binary=:all:")
_SOURCE = ("--no-binary=:all:",)
_SOURCE_HERE = (*_SOURCE, "--no-build-isolation")  # its metadata needs torch


@dataclass(frozen=True)
class Package:
    requirement: str
    options: tuple[str, ...]
    parts: tuple[str, ...]  # a path is kept if it contains one of these


PACKAGES = (
    Package("mlx-metal==0.32.4", _MAC, ("backend/metal/kernels",)),
    Package("torch==2.13.0", _MAC, ("ATen/native/mps/kernels", "c10/metal")),
    Package("llama-cpp-python", _SOURCE, ("ggml/src/ggml-metal", "ggml/src/ggml-common.h")),
    Package("torchao", _SOURCE_HERE, ("kernels/mps",)),
)


def fetch(package: Package, target: Path) -> int:
    """Downloads a package's files and returns their number; 0 if the download fails."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch]
        done = subprocess.run(
            [*command, *package.options, package.requirement], capture_output=True, text=True
        )
        # pip keeps a source archive even when it cannot read the package's metadata.
        archives = [path for path in Path(scratch).iterdir() if path.is_file()]
        if not archives:
            print(f"{package.requirement}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
            return 0
        folder = target / package.requirement.split("=")[0]
        count = 0
        for name, content in _members(archives[0]):
            path = PurePosixPath(name)
            wanted = path.suffix in _SUFFIXES and any(part in name for part in package.parts)
            if wanted and ".." not in path.parts and not path.is_absolute():
                out = folder / path
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_bytes(content)
                count += 1
        return count


def _members(archive: Path) -> Iterator[tuple[str, bytes]]:
    if archive.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if PurePosixPath(name).suffix in _SUFFIXES:
                    yield name, wheel.read(name)
        return
    with tarfile.open(archive) as source:
        for member in source:
            content = source.extractfile(member) if member.isfile() else None
            if content is not None and PurePosixPath(member.name).suffix in _SUFFIXES:
                yield member.name, content.read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, metavar="DIR")
    target = parser.parse_args().folder
    if target.exists() and not target.is_dir():
        parser.error(f"{target} is a file; name a folder, new or not")
    for package in PACKAGES:
        print(f"{package.requirement}: {fetch(package, target)} files", flush=True)


if __name__ == "__main__":
    main()
