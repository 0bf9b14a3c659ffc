"""Runs calls on simulated machines with matrix units. GPU, system and compiled kernels belong to a process,
so each run is a process of its own: forked from one that has imported torch_fattn, which takes 2 seconds."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

M5 = {
    "SOFTMETAL_GPU_FAMILY": "10",
    "SOFTMETAL_MACOS": "26.2",
    "SOFTMETAL_TENSOR_LAYOUT": "m5",
    "FATTN_TENSOR": "",
}
TOLERANCE = {"float16": 4e-3, "bfloat16": 3.2e-2, "float32": 1e-5}
CALLS = PREFILL, BACKWARD = "prefill", "backward"
PROBE = "fattn_tensor_probe"
REGISTERS = ("FATTN_REGISTERS", "1")  # the macro of that variant
# The kernels of a call on tensor operations, and on simdgroup matrices.
TENSORS = {
    PREFILL: ("fattn_prefill_tensor",),
    BACKWARD: ("fattn_backward_query_tensor", "fattn_backward_key_tensor"),
}
SIMDGROUPS = {PREFILL: ("fattn_prefill",), BACKWARD: ("fattn_backward_query", "fattn_backward_key")}


@dataclass
class Run:
    """What a process does: `calls` of prefill, or of its backward with `"call": "backward"`, of these rows
    (and 16 keys more), checked against float64. `python` runs before them, without faults, with `torch`,
    `torch_fattn` and `softmetal` at hand; what it puts into `found` is returned. `faults`: arguments of
    softmetal.fault, `flip` as those of softmetal.Flip."""

    calls: list[dict[str, Any]] = field(default_factory=lambda: [{}])
    faults: list[dict[str, Any]] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    python: str = ""


@dataclass
class Outcome:
    """`state` and `why` of the size of the first call, and the states of all sizes; launches by the calls,
    and by all in the process; `hits`: how often each fault took effect."""

    state: str
    why: str
    states: dict[str, str]
    off: str
    launches: dict[str, int]
    all_launches: dict[str, int]
    hits: list[int]
    doctor: str
    found: dict[str, Any]


def once(kernels: tuple[str, ...]) -> dict[str, int]:
    return dict.fromkeys(kernels, 1)


def other(call: str) -> str:
    """The other kind of call."""
    return PREFILL if call == BACKWARD else BACKWARD


def verdicts(cache: Path) -> list[Path]:
    return sorted(cache.glob("tensor-*.txt"))


class Machines:
    """Starts a process for each run."""

    def __init__(self) -> None:
        environment = {**os.environ, "FATTN_ARCHIVE": "0", "FATTN_TUNING": "0"}

        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, cache: Path, run: Run) -> Outcome:
        """`cache`: the folder of what the self-test found."""
        assert self._process.stdin is not None and self._process.stdout is not None
        environment = {**M5, "FATTN_CACHE": str(cache), **run.environment}
        self._process.stdin.write(json.dumps({**asdict(run), "environment": environment}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert "error" not in answer, answer["error"]
        return Outcome(**answer)

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _run(call: dict[str, Any]) -> None:
    """Runs one call and checks its results."""
    import torch

    sizes = {"call": PREFILL, "dtype": "float16", "dim": 64, "rows": 70, "is_causal": True, **call}
    dtype, dim, rows = getattr(torch, sizes["dtype"]), sizes["dim"], sizes["rows"]
    generator = torch.Generator().manual_seed(rows)
    query, key, value, grad_out = (
        torch.randn(1, heads, length, dim, generator=generator).to(dtype)
        for heads, length in ((4, rows), (2, rows + 16), (2, rows + 16), (4, rows))
    )
    value = value[..., :512]  # latent attention has wider keys
    options = {"is_causal": sizes["is_causal"]} | sizes.get("options", {})
    if sizes["call"] == BACKWARD:
        error = _backward_error(grad_out, query, key, value, options)
    else:
        error = _prefill_error(query, key, value, options, through_sdpa="sdpa" in sizes)
    assert error <= TOLERANCE[sizes["dtype"]], f"{sizes}: the result is wrong by {error}"


def _prefill_error(
    query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any], through_sdpa: bool
) -> float:
    import torch

    import torch_fattn

    on_gpu = (query.to("mps"), key.to("mps"), value.to("mps"))
    if through_sdpa:  # torch's function, under install()
        with torch_fattn.installed():
            out = torch.nn.functional.scaled_dot_product_attention(*on_gpu, enable_gqa=True)
        exact = torch_fattn.reference.prefill(query, key, value)[0]
    else:
        out = torch_fattn.prefill(*on_gpu, **options)
        exact = torch_fattn.reference.prefill(query, key, value, **options)[0]
    return (out.cpu().double() - exact).abs().max().item()


def _backward_error(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
) -> float:
    """The largest error of a gradient, as a part of its largest number."""
    import torch_fattn
    from tests.helpers.backward_problems import remainder_of

    out, lse = torch_fattn.reference.prefill(query, key, value, **options)
    exact = torch_fattn.reference.prefill_backward(grad_out, None, query, key, value, out, lse, **options)
    saved = out.to(query.dtype)
    given = (grad_out, query, key, value, saved, lse.float(), remainder_of(out, saved))
    grad_out, *operands, remainder = (each.to("mps") for each in given)
    options = {**options, "out_remainder": remainder}
    found = torch_fattn.prefill_backward(grad_out, None, *operands, **options)
    return max(
        ((mine.cpu().double() - true).abs().max() / true.abs().max()).item()
        for mine, true in zip(found[:3], exact[:3], strict=True)
    )


def _outcome(run: dict[str, Any]) -> dict[str, Any]:
    import torch

    import softmetal
    import torch_fattn
    from torch_fattn.commands import doctor
    from torch_fattn.runtime import settings, tensor_units

    os.environ.update(run["environment"])
    settings.apply(torch_fattn.__version__)
    found: dict[str, Any] = {}
    exec(run["python"], {"torch": torch, "torch_fattn": torch_fattn, "softmetal": softmetal, "found": found})
    torch_fattn.reset_launch_counts()
    with contextlib.ExitStack() as stack:
        faults = []
        for fault in run["faults"]:
            flip = fault.pop("flip", None)
            macro = fault.pop("macro", None)
            injected = softmetal.fault(
                **fault, macro=macro and tuple(macro), flip=flip and softmetal.Flip(**flip)
            )
            faults.append(stack.enter_context(injected))
        for call in run["calls"]:
            _run(call)
        torch.mps.synchronize()
    first = {"call": PREFILL, "dtype": "float16", "dim": 64, **(run["calls"] or [{}])[0]}
    states = {f"{each.call} {each.dtype} {each.dim}": each for each in tensor_units.states()}
    mine = states.get("{call} {dtype} {dim}".format_map(first))
    printed = doctor_lines(doctor)
    return {
        "state": mine.state if mine else "",
        "why": mine.why if mine else "",
        "states": {name: each.state for name, each in states.items()},
        "off": tensor_units.why_off(),
        "launches": torch_fattn.launch_counts(),
        "all_launches": softmetal.launches(),
        "hits": [fault.hits for fault in faults],
        "doctor": printed,
        "found": found,
    }


def doctor_lines(doctor: Any) -> str:
    """What doctor prints of tensor operations, and its advice."""
    import io

    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        advice = doctor.report_tensors(test_all=False)
    return text.getvalue() + "".join(f"-> {line}\n" for line in advice)


def _serve() -> None:
    """Runs of standard input in forked processes, one at a time; outcomes go to standard output."""
    import traceback

    import softmetal  # noqa: F401
    import torch_fattn  # noqa: F401

    for line in sys.stdin:
        if os.fork() == 0:
            try:
                answer = _outcome(json.loads(line))
            except BaseException:
                answer = {"error": traceback.format_exc()}
            _answer(answer)
            os._exit(0)
        if status := os.waitstatus_to_exitcode(os.wait()[1]):
            _answer({"error": f"the process ended with {status}"})


def _answer(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _serve()
