"""warmup: the first call afterwards compiles nothing, and the time spent compiling is reported."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_fattn
from tests.conftest import counted_launches, decodes
from torch_fattn import reference
from torch_fattn.inspection import compiled
from torch_fattn.operators import OPERATORS

f16 = torch.float16
# A head size that no other test compiles first.
MODEL: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 56, "value_dim": 24, "dtype": f16}


def operands(q_len: int, kv_len: int, dtype: torch.dtype = f16) -> list[torch.Tensor]:
    shapes = ((1, 4, q_len, 56), (1, 2, kv_len, 56), (1, 2, kv_len, 24))
    return [torch.randn(shape).to(dtype).to("mps") for shape in shapes]


def newly_compiled(run: Any) -> list[str]:
    before = len(torch_fattn.compiled_kernels())
    run()
    return [kernel.kernel for kernel in torch_fattn.compiled_kernels()[before:]]


def test_calls_after_it_compile_nothing() -> None:
    with counted_launches() as launches:
        done = torch_fattn.warmup([("prefill", MODEL | {"is_causal": True}), ("decode", MODEL)])
    assert not launches and done.compiled and done.seconds > 0
    assert {"fattn_prefill", "fattn_decode_vector", "fattn_merge"} == {
        kernel.kernel for kernel in done.kernels
    }
    assert all(kernel.seconds > 0 for kernel in done.compiled)
    assert sum(kernel.seconds for kernel in done.compiled) <= done.seconds

    lengths = torch.tensor([70], dtype=torch.int32, device="mps")
    prompt = operands(40, 40)
    with counted_launches() as launches:
        assert not newly_compiled(lambda: torch_fattn.prefill(*prompt, is_causal=True))
        assert not newly_compiled(lambda: torch_fattn.decode(*operands(1, 600)))
        assert not newly_compiled(lambda: torch_fattn.decode(*operands(1, 100), lengths))
    assert launches["fattn_prefill"] == 1 and decodes(launches) == 2
    # The control: a feature that was not warmed up.
    assert newly_compiled(lambda: torch_fattn.prefill(*prompt, softcap=3.0)) == ["fattn_prefill"]
    exact = reference.prefill(*(t.cpu() for t in prompt), is_causal=True)[0]
    assert (torch_fattn.prefill(*prompt, is_causal=True).cpu() - exact).abs().max() < 5e-3

    again = torch_fattn.warmup([("prefill", MODEL | {"is_causal": True}), ("decode", MODEL)])
    assert not again.compiled and again.kernels == done.kernels
    assert str(again).startswith("compiled 0 kernels in ")


def test_of_example_tensors() -> None:
    """Unaligned rows have different kernels, which the sizes alone do not determine."""
    query, key, value = operands(3, 30)
    odd = torch.empty(1, 2, 30, 57, dtype=f16, device="mps")[..., 1:].copy_(key)
    torch_fattn.warmup("decode", query, key, value)
    assert newly_compiled(lambda: torch_fattn.warmup("decode", query, odd, value)) == ["fattn_decode"]
    assert not newly_compiled(lambda: torch_fattn.decode(query, odd, value))
    on_meta = torch.empty(1, 2, 30, 57, dtype=f16, device="meta")[..., 1:]
    of_meta = torch_fattn.warmup("decode", query.to("meta"), on_meta, value.to("meta"))
    assert of_meta.kernels == torch_fattn.warmup("decode", query, odd, value).kernels
    assert of_meta.kernels != torch_fattn.warmup("decode", query, key, value).kernels
    by_name = {"query": query, "key": odd, "value": value}
    assert torch_fattn.warmup("decode", **by_name).kernels == of_meta.kernels
    assert torch_fattn.warmup([("decode", by_name)]).kernels == of_meta.kernels


def test_lists_of_sizes() -> None:
    sizes = {"heads": 2, "kv_len": 64, "head_dim": 64, "q_len": 40}
    done = torch_fattn.warmup("prefill", **sizes, dtype=["float32", f16])
    assert {kernel.macros["FATTN_T"] for kernel in done.kernels} == {"float", "half"}
    assert {kernel.macros["FATTN_HEAD_DIM"] for kernel in done.kernels} == {"64"}


@pytest.mark.parametrize("op", OPERATORS)
def test_every_operator_by_sizes(op: str) -> None:
    assert torch_fattn.warmup(op, heads=2, head_dim=64).kernels


def test_sizes_of_every_kind() -> None:
    sizes = {"dtype": [f16], "heads": 2, "kv_heads": None, "head_dim": 64, "kv_len": 64}
    assert torch_fattn.warmup("prefill", **sizes, mask=torch.bool, is_causal=True).kernels
    assert torch_fattn.warmup("paged_decode", **sizes, kv_format=(None, "int8")).kernels
    assert torch_fattn.warmup("paged_prefill", **sizes, max_seqlen_q=1).kernels
    assert torch_fattn.warmup("decode", heads=4, kv_heads=2, head_dim=64).kernels


def test_explain_reports_the_seconds() -> None:
    query, key, value = operands(1, 30, torch.float32)
    scale = {"softcap": 1.5}
    assert "compiled    in" not in torch_fattn.explain("decode", query, key, value, **scale).details
    torch_fattn.decode(query, key, value, **scale)
    text = torch_fattn.explain("decode", query, key, value, **scale).details
    assert "compiled    in" in text and "pipeline" in text


def test_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = [
        compiled.CompiledKernel(name, "s.metal", {}, {}, *seconds, False)
        for name, seconds in (("a", (1.0, 0.5)), ("b", (4.0, 1.0)), ("a", (0.0, 0.5)))
    ]
    monkeypatch.setattr(compiled, "compiled_kernels", lambda: kernels)
    assert compiled.compile_summary() == "3 kernels in 7.0 s: 1 x b 5.0 s, 2 x a 2.0 s"
    monkeypatch.setattr(compiled, "compiled_kernels", lambda: kernels[:1])
    assert compiled.compile_summary() == "1 kernel in 1.5 s: 1 x a 1.5 s"
    monkeypatch.setattr(compiled, "compiled_kernels", list)
    assert compiled.compile_summary() == "0 kernels in 0.0 s"
