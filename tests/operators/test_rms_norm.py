"""rms_norm and the norms of rotary: the float64 reference, transformers, rows apart, and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torch_fattn
from tests.conftest import Checked, counted_launches, needs_emulator
from tests.helpers import rms_norm_problems
from tests.helpers.problems import DTYPES
from tests.helpers.rms_norm_problems import RmsNormProblem
from tests.helpers.tensors import same_bits

ORDERS = ("forward", "reverse", "random")  # of the threads


@pytest.mark.parametrize("problem", rms_norm_problems.draw(72), ids=str)
def test_problem(problem: RmsNormProblem, device: str, checked: Checked) -> None:
    operands, options = rms_norm_problems.build(problem)
    on_device = {name: each.on(device) for name, each in operands.items()}
    before = [base.cpu().clone() for base, _ in on_device.values()]
    arguments = {name: view for name, (_, view) in on_device.items()} | options
    with checked(order=ORDERS[problem.index % 3]), counted_launches() as launches:
        torch_fattn.rms_norm(**arguments).fill_(torch.nan)  # the memory of the next result
        result = torch_fattn.rms_norm(**arguments).cpu()
    assert launches == ({"fattn_rms_norm": 2} if device == "mps" else {})
    assert same_bits(before, [base.cpu() for base, _ in on_device.values()])
    on_cpu = {name: each.of(each.base) for name, each in operands.items()}
    rms_norm_problems.assert_close(result, on_cpu | options)


def module_of(model: str, name: str) -> Any:
    return getattr(pytest.importorskip(f"transformers.models.{model}.modeling_{model}"), name)


MODULES = [
    ("llama", "LlamaRMSNorm", {"norm": "rounded"}),
    ("olmo2", "Olmo2RMSNorm", {"norm": "float"}),
    ("gpt_oss", "GptOssRMSNorm", {"norm": "float"}),
    ("gemma2", "Gemma2RMSNorm", {"norm": "plus_one"}),
    ("gemma3", "Gemma3RMSNorm", {"norm": "plus_one"}),
    ("qwen3_next", "Qwen3NextRMSNorm", {"norm": "plus_one"}),
    ("qwen3_5", "Qwen3_5RMSNorm", {"norm": "plus_one"}),
    ("qwen3_next", "Qwen3NextRMSNormGated", {"activation": "silu"}),
    ("qwen3_5", "Qwen3_5RMSNormGated", {"activation": "silu"}),
    ("kimi_linear", "KimiLinearRMSNormGated", {"norm": "float", "activation": "sigmoid"}),
]


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), *((d, d) for d in DTYPES[:2])],
    ids=str,
)
@pytest.mark.parametrize(("model", "name", "options"), MODULES, ids=[name for _, name, _ in MODULES])
def test_modules_of_transformers(
    model: str,
    name: str,
    options: dict[str, Any],
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    device: str,
) -> None:
    """Equal but for the last bit of the mean, which moves few roundings."""
    module: nn.Module = module_of(model, name)(64, eps=1e-5).requires_grad_(False)
    module.weight.copy_(torch.randn(64))
    module.to(weight_dtype)
    x, gate = (torch.randn(40, 9, 64).to(dtype) for _ in range(2))
    if dtype == torch.float32:
        x[0] *= 1e15
        x[1] *= 1e30  # squares that overflow
    more = (gate,) if "activation" in options else ()
    expected = module(x, *more)
    operands = [each.to(device) for each in (x, module.weight, *more)]
    float32_out = expected.dtype != dtype
    results = [(torch_fattn.rms_norm(*operands, eps=1e-5, **options, float32_out=float32_out), expected)]
    if not more:  # and that of rotary, which rotates by 0
        query, tables = (
            operands[0][None],
            (torch.full((1, 9, 64), n, device=device).to(dtype) for n in (1, 0)),
        )
        out, _ = torch_fattn.rotary(query, query, *tables, query_norm=operands[1], eps=1e-5, **options)
        results.append((out[0], expected.to(dtype)))
    roundings = (8 if dtype == torch.float32 else 2) * torch.finfo(dtype).eps
    for out, exact in results:
        out = out.cpu()
        assert out.dtype == exact.dtype and out.isfinite().all()
        assert ((out - exact).abs() <= roundings * exact.abs()).all()
        assert dtype == torch.float32 or (out != exact).float().mean() < 2e-3


@pytest.mark.parametrize("columns", [64, 700])
def test_a_row_depends_on_itself(columns: int, device: str) -> None:
    """Its bits, too; and a NaN stays in it."""
    x, weight = torch.randn(3000, columns).bfloat16().to(device), torch.randn(columns).to(device)
    whole = torch_fattn.rms_norm(x, weight)
    assert same_bits(whole[17:18], torch_fattn.rms_norm(x[17:18], weight))
    for number in (torch.nan, torch.inf):
        x[5, 9] = number
        out = torch_fattn.rms_norm(x, weight)
        assert out[5].isnan().any()
        out[5] = whole[5]
        assert same_bits(out, whole)


@needs_emulator
@pytest.mark.parametrize(("columns", "reads"), [(4096, 4096), (8196, 8196 + 8192)])
def test_a_row_is_read_once(columns: int, reads: int) -> None:
    """The control: of a row that is too long for the registers, all but the last block is read twice."""
    import softmetal

    x, gate, weight = (torch.randn(*n, columns).half().to("mps") for n in ((2,), (2,), ()))
    with softmetal.checks(count_bytes=True), softmetal.record() as launches:
        torch_fattn.rms_norm(x, weight, gate)
    [launch] = launches
    assert launch["buffers_read"]["0"] == 4 * reads and launch["counters"]["threadgroup_barriers"] == 2
    assert launch["buffers_read"]["1"] == launch["buffers_read"]["2"] == 4 * columns
    assert launch["buffers_written"]["3"] == 4 * columns


def test_gradients_and_autocast(device: str) -> None:
    x, weight = torch.randn(3, 64, device=device), torch.randn(64, device=device, requires_grad=True)
    out = torch_fattn.rms_norm(x, weight)
    with pytest.raises(RuntimeError, match=r"fattn\.rms_norm has no backward; use the model's own .* norms"):
        out.sum().backward()
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        assert same_bits(torch_fattn.rms_norm(x, weight), out.detach())
