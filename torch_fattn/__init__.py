"""Attention for PyTorch on Apple GPUs, in Metal: prefill and decode over dense, paged and quantised keys.

    import torch_fattn
    out = torch_fattn.prefill(query, key, value, is_causal=True)

The operators are `torch.ops.fattn.*`; tensors on "cpu" and "cuda" run a plain PyTorch implementation.
`attention` and `varlen_attention` are the prefills with gradients. `StaticKVCache` and `PagedKVCache` hold a
model's keys and values during generation. `explain` shows how a call would run on the GPU, `warmup` compiles
its kernels ahead of time, and `compiled_kernels` lists compile times. `sdpa` is
`F.scaled_dot_product_attention` on these kernels, `install` routes a program's calls of that function to
them, and `report` counts those calls. `torch_fattn.distributed` attends over keys that several processes
share, `torch_fattn.patterns` chooses the blocks that long calls see, and `torch_fattn.linear_attention` holds
the states of hybrid models. `torch_fattn.reference` defines what the operators must compute,
`torch_fattn.integrations.transformers.register()` makes transformers models use it, and
`python -m torch_fattn doctor` checks the installation.
"""

from __future__ import annotations

from . import distributed, flash_attn, linear_attention, patterns, reference
from .caches import CacheFullError, CacheStats, CacheStep, PagedKVCache, StaticKVCache
from .inspection.compiled import CompiledKernel as CompiledKernel
from .inspection.compiled import compiled_kernels as compiled_kernels
from .inspection.plans import Explanation as Explanation
from .inspection.plans import explain
from .inspection.plans import launch_counts as launch_counts
from .inspection.plans import reset_launch_counts as reset_launch_counts
from .inspection.warmup import Warmup as Warmup
from .inspection.warmup import warmup
from .integrations.pytorch import install as _install
from .integrations.pytorch.install import install, installed, uninstall
from .integrations.pytorch.report import Report as Report
from .integrations.pytorch.report import report
from .integrations.pytorch.report import reset_report as reset_report
from .integrations.pytorch.sdpa import sdpa
from .operators import batching as _batching
from .operators import fakes as _fakes
from .operators.attention import (
    decode,
    merge,
    paged_decode,
    paged_prefill,
    prefill,
    varlen_prefill,
)
from .operators.backward import prefill_backward as prefill_backward
from .operators.backward import varlen_prefill_backward as varlen_prefill_backward
from .operators.cache_write import cache_write
from .operators.delta import causal_conv1d as causal_conv1d
from .operators.delta import gated_delta_rule as gated_delta_rule
from .operators.delta import gated_delta_step as gated_delta_step
from .operators.differentiable import attention, varlen_attention
from .operators.logits import softcap as softcap
from .operators.logits import softmax as softmax
from .operators.mask_map import mask_map
from .operators.rms_norm import rms_norm
from .operators.rotary import rotary, rotary_write
from .operators.shared_prefix import shared_prefix_decode as shared_prefix_decode
from .operators.shared_prefix import shared_prefix_paged_decode as shared_prefix_paged_decode
from .operators.sparse import sparse_decode as sparse_decode
from .runtime import extension as _extension
from .runtime import settings as _settings
from .runtime import versions as _versions
from .tuning import tuned_file as _tuned_file

__version__ = _versions.VERSION
built_for_torch = _extension.load()
_fakes.register()
_batching.register()
_install.register()
_tuned_file.load_all(__version__)
_settings.apply(__version__)

# The names that most users need. The others can be imported from here too.
__all__ = [
    "CacheFullError",
    "CacheStats",
    "CacheStep",
    "PagedKVCache",
    "StaticKVCache",
    "__version__",
    "attention",
    "cache_write",
    "decode",
    "distributed",
    "explain",
    "flash_attn",
    "install",
    "installed",
    "linear_attention",
    "mask_map",
    "merge",
    "paged_decode",
    "paged_prefill",
    "patterns",
    "prefill",
    "reference",
    "report",
    "rms_norm",
    "rotary",
    "rotary_write",
    "sdpa",
    "uninstall",
    "varlen_attention",
    "varlen_prefill",
    "warmup",
]
