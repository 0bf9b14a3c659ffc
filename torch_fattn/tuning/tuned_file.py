"""Writes, reads and checks the file of `python -m torch_fattn tune`: tile sizes and routes for one GPU. Files
for another GPU, version or sources are ignored."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..integrations.pytorch.routing import forget, version_number
from ..runtime.settings import cache_folder, tuning_is_off
from ..runtime.warn import warn

FORMAT = 5
SIZES = {
    "prefill": ("row_fragments", "tile_keys", "simdgroups", "early_loads"),
    "prefill_wide": ("row_fragments", "row_groups", "tile_keys", "simdgroups", "early_loads"),
    "decode": ("tile_keys", "simdgroups", "min_chunk", "threadgroups_per_core"),
    "decode_wide": ("tile_keys", "simdgroups", "min_chunk", "threadgroups_per_core"),
    "decode_vector": ("tile_keys", "simdgroups", "min_chunk", "threadgroups_per_core"),
}
# The kernel of a row that enables Metal 4's tensor operations on a GPU before M5. It has one tile.
TENSORS = "prefill_tensor"

Named = dict[str, str]  # a row in the form of csrc/ops/gpu.cpp


class BadFileError(ValueError):
    """A file cannot be used; the message is the reason."""

    def __init__(self, fault: str) -> None:
        super().__init__(fault if len(fault) <= 200 else f"{fault[:196]} ...")


@dataclass(frozen=True)
class Gpu:
    """Metal's description of a GPU."""

    name: str
    family: int
    cores: int

    @classmethod
    def this(cls) -> Gpu:
        return cls(*torch.ops.fattn._this_gpu())

    @property
    def file_name(self) -> str:
        words = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-") or "gpu"
        return f"tuned-{words}-family{self.family}-{self.cores}cores.json"

    def __str__(self) -> str:
        return f"{self.name} (Apple family {self.family}, {self.cores} cores)"


@dataclass(frozen=True)
class TunedRow:
    """Sizes for calls of one kernel and dtype with the larger head size in a range; for prefill also by the
    number of rows. A row of TENSORS has no sizes: prefills were faster on tensor operations with this macOS.
    csrc/plan/tuned.h has the rules."""

    kernel: str
    dtype: str
    min_dim: int
    max_dim: int
    sizes: dict[str, int]
    max_length: int | None = None  # maximum rows of a prefill; None: any
    gain: float = 1.0  # speedup over the choice without this row, when timed
    macos: str | None = None  # of a row of TENSORS


@dataclass(frozen=True)
class TunedRoute:
    """The route of calls without a mask, for one dtype and head size and a range of rows (prefill), keys
    (decode) or the fewer of both (training), on this system and torch (csrc/plan/route.h)."""

    op: str
    dtype: str
    dim: int
    min_length: int
    max_length: int | None  # None: any
    to: str
    macos: str
    torch: str
    gain: float = 1.0  # speedup over the other route, when timed


@dataclass(frozen=True)
class TunedFile:
    torch_fattn: str
    sources: str
    gpu: Gpu
    date: str
    rows: list[TunedRow] = field(default_factory=list)
    routes: list[TunedRoute] = field(default_factory=list)

    @property
    def provenance(self) -> str:
        return f"tuned on {self.gpu.name}, {self.date}"

    def to_json(self) -> str:
        data = asdict(self)
        return json.dumps({"format": FORMAT, "digest": _digest_of(data)} | data, indent=1) + "\n"


def _digest_of(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


def path_of(gpu: Gpu) -> Path:
    return cache_folder() / gpu.file_name


def fault_of(rows: list[TunedRow], routes: list[TunedRoute] | None = None) -> str:
    """Why the kernels cannot run with these rows; "" if they can. csrc/plan/tuned.cpp has the rules."""
    try:
        fault: str = torch.ops.fattn._tuning_fault(named(rows), named(routes or []))
    except ValueError as error:
        return str(error).splitlines()[0]
    return fault


def set_tuning(
    gpu: Gpu, rows: list[TunedRow], provenance: str, routes: list[TunedRoute] | None = None
) -> None:
    """Gives the rows to the planner for this GPU. An empty list restores the built-in table."""
    entries = named(rows), named(routes or [])
    torch.ops.fattn._set_tuning(gpu.name, gpu.family, gpu.cores, *entries, provenance)
    forget()


def named(rows: Sequence[TunedRow | TunedRoute]) -> list[Named]:
    def fields_of(row: TunedRow | TunedRoute) -> Named:
        fields = asdict(row)
        fields |= fields.pop("sizes", {})
        del fields["gain"]
        for name in fields.keys() & {"macos", "torch"}:
            fields[name] = version_number(fields[name]) if fields[name] is not None else 0
        fields["max_length"] = fields["max_length"] or 0
        return {name: str(value) for name, value in fields.items()}

    return [fields_of(row) for row in rows]


def source_digest() -> str:
    """A hash of the kernels and the planner of this build."""
    digest: str = torch.ops.fattn._source_digest()
    return digest


def read(path: Path, version: str) -> TunedFile:
    """Reads a file. Raises BadFileError unless this build wrote it."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadFileError(f"it cannot be read ({error})") from error
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
        raise BadFileError(f"its format is not {FORMAT}")
    for name, mine in (("torch_fattn", version), ("sources", source_digest())):
        if data.get(name) != mine:
            raise BadFileError(f"its field {name} is {data.get(name)!r} and must be {mine!r}")
    if data.pop("digest", None) != _digest_of(data):
        raise BadFileError("it was changed after it was written")
    gpu = Gpu(**data.pop("gpu"))
    rows = [TunedRow(**row) for row in data.pop("rows")]
    routes = [TunedRoute(**route) for route in data.pop("routes")]
    if path.name != gpu.file_name:
        raise BadFileError(f"its name does not match its GPU, {gpu}")
    if fault := fault_of(rows, routes):
        raise BadFileError(f"its sizes are not legal: {fault}")
    return TunedFile(**data, gpu=gpu, rows=rows, routes=routes)


def write(file: TunedFile) -> Path:
    """Writes the file atomically."""
    path = path_of(file.gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tuned-", suffix=".json")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(file.to_json())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return path


def load_all(version: str) -> None:
    """Gives every tuned file of this user to the planner, which uses the one for its GPU. An invalid file
    never fails a call; it warns if it is for this GPU, which is queried only then.
    """
    if tuning_is_off():
        return
    try:
        paths = sorted(cache_folder().glob("tuned-*.json"))
    except (OSError, RuntimeError):  # no home folder
        return
    for path in paths:
        try:
            file = read(path, version)
            set_tuning(file.gpu, file.rows, file.provenance, file.routes)
        except BadFileError as fault:
            if path.name != _this_file_name():
                continue
            warn(
                f"torch_fattn: the tuned sizes in {path} are not used, the built-in ones are: "
                f"{fault}; run `python -m torch_fattn tune` again, or with --reset",
                RuntimeWarning,
            )


def _this_file_name() -> str | None:
    try:
        return Gpu.this().file_name
    except RuntimeError:  # no GPU
        return None
