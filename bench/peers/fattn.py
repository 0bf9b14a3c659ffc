"""torch_fattn's launches: the plans of its operators, for an Apple GPU with as many cores as this GPU has."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

import torch_fattn

from ..cases.calls import ATTENTION, METAL_TYPES, Call
from .launch import OURS, OURS_ON_M1, OURS_ON_TENSORS, Launch, Pass, with_rounded_states

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from embed_kernels import flatten, kernels  # noqa: E402

IMPL = OURS
FAMILY = 9  # Apple GPUs from M3 on; their rows of the tuning table were chosen by time on an NVIDIA GPU
# M1 and M2 (families 7 and 8) have fewer registers, and separate rows.
OLDER_IMPL = OURS_ON_M1
OLDER_FAMILY = 7
TENSOR_FAMILY = 10  # M5, the first with tensor units
_FORMATS = json.loads(torch.ops.fattn._kernel_interface())["kv_formats"]
KV_INT4 = str(_FORMATS["int4"]["number"])  # as a macro
_REGISTERS = "FATTN_REGISTERS"  # the macro of kernels on tensor operations


def plan_of(call: Call, **options: Any) -> dict[str, Any]:
    """The operator's plan, without allocating or launching. Raises what the operator would raise."""
    positional, keywords = call.arguments(call.operands("meta"))
    plan: dict[str, Any] = torch_fattn.explain(call.op, *positional, **{**keywords, **options}).data
    return plan


def tensor_launches(call: Call, cores: int) -> list[Launch]:
    """The launches on tensor operations, of each kernel that there is for the call."""
    launches = (launch(call, cores, TENSOR_FAMILY, tensor) for tensor in OURS_ON_TENSORS)
    kernels = {one.impl: one for one in launches}  # heads of 576 have one, whatever the state
    return [one for impl, one in kernels.items() if impl in OURS_ON_TENSORS.values()]


def launch(call: Call, cores: int, family: int = FAMILY, tensor: str = "off") -> Launch:
    call.refuse_score_options()
    plan = plan_of(call, device_name="CUDA", family=family, cores=cores, tensor=tensor)
    for one in plan["passes"]:
        if _is_on_tensors(one):
            state = "registers" if one["macros"][_REGISTERS] == "1" else "threadgroup"
            return from_plan(call, plan, OURS_ON_TENSORS[state])
    return from_plan(call, plan, OLDER_IMPL if family == OLDER_FAMILY else IMPL)


def _is_on_tensors(plan: dict[str, Any]) -> bool:
    return _REGISTERS in plan["macros"]


def from_plan(call: Call, plan: dict[str, Any], impl: str = IMPL) -> Launch:
    rows = call.batch * call.q_heads * call.q_len
    passes = [pass_of(one, call.dtype) for one in plan["passes"]]
    if call.op not in ATTENTION:
        name = "row_states" if call.is_backward else "chunks"
        launch = Launch(impl, passes, scratch={name: plan["scratch_bytes"]}, note=plan["tuning"])
        return with_rounded_states(launch, call.dtype) if call.op == "gated_delta_rule" else launch
    scratch: dict[str, int] = {}
    if plan["scratch_bytes"]:
        splits = plan["scratch_bytes"] // (4 * rows * (call.value_dim + 4))
        scratch = {"partial_out": splits * rows * call.value_dim * 4, "partial_sum": splits * rows * 16}
    return Launch(
        impl,
        passes,
        scratch={**scratch, "lse": rows * 4},
        note=plan["tuning"],
    )


def pass_of(plan: dict[str, Any], dtype: str) -> Pass:
    """Converts one pass of a plan for operands of `dtype` ("float16", ...)."""
    from softmetal.testing.cuda import Pipeline

    if "slice" in plan:
        raise ValueError("a call that is split into several dispatches is not timed; choose a smaller one")
    params = bytes.fromhex(plan["params_bytes"])
    arguments: dict[int, str | bytes] = {
        slot: params if name == "params" else name for name, slot in plan["bindings"].items()
    }
    # Float32 operands: states, and those of an int4 cache, a minimum plus an unrounded multiple of the scale.
    has_float32s = plan["macros"].get("FATTN_KV_FORMAT") == KV_INT4 or "state" in plan["bindings"]
    pipeline = Pipeline(
        source=flatten(kernels()[Path(plan["source"]).stem]),
        name=plan["source"],
        kernel=plan["kernel"],
        max_threads=plan["threads"][0],
        macros=plan["macros"],
        constants={_variable(name): value for name, value in plan["constants"].items()},
        widened_from="float" if has_float32s else METAL_TYPES[dtype],
        aligned_runs=plan["constants"].get("vector_loads", True),
        std="metal4.0" if _is_on_tensors(plan) else "metal3.1",
    )
    return Pass(pipeline, tuple(plan["grid"]), tuple(plan["threads"]), arguments)


def _variable(constant: str) -> str:
    """Returns the name of a function constant in the kernels."""
    return f"fc_{re.sub(r'[^a-z_]', '', constant)}"
