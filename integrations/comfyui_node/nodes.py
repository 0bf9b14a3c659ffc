"""The nodes."""

from __future__ import annotations

from typing import Any

from torch_fattn.integrations import comfyui
from torch_fattn.patterns import Pattern


class Attention:
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "apply"
    CATEGORY = "model/attention"
    DESCRIPTION = "Computes the model's attention with torch_fattn's Metal kernels."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802  ComfyUI's name
        return {"required": {"model": ("MODEL",)}}

    def apply(self, model: Any) -> tuple[Any]:
        return (comfyui.apply(model),)


class SparseAttention(Attention):
    DESCRIPTION = (
        "An approximation for long videos and large images: each block of 128 tokens sees only the blocks of "
        "keys with the highest scores. Short calls, cross-attention, masks and the first steps stay exact."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802  ComfyUI's name
        return {
            "required": {
                "model": ("MODEL",),
                "density": ("FLOAT", {"default": 0.3, "min": 0.05, "max": 1.0, "step": 0.05}),
                "min_tokens": ("INT", {"default": 16384, "min": 256, "max": 1 << 20}),
                "exact_steps": ("INT", {"default": 2, "min": 0, "max": 100}),
                "with_means": ("BOOLEAN", {"default": False}),
            }
        }

    def apply(  # type: ignore[override]
        self, model: Any, density: float, min_tokens: int, exact_steps: int, with_means: bool
    ) -> tuple[Any]:
        pattern = Pattern(density, min_tokens=min_tokens, with_means=with_means)
        return (comfyui.apply(model, pattern, exact_steps=exact_steps),)
