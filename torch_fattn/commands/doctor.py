"""`python -m torch_fattn doctor`: prints versions and the GPU, tests each operator, and gives advice."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..inspection.chips import newer_than_tiles
from ..inspection.compiled import compile_summary
from ..inspection.planning import FUNCTIONS, signature_of
from ..inspection.plans import Explanation, explain, launch_counts
from ..operators import BACKWARDS, DIFFERENTIABLE, LOGITS_OPERATORS
from ..runtime import extension, tensor_units, versions
from ..runtime.cache_folder import archives_are_on
from ..runtime.signatures import shown
from . import report

OK = "ok"
# Largest difference from the float64 reference for operands of about 1.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
SWITCHES = ("FATTN_ARCHIVE", "FATTN_CHECK", "FATTN_TUNING")
RAISES_FAULTS = (2, 15)
SILENT_FAULTS = (
    "torch {} raises no error when the GPU faults or macOS stops a kernel: only the results show it"
)
FIND_FAULTS = (
    "if the GPU faulted, there may be a line with `command buffer` or `kIOGPU` above: run this again with "
    "MTL_SHADER_VALIDATION=1 MTL_SHADER_VALIDATION_REPORT_TO_STDERR=1 to see which kernel"
)
KERNEL_OF: dict[str, str | None] = {
    "prefill": "fattn_prefill",
    "decode": "fattn_decode",
    "paged_decode": "fattn_decode_vector",
    "paged_prefill": "fattn_prefill",
    "varlen_prefill": "fattn_prefill",
    "merge": "fattn_merge",
    **dict.fromkeys(BACKWARDS, "fattn_backward_key"),
    **{op: f"fattn_{op}" for op in LOGITS_OPERATORS},
    "mask_map": "fattn_mask_map",
    "cache_write": "fattn_cache_write",
    **dict.fromkeys(DIFFERENTIABLE, "fattn_prefill"),
    **dict.fromkeys(("shared_prefix_decode", "shared_prefix_paged_decode"), "fattn_merge"),
    "sparse_decode": "fattn_decode",
    "sdpa": None,  # torch's own kernel may be faster
}


@dataclass
class Case:
    """One function on one small problem."""

    op: str
    operands: tuple[Any, ...]
    options: dict[str, Any]
    same: Case | None = None  # the reference operator with the same results

    def run(self, device: str) -> tuple[Tensor, ...]:
        signature = signature_of(self.op)
        with_lse = {"return_lse": True} if "return_lse" in signature.names else {}
        return copied_and_cleared(*self._results(signature.function, device, **with_lse))

    def exact(self) -> tuple[Tensor, ...]:
        same = self.same or self
        return same._results(getattr(reference, same.op), "cpu")

    def error(self, results: tuple[Tensor, ...]) -> float:
        """The largest difference from the reference, for gradients relative to the largest gradient; inf for
        NaN."""
        pairs = list(zip(results, self.exact(), strict=False))
        errors = [float((mine.double() - true).abs().max()) for mine, true in pairs]
        if self.op in BACKWARDS:
            errors = [error / float(true.abs().max()) for error, (_, true) in zip(errors, pairs, strict=True)]
        return max(error if error == error else float("inf") for error in errors)

    def _results(self, function: Callable[..., Any], device: str, **more: Any) -> tuple[Tensor, ...]:
        """Out and lse, the caches that are written, or the gradients of query, key and value."""
        operands = [x.to(device, copy=True) if isinstance(x, Tensor) else x for x in self.operands]
        results = function(*operands, **self.options, **more)
        if self.op == "cache_write":
            return operands[2], operands[3]
        if self.op in BACKWARDS:
            results = results[:3]
        return results if isinstance(results, tuple) else (results,)


def copied_and_cleared(*results: Tensor) -> tuple[Tensor, ...]:
    """Copies the results and fills their memory with NaN. The next run reuses that memory and returns NaN if
    its kernel wrote nothing: before torch 2.15, GPU faults raise no error."""
    copies = tuple(result.to("cpu", copy=True) for result in results)
    for result in results:
        result.fill_(torch.nan if result.is_floating_point() else 0xFF)
    return copies


def main(report_kernels: bool = False) -> int:
    """Prints the report and returns the exit status."""
    advice = [*report_versions(), *advice_about_environment(), *report_device()]
    on_gpu = not advice_about_device()
    advice += self_test("mps" if on_gpu else "cpu")
    if on_gpu:
        advice += report_tensors(test_all=report_kernels)
    kept = "kept" if archives_are_on() else "not kept"
    print(f"\ncompiled      {compile_summary()}\n              {kept} for the next run (FATTN_ARCHIVE)\n")
    if report_kernels and on_gpu:
        advice += print_report()
    for line in advice:
        print(f"-> {line}")
    print("No problems found." if not advice else f"Problems found: {len(advice)}.")
    return 1 if advice else 0


def print_report() -> list[str]:
    try:
        for line in report.lines(this_gpu()):
            print(line)
    except RuntimeError as error:
        return [f"no report of the kernels: {str(error).splitlines()[0]}: please report it with this output"]
    finally:
        print()
    return []


def report_versions() -> list[str]:
    print(f"torch_fattn   {versions.VERSION}, built for torch {extension.load()}")
    print(f"python        {platform.python_version()} on {platform.system()} {platform.machine()}")
    print(f"torch         {torch.__version__}")
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        print("transformers  not installed (needed only for attn_implementation='fattn')")
        return []
    print(f"transformers  {version}")
    fault = versions.fault("transformers", version, versions.TRANSFORMERS)
    return [] if fault is None else [fault]


def advice_about_environment() -> list[str]:
    """Advice about switches that are neither 0 nor 1."""
    given = {name: os.environ.get(name, "") for name in SWITCHES}
    return [
        f"{name} is {shown(value)}, which counts as 1; set it to 0 or 1, or unset it"
        for name, value in given.items()
        if value not in ("", "0", "1")
    ]


def advice_about_device() -> list[str]:
    """Reasons why the operators cannot run on the GPU."""
    if not torch.backends.mps.is_built():
        return [
            "this torch has no MPS backend, so the operators run as plain PyTorch: "
            "on a Mac with Apple silicon install torch's arm64 wheel "
            f"(pip install '{versions.requirement('torch', versions.TORCH)}')"
        ]
    if not torch.backends.mps.is_available():
        return ["torch finds no Metal device: macOS 14 or newer and a GPU that supports Metal are needed"]
    if not torch._C._dispatch_has_kernel_for_dispatch_key("fattn::prefill", "MPS"):
        return [
            "torch_fattn was built without its Metal part: run `pip install --no-build-isolation .` "
            "with the torch that is installed now"
        ]
    try:
        _plan_for_this_gpu()
    except NotImplementedError as refusal:
        fault = str(refusal).partition("; ")[0]  # the rest of the message is for callers of the operators
        return [f"{fault}; use a Mac with an M1 or newer"]
    return []


def report_device() -> list[str]:
    advice = advice_about_device()
    if advice:
        print("device        no Metal device that the operators can use")
        return advice
    device = _plan_for_this_gpu().data["device"]
    print(f"device        {device['name']}")
    print(
        f"              Apple family {device['family']}, {device['cores']} cores, "
        f"{device['max_threadgroup_bytes'] // 1024} KiB of threadgroup memory"
    )
    if newer := newer_than_tiles(device["family"]):
        print(f"              {newer}")
    if versions.minor(torch.__version__) < RAISES_FAULTS:
        print(f"              {SILENT_FAULTS.format(torch.__version__)}")
    return []


def report_tensors(test_all: bool) -> list[str]:
    """Prints whether the kernels use Metal 4's tensor operations: one line per call, dtype and state."""
    why_off = tensor_units.why_off()
    if not tensor_units.states():
        print(f"\ntensor operations  off: {why_off}")
        return []
    if test_all:
        tensor_units.test_all()
    print("\ntensor operations, by call, dtype and head size")
    dims: dict[tuple[str, str, str, str], list[int]] = {}
    for size in tensor_units.states():
        dims.setdefault((size.call, size.dtype, size.state, size.why), []).append(size.dim)
    advice = []
    for (call, dtype, state, why), sizes in dims.items():
        name = f"{call} {dtype} {', '.join(map(str, sizes))}"
        print(f"  {name:<44} {state:<12} {why or f'the first {call} of a size runs the self-test'}")
        if state == "off":
            advice.append(
                f"tensor operations of {name} failed the self-test: please report it with this output"
            )
    if why_off:
        print(f"  {'all others':<44} {'off':<12} {why_off}")
    return advice


