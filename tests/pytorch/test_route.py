"""The route of a plain call of torch's attention: the rule on invented machines, and all its callers."""

from __future__ import annotations

import os
import subprocess
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_fattn
from tests.conftest import counted_launches, decodes
from tests.helpers.processes import run_python
from tests.helpers.tuned import PROVENANCE, this_chip
from tests.pytorch.test_sdpa import by_install
from torch_fattn.flash_attn import flash_attn_func
from torch_fattn.integrations import comfyui
from torch_fattn.integrations.pytorch import routing
from torch_fattn.integrations.transformers import operators
from torch_fattn.tuning import tuned_file
from torch_fattn.tuning.tuned_file import TunedRoute

M1, M2, M3_AND_M4, M5 = 7, 8, 9, 10
NEW = {"family": M5, "macos": "26.2", "torch_version": "2.14"}


def route(
    *,
    q_len: int = 512,
    kv_len: int = 512,
    dim: int = 128,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float16,
    mask: torch.dtype | None = None,
    machine: dict[str, Any] = NEW,
    op: str = "prefill",
    **options: Any,
) -> routing.Route:
    def tensor(length: int, dim: int) -> Tensor:
        return torch.empty(1, 8, length, dim, dtype=dtype, device="meta")

    if mask is not None:
        options["attn_mask"] = torch.empty(1, 1, q_len, kv_len, dtype=mask, device="meta")
    operands = tensor(q_len, dim), tensor(kv_len, dim), tensor(kv_len, value_dim or dim)
    found = torch_fattn.explain(op, *operands, **options, **machine).route
    assert found is not None and found.why
    return found


# ---- the rule


@pytest.mark.host_only
@pytest.mark.parametrize("family", [M1, M2, M3_AND_M4, M5, 11])
@pytest.mark.parametrize("macos", ["14.0", "15.6", "26.1", "26.2", "27.0"])
def test_prefills_on_invented_machines(family: int, macos: str) -> None:
    """torch's only with all of what its tensor kernel needs, and a GPU for which that is worth something."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    torchs = 0
    for version, dtype, dim, q_len in product(
        ("2.13", "2.14", "2.15"), dtypes, (64, 72, 80, 96, 128, 256, 512), (9, 63, 64, 4096)
    ):
        machine = {"family": family, "macos": macos, "torch_version": version}
        found = route(dtype=dtype, dim=dim, q_len=q_len, machine=machine)
        new = family >= M5 and macos in ("26.2", "27.0") and version != "2.13"
        kernel = dtype != torch.float32 and dim in (64, 96, 128, 256) and q_len >= 64
        assert found.to == ("torch" if new and kernel else "fattn"), (version, dtype, dim, q_len, found)
        torchs += found.to == "torch"
    assert torchs == (2 * 2 * 4 * 2 if family >= M5 and macos >= "26.2" else 0)


CHANGED: dict[str, dict[str, Any]] = {
    "narrower values": {"value_dim": 64},
    "no keys": {"kv_len": 0},
    "a float32 mask": {"mask": torch.float32},
    "a decode": {"op": "decode", "q_len": 1},
}


@pytest.mark.host_only
@pytest.mark.parametrize("change", CHANGED)
def test_one_thing_less(change: str) -> None:
    assert route().to == "torch"
    assert route(**CHANGED[change]).to == "fattn"


@pytest.mark.host_only
def test_long_calls_are_ours() -> None:
    """torch's kernel is one dispatch, in which the cores of a larger GPU do more."""
    for length, cores, to in ((24_900, 8, "torch"), (25_100, 8, "fattn"), (25_100, 10, "torch")):
        found = route(q_len=length, kv_len=length, machine=NEW | {"cores": cores})
        assert found.to == to and ("one dispatch" in found.why) == (to == "fattn")


