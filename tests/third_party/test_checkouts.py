"""Unchanged scripts and test files of other projects, on mps, with install() and without.

They have no packages: NANOGPT, TIMM and DIFFUSERS name checkouts, and tests without one are skipped.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

from tests.third_party.test_third_party import ROOT, packages  # noqa: F401 - a fixture

# Runs a script, or pytest, as `python SCRIPT ARGUMENTS` does; then prints the report.
RUN = """
import sys; sys.path.insert(0, {packages!r})
from tests.third_party import torchvision_stub; torchvision_stub.install()
import json, os, runpy, torch_fattn
del sys.modules["tests"], sys.modules["tests.third_party"]  # the checkouts have such a package, too
sys.argv = {arguments!r}
os.chdir({checkout!r}); sys.path[:0] = {paths!r}
if {installed!r}:
    torch_fattn.install()
try:
    if sys.argv[0] == "pytest":
        import pytest; pytest.main(sys.argv[1:])
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    report = torch_fattn.report()
    print(json.dumps(dict(routed=report.routed, calls=report.calls, why=report.fallbacks_by_reason())))
"""


def checkout(name: str) -> Path:
    if name not in os.environ:
        pytest.skip(f"{name} names no checkout")
    return Path(os.environ[name]).resolve()


def run(
    folder: Path, libraries: Path, *arguments: str, installed: bool, paths: tuple[str, ...] = (".",)
) -> tuple[str, dict]:
    """Its output, and the report."""
    script = RUN.format(
        packages=str(libraries), arguments=list(arguments), checkout=str(folder), installed=installed,
        paths=[str(folder / path) for path in paths],
    )  # fmt: skip
    devices = {"TORCH_DEVICE": "mps", "DIFFUSERS_TEST_DEVICE": "mps", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], cwd=ROOT, env=os.environ | devices,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    *lines, report = done.stdout.splitlines()
    return "\n".join(lines), json.loads(report)


def test_nanogpt_trains_and_samples(packages: Path, tmp_path: Path) -> None:  # noqa: F811
    """Training goes to torch, the validation in between and the sampling are routed; the losses and the text
    are those of the CPU."""
    folder = checkout("NANOGPT")
    letters = "abcdefghijklmnopqrstuvwxyz .,!?\n"
    rows = numpy.random.default_rng(0).integers(len(letters), size=4000).astype(numpy.uint16)
    for name in ("train", "val"):
        rows.tofile(tmp_path / f"{name}.bin")
    symbols = {"stoi": {c: i for i, c in enumerate(letters)}, "itos": dict(enumerate(letters))}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(letters), **symbols}))

    printed = {}
    for device, installed in (("cpu", False), ("mps", False), ("mps", True)):
        out = tmp_path / f"{device}-{installed}"
        common = [f"--out_dir={out}", f"--device={device}", "--compile=False", "--dtype=float32"]
        sizes = [
            f"--{name}" for name in ("n_layer=2", "n_head=2", "n_embd=32", "block_size=16", "batch_size=4")
        ]
        steps = ["--max_iters=4", "--eval_interval=2", "--eval_iters=2", "--log_interval=1"]
        steps += ["--gradient_accumulation_steps=1", "--always_save_checkpoint=True"]
        losses, training = run(
            folder,
            packages,
            "train.py",
            f"--dataset={tmp_path}",
            *common,
            *sizes,
            *steps,
            installed=installed,
        )
        text, sampling = run(
            folder, packages, "sample.py", *common, "--num_samples=2", "--max_new_tokens=20", "--top_k=1",
            "--start=a", installed=installed,
        )  # fmt: skip
        printed[device, installed] = [float(x) for x in re.findall(r"loss (\d+\.\d+)", losses)], text
        if installed:
            # Two layers; three evaluations of two batches of either data, and five steps.
            assert training == {"routed": 2 * 3 * 2 * 2, "calls": 34, "why": {"small_training": 2 * 5}}
            assert sampling["routed"] == sampling["calls"] == 2 * 2 * 20
        else:
            assert training["calls"] == sampling["calls"] == 0
    losses, text = printed["cpu", False]
    assert len(losses) == 11 and len(text.split("---------------")) == 3
    for other in (("mps", False), ("mps", True)):
        assert printed[other][0] == pytest.approx(losses, abs=2e-4)
        assert printed[other][1].splitlines()[3:] == text.splitlines()[3:]


TEST_FILES = {
    "TIMM": (".", ["tests/test_layers.py", "tests/test_layers_pool.py"]),
    "DIFFUSERS": (
        "src",
        [
            f"tests/models/transformers/test_models_transformer_{name}"
            for name in (
                "flux.py::TestFluxTransformer",
                "flux.py::TestFluxTransformerAttention",
                "wan.py::TestWanTransformer3D",
                "wan.py::TestWanTransformer3DAttention",
                "ltx.py::TestLTXTransformer",
            )
        ],
    ),
}


@pytest.mark.parametrize("name", TEST_FILES)
def test_their_own_tests(name: str, packages: Path) -> None:  # noqa: F811
    """The same ones pass with install() and without."""
    source, files = TEST_FILES[name]
    folder = checkout(name)

    def outcomes(installed: bool) -> tuple[list[str], dict]:
        printed, report = run(
            folder, packages, "pytest", "-rA", "--tb=no", "-q", "-p", "no:cacheprovider", *files,
            installed=installed, paths=(source, "."),
        )  # fmt: skip
        return sorted(line for line in printed.splitlines() if re.match("PASSED|FAILED|ERROR", line)), report

    plain, none = outcomes(installed=False)
    ours, report = outcomes(installed=True)
    passed = sum(line.startswith("PASSED") for line in ours)
    assert [line.split(" - ")[0] for line in ours] == [line.split(" - ")[0] for line in plain]
    assert none["calls"] == 0 and report["routed"] > 0
    assert set(report["why"]) <= {"small_training", "head_dim"}
    print(f"{name}: {passed} of {len(ours)} pass either way, {report}")
    assert passed > 0.8 * len(ours)
