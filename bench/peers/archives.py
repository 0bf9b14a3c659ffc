"""Archives of the peers' sources: environment variables name wheels and a source archive."""

from __future__ import annotations

import tarfile
import tempfile
import zipfile
from pathlib import Path

from ..cases.arguments import WrongArgumentError


def unpack(variable: str, archive: str, parts: tuple[str, ...], place: str, how: str) -> Path:
    """Unpacks the files whose names contain one of `parts`, and returns the path that matches `place`."""
    folder = Path(tempfile.gettempdir()) / f"bench-{Path(archive).name}"
    try:
        if archive.endswith(".tar.gz"):
            with tarfile.open(archive) as source:
                members = [one for one in source if any(part in one.name for part in parts)]
                source.extractall(folder, members, filter="data")
        else:
            with zipfile.ZipFile(archive) as wheel:
                names = [name for name in wheel.namelist() if any(part in name for part in parts)]
                wheel.extractall(folder, names)
    except (OSError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise WrongArgumentError(f"{variable}={archive!r} is not a readable archive; {how}") from error
    found = next(folder.glob(place), None)
    if found is None:
        raise WrongArgumentError(f"{variable}={archive!r} does not contain {place}; {how}")
    return found
