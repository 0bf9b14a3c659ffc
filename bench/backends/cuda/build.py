"""Compiles the kernels of the NVIDIA bench, ours and the peers', into one folder: cubins and manifest.json.

    MLX_METAL_WHEEL=... LLAMA_CPP_SDIST=... python -m bench cuda-build --out bench/_cuda [--cores 132]
    python -m bench cuda-build --out bench/_cuda --shapes prefill --impls fattn llama-metal     # less
    TORCH_MACOS_WHEEL=... python -m bench cuda-build --out bench/_cuda --shapes tensor    # tensor operations

run.py needs this folder, softmetal and torch with CUDA, but not torch_fattn.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from softmetal.testing.cuda import Pipeline, compile_all

from ...cases.arguments import Parser, WrongArgumentError, positive
from ...cases.calls import Call, UnsupportedCallError
from ...cases.shapes import SHAPES
from ...peers import fattn, registry
from ...peers.launch import OURS_ON_TENSORS, SAME_PLAN, Launch, call_of
from . import FOLDER

CEILINGS = Path(__file__).parents[1] / "ceilings.metal"
H200_CORES = 132
# Threadgroups per multiprocessor for which ptxas allocates registers and orders instructions (0: it chooses).
# The choice changes the time of a kernel by up to 20 %: every row is timed with each, and the fastest is
# kept.
GROUPS = (0, 1, 3)
IMPLS = (fattn.IMPL, fattn.OLDER_IMPL, *(peer.IMPL for peer in registry.PEERS))
TENSOR_IMPLS = (*OURS_ON_TENSORS.values(), *(peer.IMPL for peer in registry.TENSOR_PEERS))

# The shapes in the README and in docs/measured.md.
TIMED = ("standard", "decode", "prefill", "chunked")
# Small, ragged and grouped shapes, whose results a wrong index would change.
CORRECTNESS = [
    Call("decode", 8, 2, 128, 1, 1500, batch=2),
    Call("decode", 4, 4, 64, 1, 77, batch=2),
    Call("decode", 16, 2, 128, 1, 5000),
    Call("decode", 16, 2, 64, 1, 9000, dtype="bfloat16"),
    Call("decode", 8, 1, 128, 1, 600, dtype="float32"),
    Call("decode", 8, 2, 128, 6, 4100),
    Call("decode", 16, 1, 576, 2, 700, latent_dim=512),
    Call("decode", 8, 2, 256, 1, 4100, dtype="bfloat16"),
    Call("decode", 8, 2, 96, 1, 300, batch=2, lengths=(300, 41)),
    Call("decode", 8, 2, 128, 1, 2100, batch=2, kv_format="int8"),
    Call("paged_decode", 8, 2, 128, 1, 700, batch=2, block_size=16, lengths=(700, 123)),
    Call("paged_decode", 8, 2, 128, 6, 700, batch=2, block_size=16, lengths=(700, 123)),
    Call("prefill", 4, 2, 64, 200, 200, batch=2, causal=True),
    Call("prefill", 4, 4, 128, 96, 333),
    Call("prefill", 16, 4, 64, 333, 333, causal=True),
    Call("prefill", 2, 2, 128, 300, 700, density=0.4),
    Call("prefill", 4, 1, 128, 300, 300, causal=True, dtype="bfloat16"),
    Call("prefill", 2, 2, 64, 130, 130, causal=True, dtype="float32"),
    Call("prefill", 2, 1, 80, 44, 300, causal=True),
    Call("prefill", 2, 1, 256, 72, 300, causal=True),
    Call("prefill", 2, 1, 256, 72, 72, causal=True, whole_rows=2048),
    Call("prefill", 2, 1, 512, 40, 128, dtype="bfloat16"),
    Call("prefill", 4, 1, 576, 40, 128, causal=True, dtype="bfloat16", latent_dim=512),
    Call("prefill_backward", 4, 2, 64, 200, 200, batch=2, causal=True),
    Call("prefill_backward", 4, 1, 128, 96, 333, dtype="bfloat16"),
    Call("prefill_backward", 2, 2, 80, 130, 130, causal=True, dtype="bfloat16"),
    Call("prefill_backward", 2, 1, 96, 44, 300, causal=True),
    Call("prefill_backward", 2, 2, 64, 70, 70, causal=True, dtype="float32"),
    Call("rotary_write", 5, 2, 128, 70, 70, norms=True),
    Call("rotary_write", 4, 1, 80, 33, 33, block_size=16, dtype="bfloat16"),
    Call("gated_delta_rule", 6, 2, 64, 21, 21, batch=2),
    Call("gated_delta_rule", 2, 2, 64, 13, 13, channel_decay=True),
    Call("gated_delta_rule", 32, 16, 128, 5, 5),
    Call("gated_delta_rule", 48, 16, 128, 20, 20, dtype="bfloat16"),
    Call("gated_delta_step", 4, 2, 64, 3, 3, batch=2),
    Call("gated_delta_step", 2, 2, 64, 1, 1, batch=2, dtype="bfloat16", channel_decay=True),
]


def timed(shapes: Sequence[str]) -> list[Call]:
    calls = dict.fromkeys(replace(call, model="") for name in shapes for call in SHAPES[name])
    for call in calls:
        call.refuse_score_options()
    return list(calls)


def launches(call: Call, cores: int) -> tuple[list[Launch], dict[str, str]]:
    """Returns the launches of the call, and the reason of each implementation that refuses it.

    Our plan for M1 and M2 is one of them if it differs from the plan for later chips.
    """
    runs: list[Launch] = []
    refused: dict[str, str] = {}
    try:
        runs.append(fattn.launch(call, cores))
        older = fattn.launch(call, cores, fattn.OLDER_FAMILY)
        if older.passes != runs[0].passes:
            runs.append(older)
        else:
            refused[fattn.OLDER_IMPL] = SAME_PLAN
    except NotImplementedError as refusal:
        refused |= dict.fromkeys((fattn.IMPL, fattn.OLDER_IMPL), str(refusal))
    for peer in registry.PEERS:
        try:
            runs.append(registry.launch(peer, call))
        except UnsupportedCallError as refusal:
            refused[peer.IMPL] = str(refusal)
    return runs, refused


def tensor_launches(call: Call, cores: int) -> tuple[list[Launch], dict[str, str]]:
    """The same on tensor operations."""
    runs = fattn.tensor_launches(call, cores)
    why = f"there is {'one' if runs else 'no'} kernel on tensor operations for this"
    refused = dict.fromkeys(set(OURS_ON_TENSORS.values()) - {launch.impl for launch in runs}, why)
    for peer in registry.TENSOR_PEERS:
        try:
            runs.append(registry.launch(peer, call))
        except UnsupportedCallError as refusal:
            refused[peer.IMPL] = str(refusal)
    return runs, refused


def registers(pipeline: Pipeline, groups: int) -> Pipeline:
    """Returns the pipeline for this number of threadgroups per multiprocessor, or for as many as fit. Its own
    number stays."""
    return replace(pipeline, min_groups=pipeline.min_groups or min(groups, 2048 // pipeline.max_threads))


def distinct(variants: Sequence[list[str]], folder: Path) -> list[list[str]]:
    """Drops variants with the machine code of an earlier one."""
    variants_by_code: dict[tuple[bytes, ...], list[str]] = {}
    for cubins in variants:
        variants_by_code.setdefault(tuple((folder / cubin).read_bytes() for cubin in cubins), cubins)
    return list(variants_by_code.values())


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


def ceilings() -> list[tuple[str, Pipeline]]:
    source = CEILINGS.read_text()
    return [
        (kernel, Pipeline(source, kernel, 256, widened_from="half", name=CEILINGS.name))
        for kernel in ("products", "reading")
    ]


def versions() -> dict[str, str]:
    """Versions of the sources and of the compiler."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=CEILINGS.parent, capture_output=True, text=True
    )
    nvcc = subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release [\d.]+, V([\d.]+)", nvcc)
    return {
        "commit": commit.stdout.strip() or "unknown",
        **registry.versions(),
        "nvcc": release.group(1) if release else "unknown",
    }


