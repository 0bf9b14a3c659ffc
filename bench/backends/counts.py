"""Counts calls exactly on softmetal, for a machine without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..cases.arguments import WrongArgumentError
from ..cases.calls import ATTENTION, Call
from ..peers.launch import OURS
from . import counting, samples
from .backend import common_versions


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
        from ..peers import registry

        self._versions = registry.versions()  # refuses a wrong MLX_METAL_WHEEL or LLAMA_CPP_SDIST now
        self._peers = {peer.IMPL: peer for peer in registry.PEERS}
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
        if call.op not in ATTENTION:
            raise NotImplementedError(f"{call.op} is timed by --backend cuda, and counted by the tests")
        if call.lengths:
            raise NotImplementedError("sequences of different lengths are timed, not counted")
        if not call.is_decode and call.q_len != call.kv_len:
            raise NotImplementedError("prompts with as many rows as keys are counted, not chunks of prompts")
        if impl == OURS:
            from ..peers.fattn import plan_of

            plan_of(call)  # raises what the operator would raise
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
        from ..peers import registry

        fields: dict[str, Any] = {"max_error": 0.0}

        def count(one: Call) -> counting.Counts:
            counts, error, fields["note"] = counting.count_peer(
                self._peers[impl], one, whole_rows=0 if one.is_decode else call.q_len
            )
            fields["max_error"] = max(error, fields["max_error"])
            return counts

        try:
            if call.is_decode:
                counts = count(call)
            else:
                passes = registry.launch(self._peers[impl], call).passes
                has_mask = any("mask" in one.arguments.values() for one in passes)
                counts = samples.count_prefill(call, count, has_shared_passes=has_mask)
        except NotImplementedError:
            raise
        except RuntimeError as failure:  # a peer's failure must not lose the other rows
            raise NotImplementedError(f"{impl} does not run on softmetal: {failure}") from failure
        return {"counts": counts.as_json(), **fields}
