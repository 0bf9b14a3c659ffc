"""Other people's libraries, unmodified, on mps with install(): fetched when this runs, with random weights.

Slow, and needs a package index: without one they are skipped, with the reason.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.third_party.cases import CASES
from tests.third_party.run import PACKAGES

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).parent / "packages.txt"
# Both sides are errors of whole models, in which the same roundings add up in other ways.
TIMES, PLUS = 2.0, 2e-6


@pytest.fixture(scope="session")
def packages() -> Path:
    """A folder for each version of torch, kept between runs while the list does not change."""
    folder = ROOT / "out" / f"third_party-{torch.__version__.split('+')[0]}"
    stamp = folder / "packages.txt"
    if not stamp.exists() or stamp.read_text() != LIST.read_text():
        # Without build isolation, in which sam2 would install another torch.
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
        # One torchvision works with torch 2.14 and later; that for torch 2.13 works with no other.
        vision = ["torchvision>=0.29.2"] if torch.__version__ >= "2.14" else []
        done = subprocess.run(
            [*install, "--upgrade", "--target", str(folder), "-r", str(LIST), *vision],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            pytest.skip(f"the packages cannot be installed: {done.stderr.strip().splitlines()[-1]}")
        stamp.write_text(LIST.read_text())
    return folder


def test_every_case_has_its_package() -> None:
    assert list(PACKAGES) == list(CASES) and len({package for package, _ in PACKAGES.values()}) >= 10


@pytest.mark.parametrize("case", CASES)
def test_unmodified(case: str, packages: Path) -> None:
    command = [sys.executable, "-m", "tests.third_party.run", str(packages), case]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["routed"] == result["calls"] > 0, result["fallbacks"]
    assert result["launches"] >= result["routed"] and not result["installed_after"]
    assert result["error"] <= TIMES * result["torch_error"] + PLUS * max(1.0, result["size"]), result
    assert result["size"] > 0, "the control: the model computes something"


DIFFUSERS = """
import sys; sys.path.insert(0, {packages!r})
from tests.third_party import torchvision_stub; torchvision_stub.install()
import torch, torch_fattn
from tests.third_party.cases import diffusers_flux
from torch_fattn.integrations import diffusers
torch.manual_seed(0)
model, forward = diffusers_flux()
def run(device):
    with torch.no_grad():
        return forward(model.to(device), lambda tensor: tensor.to(device)).cpu()
on_cpu, plain = run("cpu"), run("mps")
assert torch_fattn.report().calls == 0
diffusers.register(); diffusers.register()
ours = run("mps")
assert torch_fattn.report().routed == 2, torch_fattn.report()
assert torch.equal(run("cpu"), on_cpu)
assert (ours - on_cpu).abs().max() < 2e-6
model.set_attention_backend("native")
assert torch.equal(run("mps"), ours) and torch_fattn.report().routed == 4
model.set_attention_backend("_native_math")
assert (run("mps") - ours).abs().max() < 2e-6 and torch_fattn.report().calls == 4
model.set_attention_backend("native"); model.reset_attention_backend()  # for the process, for the model
diffusers.unregister(); diffusers.unregister()
torch_fattn.reset_report()
assert torch.equal(run("mps"), plain) and torch_fattn.report().calls == 0

from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
backends, native, seen = _AttentionBackendRegistry._backends, AttentionBackendName.NATIVE, []
own = backends[native]
diffusers.register()
below = backends[native]
backends[native] = over = lambda *args, **options: seen.append(1) or below(*args, **options)
assert torch.equal(run("mps"), ours) and len(seen) == torch_fattn.report().routed == 2
diffusers.unregister()
assert backends[native] is over, "what others put over it stays"
assert torch.equal(run("mps"), plain) and len(seen) == 4 and torch_fattn.report().calls == 2
diffusers.register()
assert torch.equal(run("mps"), ours) and torch_fattn.report().routed == 4
diffusers.unregister()
backends[native] = own
"""


def test_the_backend_for_diffusers(packages: Path) -> None:
    script = DIFFUSERS.format(packages=str(packages))
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