def this_gpu() -> dict[str, Any]:
    """The GPU's name, family and number of cores."""
    device = _plan_for_this_gpu().data["device"]
    return {name: device[name] for name in ("name", "family", "cores")}


def _plan_for_this_gpu() -> Explanation:
    query = torch.empty(1, 1, 1, 8, device="mps")
    return explain("decode", query, query, query)


def self_test(device: str) -> list[str]:
    """Runs every operator in every dtype against the float64 reference."""
    print(f"\nself-test on {device}: largest difference from the float64 reference, first and second run")
    failed: dict[str, list[str]] = {}
    width = max(map(len, FUNCTIONS)) + len(" bfloat16  ")
    for op in FUNCTIONS:
        for dtype, tolerance in TOLERANCES.items() if (op, device) != ("sdpa", "cpu") else ():
            name = f"{op} {str(dtype).removeprefix('torch.')}"
            try:
                verdict, line = judge(CASES[op](dtype), device, tolerance)
            except RuntimeError as error:
                text = str(error).splitlines()
                verdict, line = "an error", " ... ".join(dict.fromkeys((text[0], text[-1])))
            print(f"  {name:<{width}}{line}{'' if verdict == OK else f'   {verdict.upper()}'}")
            failed.setdefault(verdict, []).append(name)
    failed.pop(OK, None)
    advice = [
        f"{verdict} in {', '.join(names)}: please report it with this output"
        for verdict, names in failed.items()
    ]
    return [*advice, FIND_FAULTS] if advice and device == "mps" else advice


