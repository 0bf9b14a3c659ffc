"""Counts only: what a machine without a GPU can say, exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from . import counting, samples
from .arguments import WrongArgumentError
from .backends import OURS, common_versions
from .calls import Call


class CountsBackend:
    name = "counts"

    def __init__(self) -> None:
        try:
            from softmetal.testing import device_facts

            self._device = device_facts()
        except ImportError as error:
            raise WrongArgumentError(
                "--backend counts, the default where there is neither an Apple nor an NVIDIA GPU, counts on "
                "softmetal, which is not built here; run `make build` in the checkout"
            ) from error
        from .peers import known

        self._versions = known.versions()  # a wrong MLX_METAL_WHEEL or LLAMA_CPP_SDIST is found now
        self._peers = {peer.IMPL: peer for peer in known.PEERS}
        self._counted: dict[tuple[Call, str], dict[str, Any]] = {}

    def machine(self) -> str:
        device = self._device
        return f"no GPU; softmetal ({device['name']}), planning for {device['cores']} GPU cores"

    def versions(self) -> dict[str, str]:
        return common_versions() | self._versions

    def implementations(self) -> list[str]:
        return [OURS, *self._peers]

    def ceilings(self) -> dict[str, float]:
        return {}

    def measure(self, call: Call, impl: str) -> dict[str, Any]:
        if call.lengths:
            raise NotImplementedError("counts are taken of sequences of one length")
        if not call.is_decode and call.q_len != call.kv_len:
            raise NotImplementedError("counts are taken of prompts with as many rows as keys, not of chunks")
        if impl == OURS:
            refuse_as_planned(call)
        if not call.is_decode:
            sample = call
        else:
            sample = samples.our_decode(call) if impl == OURS else samples.peers_decode(call)
        key = (replace(sample, model=""), impl)
        if key not in self._counted:
            self._counted[key] = self._count(sample, impl)
        return {"counted_as": str(sample), **self._counted[key]}

    def _count(self, call: Call, impl: str) -> dict[str, Any]:
        if impl == OURS:
            counts = (
                counting.count_ours(call)
                if call.is_decode
                else samples.count_prefill(call, counting.count_ours)
            )
            return {"counts": counts.as_json()}
        from .peers import known

        found: dict[str, Any] = {"max_error": 0.0}

        def count(one: Call) -> counting.Counts:
            counts, error, found["note"] = counting.count_peer(
                self._peers[impl], one, whole_rows=0 if one.is_decode else call.q_len
            )
            found["max_error"] = max(error, found["max_error"])
            return counts

        try:
            if call.is_decode:
                counts = count(call)
            else:
                passes = known.launch(self._peers[impl], call.case()).passes
                has_mask = any("mask" in one.arguments.values() for one in passes)
                counts = samples.count_prefill(call, count, has_shared_passes=has_mask)
        except NotImplementedError:
            raise
        except RuntimeError as failure:  # not ours to repair, and no reason to lose the other rows
            raise NotImplementedError(f"{impl} does not run on softmetal: {failure}") from failure
        return {"counts": counts.as_json(), **found}


def refuse_as_planned(call: Call) -> None:
    """Raises what the op would raise for the whole call; nothing is allocated or launched."""
    import torch_fattn

    shapes = call.operands(torch.device("meta"))
    keywords = call.keywords(shapes)
    tensors = [tensor for name, tensor in shapes.items() if name not in keywords]
    torch_fattn.explain(call.op, *tensors, **keywords)
