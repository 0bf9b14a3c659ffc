"""The peers that stand beside torch_fattn in the bench.

None of them attends to a paged cache: vllm-metal and mistral.rs, which do, have no kernel's source in their
packages on PyPI, only compiled libraries or none.
"""

from __future__ import annotations

from types import ModuleType

from ..cases.case import Case, NotTakenError
from . import llama_metal, mlx_metal, torch_metal
from .launch import Launch

PEERS = (torch_metal, mlx_metal, llama_metal)


def versions() -> dict[str, str]:
    """Of those that are at hand, by implementation. Raises WrongArgumentError for an archive that is none."""
    found = {peer.IMPL: peer.version() for peer in PEERS}
    return {impl: version for impl, version in found.items() if version != "not installed"}


def launch(peer: ModuleType, case: Case) -> Launch:
    """How the peer runs the case. Raises NotTakenError, with one sentence, where it does not."""
    found: Launch | None = peer.launch(case)
    if found is None:
        why = "is not installed" if peer.version() == "not installed" else "has no fused kernel for this"
        raise NotTakenError(f"{peer.IMPL} {why}")
    return found
