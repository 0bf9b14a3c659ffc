"""Compiled pipelines that are kept between runs: found again by the next process, and made again where the
file is broken or of something else. That a call works is never in question."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import torch_fattn
from tests.conftest import EMULATED, needs_emulator
from tests.helpers.processes import run_python
from torch_fattn.tuning import tuned_file

# Calls with two pipelines, checked against the reference; prints how many pipelines were compiled.
SCRIPT = """
import json, torch, torch_fattn
torch.manual_seed(0)
query, key, value = (torch.randn(1, 2, n, 16) for n in (1, 3000, 3000))
exact = torch_fattn.reference.decode(query, key, value)[0]
out = torch_fattn.decode(*(t.to("mps") for t in (query, key, value))).cpu()
assert (out - exact).abs().max() < 1e-5
assert torch_fattn.launch_counts()["fattn_decode_vector"] == 1
print(json.dumps([(k.kernel, k.archived) for k in torch_fattn.compiled_kernels()]))
"""


def run(folder: Path, script: str = SCRIPT, **environment: str) -> dict[str, bool]:
    """Maps each kernel to whether its pipeline came from an archive."""
    done = run_python(["-c", script], env={**settings(folder), **environment})
    assert done.returncode == 0 and not done.stderr, done.stderr
    return dict(json.loads(done.stdout))


def settings(folder: Path) -> dict[str, str]:
    return {**os.environ, "FATTN_CACHE": str(folder), "FATTN_ARCHIVE": "1"}


def archives(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.metalarchive"))


NONE = {"fattn_decode_vector": False, "fattn_merge": False}
ALL = dict.fromkeys(NONE, True)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the archives of one process."""
    folder = tmp_path_factory.mktemp("kept")
    assert run(folder) == NONE
    assert len(archives(folder)) == 2
    return folder


@pytest.fixture
def folder(kept: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(kept, tmp_path / "copy"))


def test_the_next_process_finds_them(folder: Path) -> None:
    before = {path: path.read_bytes() for path in archives(folder)}
    assert run(folder) == ALL
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    where = str(archives(folder)[0].relative_to(folder))
    assert where.startswith(f"pipelines/{torch_fattn.__version__}/")
    assert tuned_file.source_digest() in where


def test_they_are_off_by_default(folder: Path, tmp_path: Path) -> None:
    assert run(folder, FATTN_ARCHIVE="") == NONE
    other = tmp_path / "other"
    environment = {name: value for name, value in settings(other).items() if name != "FATTN_ARCHIVE"}
    done = run_python(["-c", SCRIPT], env=environment)
    assert done.returncode == 0 and dict(json.loads(done.stdout)) == NONE, done.stderr
    assert not other.exists()


def test_another_pipeline_is_a_miss(folder: Path) -> None:
    found = run(
        folder,
        SCRIPT.replace("value))", "value)), softcap=0.0, scale=0.25", 1).replace(
            "value)[0]", "value, scale=0.25)[0]"
        ),
    )
    assert found == ALL, "a scale is not part of the pipeline"
    found = run(
        folder,
        SCRIPT.replace("value))", "value)), softcap=2.0", 1).replace("value)[0]", "value, softcap=2.0)[0]"),
    )
    assert found == {"fattn_decode_vector": False, "fattn_merge": True}
    assert len(archives(folder)) == 3


def test_a_broken_file_is_made_again(folder: Path) -> None:
    """One that has not the hash in its name. test_the_next_process_finds_them is the control."""
    first, _ = archives(folder)
    whole = first.read_bytes()
    first.write_bytes(whole[:40] + bytes([whole[40] ^ 1]) + whole[41:])
    assert sorted(run(folder).values()) == [False, True]
    assert len(archives(folder)) == 2 and first.read_bytes() == whole


def test_undeletable_files_are_skipped(folder: Path) -> None:
    """Folders instead of archives, some of which sort before the archive."""
    for archive in archives(folder):
        for number in range(16):
            in_its_place = archive.with_name(f"{archive.name.split('-')[0]}-{number:016x}.metalarchive")
            in_its_place.mkdir()
            (in_its_place / "content").write_text("")
    assert run(folder) == ALL
    assert len(archives(folder)) == 2 * 17


def fnv(data: bytes) -> str:
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return f"{value:016x}"


@needs_emulator
@pytest.mark.parametrize("damage", ["no archive", "of another pipeline"])
def test_a_whole_file_that_metal_refuses(damage: str, folder: Path) -> None:
    """The hash in its name is right, but Metal finds no archive in it, or another pipeline."""
    first, second = archives(folder)
    content = second.read_bytes() if damage == "of another pipeline" else b"no archive"
    first.rename(first.with_name(f"{first.name.split('-')[0]}-{fnv(content)}.metalarchive"))
    (replaced,) = (path for path in archives(folder) if path.name.startswith(first.name.split("-")[0]))
    replaced.write_bytes(content)
    assert sorted(run(folder).values()) == [False, True]
    assert not replaced.exists() and first.exists()


@needs_emulator
def test_archives_of_another_gpu_are_ignored(folder: Path) -> None:
    assert run(folder, SOFTMETAL_GPU_FAMILY="9") == NONE
    assert len(archives(folder)) == 4 and len({path.parent for path in archives(folder)}) == 2
    assert run(folder) == ALL


def test_two_processes_at_once(tmp_path: Path) -> None:
    command, pipe = [sys.executable, "-c", SCRIPT], subprocess.PIPE
    both = [
        subprocess.Popen(command, env=settings(tmp_path), stdout=pipe, stderr=pipe, text=True)
        for _ in range(2)
    ]
    for process in both:
        out, err = process.communicate()
        assert process.returncode == 0 and not err, err
        assert set(dict(json.loads(out))) == set(NONE)
    assert run(tmp_path) == ALL
    assert not list(tmp_path.rglob(".writing-*"))


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert run(tmp_path / "file") == NONE and (tmp_path / "file").read_text() == ""


@pytest.mark.skipif(not EMULATED, reason="the file is of a form that only the software has")
def test_no_object_is_left_behind(folder: Path) -> None:
    script = (
        SCRIPT
        + """
import softmetal
alive = softmetal.live_objects()
left = {"MTLBinaryArchive", "MTLBinaryArchiveDescriptor", "MTLComputePipelineDescriptor", "MTLFunction"}
assert not left & {name for name, count in alive.items() if count}, alive
assert alive["MTLComputePipelineState"] == 2, alive
"""
    )
    assert run(folder, script) == ALL
    assert run(folder.parent / "new", script) == NONE
