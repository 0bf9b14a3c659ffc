"""Sequences of a paged cache in a safetensors file. The rows of a slot are stored once, even if sequences
share it. Each sequence lists its rows, so the file does not depend on the block size.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from .blocks import block_keys
from .memory import Layers
from .sequences import CachedSequence, Window

FORMAT, VERSION = "torch_fattn.PagedKVCache", 1
_SIDES = ("key", "key_scales", "value", "value_scales")


@dataclass
class SavedSequence:
    rows: list[int]  # per token; -1 before the window
    token_ids: list[int]
    salt: str

    @property
    def missing(self) -> range:
        """The range from the first position without a row to the last."""
        without = [n for n, row in enumerate(self.rows) if row < 0]
        return range(without[0], without[-1] + 1) if without else range(0)

    def has_seen_rows(self, window: Window) -> bool:
        """Whether every token that later rows see has a row."""
        missing, first_seen = self.missing, len(self.rows) - 1 - window.left
        if not missing:
            return True
        return window.left >= 0 and window.sink_tokens <= missing.start and missing.stop <= first_seen

    def chunks(self, window: Window, block_size: int) -> list[tuple[int, ...]]:
        """The rows of each block; () if no later row sees the block. Sequences with equal chunks share the
        block."""
        begin, end = window.hidden(len(self.rows), block_size)
        firsts = range(0, len(self.rows), block_size)
        return [
            () if begin <= n < end else tuple(self.rows[first : first + block_size])
            for n, first in enumerate(firsts)
        ]

    def in_blocks(self, blocks: list[int], window: Window, block_size: int, epoch: int) -> CachedSequence:
        """The sequence, with a block for each chunk."""
        length = len(self.rows)
        keys = list(block_keys(self.token_ids, block_size, self.salt))
        return CachedSequence(
            row=-1,
            salt=self.salt,
            epoch=epoch,
            length=length,
            blocks=blocks,
            hidden=window.hidden(length, block_size)[1],
            missing=self.missing,
            token_ids=self.token_ids[: len(keys) * block_size],
            keys=keys,
        )


@dataclass
class Saved:
    memory: list[Tensor]  # rows of every tensor of the cache's memory
    sequences: list[SavedSequence]


def write(name: str, path: Path, layers: Layers, window: Window, saved: Saved) -> None:
    """Writes the file atomically."""
    safetensors = _safetensors(name)
    tensors = dict(zip(_names(layers), saved.memory, strict=True))
    for n, sequence in enumerate(saved.sequences):
        for what, numbers in (("rows", sequence.rows), ("token_ids", sequence.token_ids)):
            tensors[f"sequences.{n}.{what}"] = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    header = {
        "format": FORMAT,
        "version": str(VERSION),
        "cache": json.dumps(_sizes(layers, window)),
        "salts": json.dumps([sequence.salt for sequence in saved.sequences]),
    }
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is a folder, a device or a pipe")
        with TemporaryDirectory(dir=path.parent, prefix=".") as folder:
            whole = Path(folder) / "whole"
            safetensors.torch.save_file(tensors, whole, header)
            os.replace(whole, path)
    except (OSError, safetensors.SafetensorError) as error:
        raise OSError(
            f"{name}: {path} cannot be written ({error}); pass the path of a file in a folder with the "
            "permission and the space for it"
        ) from None


def read(name: str, path: Path, layers: Layers, window: Window) -> Saved:
    """Raises ValueError unless `write` made the file for the same kind of cache."""
    safetensors = _safetensors(name)
    try:
        if not path.is_file():
            raise OSError("there is no file")
        with safetensors.safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            _check_header(name, path, header, layers, window)
            tensors = {key: file.get_tensor(key) for key in file.keys()}
        return _checked(tensors, json.loads(header["salts"]), layers, window)
    except OSError as error:
        raise OSError(
            f"{name}: {path} cannot be read ({error.strerror or error}); pass the path of a file that save() "
            "wrote and that you may read"
        ) from None
    except (
        safetensors.SafetensorError,
        json.JSONDecodeError,
        KeyError,
        RecursionError,
        TypeError,
        _DamagedError,
    ) as error:
        raise ValueError(
            f"{name}: {path} is damaged or no file of a cache ({error}); save() the sequences again"
        ) from None


class _DamagedError(Exception):
    pass


def _safetensors(name: str) -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError(f"{name}: safetensors is not installed; pip install safetensors") from None
    return safetensors


def _names(layers: Layers) -> list[str]:
    """Names in the file of a cache's tensors."""
    quantised, latent = layers.shape.kv_format != "auto", layers.shape.is_latent
    sides = [
        side
        for side in _SIDES
        if (quantised or not side.endswith("scales")) and not (latent and side.startswith("value"))
    ]
    return [f"layers.{layer}.{side}" for layer in range(len(layers)) for side in sides]


def _sizes(layers: Layers, window: Window) -> dict[str, Any]:
    shape = layers.shape
    return {
        "num_layers": shape.num_layers,
        "num_kv_heads": shape.shape[1],
        "head_dim": shape.head_dim,
        "value_dim": shape.value_dim,
        "stored": shape.stored,
        "latent": shape.is_latent,
        "window_left": window.left,
        "sink_tokens": window.sink_tokens,
    }


def _check_header(name: str, path: Path, header: Mapping[str, str], layers: Layers, window: Window) -> None:
    if header.get("format") != FORMAT:
        raise _DamagedError(f"its format is {header.get('format')!r}")
    if header.get("version") != str(VERSION):
        raise ValueError(
            f"{name}: {path} has version {header.get('version')} of the format, and this torch_fattn reads "
            f"{VERSION}; save() the sequences again"
        )
    theirs = json.loads(header["cache"])
    if not isinstance(theirs, dict):
        raise _DamagedError(f"its cache is {theirs!r}")
    for what, own in _sizes(layers, window).items():
        if theirs.get(what) != own:
            raise ValueError(
                f"{name}: {path} has {what} {theirs.get(what)} and the cache {own}; load it into a cache "
                "made as that of save()"
            )


def _checked(tensors: dict[str, Tensor], salts: Any, layers: Layers, window: Window) -> Saved:
    if not isinstance(salts, list) or not all(isinstance(salt, str) for salt in salts):
        raise _DamagedError("its salts are no list of strings")
    memory = [tensors[name] for name in _names(layers)]
    for rows, own in zip(memory, layers.tensors(), strict=True):
        if rows.dtype != own.dtype or rows.shape[1:] != own.shape[2:] or len(rows) != len(memory[0]):
            raise _DamagedError(f"a tensor has shape {list(rows.shape)} and {rows.dtype}")
    sequences = []
    for n, salt in enumerate(salts):
        rows, token_ids = (tensors[f"sequences.{n}.{what}"] for what in ("rows", "token_ids"))
        sequence = SavedSequence(rows.tolist(), token_ids.tolist(), salt)
        is_list = {(each.dtype, each.dim()) for each in (rows, token_ids)} == {(torch.int64, 1)}
        if (
            not is_list
            or len(token_ids) > len(rows)
            or not all(-1 <= row < len(memory[0]) for row in sequence.rows)
            or not sequence.has_seen_rows(window)
        ):
            raise _DamagedError(f"the rows of sequence {n}")
        sequences.append(sequence)
    return Saved(memory, sequences)
