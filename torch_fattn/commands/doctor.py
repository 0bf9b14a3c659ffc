"""`python -m torch_fattn doctor`: prints versions and the GPU, tests each operator, and gives advice."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..inspection.chips import newer_than_tiles
from ..inspection.compiled import compile_summary
from ..inspection.planning import FUNCTIONS, signature_of
from ..inspection.plans import Explanation, explain, launch_counts
from ..inspection.sizes import WRITES, call_of_sizes
from ..operators import BACKWARDS, DIFFERENTIABLE, DTYPES
from ..runtime import extension, tensor_units, versions
from ..runtime.settings import archives_are_on
from ..runtime.signatures import shown
from ..tuning.timing import TOLERANCES
from ..tuning.tuned_file import Gpu
from . import report

OK = "ok"
SWITCHES = ("FATTN_ARCHIVE", "FATTN_CHECK", "FATTN_TUNING")
RAISES_FAULTS = (2, 15)
SILENT_FAULTS = (
    "torch {} raises no error when the GPU faults or macOS stops a kernel: only the results show it"
)
FIND_FAULTS = (
    "if the GPU faulted, there may be a line with `command buffer` or `kIOGPU` above: run this again with "
    "MTL_SHADER_VALIDATION=1 MTL_SHADER_VALIDATION_REPORT_TO_STDERR=1 to see which kernel"
)
# Rows and keys that fill no tile, decodes whose keys are split, and sequences of different lengths.
SIZES: dict[str, Any] = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 64, "q_len": 45, "kv_len": 61}
DECODE_SIZES = SIZES | {"q_len": 1, "kv_len": 600, "prefix_len": 32}
STEP_SIZES = SIZES | {"q_len": 5}


@dataclass
class Case:
    """One function on one small problem."""

    op: str
    call: dict[str, Any]  # by argument name
    same: Case | None = None  # the reference operator with the same results

    def run(self, device: str) -> tuple[Tensor, ...]:
        signature = signature_of(self.op)
        with_lse = {"return_lse": True} if "return_lse" in signature.names else {}
        return copied_and_cleared(*self._results(signature.function, device, **with_lse))

    def exact(self) -> tuple[Tensor, ...]:
        same = self.same or self
        return same._results(getattr(reference, same.op), "cpu")

    def kernels(self) -> set[str]:
        """The kernels that the plan launches, if it does not leave the call to torch."""
        return {launch["kernel"] for launch in explain(self.op, **self.on("mps")).passes}

    def error(self, results: tuple[Tensor, ...]) -> float:
        """The largest difference from the reference, for gradients relative to the largest gradient; inf for
        NaN."""
        pairs = list(zip(results, self.exact(), strict=False))
        errors = [float((mine.double() - true).abs().max()) for mine, true in pairs]
        if self.op in BACKWARDS:
            errors = [error / float(true.abs().max()) for error, (_, true) in zip(errors, pairs, strict=True)]
        return max(error if error == error else float("inf") for error in errors)

    def _results(self, function: Callable[..., Any], device: str, **more: Any) -> tuple[Tensor, ...]:
        """Results; the caches or states that are written; or the gradients of query, key and value."""
        call = self.on(device)
        results = function(**call, **more)
        if self.op in BACKWARDS:
            return results[:3]
        results = results if isinstance(results, tuple) else (results,)
        caches = ("key_cache", "value_cache") if self.op in WRITES else ("conv_state", "state")
        written = (call[name] for name in caches if name in call)
        return tuple(each for each in (*results, *written) if each is not None)

    def on(self, device: str) -> dict[str, Any]:
        """The call with its tensors copied to this device."""
        return {
            name: value.to(device, copy=True) if isinstance(value, Tensor) else value
            for name, value in self.call.items()
        }


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
    return asdict(Gpu.this())


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
            name = f"{op} {dtype}"
            try:
                verdict, line = judge(case_of(op, DTYPES[dtype]), device, tolerance)
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
    before = launch_counts()
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
    if device == "mps" and not all(launch_counts()[kernel] > before[kernel] for kernel in case.kernels()):
        return "no launch of the kernel", line
    return OK, line


def case_of(op: str, dtype: torch.dtype) -> Case:
    sizes = {"decode": DECODE_SIZES, "step": STEP_SIZES}.get(op.rpartition("_")[2], SIZES)
    mask = dtype if op == "mask_map" else None
    call = call_of_sizes(op, dtype=dtype, mask=mask, **sizes)
    call = {
        name: _filled(name, value, sizes) if isinstance(value, Tensor) else value
        for name, value in call.items()
    }
    if op == "gated_delta_rule":
        call["use_qk_l2norm_in_kernel"] = True
    if "is_causal" in signature_of(op).names and op != "sparse_decode":
        call["is_causal"] = True
    if op in BACKWARDS:
        received = ("grad_out", "grad_lse", "out", "lse", "out_remainder")
        forward = {name: call[name] for name in call if name not in received}
        out, lse = getattr(reference, op.removesuffix("_backward"))(**forward)
        call |= {"out": out.float(), "out_remainder": None, "lse": lse.float()}

    def operands(*names: str) -> dict[str, Any]:
        return {name: call[name] for name in names}

    same = None
    if op in DIFFERENTIABLE:
        same = Case(DIFFERENTIABLE[op], call)
    if op == "sdpa":
        same = Case("prefill", operands("query", "key", "value", "is_causal") | {"q_offset": 0})
    if op == "sparse_decode":
        same = Case("decode", operands("query", "key", "value", "seq_lens"))
    if op == "shared_prefix_decode":
        whole = operands("query", "key", "value", "seq_lens")
        for name in ("key", "value"):
            whole[name] = torch.cat((call[f"prefix_{name}"].expand(2, -1, -1, -1), call[name]), 2)
        whole["seq_lens"] = call["seq_lens"] + sizes["prefix_len"]
        same = Case("decode", whole)
    if op == "shared_prefix_paged_decode":
        tables, shared = call["block_tables"], call["shared_blocks"]
        tables[1, :shared] = tables[0, :shared]
        same = Case("paged_decode", {name: call[name] for name in call if name != "shared_blocks"})
    return Case(op, call, same)


def _filled(name: str, like: Tensor, sizes: dict[str, Any]) -> Tensor:
    """Numbers for an operand of this name."""
    shape, generator = like.shape, torch.Generator().manual_seed(len(like.shape) + sum(like.shape))
    if name == "attn_mask":  # documents of 20 tokens, side by side
        document = (torch.arange(shape[dim]) // 20 for dim in (2, 3))
        hidden = torch.ne(*torch.meshgrid(*document, indexing="ij"))
        return torch.zeros(shape, dtype=like.dtype).masked_fill(hidden, -torch.inf)
    if like.is_floating_point():
        numbers = torch.randn(shape, generator=generator)
        in_range = {"g": -numbers.abs(), "beta": numbers.sigmoid()}  # others may grow with each token
        return in_range.get(name, numbers).to(like.dtype)
    if name == "seq_lens":
        return torch.tensor([sizes["kv_len"], 50], dtype=like.dtype)
    if name.startswith("cu_seqlens"):
        return torch.arange(shape[0], dtype=like.dtype) * sizes["q_len" if name.endswith("q") else "kv_len"]
    if name == "indices":
        return torch.randperm(shape[-1], generator=generator).to(like.dtype).expand(shape)
    return torch.randperm(like.numel(), generator=generator).to(like.dtype).view(shape)