@pytest.mark.host_only
def test_settings_without_effect() -> None:
    for mask in (torch.bool, torch.float16):
        assert route(mask=mask).to == "torch"
    assert route(is_causal=True).to == "torch" and route(is_causal=True, q_offset=0).to == "torch"
    assert route(kv_len=77).to == "torch" and route(scale=0.3).to == "torch"


@pytest.mark.host_only
def test_each_fallback_has_its_reason() -> None:
    old = NEW | {"family": M1, "macos": "15.0"}
    reasons = [
        route().why,
        route(q_len=16).why,
        route(machine=NEW | {"family": M3_AND_M4}).why,
        route(machine=old).why,
        route(machine=old, dim=112).why,
        route(machine=old, op="decode", q_len=1).why,
    ]
    message = ["matrix units of M5", "64 rows", "before M5", "baseline", "all scores", "torch's decode"]
    assert all(words in why for words, why in zip(message, reasons, strict=True)), reasons
    assert len(set(reasons)) == len(reasons)


@pytest.mark.host_only
def test_calls_that_torch_has_not() -> None:
    """They have no route: such a call needs the operator."""
    query, key = (torch.empty(1, 8, n, 128, dtype=torch.float16, device="meta") for n in (512, 600))
    for options in (
        {"window_left": 5},
        {"softcap": 3.0},
        {"sinks": torch.empty(8, device="meta")},
        {"is_causal": True},  # by the lower right corner
    ):
        assert torch_fattn.explain("prefill", query, key, key, **options).route is None
    assert torch_fattn.explain("prefill", query, key, key, is_causal=True, q_offset=0).route is not None
    assert torch_fattn.explain("prefill", query, key, key, return_lse=False, **NEW).route is not None
    assert torch_fattn.explain("prefill", query, key, key, return_lse=True, **NEW).route is None
    assert torch_fattn.explain("decode", query[:, :, :1], key, key, return_lse=True).route is None
    assert torch_fattn.explain("decode", query[:, :, :4], key, key).route is None


@pytest.mark.host_only
def test_heads_that_would_be_padded() -> None:
    """Few rows do not pay for a copy of many keys."""

    def to_torch(q_len: int, kv_len: int, dim: int) -> bool:
        query, key = (torch.empty(1, 8, n, dim, device="meta") for n in (q_len, kv_len))
        found: bool = torch.ops.fattn._route(query, key, key, None, False, False)[0]
        return found

    assert to_torch(1, 256, 60) and to_torch(8, 4096, 60)
    assert not to_torch(9, 4096, 60) and not to_torch(1, 255, 60) and not to_torch(1, 4096, 64)


@pytest.mark.host_only
@pytest.mark.parametrize(
    ("name", "release", "macos"),
    [
        ("Darwin", "23.6.0", 1406),
        ("Darwin", "24.0.0", 1500),
        ("Darwin", "25.2.0", 2602),
        ("Darwin", "26.0.0", 2700),
        ("Darwin", "", 0),
        ("Linux", "6.1.0-13-amd64", 0),
    ],
)
def test_the_version_of_macos(name: str, release: str, macos: int) -> None:
    assert torch.ops.fattn._macos_of_kernel(name, release) == macos


@pytest.mark.host_only
@pytest.mark.parametrize(
    ("version", "to"),
    [
        ("2.13.0+cpu", "fattn"),
        ("2.14.1", "torch"),
        ("2.15.0a0+git0a1b2c3", "torch"),
        ("2.16.0.dev20261001", "torch"),
        (torch.__version__, None),
    ],
)
def test_versions_as_torch_writes_them(version: str, to: str | None) -> None:
    found = route(machine=NEW | {"torch_version": version})
    assert to in (None, found.to)


# ---- the environment

SCRIPT = """
import torch, torch_fattn
query = torch.empty(1, 8, 512, 128, dtype=torch.float16, device="meta")
machine = {"family": 10, "macos": "26.2", "torch_version": "2.15"}
route = torch_fattn.explain("prefill", query, query, query, **machine).route
print(route.to, route.why)
"""


