"""ComfyUI's own attention module, from a checkout: set COMFYUI to its folder. There is no package of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.third_party.test_third_party import ROOT, packages  # noqa: F401 - a fixture

SCRIPT = """
import sys; sys.argv = ["comfyui"]; sys.path.insert(0, {packages!r})
from tests.third_party import torchvision_stub; torchvision_stub.install()
sys.path.insert(0, {comfyui!r})  # which has a package of the name tests, too
import copy, torch, torch_fattn
from comfy.ldm.modules import attention
from torch_fattn.integrations.comfyui import attention_override

torch.manual_seed(0)
model = attention.SpatialTransformer(64, 4, 16, depth=1, context_dim=32, device="cpu", dtype=torch.float32)
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, std=0.1) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
image, text = torch.randn(2, 64, 8, 8), torch.randn(2, 9, 32)

def run(device, dtype=torch.float32, **options):
    there = copy.deepcopy(model).to(device, dtype)
    with torch.no_grad():
        out = there(image.to(device, dtype), text.to(device, dtype), transformer_options=options)
    return out.cpu().double()

exact = run("cpu", torch.float64)
error = lambda out: (out - exact).abs().max().item()
limit = 2 * max(error(run("cpu")), error(run("mps"))) + 2e-6
assert torch_fattn.report().calls == 0
assert error(run("mps", optimized_attention_override=attention_override)) < limit
assert torch_fattn.report().routed == torch_fattn.report().calls == 2, torch_fattn.report()
attention.optimized_attention = attention.optimized_attention_masked = attention.attention_pytorch
with torch_fattn.installed():
    assert error(run("mps")) < limit
assert torch_fattn.report().routed == torch_fattn.report().calls == 4, torch_fattn.report()
"""


def test_override_and_install(packages: Path) -> None:  # noqa: F811
    comfyui = os.environ.get("COMFYUI")
    if not comfyui:
        pytest.skip("COMFYUI names no checkout of ComfyUI")
    script = SCRIPT.format(comfyui=comfyui, packages=str(packages))
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
