"""rms_norm: the float64 reference, rows apart, and gradients; models are in transformers/test_fusion.py."""

from __future__ import annotations

import pytest
import torch

import torch_fattn
from tests.conftest import Checked, counted_launches, needs_emulator
from tests.helpers import rms_norm_problems
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


def test_gradients(device: str) -> None:
    x, weight = torch.randn(3, 64, device=device), torch.randn(64, device=device, requires_grad=True)
    out = torch_fattn.rms_norm(x, weight)
    with pytest.raises(RuntimeError, match=r"fattn\.rms_norm has no backward; use the model's own .* norms"):
        out.sum().backward()