def judge(case: Case, device: str, tolerance: float) -> tuple[str, str]:
    """The verdict, "OK" or a fault, and the line to print."""
    kernel = KERNEL_OF[case.op]
    launched = kernel and _launches(kernel)
    start = time.perf_counter()
    results = case.run(device)
    middle = time.perf_counter()
    again = case.run(device)
    end = time.perf_counter()
    error = case.error(results)
    line = f"{error:8.1e}  {1e3 * (middle - start):8.1f} ms {1e3 * (end - middle):8.1f} ms"
    if error > tolerance:
        return "a wrong result", line
    if not all(map(torch.equal, results, again)):
        return "results that differ from run to run", line
    if device == "mps" and kernel and _launches(kernel) == launched:
        return "no launch of the kernel", line
    return OK, line


def _launches(kernel: str) -> int:
    """Launches of the kernel and its variants, such as fattn_prefill_tensor."""
    return sum(count for name, count in launch_counts().items() if name.startswith(kernel))


def _random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape))).to(dtype)


def _prefill_case(dtype: torch.dtype) -> Case:
    query, key = _random(1, 4, 45, 64, dtype=dtype), _random(1, 2, 61, 64, dtype=dtype)
    return Case("prefill", (query, key, _random(1, 2, 61, 64, dtype=dtype).flip(2)), {"is_causal": True})


def _decode_case(dtype: torch.dtype) -> Case:
    # Long enough that the keys are split, so that the merge pass runs too.
    query, key = _random(2, 4, 1, 64, dtype=dtype), _random(2, 1, 600, 64, dtype=dtype)
    return Case("decode", (query, key, key.flip(2), torch.tensor([600, 37], dtype=torch.int32)), {})


