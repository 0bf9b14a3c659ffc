"""Counts only: what a machine without a GPU can say, exactly."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from . import counting
from .backends import OURS, common_versions
from .calls import Call


class CountsBackend:
    name = "counts"

    def __init__(self) -> None:
        try:
            import softmetal  # noqa: F401
        except ImportError as error:
            raise SystemExit(
                "bench: this machine has neither an Apple nor an NVIDIA GPU, and softmetal, which counts "
                "without one, is not installed; run `make build` in the checkout."
            ) from error
        from .peers import mlx_metal, torch_metal

        self._peers = {peer.IMPL: peer for peer in (torch_metal, mlx_metal)}
        self._counted: dict[tuple[Call, str], dict[str, Any]] = {}

    def machine(self) -> str:
        from softmetal.control import device_facts

        facts = device_facts()
        return f"no GPU; softmetal ({facts['name']}), planning for {facts['cores']} GPU cores"

    def versions(self) -> dict[str, str]:
        wheel = os.environ.get("MLX_METAL_WHEEL")  # whose headers stand in for an installed mlx
        return common_versions() | ({"mlx-metal": Path(wheel).name.split("-")[1]} if wheel else {})

    def implementations(self) -> list[str]:
        return [OURS, *self._peers]

    def ceilings(self) -> dict[str, float]:
        return {}

    def measure(self, call: Call, impl: str) -> dict[str, Any]:
        if impl == OURS:
            refuse_as_planned(call)
        sample = counting.our_sample(call) if impl == OURS else counting.peer_sample(call)
        key = (sample, impl)
        if key not in self._counted:
            self._counted[key] = self._count(sample, impl)
        return {"counted_as": str(sample), **self._counted[key]}

    def _count(self, call: Call, impl: str) -> dict[str, Any]:
        if impl == OURS:
            return {"counts": counting.count_ours(call).as_json()}
        try:
            counts, error, note = counting.count_peer(self._peers[impl], call)
        except NotImplementedError:
            raise
        except RuntimeError as failure:  # not ours to repair, and no reason to lose the other rows
            raise NotImplementedError(f"{impl} does not run on softmetal: {failure}") from failure
        return {"counts": counts.as_json(), "max_error": error, "note": note}


def refuse_as_planned(call: Call) -> None:
    """Raises what the op would raise for the whole call; nothing is allocated or launched."""
    import torch_fattn

    shapes = call.operands(torch.device("meta"))
    keywords = call.keywords(shapes)
    tensors = [tensor for name, tensor in shapes.items() if name not in keywords]
    torch_fattn.explain(call.op, *tensors, **keywords)
