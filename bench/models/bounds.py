"""Upper bounds on the counts of our kernels, in tests/kernels/counts_bounds.json. The tests enforce them.

python -m bench bounds                          compares
python -m bench bounds --update                 lowers bounds; refuses to raise one
python -m bench bounds --update --allow-raise   raises bounds too, for a change that is worth it
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ..backends import counting
from ..cases.arguments import Parser
from ..cases.calls import Call
from ..peers.launch import OURS_ON_TENSORS

FILE = Path(__file__).resolve().parents[2] / "tests" / "kernels" / "counts_bounds.json"

GROUP_SIZES = (1, 2, 4, 8, 16)


def _cases() -> dict[str, Call]:
    cases = {}
    for group in GROUP_SIZES:
        decode = Call("decode", 2 * group, 2, 128, 1, 2048)
        cases[f"decode-group{group}"] = decode
        cases[f"paged-decode-group{group}"] = replace(decode, op="paged_decode", block_size=16)
    cases["decode-rows4"] = Call("decode", 8, 2, 64, 4, 1024)
    cases["decode-float32"] = Call("decode", 8, 2, 64, 1, 1024, dtype="float32")
    for rows in (8, 32):
        wide = Call("decode", rows, 1, 256, 1, 512)
        latent = Call("decode", rows, 1, 576, 1, 256, latent_dim=512)
        for name, call in (("D256", wide), ("MLA", latent)):
            cases[f"decode-{name}-rows{rows}"] = call
            cases[f"paged-decode-{name}-rows{rows}"] = replace(call, op="paged_decode", block_size=16)
    for kv_format in ("int8", "int4"):
        stored = Call("decode", 8, 2, 128, 1, 512, kv_format=kv_format)
        cases[f"decode-{kv_format}"] = stored
        cases[f"decode-MLA-{kv_format}"] = replace(stored, kv_heads=1, head_dim=576, latent_dim=512)
    for head_dim in (64, 128):
        causal = Call("prefill", 2, 1, head_dim, 256, 256, causal=True)
        cases[f"prefill-causal-D{head_dim}"] = causal
        cases[f"prefill-full-D{head_dim}"] = replace(causal, causal=False)
    for head_dim in (192, 256, 512):
        cases[f"prefill-wide-D{head_dim}"] = Call("prefill", 2, 1, head_dim, 128, 256, causal=True)
    cases["prefill-wide-float32"] = Call("prefill", 2, 1, 256, 64, 128, dtype="float32")
    cases["prefill-ragged"] = Call("prefill", 2, 1, 80, 100, 230, causal=True)
    # Few rows over many keys: heads that share keys are packed, and the keys are split.
    cases["prefill-chunk"] = Call("prefill", 8, 2, 128, 12, 1100, causal=True)
    cases["prefill-chunk-wide"] = Call("prefill", 4, 1, 256, 9, 600, causal=True)
    # The planner makes a map of this mask.
    cases["prefill-documents"] = Call("prefill", 4, 1, 64, 512, 512, causal=True, mask="documents:100")
    cases["prefill-float32"] = Call("prefill", 2, 1, 128, 128, 256, dtype="float32", causal=True)
    return cases


def _tensor_cases() -> dict[str, tuple[Call, str]]:
    """Calls on tensor operations, and where their scores are."""
    cases = {}
    for state in OURS_ON_TENSORS:
        for head_dim in (64, 128):
            causal = Call("prefill", 2, 1, head_dim, 256, 256, causal=True)
            cases[f"tensor-{state}-causal-D{head_dim}"] = causal, state
            cases[f"tensor-{state}-full-D{head_dim}"] = replace(causal, causal=False), state
        # Staged: keys and values are padded, and the last step is partly empty.
        cases[f"tensor-{state}-ragged"] = Call("prefill", 2, 1, 80, 100, 230, causal=True), state
        cases[f"tensor-{state}-wide-D256"] = Call("prefill", 2, 1, 256, 64, 128, causal=True), state
        cases[f"tensor-{state}-decode"] = Call("decode", 8, 2, 128, 8, 1024), state
    latent = Call("decode", 32, 1, 576, 1, 256, latent_dim=512)
    cases["tensor-decode-MLA"] = latent, "threadgroup"
    cases["tensor-paged-decode-MLA"] = replace(latent, op="paged_decode", block_size=16), "threadgroup"
    prompt = Call("prefill", 2, 1, 576, 32, 64, causal=True, latent_dim=512)
    cases["tensor-prefill-MLA"] = prompt, "threadgroup"
    return cases


CASES = _cases()
TENSOR_CASES = _tensor_cases()
NAMES = (*CASES, *TENSOR_CASES)
Bounds = dict[str, dict[str, int]]  # by case, then by count


def count(name: str) -> counting.Counts:
    if name in TENSOR_CASES:
        return counting.count_on_tensors(*TENSOR_CASES[name])
    return counting.count_ours(CASES[name])


def summary(counts: counting.Counts) -> dict[str, int]:
    """The bounded counts, summed over the dispatches of a call."""
    return {
        "cache_bytes": counts.traffic("key", "value"),
        "distinct_cache_bytes": counts.distinct_bytes,
        "device_bytes": counts.traffic(*counting.ROLES) - counts.traffic("partial"),
        "partial_bytes": counts.traffic("partial"),
        "threadgroup_bytes": counts.threadgroup_bytes,
        **{name: counts.total(name) for name in ("products", *counting.OPERATIONS)},
    }


def load(file: Path) -> Bounds:
    bounds: Bounds = json.loads(file.read_text()) if file.exists() else {}
    return bounds


def save(bounds: Mapping[str, Mapping[str, int]], file: Path) -> None:
    """Writes one line per case."""
    lines = (f"{json.dumps(name)}: {json.dumps(counts)}" for name, counts in bounds.items())
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def exceeded(bounds: Mapping[str, int], counted: Mapping[str, int]) -> list[str]:
    """Returns a message for each count above its bound; a count without a bound never exceeds it."""
    return [
        f"{what} rose from {bounds[what]:,} to {count:,}"
        for what, count in counted.items()
        if count > bounds.get(what, count)
    ]


def main(arguments: list[str] | None = None) -> int:
    about = "Compares the counts of our kernels with their bounds."
    parser = Parser(prog="python -m bench bounds", description=about)
    parser.add_argument("--update", action="store_true", help="lower the bounds to what is counted now")
    parser.add_argument("--allow-raise", action="store_true", help="with --update: raise bounds as well")
    options = parser.parse_args(arguments)
    if options.allow_raise and not options.update:
        parser.error("--allow-raise needs --update")

    old = load(FILE)
    counted = {name: summary(count(name)) for name in NAMES}
    risen = [
        f"{name}: {sentence}"
        for name, now in counted.items()
        for sentence in exceeded(old.get(name, {}), now)
    ]
    for sentence in risen:
        print(sentence)
    if options.update and (options.allow_raise or not risen):
        save(counted, FILE)
        print(f"wrote {FILE.name}")
        return 0
    if options.update:
        print("Nothing was written, because bounds may only go down; --allow-raise raises them.")
    elif not risen:
        print("All counts are within their bounds.")
    return 1 if risen else 0
