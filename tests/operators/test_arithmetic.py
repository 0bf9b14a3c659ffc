"""Results are right with every permitted arithmetic: with and without contraction of a * b + c, with the
largest errors that Metal's specification allows, and with subnormal numbers flushed.

softmetal reads these settings from the environment, so the problems run in separate processes.
"""

from __future__ import annotations

import hashlib
import itertools
import os

import pytest
import torch

import torch_fattn  # noqa: F401
from tests.conftest import needs_emulator
from tests.helpers import cache_problems, logits_problems, problems, small_problems
from tests.helpers.accuracy import assert_close, assert_lse_close
from tests.helpers.cache_problems import WriteProblem, assert_written
from tests.helpers.kv_formats import KV_FORMATS
from tests.helpers.logits_problems import ROW_OPS, LogitsProblem
from tests.helpers.problems import Problem
from tests.helpers.processes import run_python
from tests.operators.test_cache_write import written
from torch_fattn.operators import LOGITS_OPERATORS

pytestmark = needs_emulator

ARITHMETICS: dict[str, dict[str, str]] = {
    "default": {},
    "uncontracted": {"SOFTMETAL_CONTRACT": "0"},
    "worst": {"SOFTMETAL_FAST_MATH": "worst"},
}


def every_kind() -> list[Problem]:
    """One problem with a mask and one without for every op and dtype; one head size, to compile few
    kernels."""
    sizes = {"prefill": {"q_len": 45, "kv_len": 96, "causality": "bottom_right"}}
    kinds = itertools.product(("prefill", "decode", "paged_decode"), problems.DTYPES, (None, torch.float32))
    return [
        small_problems.problem(op, dtype, index, mask=mask, **sizes.get(op, {}))
        for index, (op, dtype, mask) in enumerate(kinds)
    ]


def check_writes_and_logits() -> None:
    """The bits of cache_write do not depend on the arithmetic. Rows of logits are those of a simdgroup, of a
    threadgroup, and longer than that holds."""
    for kv_format in KV_FORMATS:
        write = cache_problems.build(
            WriteProblem(7, kv_format, torch.float32, 150, 1, 64, 64, 160, 1, "hnd", special=True)
        )
        assert_written(write, written(write, "mps"))
    shapes = [*((dtype, 64) for dtype in problems.DTYPES), (torch.float16, 1300), (torch.float32, 33000)]
    for op, cap, (dtype, columns) in itertools.product(LOGITS_OPERATORS, (0.0, 5.0), shapes):
        if cap or op in ROW_OPS:
            logits = logits_problems.build(LogitsProblem(2, op, dtype, (6, columns), "padded", cap))
            logits.assert_close(logits.run("mps"))


def check_attention() -> dict[str, str]:
    """Checks every result, and returns a digest of the bits for each op."""
    digests: dict[str, hashlib._Hash] = {}
    for problem in every_kind():
        case = problems.build(problem)
        out, lse = getattr(torch.ops.fattn, problem.op)(**case.arguments("mps")[0])
        assert_close(case, out.cpu(), lse.cpu())
        digest = digests.setdefault(problem.op, hashlib.sha256())
        digest.update(out.cpu().view(torch.uint8).numpy().tobytes() + lse.cpu().numpy().tobytes())
    digests["merge"] = hashlib.sha256()
    for dtype in problems.DTYPES:
        outs, lses = torch.randn(5, 1, 2, 5, 24, dtype=torch.float64), torch.randn(5, 1, 2, 5) * 8
        weights = (lses.double() - lses.double().logsumexp(0)).exp()
        exact = (outs.to(dtype).double() * weights[..., None]).sum(0)
        out, lse = torch.ops.fattn.merge(outs.to(dtype).to("mps"), lses.to("mps"))
        ulp = torch.finfo(dtype).eps
        assert torch.allclose(out.cpu().double(), exact, rtol=ulp, atol=2e-6)
        assert_lse_close(lse.cpu(), lses.double().logsumexp(0), dtype)
        digests["merge"].update(out.cpu().view(torch.uint8).numpy().tobytes() + lse.cpu().numpy().tobytes())
    return {op: digest.hexdigest() for op, digest in digests.items()}


@pytest.fixture(scope="module")
def digests() -> dict[str, dict[str, str]]:
    """The results of each arithmetic; for a process that failed, its last output."""
    results = {}
    for name, variables in ARITHMETICS.items():
        done = run_python(["-m", "tests.operators.test_arithmetic"], env={**os.environ, **variables})
        found = dict(line.split() for line in done.stdout.splitlines())
        results[name] = {"failure": done.stderr} if done.returncode else found
    return results


@pytest.mark.parametrize("name", ARITHMETICS)
def test_results_are_right(name: str, digests: dict[str, dict[str, str]]) -> None:
    assert "failure" not in digests[name], digests[name]["failure"]
    assert set(digests[name]) == {"prefill", "decode", "paged_decode", "merge"}


@pytest.mark.parametrize(
    ("name", "op"),
    [
        # merge sums what it selects: there is nothing to contract.
        *itertools.product(("uncontracted",), ("prefill", "decode", "paged_decode")),
        *itertools.product(("worst",), ("prefill", "decode", "paged_decode", "merge")),
    ],
)
def test_the_arithmetic_really_differs(name: str, op: str, digests: dict[str, dict[str, str]]) -> None:
    assert digests[name][op] != digests["default"][op]


if __name__ == "__main__":
    if {*os.environ} & {name for variables in ARITHMETICS.values() for name in variables}:
        check_writes_and_logits()  # test_cache_write.py and test_logits.py have the default arithmetic
    torch.manual_seed(0)
    for op, digest in check_attention().items():
        print(op, digest)
