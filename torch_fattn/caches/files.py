"""Sequences of a paged cache in a safetensors file. The rows of every slot are stored once, however many
sequences share it, and each sequence lists its rows: so the block size is free.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .memory import Layers
from .prefixes import block_keys
from .sequences import PagedSequence, Window

FORMAT, VERSION = "torch_fattn.PagedKVCache", 1
_SIDES = ("key", "key_scales", "value", "value_scales")


@dataclass
class SavedSequence:
    rows: list[int]  # of each token, -1 behind a window
    token_ids: list[int]
    salt: str


@dataclass
class Saved:
    memory: list[Tensor]  # rows of every tensor of the cache's memory
    sequences: list[SavedSequence]


def write(name: str, path: Path, layers: Layers, window: Window, saved: Saved) -> None:
    """Replaces the file as a whole."""
    save_file = _safetensors(name).torch.save_file
    if path.is_dir() or not path.parent.is_dir():
        wrong = f"{path} is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ValueError(f"{name}: {wrong}; pass the path of a file in a folder")
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
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        save_file(tensors, temporary, header)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read(name: str, path: Path, layers: Layers, window: Window) -> Saved:
    """Raises ValueError for a file that `write` did not make for such a cache."""
    if not path.is_file():
        raise ValueError(f"{name}: there is no file {path}; pass the path of a file that save() wrote")
    safetensors = _safetensors(name)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            _check_header(name, path, header, layers, window)
            tensors = {key: file.get_tensor(key) for key in file.keys()}
        return _checked(tensors, json.loads(header["salts"]), layers)
    except (safetensors.SafetensorError, json.JSONDecodeError, KeyError, TypeError, _DamagedError) as error:
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
    """The names of the tensors of its memory."""
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
    for what, own in _sizes(layers, window).items():
        if theirs.get(what) != own:
            raise ValueError(
                f"{name}: {path} has {what} {theirs.get(what)} and the cache {own}; load it into a cache "
                "made as that of save()"
            )


def _checked(tensors: dict[str, Tensor], salts: Sequence[str], layers: Layers) -> Saved:
    memory = [tensors[name] for name in _names(layers)]
    for rows, own in zip(memory, layers.tensors(), strict=True):
        if rows.dtype != own.dtype or rows.shape[1:] != own.shape[2:] or len(rows) != len(memory[0]):
            raise _DamagedError(f"a tensor has shape {list(rows.shape)} and {rows.dtype}")
    sequences = []
    for n, salt in enumerate(salts):
        rows, token_ids = (tensors[f"sequences.{n}.{what}"] for what in ("rows", "token_ids"))
        if {rows.dtype, token_ids.dtype} != {torch.int64} or rows.dim() != 1 or len(token_ids) > len(rows):
            raise _DamagedError(f"the rows of sequence {n}")
        if len(rows) > 0 and not -1 <= int(rows.min()) <= int(rows.max()) < len(memory[0]):
            raise _DamagedError(f"the rows of sequence {n}")
        sequences.append(SavedSequence(rows.tolist(), token_ids.tolist(), str(salt)))
    return Saved(memory, sequences)


class LoadedSequence:
    """A saved sequence in blocks of a size. A chunk is the rows of a block; it is empty where rows that come
    do not see the block. Sequences with one chunk share a block."""

    def __init__(self, saved: SavedSequence, window: Window, block_size: int) -> None:
        rows = saved.rows
        begin, end = window.hidden(len(rows), block_size)
        self._saved, self._block_size = saved, block_size
        self.chunks = [tuple(rows[n : n + block_size]) for n in range(0, len(rows), block_size)]
        self.chunks[begin:end] = [()] * len(self.chunks[begin:end])
        missing = max((n + 1 for n, row in enumerate(rows) if row < 0), default=0)
        self._hidden = max(end, -(-missing // block_size))

    def sequence(self, blocks: list[int], epoch: int) -> PagedSequence:
        length, size = len(self._saved.rows), self._block_size
        keys = list(block_keys(self._saved.token_ids, size, self._saved.salt))
        return PagedSequence(
            row=-1,
            salt=self._saved.salt,
            epoch=epoch,
            length=length,
            filled=length,
            blocks=blocks,
            hidden=self._hidden,
            token_ids=self._saved.token_ids[: len(keys) * size],
            keys=keys,
        )
