"""The examples run, and their results are right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.processes import run_python

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, *arguments: str, launcher: tuple[str, ...] = ()) -> str:
    done = run_python([*launcher, EXAMPLES / name, *arguments], timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_paged(device: str) -> None:
    message = run("paged.py", "--device", device, "--continuations", "3", "--tokens", "9")
    assert "45 tokens in 6 blocks, for 3 sequences" in message
    assert "11 in use, 5 of them shared by all" in message, message
    difference = re.search(r"difference +(\S+) at most", message)
    assert difference is not None and float(difference[1]) < 1e-3
    assert "40 of 40 blocks are free" in message


def test_paged_in_a_full_pool() -> None:
    """20 sequences share 5 blocks and have one more each: the pool has no room for a seventh."""
    message = run("paged.py", "--device", "cpu", "--continuations", "20", "--tokens", "9")
    assert re.search(
        r"stopped +PagedKVCache.extend: 20 blocks of 8 tokens are needed and 15 of 40 are free", message
    )
    difference = re.search(r"difference +(\S+) at most", message)
    assert difference is not None and float(difference[1]) < 1e-3


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_shared_prefix(device: str) -> None:
    """96 of 99 tokens are in whole blocks: 15 times that, and 4 to 18 tokens of each of three."""
    message = run(
        "shared_prefix.py", "--device", device, "--answers", "3", "--prompt", "99", "--tokens", "15"
    )
    assert "99 tokens, 6 whole blocks for 3 answers" in message
    together = 15 * 96 + 3 * sum(range(4, 19))
    assert f"{together:,} together, {together + 2 * 15 * 96:,} apart" in message, message
    difference = re.search(r"difference +(\S+) at most", message)
    assert difference is not None and float(difference[1]) < 2e-3


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_varlen(device: str) -> None:
    message = run("varlen.py", "--device", device, "--sentences", "5", "--longest", "70")
    assert "5 sentences of" in message and "to 70 tokens" in message
    rows = re.search(r"rows +(\d+) packed, 350 padded", message)
    assert rows is not None and 70 < int(rows[1]) < 350, message
    difference = re.search(r"difference +(\S+) at most", message)
    assert difference is not None and float(difference[1]) < 1e-3


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_document_mask(device: str) -> None:
    """64 and 93 tokens: ten rows of cells over five columns, of which the diagonal is mixed."""
    message = run("document_mask.py", "--device", device, "--documents", "2", "--shortest", "64")
    assert "2 documents, 157 tokens" in message
    cells = re.search(r"cells +(\d+) are left out, (\d+) need no mask, (\d+) are mixed", message)
    assert cells is not None and sum(map(int, cells.groups())) == 50, message
    assert min(map(int, cells.groups())) > 5, message
    difference = re.search(r"difference +(\S+) at most", message)
    assert difference is not None and float(difference[1]) < 1e-3


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_encoder(device: str) -> None:
    message = run("encoder.py", "--device", device, "--clips", "3", "--longest", "50")
    assert "3 clips of" in message and "to 50 frames" in message
    assert "padded        150 rows, 7,500 pairs of frames" in message, message
    packed = re.search(r"packed +(\d+) rows, ([\d,]+) pairs", message)
    assert packed is not None and 50 < int(packed[1]) < 150, message
    assert 2500 < int(packed[2].replace(",", "")) < 7500
    differences = re.search(r"difference +padded (\S+), packed (\S+) at most", message)
    assert differences is not None and all(float(one) < 1e-4 for one in differences.groups())
    assert device == "cpu" or "4 launches of fattn_prefill" in message


def not_run(names: list[str]) -> list[str]:
    """The scripts that no test names."""
    tests = "".join(path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py"))
    return [name for name in names if f'"{name}"' not in tests]


@pytest.mark.host_only
def test_every_example_is_run() -> None:
    scripts = [path.name for path in EXAMPLES.glob("*.py")]
    assert len(scripts) > 5 and not not_run(scripts)
    another = "_".join(("another", "script.py"))
    assert not_run([another]) == [another]


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_lora(device: str) -> None:
    """Both runs learn alike, and one of them keeps no matrix of 128 by 128 per layer and head."""
    message = run("lora.py", "--device", device, "--length", "128", "--steps", "6")
    found = re.findall(r"(\w+) +loss (\S+) to (\d+\.\d+)(?:, (\S+) MB before the backward)?", message)
    (_, *torchs), (_, *ours) = found
    assert [name for name, *_ in found] == ["sdpa", "fattn"]
    first, last = float(ours[0]), float(ours[1])
    assert last < first - 0.01 and abs(last - float(torchs[1])) < 1e-3
    if device == "mps":
        matrices = 4 * 4 * 4 * 128 * 128 / 1e6
        assert float(torchs[2]) - float(ours[2]) > 0.8 * matrices


@pytest.mark.host_only
@pytest.mark.parametrize(
    "launcher", [(), ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")]
)
def test_context_parallel(launcher: tuple[str, ...]) -> None:
    """Started by itself, and by torchrun."""
    message = run("context_parallel.py", "--device", "cpu", "--length", "200", launcher=launcher)
    assert "ranks         3, with [67, 66, 67] tokens of the prompt" in message, message
    assert "torch_fattn.distributed.prefill on 3 ranks: ring" in message
    difference = re.search(r"difference +(\S+) at most", message)
    assert difference is not None and float(difference[1]) < 1e-5
