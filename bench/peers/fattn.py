"""torch_fattn's launches: the plans of its operators, for an Apple GPU with as many cores as this GPU has."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

import torch_fattn

from ..cases.case import METAL_TYPES, PREFILLS, Case
from .launch import OURS, OURS_ON_M1, OURS_ON_TENSORS, Launch, Pass

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


def tensor_launches(case: Case, cores: int) -> list[Launch]:
    """The launches on tensor operations, of each kernel that there is for the case."""
    launches = (launch(case, cores, TENSOR_FAMILY, tensor) for tensor in OURS_ON_TENSORS)
    kernels = {one.impl: one for one in launches}  # heads of 576 have one, whatever the state
    return [one for impl, one in kernels.items() if impl in OURS_ON_TENSORS.values()]


def launch(case: Case, cores: int, family: int = FAMILY, tensor: str = "off") -> Launch:
    dtype = getattr(torch, case.dtype)

    def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    stored = torch.int8 if case.kv_format else dtype
    shape: tuple[int, ...] = (case.batch, case.kv_heads, case.kv_len, case.head_dim)
    rest: list[torch.Tensor] = []
    if case.block_size:
        blocks = -(-case.kv_len // case.block_size)
        shape = (case.batch * blocks, case.block_size, case.kv_heads, case.head_dim)
        rest.append(empty(case.batch, blocks, of=torch.int32))
    if case.block_size or case.lengths:
        rest.append(empty(case.batch, of=torch.int32))
    options: dict[str, Any] = {"is_causal": case.causal} if case.op in PREFILLS else {}
    if case.kv_format:
        scales = empty(*shape[:-1], of=torch.float32)
        options |= {"kv_format": case.kv_format, "key_scales": scales, "value_scales": scales}
    query = empty(case.batch, case.q_heads, case.q_len, case.head_dim)
    key = empty(*shape, of=stored)
    value = key[..., : case.latent_dim] if case.latent_dim else empty(*shape, of=stored)
    operands: list[torch.Tensor | None] = [query, key, value, *rest]
    if case.op == "prefill_backward":
        lse = empty(*query.shape[:-1], of=torch.float32)
        operands = [torch.empty_like(query), None, query, key, value, None, lse]
    plan = torch_fattn.explain(
        case.op, *operands, device_name="CUDA", family=family, cores=cores, tensor=tensor, **options
    )
    for one in plan.data["passes"]:
        if _is_on_tensors(one):
            state = "registers" if one["macros"][_REGISTERS] == "1" else "threadgroup"
            return from_plan(case, plan.data, OURS_ON_TENSORS[state])
    return from_plan(case, plan.data, OLDER_IMPL if family == OLDER_FAMILY else IMPL)


def _is_on_tensors(plan: dict[str, Any]) -> bool:
    return _REGISTERS in plan["macros"]


def from_plan(case: Case, plan: dict[str, Any], impl: str = IMPL) -> Launch:
    rows = case.batch * case.q_heads * case.q_len
    passes = [pass_of(one, case.dtype) for one in plan["passes"]]
    if case.op == "prefill_backward":
        return Launch(impl, passes, scratch={"row_states": plan["scratch_bytes"]}, note=plan["tuning"])
    scratch: dict[str, int] = {}
    if plan["scratch_bytes"]:
        splits = plan["scratch_bytes"] // (4 * rows * (case.value_dim + 4))
        scratch = {"partial_out": splits * rows * case.value_dim * 4, "partial_sum": splits * rows * 16}
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
    pipeline = Pipeline(
        source=flatten(kernels()[Path(plan["source"]).stem]),
        name=plan["source"],
        kernel=plan["kernel"],
        max_threads=plan["threads"][0],
        macros=plan["macros"],
        constants={_variable(name): value for name, value in plan["constants"].items()},
        # Operands of an int4 cache are float32: the minimum plus a multiple of the scale, unrounded.
        widened_from="float" if plan["macros"].get("FATTN_KV_FORMAT") == KV_INT4 else METAL_TYPES[dtype],
        aligned_runs=plan["constants"].get("vector_loads", True),
        std="metal4.0" if _is_on_tensors(plan) else "metal3.1",
    )
    return Pass(pipeline, tuple(plan["grid"]), tuple(plan["threads"]), arguments)


def _variable(constant: str) -> str:
    """Returns the name of a function constant in the kernels."""
    return f"fc_{re.sub(r'[^a-z_]', '', constant)}"
