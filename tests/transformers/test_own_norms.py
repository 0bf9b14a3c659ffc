"""Norms that run `torch_fattn.rms_norm`, as torch's lacks their form; test_fusion.py has what all share."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from tests.conftest import counted_launches
from tests.transformers.test_fusion import SIZE, norm_of
from tests.transformers.test_native import MODELS
from tests.transformers.tiny_models import DEVICE, TOLERANCE, generate, largest_logit_error, pair, prompt
from torch_fattn.integrations.transformers.fusion import norms


@pytest.mark.parametrize(
    ("kind", "weight_dtype"),
    [
        (Gemma3RMSNorm, torch.bfloat16),
        (Llama4TextL2Norm, None),
        (GptOssRMSNorm, torch.float32),
        (Qwen3NextRMSNormGated, torch.bfloat16),
        (KimiLinearRMSNormGated, torch.float32),
    ],
)
def test_norms_of_our_kernel(kind: type[nn.Module], weight_dtype: torch.dtype | None) -> None:
    """In one launch, a gate by place or by name; not where the own forward must run."""
    norm = kind(1e-5) if weight_dtype is None else norm_of(kind, weight_dtype)
    x, gate = (torch.randn(7, SIZE).bfloat16().to(DEVICE) for _ in range(2))
    gates = (gate,) if "Gated" in kind.__name__ else ()
    own = norm(x, *gates)
    assert norms.fuse(norm) == ""
    with counted_launches() as launches:
        results = [norm(x, *gates), norm(x, **dict.fromkeys(("gate",)[: len(gates)], gate))]
    assert launches == {"fattn_rms_norm": 2}
    for result in results:
        assert result.dtype is own.dtype and (result != own).float().mean() < 0.02
    with counted_launches() as launches:
        norm(x.clone().requires_grad_(), *gates)
        if gates:
            norm(x, gate[:1])  # broadcast
    assert launches == {}


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gpt_oss", "qwen3_5", "qwen3_next"])
def test_tokens_of_models_with_random_norms(family: str) -> None:
    ours, eager = pair(AutoModelForCausalLM, MODELS[family])
    with torch.no_grad():
        for mine, own in zip(ours.modules(), eager.modules(), strict=True):
            if norms.is_norm(own):
                own.weight.normal_(0.5, 0.5)
                mine.weight.copy_(own.weight)
    ids, mask = prompt(padding=3)
    with counted_launches() as launches:
        tokens = generate(ours, ids, mask, 6)
    expected = generate(eager, ids, mask, 6)
    assert tokens.sequences.tolist() == expected.sequences.tolist()
    assert largest_logit_error(tokens, expected) < 10 * TOLERANCE
    assert ("fattn_rms_norm" in launches) == (family != "gpt_oss")  # in float32 torch has its form
