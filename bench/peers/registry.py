"""The peers in the bench.

None of them has a paged cache. vllm-metal and mistral.rs do, but their packages on PyPI contain no kernel
source.
"""

from __future__ import annotations

from types import ModuleType

from ..cases.calls import ATTENTION, Call, UnsupportedCallError
from . import gated_delta, llama_metal, mlx_metal, mlx_nax, mlx_vjp, torch_metal, torch_mpp
from .launch import Launch, call_of

FORWARDS = (torch_metal, mlx_metal, llama_metal)
PEERS = (*FORWARDS, mlx_vjp)
DELTA_RULES = {mlx_metal: gated_delta.mlx, llama_metal: gated_delta.llama}
TENSOR_PEERS = (mlx_nax, torch_mpp)  # on tensor operations: in the set of shapes "tensor" only


def versions() -> dict[str, str]:
    """Returns the version of each installed peer. Raises WrongArgumentError for an unreadable archive."""
    installed = {peer.IMPL: peer.version() for peer in (*PEERS, *TENSOR_PEERS)}
    return {impl: version for impl, version in installed.items() if version != "not installed"}


def launch(peer: ModuleType, call: Call) -> Launch:
    """Returns the peer's launch of the call, or raises UnsupportedCallError with the reason."""
    call.refuse_score_options()
    call = call_of(peer.IMPL, call)
    has_it = call.is_backward if peer is mlx_vjp else call.op in ATTENTION
    launcher = peer.launch if has_it else None
    if call.op == "gated_delta_rule":
        launcher = DELTA_RULES.get(peer)
    if launcher is None or call.density:
        what = "kernel for a block mask" if call.density else f"fused {call.op}"
        raise UnsupportedCallError(f"{peer.IMPL} has no {what}")
    chosen: Launch | None = launcher(call)
    if chosen is None:
        why = "is not installed" if peer.version() == "not installed" else "has no fused kernel for this"
        raise UnsupportedCallError(f"{peer.IMPL} {why}")
    return chosen
