"""The file of tuned sizes: it is used if it is of exactly this GPU, this version and these sources, and legal
in every field; else there is one warning, and the built-in table."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_fattn
from tests.helpers.processes import run_python
from tests.helpers.tuned import PROVENANCE, Install, file_of, install, plan_of, row, tensor_row, this_chip
from torch_fattn.integrations.pytorch import routing
from torch_fattn.tuning import tuned_file
from torch_fattn.tuning.tuned_file import TunedRoute

__all__ = ["install"]

Data = dict[str, Any]
ROUTE = TunedRoute("prefill", "float16", 64, 1, 512, "torch", *routing.system_and_torch())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install: Install) -> Path:
    monkeypatch.setenv("FATTN_CACHE", str(tmp_path))
    monkeypatch.delenv("FATTN_TUNING", raising=False)
    return tmp_path


def tuning() -> str:
    text: str = plan_of("prefill", 40, 40, 64).data["tuning"]
    return text


def load() -> list[str]:
    """The warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tuned_file.load_all(torch_fattn.__version__)
    return [str(warning.message) for warning in caught]


def test_a_file_is_used(folder: Path) -> None:
    assert not load() and "tuned" not in tuning()
    written = file_of([row("prefill", simdgroups=8), tensor_row()], [ROUTE])
    path = tuned_file.write(written)
    assert path.parent == folder and list(folder.iterdir()) == [path]
    assert not load()
    assert tuning() == f"tuned on {this_chip().name}, 2026-01-31"
    assert plan_of("prefill", 40, 40, 64).passes[0]["macros"]["FATTN_SIMDGROUPS"] == "8"
    assert tuned_file.read(path, torch_fattn.__version__) == written
    route = plan_of("prefill", 40, 40, 64).route
    assert route is not None and (route.to, route.why) == ("torch", tuning())


def test_it_can_be_switched_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned_file.write(file_of([row("prefill")]))
    monkeypatch.setenv("FATTN_TUNING", "0")
    assert not load() and "tuned" not in tuning()
    monkeypatch.setenv("FATTN_TUNING", "1")
    assert not load() and "tuned" in tuning()


FAULTS: dict[str, tuple[Data, str]] = {
    "format": ({"format": 1}, "format is not 5"),
    "version": ({"torch_fattn": "0.0.9"}, "torch_fattn is '0.0.9'"),
    "sources": ({"sources": "0" * 16}, "sources is '0000000000000000'"),
    "unknown field": ({"note": "x"}, "it was changed"),
    "half a character": ({"date": "\ud800"}, "it was changed"),
    "rows": ({"rows": [3]}, "it was changed"),
    "digest": ({"digest": None}, "it was changed"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_with_a_fault_is_ignored(fault: str, folder: Path) -> None:
    """test_a_file_is_used is the control."""
    fields, words = FAULTS[fault]
    path = tuned_file.write(file_of([row("prefill"), tensor_row()], [ROUTE]))
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    (warning,) = load()
    assert words in warning and str(path) in warning and "python -m torch_fattn tune" in warning
    assert "\n" not in warning and "tuned" not in tuning()


def test_a_renamed_file_and_illegal_sizes_are_ignored(folder: Path) -> None:
    path = tuned_file.write(file_of([row("prefill", tile_keys=12)]))
    assert "its sizes are not legal: " in load()[0] and "tuned" not in tuning()
    other = replace(this_chip(), cores=99)
    tuned_file.write(replace(file_of([row("prefill")]), gpu=other)).rename(path)
    assert "its name does not match its GPU" in load()[0] and "tuned" not in tuning()


# Fields of a tile's row or sizes, of a row of tensor operations, or of a route, and the fault of all three.
TILES: dict[str, tuple[Data, str]] = {
    "dtype": ({"dtype": "int8"}, "dtype of a tuned row is 'int8', which is unknown"),
    "dims": ({"min_dim": 64, "max_dim": 32}, "the kernel does not support these head sizes"),
    "dims of the wide kernel": ({"max_dim": 256}, "the kernel does not support these head sizes"),
    "huge dim": ({"max_dim": 10**6}, "max_dim of a tuned row is 1000000"),
    "huger dim": ({"max_dim": 10**30}, "max_dim of a tuned row is 1000000"),
    "negative": ({"max_length": -1}, "max_length of a tuned row is -1"),
    "one length": ({"max_length": 512}, "not followed by one for the others"),
    "system": ({"macos": "26.2"}, "and no other, names its macOS"),
}
SIZES: dict[str, tuple[Data, str]] = {
    "fraction": ({"tile_keys": 16.0}, "tile_keys of a tuned row is 16.0 and must be"),
    "tile": ({"tile_keys": 12}, "tile_keys is not 8, 16 or 32"),
    "no tile": ({"tile_keys": 0}, "tile_keys is not 8, 16 or 32"),
    "threads": ({"simdgroups": 64}, "simdgroups is not"),
    "rows of a tile": ({"row_fragments": 4}, "row_fragments is not 1 or 2"),
}
TENSORS: dict[str, tuple[Data, str]] = {
    "length": ({"max_length": 512}, "prefill_tensor has no sizes and is for all"),
    "dtype": ({"dtype": "float32"}, "are for float16 and bfloat16"),
    "heads": ({"min_dim": 97, "max_dim": 120}, "does not support these head sizes"),
    "no system": ({"macos": None}, "and no other, names its macOS"),
}
ROUTES: dict[str, tuple[Data, str]] = {
    "op": ({"op": "merge"}, "op of a tuned row is 'merge', which is unknown"),
    "taker": ({"to": "mlx"}, "to of a tuned row is 'mlx', which is unknown"),
    "head": ({"dim": 0}, "route 0: the kernels do not support this head size"),
    "huge head": ({"dim": 577}, "dim of a tuned row is 577"),
    "head of a backward": ({"op": "training", "dim": 264}, "route 0: the kernels do not support this head"),
    "lengths": ({"min_length": 600}, "min_length is below 1 or above max_length"),
}


def test_illegal_rows() -> None:
    tile, tensors = row("prefill"), tensor_row()
    assert tuned_file.fault_of([tile, tensors], [ROUTE]) == ""
    for fields, words in TILES.values():
        assert words in tuned_file.fault_of([replace(tile, **fields)])
    for fields, words in SIZES.values():
        assert words in tuned_file.fault_of([replace(tile, sizes=tile.sizes | fields)])
    for fields, words in TENSORS.values():
        assert words in tuned_file.fault_of([replace(tensors, **fields)])
    for fields, words in ROUTES.values():
        assert words in tuned_file.fault_of([], [replace(ROUTE, **fields)])
    wide = replace(tile, dtype="float32", sizes=tile.sizes | {"tile_keys": 32})
    assert "more than 32 KiB of threadgroup memory" in tuned_file.fault_of([wide])
    short = replace(tile, max_length=512, sizes=tile.sizes | {"tile_keys": 32})
    assert "the order of a sum would depend on the length" in tuned_file.fault_of([short, tile])


LONG = json.dumps({"format": tuned_file.FORMAT, "torch_fattn": "1" * 5000}).encode()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"[]", b" " * (2 << 20), LONG])
def test_an_invalid_file(content: bytes, folder: Path) -> None:
    path = folder / this_chip().file_name
    path.write_bytes(content)
    (warning,) = load()
    assert str(path) in warning and "tuned" not in tuning() and len(warning) < 400 + len(str(path))


