"""The examples run, and their results are right: each prints its difference from the float64 reference."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.processes import run_python

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# Arguments, what is printed with them, and the largest difference.
RUNS = [
    ("paged.py --continuations 3 --tokens 9", "45 tokens in 6 blocks, for 3 sequences", 1e-3),
    # 20 sequences share 5 blocks and have one more each: the pool has no room for a seventh.
    (
        "paged.py --continuations 20 --tokens 9",
        "20 blocks of 8 tokens are needed and 15 of 40 are free",
        1e-3,
    ),
    # 96 of 99 tokens are in whole blocks: 15 times that, and 4 to 18 tokens of each of three.
    (
        "shared_prefix.py --answers 3 --prompt 99 --tokens 15",
        f"{15 * 96 + 3 * sum(range(4, 19)):,} together",
        2e-3,
    ),
    ("varlen.py --sentences 5 --longest 70", "packed, 350 padded", 1e-3),
    ("document_mask.py --documents 2 --shortest 64", "2 documents, 157 tokens", 1e-3),
    ("long_video.py --grid 4 8 8 --block 32", "256 tokens, blocks of 32", 1e-5),
    ("encoder.py --clips 3 --longest 50", "padded        150 rows, 7,500 pairs of frames", 1e-4),
]


def run(name: str, *arguments: str, launcher: tuple[str, ...] = ()) -> str:
    done = run_python([*launcher, EXAMPLES / name, *arguments], timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def differences(message: str) -> list[float]:
    (line,) = re.findall(r"difference +(.*) at most", message)
    return [float(number) for number in re.findall(r"\d\S*\d", line)]


@pytest.mark.parametrize("device", ["cpu", "mps"])
@pytest.mark.parametrize(("command", "printed", "largest"), RUNS, ids=[command for command, *_ in RUNS])
def test_examples(command: str, printed: str, largest: float, device: str) -> None:
    message = run(*command.split(), "--device", device)
    assert printed in message, message
    assert differences(message) and max(differences(message)) < largest, message


@pytest.mark.host_only
def test_every_example_is_run() -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py"))
    scripts = [path.name for path in EXAMPLES.glob("*.py")]
    assert len(scripts) > 5
    assert [name for name in scripts if not re.search(rf'"{name}\b', tests)] == []


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
    assert max(differences(message)) < 1e-5
