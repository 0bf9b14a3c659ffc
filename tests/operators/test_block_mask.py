"""block_mask: blocks beside float64 are among the random problems; here are its edges, its work and its
memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.profiler import profile

import torch_fattn
from tests.conftest import Checked, counted_launches, needs_emulator
from tests.helpers import backward_problems, drawing, problems
from tests.helpers.accuracy import assert_close
from tests.helpers.problems import OPTIONS, Problem
from tests.operators import test_backward_random, test_random
from torch_fattn import reference

SIZES = [size for size in OPTIONS["block_mask"].values if size is not None]
SMALL = Problem(7, "prefill", torch.float32, 2, 4, 2, 150, 200, 64, 64, block_mask=(32, 64))


def blocked(problem: Problem) -> Problem:
    own = problem.block_mask or SIZES[problem.index % len(SIZES)]
    return replace(problem, mask=None, mask_map=False, mask_pattern="entries", block_mask=own)


def test_sweep(sweep_seed: int, device: str, checked: Checked, pytestconfig: pytest.Config) -> None:
    """Problems that all have a block mask, with three gradients for ten results."""
    count = pytestconfig.getoption("--problems")
    failed = []
    for problem in drawing.draw(count, sweep_seed, ops=("prefill",)):
        try:
            test_random.run_and_check(blocked(problem), sweep_seed, checked, device)
        except (AssertionError, RuntimeError) as error:
            failed.append(f"seed {sweep_seed}, {problem}: {error}")
    for drawn in backward_problems.draw(count * 3 // 10, sweep_seed):
        if drawn.forward.op != "prefill":
            continue
        gradients = replace(drawn, forward=blocked(drawn.forward))
        try:
            test_backward_random.run_and_check(gradients, sweep_seed, checked, device)
        except (AssertionError, RuntimeError) as error:
            failed.append(f"seed {sweep_seed}, {gradients}: {error}")
    assert not failed, "\n".join(failed)


def test_a_flipped_block_changes_its_rows(device: str) -> None:
    """The control of the random problems: without one block of one head, its rows are wrong and no others."""
    case = problems.build(SMALL)
    arguments, _ = case.arguments(device)
    out, lse = torch.ops.fattn.prefill(**arguments)
    assert_close(case, out.cpu(), lse.cpu())
    flipped = arguments["block_mask"].clone()
    sequence, head, row, key = flipped.nonzero()[0].tolist()
    flipped[sequence, head, row, key] = 0
    out, other_lse = torch.ops.fattn.prefill(**arguments | {"block_mask": flipped})
    changed = (other_lse != lse)[sequence, head, 32 * row : 32 * row + 32]
    assert changed.all() and changed.numel() == (other_lse != lse).sum()
    with pytest.raises(AssertionError, match="error"):
        assert_close(case, out.cpu(), other_lse.cpu())


@pytest.mark.parametrize(("density", "heads"), [(0.0, 2), (0.0, 0), (1.0, 2)])
def test_all_blocks_or_none(density: float, heads: int, device: str) -> None:
    """None: 0 and -inf, and gradients 0. All: the result of no mask."""
    query, key, value = (torch.randn(1, heads, n, 40, device=device) for n in (70, 300, 300))
    blocks = torch.full((1, 1, 2, 3), density, device=device).byte() * 7
    leaves = [each.requires_grad_() for each in (query, key, value)]
    out, lse = torch_fattn.attention(*leaves, block_mask=blocks, block_size=(64, 128), return_lse=True)
    (out.sum() + lse.masked_fill(lse.isinf(), 0.0).sum()).backward()
    if density:
        exact, exact_lse = reference.prefill(*leaves)
        assert (out.cpu() - exact).abs().max() < 1e-5 and (lse.cpu() - exact_lse).abs().max() < 1e-5
        return
    assert (out == 0).all() and (lse == -torch.inf).all()
    assert all((each.grad == 0).all() for each in leaves)


def diagonal(length: int, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Each row sees the block of its own position: a batch of short sequences, as one."""
    generator = torch.Generator().manual_seed(length)
    names = ("query", "key", "value")
    given = {n: torch.randn(1, 1, length, 64, generator=generator).to(device, dtype) for n in names}
    blocks = torch.eye(length // 128, dtype=torch.bool, device=device)
    return given | {"block_mask": blocks[None, None], "block_size": (128, 128)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_sequences(dtype: torch.dtype, device: str) -> None:
    """No temporary has an element for each row and key, nor for each block row and key."""
    length = 4096 if device == "mps" else 32768
    given = diagonal(length, device, dtype)
    with counted_launches() as launches, profile(profile_memory=True) as profiled:
        out = torch_fattn.prefill(**given)
    assert bool(launches) == (device == "mps")
    short = [given[n].view(length // 128, 1, 128, 64) for n in ("query", "key", "value")]
    exact, _ = reference.prefill(*short)
    assert (out.view_as(exact).cpu() - exact).abs().max() < (1e-5 if dtype == torch.float32 else 2e-2)
    most = max(event.self_cpu_memory_usage for event in profiled.events())
    assert device == "mps" or most <= 8 * length * 64, f"an allocation of {most} bytes"


@needs_emulator
@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_products_follow_the_visible_blocks(head_dim: int, block: int) -> None:
    """Exactly: nothing of a hidden block is multiplied."""
    import softmetal

    query = torch.randn(1, 2, 512, head_dim, device="mps", dtype=torch.float16)
    size = (1, 2, 512 // block, 512 // block)
    blocks = torch.rand(size, generator=torch.Generator().manual_seed(1)) < 0.3
    with softmetal.record() as launches:
        torch_fattn.prefill(query, query, query, block_mask=blocks.to("mps"), block_size=(block, block))
    products = sum(launch["counters"]["products"] for launch in launches)
    assert products * 8**3 == int(blocks.sum()) * block**2 * 2 * head_dim