def test_a_folder_of_that_name(folder: Path) -> None:
    (folder / this_chip().file_name).mkdir()
    assert len(load()) == 1 and "tuned" not in tuning()


def test_a_broken_file_of_another_gpu_is_its_own_affair(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tune` here would not touch it, nor would --reset."""
    name = this_chip().file_name
    others = {name.replace("cores", "0cores"), f"tuned-another-{name}", "tuned-x.json"}
    for other in others:
        (folder / other).write_text("{")
    assert not load()
    (folder / name).write_text("{")
    (warning,) = load()
    assert str(folder / name) in warning and "--reset" in warning

    def no_gpu() -> None:
        raise RuntimeError("fattn needs a GPU, and torch finds no Metal device")

    with monkeypatch.context() as patch:
        patch.setattr(torch.ops.fattn, "_this_gpu", no_gpu)
        assert not load()


def test_the_file_of_another_gpu_waits_for_it(folder: Path, install: Install) -> None:
    mine = file_of([row("prefill")])
    for difference in ({"name": "Apple M9"}, {"family": 19}, {"cores": 77}):
        other = tuned_file.Gpu(**(mine.gpu.__dict__ | difference))
        tuned_file.write(tuned_file.TunedFile(mine.torch_fattn, mine.sources, other, mine.date, mine.rows))
    assert len(list(folder.iterdir())) == 3
    assert not load() and "tuned" not in tuning()
    install(row("prefill"))
    assert tuning() == PROVENANCE


SCRIPT = """
import torch, torch_fattn
torch.manual_seed(0)
operands = [torch.randn(1, 2, 40, 64) for _ in range(3)]
exact = torch_fattn.reference.prefill(*operands)[0]
error = (torch_fattn.prefill(*(t.to("mps") for t in operands)).cpu() - exact).abs().max().item()
assert error < 1e-5, error
print(torch_fattn.explain("prefill", *(t.to("mps") for t in operands)).data["tuning"])
"""


def in_a_new_process(folder: Path, **environment: str) -> tuple[str, str]:
    environment = {**os.environ, "FATTN_CACHE": str(folder), "FATTN_TUNING": "1", **environment}
    done = run_python(["-c", SCRIPT], env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def test_a_new_process_reads_it(folder: Path) -> None:
    path = tuned_file.write(file_of([row("prefill", "float32", simdgroups=2)]))
    assert in_a_new_process(folder) == (f"tuned on {this_chip().name}, 2026-01-31", "")
    built_in = in_a_new_process(folder, FATTN_TUNING="0")
    assert "tuned" not in built_in[0] and not built_in[1]
    path.write_text("{}")
    words, warned = in_a_new_process(folder)
    assert words == built_in[0] and warned.count("RuntimeWarning") == 1


def test_without_a_home(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(tuned_file, "cache_folder", nowhere)
    assert not load()


def test_a_write_that_fails_leaves_the_old_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tuned_file.write(file_of([row("prefill")]))
    before = path.read_text()

    def fail(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(tuned_file.os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        tuned_file.write(file_of([]))
    assert path.read_text() == before and list(folder.iterdir()) == [path]