def in_a_new_process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    names = (
        "FATTN_ROUTE",
        "FATTN_TENSOR",
        "PYTORCH_MPS_METAL_VERSION",
        "PYTORCH_MPS_DISABLE_PREFILL_ATTENTION",
    )
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return run_python(arguments or ("-c", SCRIPT), env={**kept, **environment})


@pytest.mark.host_only
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("FATTN_ROUTE", "", "torch torch's prefill"),
        ("FATTN_ROUTE", "always", "fattn FATTN_ROUTE=always"),
        ("PYTORCH_MPS_METAL_VERSION", "4.0", "torch torch's prefill"),
        ("PYTORCH_MPS_METAL_VERSION", "3.2", "fattn baseline"),
        ("PYTORCH_MPS_DISABLE_PREFILL_ATTENTION", "1", "fattn torch holds all scores"),
    ],
)
def test_the_environment(name: str, value: str, message: str) -> None:
    done = in_a_new_process(**{name: value})
    assert done.returncode == 0 and done.stdout.startswith(message), done.stdout + done.stderr


@pytest.mark.host_only
@pytest.mark.parametrize(
    ("name", "must"),
    [
        ("FATTN_ROUTE", "must be one of auto, always; unset it for auto"),
        ("FATTN_TENSOR", "must be 0, threadgroup or registers; unset it for what the self-test finds"),
    ],
)
def test_another_policy(name: str, must: str) -> None:
    """Refused where it is needed, and by every command."""
    message = f"{name} is 'never' and {must}"
    asked = in_a_new_process(**{name: "never"})
    assert asked.returncode == 1 and asked.stderr.endswith(f"ValueError: torch_fattn: {message}\n")
    for arguments in (("explain", "merge"), ("bench", "--shapes", "qwen3-0.6b")):
        done = in_a_new_process("-m", "torch_fattn", *arguments, **{name: "never"})
        assert (done.returncode, done.stderr) == (
            2,
            f"python -m torch_fattn: {message}\n",
        ) and not done.stdout


# ---- the callers, on this GPU, with a tuned row that gives a prefill of D 16 to torch

TORCHS = TunedRoute("prefill", "float32", 16, 1, None, "torch", *routing.system_and_torch())


@pytest.fixture
def tuned() -> Iterator[Callable[..., None]]:
    def use(*routes: TunedRoute) -> None:
        tuned_file.set_tuning(this_chip(), [], PROVENANCE, list(routes))

    use(TORCHS)
    torch_fattn.reset_report()
    yield use
    use()


def operands(dim: int = 16, length: int = 9) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, length, dim, generator=generator).to("mps") for _ in range(3)]


def by_sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return torch_fattn.sdpa(query, key, value)


