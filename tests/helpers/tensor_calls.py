"""Random prefills and decodes through the operators, in a process whose GPU has tensor operations and whose
FATTN_TENSOR turns them on:

python -m tests.helpers.tensor_calls SEED COUNT
"""

from __future__ import annotations

import sys

import torch

import torch_fattn
from tests.helpers import problems, tensor_kernels
from tests.helpers.accuracy import assert_close
from tests.helpers.tensor_kernels import KERNELS, LATENT_VALUE
from tests.helpers.tensors import same_bits

ORDERS = ("forward", "reverse", "random")


def main(seed: int, count: int) -> None:
    import softmetal

    launched = 0
    for problem in tensor_kernels.problems(seed, count):
        case = problems.build(problem, seed)
        arguments, bases = case.arguments("mps")
        order = ORDERS[problem.index % len(ORDERS)]
        with softmetal.checks(race=True, bounds=True, uninit=True, order=order, seed=seed):
            rows = torch.zeros(1, 1, 16, problem.head_dim, dtype=problem.dtype, device="mps")
            torch_fattn.prefill(rows, rows, rows[..., :LATENT_VALUE])  # decodes wait for one
            torch_fattn.reset_launch_counts()
            out, lse = getattr(torch.ops.fattn, problem.op)(**arguments)
            torch.mps.synchronize()
        counts = torch_fattn.launch_counts()
        assert counts.get("fattn_prefill", 0) + counts.get("fattn_prefill_wide", 0) == 0, problem
        launched += any(counts.get(kernel, 0) for kernel in KERNELS)
        assert_close(case, out.cpu(), lse.cpu())
        for name, base in bases.items():
            assert same_bits(base.cpu(), case.operands[name].base), f"{name} was written"
    print(f"{launched} calls launched {' or '.join(KERNELS)}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
