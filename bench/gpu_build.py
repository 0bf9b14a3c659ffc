"""Compiles everything that the NVIDIA bench runs into one folder that travels: cubins and manifest.json.

    MLX_METAL_WHEEL=... LLAMA_CPP_SDIST=... python -m bench.gpu_build --out bench/_cuda [--cores 132]
    python -m bench.gpu_build --out bench/_cuda --shapes prefill --impls fattn llama-metal     # less

The folder is for bench/gpu_run.py, which needs torch with CUDA and nothing of what stands here.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from softmetal.testing.cuda import Pipeline, compile_all

from .arguments import Parser, WrongArgumentError, positive
from .calls import SHAPES
from .peers import fattn, known
from .peers.case import Case, Launch, NotTakenError

CEILINGS = Path(__file__).parent / "ceilings.metal"
H200_CORES = 132
# ptxas plans registers, and orders instructions, for as many threadgroups per multiprocessor as it likes (0)
# or as it is told. Which is the fastest changes from kernel to kernel by up to 20 %, so every row is timed
# each way, and quoted as the fastest.
GROUPS = (0, 1, 3)
IMPLS = (fattn.IMPL, fattn.OLDER_IMPL, *(peer.IMPL for peer in known.PEERS))

# Those of the README, and what decode and prefill are held to (bench/aims.py).
TIMED = ("standard", "decode", "prefill", "chunked")
# Small, ragged and broadcast: what a wrong index would break.
CORRECTNESS = [
    Case("decode", 2, 8, 2, 128, 1, 1500),
    Case("decode", 2, 4, 4, 64, 1, 77),
    Case("decode", 1, 16, 2, 128, 1, 5000),
    Case("decode", 1, 16, 2, 64, 1, 9000, dtype="bfloat16"),
    Case("decode", 1, 8, 1, 128, 1, 600, dtype="float32"),
    Case("decode", 1, 8, 2, 128, 4, 4100),
    Case("decode", 1, 8, 2, 256, 1, 4100, dtype="bfloat16"),
    Case("decode", 2, 8, 2, 96, 1, 300, lengths=(300, 41)),
    Case("decode", 2, 8, 2, 128, 1, 2100, kv_format="int8"),
    Case("paged_decode", 2, 8, 2, 128, 1, 700, block_size=16, lengths=(700, 123)),
    Case("prefill", 2, 4, 2, 64, 200, 200, causal=True),
    Case("prefill", 1, 4, 4, 128, 96, 333),
    Case("prefill", 1, 4, 1, 128, 300, 300, causal=True, dtype="bfloat16"),
    Case("prefill", 1, 2, 2, 64, 130, 130, causal=True, dtype="float32"),
    Case("prefill", 1, 2, 1, 80, 44, 300, causal=True),
    Case("prefill", 1, 2, 1, 256, 72, 300, causal=True),
    Case("prefill", 1, 2, 1, 256, 72, 72, causal=True, whole_rows=2048),
    Case("prefill", 1, 2, 1, 512, 40, 128, dtype="bfloat16"),
]


def timed(shapes: Sequence[str]) -> list[Case]:
    calls = (replace(call, model="") for name in shapes for call in SHAPES[name])
    return [call.case() for call in dict.fromkeys(calls)]


def launches(case: Case, cores: int) -> tuple[list[Launch], dict[str, str]]:
    """Who runs the case and how, and why the others do not. What M1 and M2 would run is there where it
    differs from what later chips would."""
    found: list[Launch] = []
    refused: dict[str, str] = {}
    try:
        found.append(fattn.launch(case, cores))
        older = fattn.launch(case, cores, fattn.OLDER_FAMILY)
        if older.passes != found[0].passes:
            found.append(older)
        else:
            refused[fattn.OLDER_IMPL] = f"it is the plan of {fattn.IMPL}"
    except NotImplementedError as refusal:
        refused |= dict.fromkeys((fattn.IMPL, fattn.OLDER_IMPL), str(refusal))
    for peer in known.PEERS:
        try:
            found.append(known.launch(peer, case))
        except NotTakenError as refusal:
            refused[peer.IMPL] = str(refusal)
    return found, refused


def registers(pipeline: Pipeline, groups: int) -> Pipeline:
    """The same for other threadgroups per multiprocessor; never more than have room there."""
    return replace(pipeline, min_groups=min(groups, 2048 // pipeline.max_threads))


def distinct(variants: Sequence[list[str]], folder: Path) -> list[list[str]]:
    """Those whose code differs."""
    found: dict[tuple[bytes, ...], list[str]] = {}
    for cubins in variants:
        found.setdefault(tuple((folder / cubin).read_bytes() for cubin in cubins), cubins)
    return list(found.values())


def describe_passes(launch: Launch, cubins: Sequence[str]) -> dict[str, Any]:
    passes = [
        {
            "cubin": cubin,
            "grid": one.grid,
            "threads": one.threads,
            "arguments": {
                slot: {"bytes": value.hex()} if isinstance(value, bytes) else {"buffer": value}
                for slot, value in one.arguments.items()
            },
        }
        for one, cubin in zip(launch.passes, cubins, strict=True)
    ]
    return {"note": launch.note, "passes": passes}


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
        **known.versions(),
        "nvcc": release.group(1) if release else "unknown",
    }


def build(
    cases: Sequence[Case], checks: Sequence[Case], cores: int, out: Path, impls: Collection[str] = IMPLS
) -> dict[str, Any]:
    """Writes `out`; returns the manifest."""
    rows: list[tuple[Case, Launch, str]] = []
    refusals: list[dict[str, Any]] = []
    for case, purpose in [*((case, "time") for case in cases), *((case, "check") for case in checks)]:
        found, refused = launches(case, cores)
        rows += [(case, launch, purpose) for launch in found if launch.impl in impls]
        if purpose == "time":
            left = {impl: why for impl, why in refused.items() if impl in impls}
            refusals += [{"case": describe(case), "impl": impl, "why": why} for impl, why in left.items()]
    plans = [
        [registers(one.pipeline, groups) for one in plan.passes]
        for _, launch, _ in rows
        for plan in (launch, *launch.alternatives)
        for groups in GROUPS
    ]
    cubins = iter(compile_all([*itertools.chain(*plans), *(p for _, p in ceilings())], out))
    manifest: dict[str, Any] = {"rows": [], "refused": refusals, "ceilings": {}}
    for case, launch, purpose in rows:
        variants = []
        for plan in (launch, *launch.alternatives):
            assert plan.scratch == launch.scratch
            compiled = [[next(cubins) for _ in plan.passes] for _ in GROUPS]
            variants += [describe_passes(plan, one) for one in distinct(compiled, out)]
        manifest["rows"].append(
            {
                "case": describe(case),
                "impl": launch.impl,
                "purpose": purpose,
                "scratch": dict(launch.scratch),
                "out_rows_first": launch.out_rows_first,
                "variants": variants,
            }
        )
    manifest["ceilings"] = {name: next(cubins) for name, _ in ceilings()}
    manifest["versions"] = versions()
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    _drop_stale(out, manifest)
    return manifest


def _drop_stale(out: Path, manifest: dict[str, Any]) -> None:
    used = set(manifest["ceilings"].values())
    used |= {one["cubin"] for row in manifest["rows"] for plan in row["variants"] for one in plan["passes"]}
    for cubin in out.glob("*.cubin"):
        if cubin.name not in used:
            cubin.unlink()
            cubin.with_suffix(".json").unlink(missing_ok=True)


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="python -m bench.gpu_build", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "_cuda")
    parser.add_argument("--cores", type=positive, default=H200_CORES, help="multiprocessors of the GPU")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=TIMED, metavar="SET")
    parser.add_argument("--impls", nargs="+", choices=IMPLS, default=IMPLS, metavar="IMPL")
    arguments = parser.parse_args(argv)
    try:
        cases = timed(arguments.shapes)
        manifest = build(cases, CORRECTNESS, arguments.cores, arguments.out, arguments.impls)
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