def by_comfyui(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    def never(*_: Any, **__: Any) -> Tensor:
        raise AssertionError("ComfyUI's slices are not asked")

    layout = {"skip_reshape": True, "skip_output_reshape": True}
    return comfyui.attention_override(never, query, key, value, 4, **layout)


def by_flash_attn(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    out = flash_attn_func(*(t.transpose(1, 2) for t in (query, key, value)))
    assert isinstance(out, Tensor) and out.is_contiguous()
    return out.transpose(1, 2)


def by_transformers(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    out: Tensor = operators.compute(query, key, value, None, None, causal=False, softcap=0.0, sinks=None)
    assert out.is_contiguous()
    return out.transpose(1, 2)


TAKERS = (by_install, by_sdpa, by_comfyui, by_flash_attn, by_transformers)


@pytest.mark.parametrize("taker", TAKERS)
def test_every_caller_uses_the_rule(taker: Callable[..., Tensor], tuned: Callable[..., None]) -> None:
    def launches_of(dim: int) -> int:
        call = operands(dim)
        with counted_launches() as launches:
            out = taker(*call)
        exact = F.scaled_dot_product_attention(*(t.cpu() for t in call))
        assert torch.allclose(out.cpu(), exact, atol=1e-6)
        return launches.get("fattn_prefill", 0)

    assert launches_of(16) == 0
    report = torch_fattn.report()
    assert report.fallbacks_by_reason() == {"torch_is_faster": 1} and report.routed == 0
    assert report.fallbacks[0].example.endswith(PROVENANCE)
    assert launches_of(24) == 1, "another head size was not timed"
    tuned()
    assert launches_of(16) == 1
    tuned(TORCHS)
    torch.ops.fattn._route_always_here(True)
    try:
        assert launches_of(16) == 1
    finally:
        torch.ops.fattn._route_always_here(False)
        routing.forget()


def test_an_operator_is_not_called_twice(tuned: Callable[..., None]) -> None:
    """A call of an operator by name runs it, and calls that torch lacks are never handed to torch."""
    query, key, value = operands()
    with counted_launches() as launches:
        torch_fattn.prefill(query, key, value)
        flash_attn_func(*(t.transpose(1, 2) for t in (query, key, value)), window_size=(4, 4))
        flash_attn_func(*(t.transpose(1, 2) for t in (query, key[:, :, :8], value[:, :, :8])), causal=True)
        flash_attn_func(*(t.transpose(1, 2) for t in (query, key, value)), return_attn_probs=True)
    assert launches["fattn_prefill"] + decodes(launches) == 4
    assert torch_fattn.report().calls == 0


def test_a_timed_route_is_of_its_system_torch_and_calls(tuned: Callable[..., None]) -> None:
    def goes_to_torch(changed: dict[str, Any], **call: Any) -> bool:
        tuned(TunedRoute(**{**TORCHS.__dict__, **changed}))
        query, key, value = operands()
        found = torch_fattn.explain("prefill", query, key, value, **call).route
        return found is not None and found.to == "torch" and found.why == PROVENANCE

    assert goes_to_torch({}) and goes_to_torch({"max_length": 9})
    assert not goes_to_torch({}, attn_mask=torch.ones(9, 9, dtype=torch.bool, device="mps"))
    long = torch.empty(1, 1, 1, 16, device="mps").expand(1, 8, 300_000, 16)
    found = torch_fattn.explain("prefill", long, long, long).route
    assert found is not None and "one dispatch" in found.why
    others = {"macos": "1.2", "torch": "2.9", "op": "decode", "dtype": "float16", "dim": 24, "min_length": 10}
    for name, other in others.items():
        assert not goes_to_torch({name: other}), name


def test_a_timed_route_may_be_ours() -> None:
    """A tuned route overrides a row of the table that goes to torch: few rows of padded heads."""
    query, key, value = operands(dim=60, length=256)
    versions = routing.system_and_torch()
    call = (query[:, :, :1], key, value, None, False, False)
    assert torch.ops.fattn._route(*call)[0]
    ours = TunedRoute("decode", "float32", 60, 1, None, "fattn", *versions)
    tuned_file.set_tuning(this_chip(), [], PROVENANCE, [ours])
    try:
        assert torch.ops.fattn._route(*call) == (False, PROVENANCE)
    finally:
        tuned_file.set_tuning(this_chip(), [], "")


def test_a_compiled_graph(tuned: Callable[..., None]) -> None:
    """It is decided on when it is traced."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = operators.compute(query, key, value, None, None, causal=True)
        return out

    for dim, mine in ((16, 0), (24, 1)):
        torch.compiler.reset()
        call = operands(dim)
        with counted_launches() as launches:
            out = torch.compile(attend, backend="aot_eager", fullgraph=True)(*call)
        exact = F.scaled_dot_product_attention(*(t.cpu() for t in call), is_causal=True).transpose(1, 2)
        assert torch.allclose(out.cpu(), exact, atol=1e-6) and launches.get("fattn_prefill", 0) == mine
