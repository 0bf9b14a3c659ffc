"""Counts calls of `F.scaled_dot_product_attention` by kernel, or by reason for the fallback."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...operators.differentiable import MAX_BACKWARD_HEAD_DIM
from ...operators.head_padding import MAX_HEAD_DIM

# A sentence for each reason that csrc/dropin/routing.cpp names.
REASONS = {
    "gradients": 'gradients are needed, and install(training="off") leaves such calls to torch',
    "mask_gradient": "attn_mask requires grad, and torch_fattn has no gradient of a mask",
    "head_dim_gradient": f"gradients are needed, and a head size is above {MAX_BACKWARD_HEAD_DIM}",
    "small_training": "gradients are needed, and torch keeps little memory for them, where it may be faster: "
    'python -m torch_fattn tune finds out (install(training="fused") takes such calls)',
    "forward_mode": "forward-mode gradients are needed, and torch_fattn has none",
    "dropout": "dropout is not implemented: model.eval() turns it off",
    "nested": "a nested tensor has no kernel: torch_fattn.varlen_prefill takes packed sequences",
    "layout": "a tensor is sparse or has another layout than strided: convert it with .to_dense()",
    "subclass": "a tensor subclass has its own meaning of this call",
    "transform": "a transform of torch.func (vmap, grad, jvp) is active",
    "rank": "query, key and value do not all have the same number of dimensions, from two to four",
    "device": "a tensor is not on mps",
    "dtype": "query, key and value are not all float32, all float16 or all bfloat16",
    "mask_dtype": "the dtype of attn_mask is neither bool nor float32 nor that of the query",
    "mask_with_causal": "both attn_mask and is_causal are given",
    "head_dim": f"a head size is not from 1 to {MAX_HEAD_DIM}",
    "shapes": "the shapes do not broadcast to one attention of query heads that share key-value heads",
    "scale": "the scale is not finite in float32",
    "unknown_sizes": "a size is not known while the call is traced",
    "math_asked": "only torch's math backend is enabled (torch.nn.attention.sdpa_kernel)",
    "no_kernel": "this GPU has no simdgroup matrices, which begin with M1 and A14",
    "torch_is_faster": "torch's own kernel is expected to be as fast or faster (FATTN_ROUTE=always takes it)",
    "refused": "the call was refused",
}
_WAYS = {
    "prefill": "by fattn.prefill",
    "decode": "by fattn.decode",
    "training": "by fattn.attention, with gradients",
    "packed": "of varlen_attn by fattn.varlen_prefill",
    "paged": "of varlen_attn by fattn.paged_prefill",
}
UNSEEN = (
    "not seen: attention that never calls torch's function, such as nn.MultiheadAttention with "
    "need_weights=True, its default"
)


@dataclass(frozen=True)
class Fallback:
    """Calls that ran on torch's own implementation for one reason, with the first as an example."""

    reason: str
    count: int
    traced: int  # calls during tracing, not included in the count
    example: str

    def __str__(self) -> str:
        traced = f" ({self.traced} more while tracing)" if self.traced else ""
        return f"{self.count:>8}  {self.reason}: {REASONS[self.reason]}{traced}\n{'':10}e.g. {self.example}"


@dataclass(frozen=True)
class Report:
    """Counts since the start of the process or the last `reset_report()`. `str()` is for reading."""

    installed: bool
    routed_by: dict[str, int]
    traced: int  # during tracing by torch.compile or export, which visits a call several times
    fallbacks: tuple[Fallback, ...]
    bytes_saved: int = 0  # that torch's own attention would have kept in addition for the backward

    @property
    def routed(self) -> int:
        return sum(self.routed_by.values())

    @property
    def fell_back(self) -> int:
        return sum(fallback.count for fallback in self.fallbacks)

    @property
    def calls(self) -> int:
        return self.routed + self.fell_back

    @property
    def share(self) -> float:
        """The fraction of calls that ran here, 0 to 1; 0 without calls."""
        return self.routed / self.calls if self.calls else 0.0

    def fallbacks_by_reason(self) -> dict[str, int]:
        return {fallback.reason: fallback.count for fallback in self.fallbacks if fallback.count}

    def __str__(self) -> str:
        lines = [self._headline()]
        lines += [
            f"{count:>8}  {_WAYS[way]}{self._saved() if way == 'training' else ''}"
            for way, count in self.routed_by.items()
            if count
        ]
        if self.traced:
            lines.append(f"{self.traced:>8}  more while tracing: those graphs hold torch_fattn's ops")
        if self.fallbacks:
            lines.append("to torch's own implementation:")
        lines += [str(fallback) for fallback in self.fallbacks]
        return "\n".join([*lines, UNSEEN])

    def _saved(self) -> str:
        scale, unit = next((s for s in ((1e9, "GB"), (1e6, "MB")) if self.bytes_saved >= s[0]), (1e3, "kB"))
        return f": torch's own would keep {self.bytes_saved / scale:.3g} {unit} more for their backward"

    def _headline(self) -> str:
        """The first line. Earlier calls, and those of `sdpa`, do not depend on the current state of
        `install`."""
        counted = f"{self.routed} of {self.calls} attention calls routed ({self.share:.0%})"
        if self.installed:
            return f"torch_fattn is installed: {counted}"
        return f"{counted}; torch_fattn is not installed now"


def report() -> Report:
    """Counts the calls that ran on torch_fattn's kernels and those that fell back to torch, with the reasons.

    The report counts calls of `F.scaled_dot_product_attention` and of `torch.nn.attention.varlen` on mps
    while installed, and all calls of `torch_fattn.sdpa`. It does not see calls in transforms of torch.func,
    which torch runs, or attention written as matrix products, as in `nn.MultiheadAttention` by default; with
    `need_weights=False` it calls torch's function and is counted.
    """
    routed = dict(torch.ops.fattn._routed())
    examples = dict(torch.ops.fattn._fallback_examples())
    traced = torch.ops.fattn._fallbacks(traced=True)
    counts = sorted(torch.ops.fattn._fallbacks(traced=False).items(), key=lambda item: -item[1])
    return Report(
        installed=torch.ops.fattn._is_installed(),
        traced=routed.pop("traced"),
        routed_by=routed,
        bytes_saved=torch.ops.fattn._bytes_saved(),
        fallbacks=tuple(
            Fallback(name, count, traced[name], examples[name])
            for name, count in counts
            if count or traced[name]
        ),
    )


def reset_report() -> None:
    """Sets all counts of `report` to 0 and drops its examples."""
    torch.ops.fattn._reset_routing()
