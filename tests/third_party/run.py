"""Runs cases on the CPU, on mps as torch has it and on mps with install(); one line of JSON for each.

python -m tests.third_party.run FOLDER_OF_PACKAGES [CASE ...]      # --markdown: the table of docs/drop-in.md
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import sys
import warnings
from importlib.metadata import version
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "LOGURU_LEVEL": "ERROR"}


def run(name: str) -> dict[str, Any]:
    import torch

    import torch_fattn
    from tests.third_party.cases import CASES

    torch.manual_seed(0)
    model, forward = CASES[name]()
    model.eval()

    def result(device: str, dtype: torch.dtype) -> torch.Tensor:
        there = copy.deepcopy(model).to(device, dtype)

        def place(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)

        with torch.no_grad():
            return forward(there, place).cpu().double()

    on_cpu = result("cpu", torch.float32)
    exact, oracle = on_cpu, "float32"
    with contextlib.suppress(RuntimeError):  # a library that writes float32 into its code
        exact, oracle = result("cpu", torch.float64), "float64"
    plain = result("mps", torch.float32)
    torch_fattn.reset_report()
    torch_fattn.reset_launch_counts()
    with torch_fattn.installed():
        ours = result("mps", torch.float32)
    report = torch_fattn.report()

    def error(values: torch.Tensor) -> float:
        return (values - exact).abs().max().item()

    return {
        "case": name,
        "oracle": oracle,
        "size": exact.abs().max().item(),
        "error": error(ours),
        "torch_error": max(error(plain), error(on_cpu)),
        "routed": report.routed,
        "calls": report.calls,
        "fallbacks": report.fallbacks_by_reason(),
        "launches": sum(torch_fattn.launch_counts().values()),
        "installed_after": torch_fattn.report().installed,
    }


# The package of each case, and which of its models it is.
PACKAGES = {
    "diffusers_unet": ("diffusers", "UNet2DConditionModel"),
    "diffusers_flux": ("diffusers", "FluxTransformer2DModel"),
    "diffusers_pipeline": ("diffusers", "StableDiffusionPipeline"),
    "timm_vit": ("timm", "ViT"),
    "timm_eva": ("timm", "EVA-02"),
    "open_clip": ("open-clip-torch", "CLIP"),
    "whisper": ("openai-whisper", "Whisper, with its cache"),
    "litgpt": ("litgpt", "GPT, with its cache"),
    "x_transformers": ("x-transformers", "Decoder"),
    "sam2_image_encoder": ("sam2", "Hiera"),
    "denoising_diffusion": ("denoising-diffusion-pytorch", "Unet"),
    "sentence_transformers": ("sentence-transformers", "Bert"),
    "transformers_pipeline": ("transformers", "text-generation of Llama"),
}


def row(result: dict[str, Any]) -> str:
    package, model = PACKAGES[result["case"]]
    return (
        f"| {package} {version(package)} | {model} | {result['routed']} of {result['calls']} "
        f"| {result['error']:.1e} | {result['torch_error']:.1e} | {result['oracle']} |"
    )


def main(arguments: list[str]) -> None:
    warnings.simplefilter("ignore")
    markdown = "--markdown" in arguments
    folder, *names = [argument for argument in arguments if argument != "--markdown"]
    sys.path.insert(0, folder)
    from tests.third_party import torchvision_stub

    torchvision_stub.install()
    with contextlib.redirect_stdout(sys.stderr):  # the libraries print, too
        results = [run(name) for name in names or PACKAGES]
    for result in results:
        print(row(result) if markdown else json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
