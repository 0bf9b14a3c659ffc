"""Runs random problems on an NVIDIA GPU and compares them with float64: masks, views of every layout, paged
caches, sequence lengths, and NaN in every unused slot.

    python -m tests.bench.cuda_problems --build  # where softmetal and nvcc are: into bench/_cuda
    python -m tests.bench.cuda_problems          # where the GPU is: needs torch with CUDA and that folder
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.backends import cuda
from bench.cases.arguments import Parser, positive

FOLDER = cuda.FOLDER / "problems"
COUNT, SEED = 40, 7
# Here a float32 product is three tf32 products (softmetal/cuda); 16-bit operands are exact.
EXTRA_FLOAT32_ERROR = 4e-6
LSE_TOLERANCE = 1e-3


def build(folder: Path, cores: int) -> int:
    """Compiles the plans and stores operands, expected results and limits beside them."""
    import torch_fattn
    from bench.backends.cuda.build import drop_stale
    from bench.peers.fattn import FAMILY, pass_of
    from softmetal.testing.cuda import compile_all
    from tests.helpers import drawing, problems
    from tests.helpers.accuracy import EXTRA_ERROR, expected, packed, sdpa_error

    stored: list[dict[str, Any]] = []
    for problem in drawing.draw(COUNT, seed=SEED):
        case = problems.build(problem)
        arguments, bases = case.arguments("cpu")
        plan = torch_fattn.explain(
            problem.op, **arguments, device_name="CUDA", family=FAMILY, cores=cores
        ).data
        passes = [pass_of(one, str(problem.dtype).removeprefix("torch.")) for one in plan["passes"]]
        operands = {
            name.removesuffix("_cache"): _bound(name, base, arguments[name]) for name, base in bases.items()
        }
        out, lse = expected(case)
        limit = 2 * sdpa_error(case, out) + EXTRA_ERROR
        if problem.q_lens is not None:
            out, lse = packed(case, out, lse)
        stored.append(
            {
                "title": str(problem),
                "cubins": compile_all([one.pipeline for one in passes], folder),
                "grids": [one.grid for one in passes],
                "threads": [one.threads for one in passes],
                "arguments": [dict(one.arguments) for one in passes],
                "bases": {name: base for name, (base, _) in operands.items()},
                "offsets": {name: offset for name, (_, offset) in operands.items()},
                "parts": plan["passes"][-1]["params"].get("parts", 1),
                "dtype": problem.dtype,
                "out": out,
                "lse": lse,
                "limit": limit + (EXTRA_FLOAT32_ERROR if problem.dtype == torch.float32 else 0.0),
            }
        )
    torch.save(stored, folder / "problems.pt")
    drop_stale(folder, {cubin for one in stored for cubin in one["cubins"]})
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{len(stored)} problems, {size / 2**20:.0f} MiB in {folder.parent.name}/{folder.name}")
    return 0


def _bound(name: str, base: torch.Tensor, operand: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Returns the storage that the operator would bind for an operand, and the offset into it in bytes. The
    operator copies queries, keys and values whose last dimension is not contiguous."""
    if name in ("query", "key", "value", "key_cache", "value_cache") and operand.stride(-1) != 1:
        return operand.contiguous(), 0
    return base, int(operand.storage_offset()) * operand.element_size()


def run_problem(folder: Path, one: dict[str, Any]) -> tuple[float, float]:
    """Returns the largest errors of out and lse."""
    from softmetal.testing.cuda import Arguments, Kernel

    bases = {name: base.cuda() for name, base in one["bases"].items()}
    addresses = {name: base.data_ptr() + one["offsets"][name] for name, base in bases.items()}
    out = torch.full_like(one["out"], math.nan, dtype=one["dtype"], device="cuda")
    lse = torch.full(one["lse"].shape, math.nan, device="cuda")
    partial_sum = torch.full((4 * max(one["parts"], 1) * lse.numel(),), math.nan, device="cuda")
    partial_out = torch.full((max(one["parts"], 1) * out.numel(),), math.nan, device="cuda")
    results = {"out": out, "lse": lse, "partial_out": partial_out, "partial_sum": partial_sum}
    addresses |= {name: tensor.data_ptr() for name, tensor in results.items()}
    stream = torch.cuda.current_stream().cuda_stream
    for cubin, grid, threads, arguments in zip(
        one["cubins"], one["grids"], one["threads"], one["arguments"], strict=True
    ):
        values = {
            slot: value if isinstance(value, bytes) else addresses[value] for slot, value in arguments.items()
        }
        Kernel(folder / cubin).launch(tuple(grid), tuple(threads), Arguments(values), stream)
    torch.cuda.synchronize()
    no_key = one["lse"] == -math.inf
    assert torch.equal(lse.cpu() == -math.inf, no_key), "lse is -inf exactly where a row sees no key"
    lse_error = (lse.cpu().double() - one["lse"]).masked_fill(no_key, 0).abs()
    return (out.cpu().double() - one["out"]).abs().max().item(), lse_error.max().item()


def run(folder: Path) -> int:
    wrong = 0
    for one in torch.load(folder / "problems.pt", weights_only=False):
        out_error, lse_error = run_problem(folder, one)
        right = out_error <= one["limit"] and lse_error <= LSE_TOLERANCE  # NaN is wrong
        wrong += not right
        print(
            f"{'right' if right else 'WRONG'}  {one['title']}  error {out_error:.2g} of {one['limit']:.2g}, "
            f"lse {lse_error:.1g}"
        )
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "problems": COUNT, "wrong": wrong}))
    return int(wrong > 0)


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="python -m tests.bench.cuda_problems", description=__doc__)
    parser.add_argument("--build", action="store_true")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--cores", type=positive, default=132, help="multiprocessors of the GPU")
    options = parser.parse_args(argv)
    if options.build:
        return build(options.folder, options.cores)
    if not (options.folder / "problems.pt").is_file():
        parser.refuse(f"--folder {str(options.folder)!r} contains no problems.pt; make it with --build first")
    return run(options.folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