def _paged_cache(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Two sequences of 50 and 18 keys."""
    pool = _random(9, 16, 2, 64, dtype=dtype)
    tables = torch.tensor([[7, 0, 4, 2], [5, 8, -1, -1]], dtype=torch.int32)
    return pool, pool.flip(0), tables, torch.tensor([50, 18], dtype=torch.int32)


def _paged_decode_case(dtype: torch.dtype) -> Case:
    return Case("paged_decode", (_random(2, 4, 1, 64, dtype=dtype), *_paged_cache(dtype)), {})


def _paged_prefill_case(dtype: torch.dtype) -> Case:
    # A chunk of a prompt, and a single token.
    starts = torch.tensor([0, 37, 38], dtype=torch.int32)
    options = {"max_seqlen_q": 37, "is_causal": True}
    return Case("paged_prefill", (_random(38, 4, 64, dtype=dtype), *_paged_cache(dtype), starts), options)


def _varlen_prefill_case(dtype: torch.dtype) -> Case:
    query, keys = _random(45, 4, 64, dtype=dtype), _random(70, 2, 64, dtype=dtype)
    starts = (torch.tensor(entries, dtype=torch.int32) for entries in ([0, 37, 37, 45], [0, 41, 50, 70]))
    options = {"max_seqlen_q": 37, "max_seqlen_k": 41, "is_causal": True}
    return Case("varlen_prefill", (query, keys, keys.flip(0), *starts), options)


def _backward_case(forward: Case) -> Case:
    out, lse = getattr(reference, forward.op)(*forward.operands, **forward.options)
    query, key, value, *packing = forward.operands
    grad_out = _random(*out.shape, dtype=query.dtype)
    operands = (grad_out, None, query, key, value, None, lse.float(), *packing)
    return Case(f"{forward.op}_backward", operands, forward.options)


def _merge_case(dtype: torch.dtype) -> Case:
    return Case("merge", (_random(3, 2, 4, 5, 64, dtype=dtype), _random(3, 2, 4, 5, dtype=torch.float32)), {})


def _logits_case(op: str, dtype: torch.dtype) -> Case:
    _logits, cap = getattr(torch.ops.fattn, op).default._schema.arguments
    return Case(op, (_random(3, 2, 600, dtype=dtype).transpose(0, 1),), {cap.name: 2.0})


def _mask_map_case(dtype: torch.dtype) -> Case:
    # Three documents side by side.
    document = torch.tensor([70, 40, 90]).repeat_interleave(torch.tensor([70, 40, 90]))
    hidden = document[:, None] != document
    return Case("mask_map", (torch.zeros(200, 200, dtype=dtype).masked_fill(hidden, -torch.inf),), {})


def _cache_write_case(dtype: torch.dtype) -> Case:
    rows, pool = _random(5, 2, 64, dtype=dtype), torch.zeros(3, 4, 2, 64, dtype=dtype)
    slots = torch.tensor([7, 0, -1, 11, 4])
    return Case("cache_write", (rows, rows.flip(0), pool, pool.clone(), slots), {})


def _as(op: str, same: Case, **options: Any) -> Case:
    return Case(op, same.operands, same.options | options, same)


def _sdpa_case(dtype: torch.dtype) -> Case:
    same = _prefill_case(dtype)
    same.options["q_offset"] = 0
    return Case("sdpa", same.operands, {"is_causal": True, "enable_gqa": True}, same)


def _sparse_decode_case(dtype: torch.dtype) -> Case:
    same = _decode_case(dtype)
    *operands, lengths = same.operands
    every = torch.randperm(600, generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    return Case("sparse_decode", (*operands, every.expand(2, 1, 600), lengths), {}, same)


def _shared_prefix_case(dtype: torch.dtype) -> Case:
    same = _decode_case(dtype)
    query, key, value, lengths = same.operands
    key[1, :, :30], value[1, :, :30] = key[0, :, :30], value[0, :, :30]
    parts = (key[:1, :, :30], value[:1, :, :30], key[:, :, 30:], value[:, :, 30:])
    return Case("shared_prefix_decode", (query, *parts, lengths - 30), {}, same)


def _shared_blocks_case(dtype: torch.dtype) -> Case:
    same = _paged_decode_case(dtype)
    same.operands[3][:, 0] = 7
    return _as("shared_prefix_paged_decode", same, shared_blocks=1)


CASES: dict[str, Callable[[torch.dtype], Case]] = {
    "prefill": _prefill_case,
    "decode": _decode_case,
    "paged_decode": _paged_decode_case,
    "paged_prefill": _paged_prefill_case,
    "varlen_prefill": _varlen_prefill_case,
    "prefill_backward": lambda dtype: _backward_case(_prefill_case(dtype)),
    "varlen_prefill_backward": lambda dtype: _backward_case(_varlen_prefill_case(dtype)),
    "merge": _merge_case,
    **{op: partial(_logits_case, op) for op in LOGITS_OPERATORS},
    "mask_map": _mask_map_case,
    "cache_write": _cache_write_case,
    "attention": lambda dtype: _as("attention", _prefill_case(dtype)),
    "varlen_attention": lambda dtype: _as("varlen_attention", _varlen_prefill_case(dtype)),
    "sdpa": _sdpa_case,
    "shared_prefix_decode": _shared_prefix_case,
    "shared_prefix_paged_decode": _shared_blocks_case,
    "sparse_decode": _sparse_decode_case,
}
