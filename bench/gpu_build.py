"""Compiles everything that the NVIDIA bench runs into one folder that travels: cubins and manifest.json.

    MLX_METAL_WHEEL=... python -m bench.gpu_build --out bench/_cuda [--cores 132]

The folder is for bench/gpu_run.py, which needs torch with CUDA and nothing of what stands here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from softmetal.cuda.compile import Pipeline, compile_all

from .arguments import Parser, WrongArgumentError, positive
from .peers import fattn, mlx_metal, torch_metal
from .peers.case import Case, Launch

CEILINGS = Path(__file__).parent / "ceilings.metal"
H200_CORES = 132

DECODE = [Case("decode", batch, 32, 8, 128, 1, keys) for batch in (1, 16) for keys in (4096, 32768, 131072)]
PREFILL = [
    Case("prefill", 1, 32, 32, head_dim, length, length, causal)
    for head_dim in (64, 128)
    for length in (2048, 8192)
    for causal in (False, True)
]
# Small, ragged and broadcast: what a wrong index would break.
CORRECTNESS = [
    Case("decode", 2, 8, 2, 128, 1, 1500),
    Case("decode", 2, 4, 4, 64, 1, 77),
    Case("decode", 1, 16, 2, 128, 1, 5000),
    Case("decode", 1, 16, 2, 64, 1, 9000, dtype="bfloat16"),
    Case("decode", 1, 8, 1, 128, 1, 600, dtype="float32"),
    Case("prefill", 2, 4, 2, 64, 200, 200, causal=True),
    Case("prefill", 1, 4, 4, 128, 96, 333),
    Case("prefill", 1, 4, 1, 128, 300, 300, causal=True, dtype="bfloat16"),
    Case("prefill", 1, 2, 2, 64, 130, 130, causal=True, dtype="float32"),
]


def launches(case: Case, cores: int) -> list[Launch]:
    found = [fattn.launch(case, cores), torch_metal.launch(case), mlx_metal.launch(case)]
    return [launch for launch in found if launch is not None]


def describe(case: Case) -> dict[str, Any]:
    return {**case.__dict__, "scale": case.scale, "flops": case.flops, "least_bytes": case.least_bytes}


def ceilings() -> list[tuple[str, Pipeline]]:
    source = CEILINGS.read_text()

    def pipeline(kernel: str, constants: dict[str, bool | int | float]) -> Pipeline:
        return Pipeline(source, kernel, 256, constants=constants, widened_from="half", name=CEILINGS.name)

    return [
        ("products", pipeline("products", {"fc_reuse": 1})),
        ("products_b_reused", pipeline("products", {"fc_reuse": 4})),
        ("products_half", pipeline("half_products", {"fc_reuse": 1})),
        ("reading", pipeline("reading", {"fc_reuse": 1})),
    ]


def versions() -> dict[str, str]:
    """Where the kernels come from."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=CEILINGS.parent, capture_output=True, text=True
    )
    nvcc = subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release [\d.]+, V([\d.]+)", nvcc)
    return {
        "commit": commit.stdout.strip() or "unknown",
        "torch-metal": torch_metal.version(),
        "mlx-metal": mlx_metal.version(),
        "nvcc": release.group(1) if release else "unknown",
    }


def build(cases: Sequence[Case], checks: Sequence[Case], cores: int, out: Path) -> dict[str, Any]:
    """Writes `out`; returns the manifest."""
    rows = [(case, launch, "time") for case in cases for launch in launches(case, cores)]
    rows += [(case, launch, "check") for case in checks for launch in launches(case, cores)]
    pipelines = [one.pipeline for _, launch, _ in rows for one in launch.passes] + [p for _, p in ceilings()]
    cubins = iter(compile_all(pipelines, out))
    manifest: dict[str, Any] = {"rows": [], "ceilings": {}}
    for case, launch, purpose in rows:
        passes = [
            {
                "cubin": next(cubins),
                "grid": one.grid,
                "threads": one.threads,
                "arguments": {
                    slot: {"bytes": value.hex()} if isinstance(value, bytes) else {"buffer": value}
                    for slot, value in one.arguments.items()
                },
            }
            for one in launch.passes
        ]
        manifest["rows"].append(
            {
                "case": describe(case),
                "impl": launch.impl,
                "purpose": purpose,
                "note": launch.note,
                "scratch": dict(launch.scratch),
                "out_rows_first": launch.out_rows_first,
                "passes": passes,
            }
        )
    manifest["ceilings"] = {name: next(cubins) for name, _ in ceilings()}
    manifest["versions"] = versions()
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    _drop_stale(out, manifest)
    return manifest


def _drop_stale(out: Path, manifest: dict[str, Any]) -> None:
    used = {one["cubin"] for row in manifest["rows"] for one in row["passes"]} | set(
        manifest["ceilings"].values()
    )
    for cubin in out.glob("*.cubin"):
        if cubin.name not in used:
            cubin.unlink()
            cubin.with_suffix(".json").unlink(missing_ok=True)


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="python -m bench.gpu_build", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "_cuda")
    parser.add_argument("--cores", type=positive, default=H200_CORES, help="multiprocessors of the GPU")
    arguments = parser.parse_args(argv)
    try:
        manifest = build([*DECODE, *PREFILL], CORRECTNESS, arguments.cores, arguments.out)
    except (NotImplementedError, WrongArgumentError) as refusal:  # a peer of another version, or no wheel
        parser.refuse(str(refusal))
    spilling = [
        path.stem for path in arguments.out.glob("*-*.json") if json.loads(path.read_text())["spill_bytes"]
    ]
    print(f"{len(manifest['rows'])} rows in {arguments.out}")
    print(f"pipelines that spill: {', '.join(spilling) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