def build(
    calls: Sequence[Call], checks: Sequence[Call], cores: int, out: Path, impls: Collection[str] = IMPLS
) -> dict[str, Any]:
    """Compiles the calls into `out`, and returns the manifest."""
    rows: list[tuple[Call, Launch, str]] = []
    refusals: list[dict[str, Any]] = []
    for call, purpose in [*((call, "time") for call in calls), *((call, "check") for call in checks)]:
        runs, refused = launches(call, cores)
        if not set(TENSOR_IMPLS).isdisjoint(impls):
            more, also_refused = tensor_launches(call, cores)
            runs, refused = runs + more, refused | also_refused
        rows += [(call_of(launch.impl, call), launch, purpose) for launch in runs if launch.impl in impls]
        if purpose == "time":
            left = {impl: why for impl, why in refused.items() if impl in impls}
            refusals += [
                {"call": vars(call_of(impl, call)), "impl": impl, "why": why} for impl, why in left.items()
            ]
    plans = [
        [registers(one.pipeline, groups) for one in plan.passes]
        for _, launch, _ in rows
        for plan in (launch, *launch.alternatives)
        for groups in GROUPS
    ]
    cubins = iter(compile_all([*itertools.chain(*plans), *(p for _, p in ceilings())], out))
    manifest: dict[str, Any] = {"rows": [], "refused": refusals, "ceilings": {}}
    for call, launch, purpose in rows:
        variants = []
        for plan in (launch, *launch.alternatives):
            assert plan.scratch == launch.scratch
            compiled = [[next(cubins) for _ in plan.passes] for _ in GROUPS]
            variants += [describe_passes(plan, one) for one in distinct(compiled, out)]
        manifest["rows"].append(
            {
                "call": vars(call),
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
    used = {one["cubin"] for row in manifest["rows"] for plan in row["variants"] for one in plan["passes"]}
    drop_stale(out, used | set(manifest["ceilings"].values()))
    return manifest


def drop_stale(out: Path, used: Collection[str]) -> None:
    for cubin in out.glob("*.cubin"):
        if cubin.name not in used:
            cubin.unlink()
            cubin.with_suffix(".json").unlink(missing_ok=True)


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="python -m bench cuda-build", description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--cores", type=positive, default=H200_CORES, help="multiprocessors of the GPU")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=TIMED, metavar="SET")
    parser.add_argument("--impls", nargs="+", choices=(*IMPLS, *TENSOR_IMPLS), metavar="IMPL")
    arguments = parser.parse_args(argv)
    impls = arguments.impls or (*IMPLS, *(TENSOR_IMPLS if "tensor" in arguments.shapes else ()))
    try:
        calls = timed(arguments.shapes)
        manifest = build(calls, CORRECTNESS, arguments.cores, arguments.out, impls)
    except (NotImplementedError, WrongArgumentError) as refusal:  # a peer of another version, or no wheel
        parser.refuse(str(refusal))
    spilling = [
        path.stem for path in arguments.out.glob("*-*.json") if json.loads(path.read_text())["spill_bytes"]
    ]
    print(f"{len(manifest['rows'])} rows in {arguments.out}")
    print(f"pipelines that spill: {', '.join(spilling) or 'none'}")
    return 0
