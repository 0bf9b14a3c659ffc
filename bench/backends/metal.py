"""Times calls on an Apple GPU: torch_fattn, torch's F.scaled_dot_product_attention, and MLX if installed.

Every implementation is timed in the same way: by the host's clock around a batch of calls over rotating
operands, with a synchronisation before and after. The batch is long enough to hide the synchronisation.
"""

from __future__ import annotations

import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cases.arguments import WrongArgumentError
from ..cases.calls import ATTENTION, Call
from ..peers.launch import OURS
from .backend import common_versions, timed_row

REPEATS = 20
WARM_UP_SECONDS = 0.3
BATCH_SECONDS = 0.02
ROTATED_BYTES = 256 << 20  # more than the system-level cache of every chip
CHECKED_ROWS = 64
# The largest error of a correct result, for operands of about 1.
TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 8e-2}
TORCH, MLX = "torch-metal", "mlx-metal"
PRODUCT_FLOPS = 2 * 8 * 8 * 8
PRODUCTS_PER_ROUND = 16  # in ceilings.metal, per simdgroup


class MetalBackend:
    name = "metal"

    def __init__(self) -> None:
        if sys.platform != "darwin" or not torch.backends.mps.is_available():
            raise WrongArgumentError(
                "--backend metal times an Apple GPU, and this machine has none; leave the option out to use "
                "the best backend for this machine"
            )
        self._ceilings: dict[str, float] = {}

    def machine(self) -> str:
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        try:
            chip = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            chip = platform.machine()
        return f"{chip}, macOS {platform.mac_ver()[0]}"

    def versions(self) -> dict[str, str]:
        return common_versions()

    def implementations(self) -> list[str]:
        try:
            import mlx.core  # noqa: F401
        except ImportError:
            return [OURS, TORCH]
        return [OURS, TORCH, MLX]

    def ceilings(self) -> dict[str, float]:
        if not self._ceilings:
            shaders = torch.mps.compile_shader(Path(__file__).with_name("ceilings.metal").read_text())
            self._ceilings = {"read": _read_ceiling(shaders), "products": _products_ceiling(shaders)}
        return self._ceilings

    def measure(self, call: Call, impl: str) -> dict[str, Any]:
        if call.op not in ATTENTION:
            raise NotImplementedError(f"{call.op} is timed by --backend cuda")
        copies = max(2, min(64, ROTATED_BYTES // call.least_bytes))
        if impl == MLX:
            run, finish, results = _mlx(call, copies)
        else:
            run, finish, results = _torch(call, copies, impl)
        error = _error(call, results())
        if not error <= TOLERANCES[call.dtype]:
            raise NotImplementedError(f"{impl} computes {call} wrongly here: largest error {error:.2g}")
        times = _times(run, finish)
        return timed_row(call, times, self.ceilings(), error)


Run = Callable[[int], object]  # runs a call on the n-th copy of the operands
Finish = Callable[[list[object]], None]


def _torch(call: Call, copies: int, impl: str) -> tuple[Run, Finish, Callable[[], Tensor]]:
    import torch_fattn

    operands = [call.operands("mps", seed) for seed in range(copies)]
    if impl == OURS:
        op, arguments = getattr(torch_fattn, call.op), [call.arguments(one) for one in operands]

        def run(i: int) -> Tensor:
            positional, keywords = arguments[i % copies]
            result: Tensor = op(*positional, **keywords)
            return result
    else:
        if call.features:
            features = " and ".join(call.features)
            raise NotImplementedError(f"F.scaled_dot_product_attention does not support {features}")
        hides_keys = call.hides_keys
        # torch's causal row i sees the first i + 1 keys. A mask replaces is_causal where that is wrong.
        is_causal = hides_keys and call.q_len == call.kv_len
        mask = None
        if hides_keys and not is_causal:
            seen = torch.ones(call.q_len, call.kv_len, dtype=torch.bool).tril(call.kv_len - call.q_len)
            mask = seen.to(operands[0]["query"].device)

        def run(i: int) -> Tensor:
            o = operands[i % copies]
            return F.scaled_dot_product_attention(
                o["query"],
                o["key"],
                o["value"],
                attn_mask=mask,
                is_causal=is_causal,
                enable_gqa=call.group_size > 1,
            )

    return run, lambda results: torch.mps.synchronize(), lambda: run(0).cpu()


def _mlx(call: Call, copies: int) -> tuple[Run, Finish, Callable[[], Tensor]]:
    import mlx.core as mx

    if call.features:
        raise NotImplementedError(f"this bench does not ask MLX for {' and '.join(call.features)}")

    def convert(tensor: Tensor) -> Any:
        return mx.array(tensor.float().numpy()).astype(getattr(mx, call.dtype))

    operands = []
    for seed in range(copies):
        chosen = call.operands("cpu", seed)
        operands.append([convert(chosen[name]) for name in ("query", "key", "value")])
    mx.eval(operands)
    mask = "causal" if call.hides_keys else None

    def run(i: int) -> object:
        return mx.fast.scaled_dot_product_attention(*operands[i % copies], scale=call.scale, mask=mask)

    def first_result() -> Tensor:
        return torch.tensor(run(0).astype(mx.float32).tolist())  # type: ignore[attr-defined]

    return run, mx.eval, first_result


def _error(call: Call, out: Tensor) -> float:
    """Returns the largest difference from the float64 reference in the first and the last rows, which see the
    fewest and the most keys."""
    from torch_fattn import reference

    (query, *others), keywords = call.arguments(call.operands("cpu"))
    assert query is not None
    rows = min(call.q_len, CHECKED_ROWS)
    slices = [slice(call.q_len - rows, call.q_len)]
    if call.op == "prefill" and not call.causal:
        slices.append(slice(0, rows))
    error = 0.0
    for chosen in slices:
        expected = getattr(reference, call.op)(query[:, :, chosen], *others, **keywords)
        expected = expected[0] if isinstance(expected, tuple) else expected
        difference = (out[:, :, chosen].double() - expected).abs().max().item()
        error = max(error, difference if difference == difference else float("inf"))
    return error


def _times(run: Run, finish: Finish) -> list[float]:
    """Returns milliseconds per call, one value for each of REPEATS batches."""

    def batch(first: int, calls: int) -> float:
        start = time.perf_counter()
        finish([run(first + i) for i in range(calls)])
        return time.perf_counter() - start

    deadline = time.perf_counter() + WARM_UP_SECONDS
    seconds = batch(0, 1)
    while time.perf_counter() < deadline:
        seconds = batch(0, 1)
    calls = max(1, min(1000, round(BATCH_SECONDS / seconds)))
    return [batch(n * calls, calls) / calls * 1e3 for n in range(REPEATS)]


def _read_ceiling(shaders: Any) -> float:
    """Measures GB/s of reading alone."""
    data = torch.zeros(ROTATED_BYTES // 4, device="mps")
    threads = 1 << 16
    out = torch.empty(threads, device="mps")

    def run(i: int) -> None:
        shaders.reading(data, out, data.numel() // 4, threads=threads, group_size=256)

    times = _times(run, lambda results: torch.mps.synchronize())
    return data.numel() * 4 / statistics.median(times) / 1e6


def _products_ceiling(shaders: Any) -> float:
    """Measures TFLOP/s of 8x8x8 products whose operands stay in registers."""
    rounds, threads = 2048, 1 << 16
    out = torch.empty(threads, device="mps")

    def run(i: int) -> None:
        shaders.products(out, rounds, 1e-3, threads=threads, group_size=128)

    times = _times(run, lambda results: torch.mps.synchronize())
    products = rounds * PRODUCTS_PER_ROUND * (threads // 32)
    return products * PRODUCT_FLOPS / statistics.median(times) / 1e9
