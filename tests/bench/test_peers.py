"""The peers' launch rules in bench/peers: which kernel they choose, and for which version they hold."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("softmetal.testing", reason="the peers run on softmetal, which is for Linux")

from bench.backends import counting, metal
from bench.backends.cuda import build
from bench.cases import buffers
from bench.cases.calls import Call, UnsupportedCallError
from bench.peers import fattn, llama_metal, mlx_metal, mlx_vjp, registry, torch_metal
from softmetal.testing.cuda import compile_pipeline
from tests.conftest import needs_emulator

pytestmark = pytest.mark.host_only


def needs(peer: ModuleType) -> None:
    if peer.version() == "not installed":
        pytest.skip(f"{peer.IMPL} is not installed, and no archive of it is named")


def error_of_every_plan(peer: ModuleType, call: Call) -> float:
    """The largest relative error of the launch and its alternatives."""
    launch = registry.launch(peer, call)
    found = []
    for plan in (launch, *launch.alternatives):
        made = buffers.make(call, plan.buffers, plan.scratch, "cpu", seed=2)
        counting.run_on_harness(plan, made)
        found.append(buffers.errors(call, made, plan.out_rows_first, "cpu")[1])
    return max(found)


# In one pass (70 keys; for MLX on small chips 1,100, too) and in two.
@needs_emulator
@pytest.mark.parametrize("keys", [70, 1100])
@pytest.mark.parametrize("peer", registry.FORWARDS, ids=lambda peer: peer.IMPL)
def test_rows_of_a_decode_are_causal(peer: ModuleType, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    needs(peer)
    for rows in (1, 2, 4, 8, 16):
        assert error_of_every_plan(peer, Call("decode", 2, 1, 64, rows, keys)) < 2e-3
    monkeypatch.setattr(Call, "hides_keys", False)
    with pytest.raises(NotImplementedError, match=f"{peer.IMPL} computes .* wrongly: relative error"):
        counting.count_peer(peer, Call("decode", 2, 1, 64, 4, keys))


@needs_emulator
@pytest.mark.parametrize(("head_dim", "q_len"), [(64, 40), (256, 24)])
def test_torch_gets_a_mask_where_causal_rows_begin_later(
    head_dim: int, q_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = Call("prefill", 2, 1, head_dim, q_len, 100, causal=True)
    assert "_hm1_dc0_maskbool_" in registry.launch(torch_metal, chunk).passes[0].pipeline.kernel
    assert error_of_every_plan(torch_metal, chunk) < 2e-3
    square = registry.launch(torch_metal, replace(chunk, kv_len=q_len)).passes[0]
    assert "_hm0_dc1_" in square.pipeline.kernel and "seen" not in square.arguments.values()
    monkeypatch.setattr(torch_metal, "needs_mask", lambda call: False)
    assert error_of_every_plan(torch_metal, chunk) > 0.1


@pytest.mark.parametrize(("peer", "name"), [(llama_metal, "mask"), (torch_metal, "seen")])
def test_rows_of_a_mask_are_aligned(peer: ModuleType, name: str) -> None:
    """An NVIDIA GPU ends a process that reads a pair of halves from an odd element: "misaligned address"."""
    needs(peer)
    chunk = Call("prefill", 2, 1, 64, 24, 37, causal=True)
    launch = registry.launch(peer, chunk)
    mask = buffers.make(chunk, launch.buffers, launch.scratch, "cpu", seed=2)[name]
    assert mask.stride(-2) * mask.itemsize % 16 == 0 and name in launch.buffers
    assert all(step.pipeline.aligned_runs for step in launch.passes)


@needs_emulator
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_the_fused_backward_of_mlx(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    needs(mlx_vjp)
    call = Call("prefill_backward", 2, 1, head_dim, 32, 32, dtype="bfloat16")
    for one in (call, replace(call, q_len=38, kv_len=58, dtype="float16", causal=True)):
        assert error_of_every_plan(mlx_vjp, one) < buffers.TOLERANCE[one.dtype]
    monkeypatch.setitem(buffers._DERIVED, "lse_log2", buffers._DERIVED["lse"])
    assert error_of_every_plan(mlx_vjp, call) > 0.1, "the control"


ROWS = [
    Call("decode", 4, 2, 64, 1, 40),
    Call("decode", 4, 2, 64, 4, 40),
    Call("prefill", 4, 2, 64, 20, 40, causal=True),
    Call("prefill", 4, 2, 64, 40, 40, causal=True),
    Call("prefill", 4, 2, 64, 20, 40),
]


@pytest.mark.parametrize("call", ROWS, ids=str)
def test_peers_on_a_mac_run_the_same_calls(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    operands = Call.operands
    monkeypatch.setattr(Call, "operands", lambda self, device, seed=0: operands(self, "cpu", seed))
    _, _, results = metal._torch(call, 1, metal.TORCH)
    assert metal._error(call, results()) < metal.TOLERANCES["float16"]
    hides = call.visible_pairs < call.q_len * call.kv_len
    if hides:
        assert metal._error(call, results().roll(1, 2)) > 0.1
    asked: list[dict[str, Any]] = []
    fast = SimpleNamespace(scaled_dot_product_attention=lambda *_, **options: asked.append(options))
    core = SimpleNamespace(array=torch.from_numpy, eval=lambda _: None, fast=fast, float16=torch.float16)
    monkeypatch.setattr(torch.Tensor, "astype", torch.Tensor.to, raising=False)
    monkeypatch.setitem(sys.modules, "mlx", SimpleNamespace(core=core))
    monkeypatch.setitem(sys.modules, "mlx.core", core)
    metal._mlx(call, 1)[0](0)
    assert asked == [{"scale": 0.125, "mask": "causal" if hides else None}]


@pytest.mark.parametrize(
    ("peer", "sources", "version", "known"),
    [
        (torch_metal, "INCLUDE", "2.16.0", r"torch==2\.15\.0"),
        (mlx_metal, "include_folder", "0.33.0", r"mlx-metal==0\.32\.4"),
        (llama_metal, "folder", "0.3.35", r"llama-cpp-python==0\.3\.36"),
    ],
)
def test_another_version_of_a_peer_is_refused(
    peer: ModuleType, sources: str, version: str, known: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, sources, lambda: object())
    monkeypatch.setattr(peer, "version", lambda: version)
    with pytest.raises(NotImplementedError, match=rf"{peer.IMPL}: .*{version}.*{known}"):
        peer.launch(Call("decode", 2, 1, 64, 1, 64))


SMALL = [call for call in build.CORRECTNESS if call.op != "prefill" or call.latent_dim]


@needs_emulator
@pytest.mark.parametrize("call", SMALL, ids=str)
def test_our_plans_run_over_the_same_buffers(call: Call) -> None:
    """Every option that the NVIDIA bench checks, by the names that the plan binds."""
    launches = [fattn.launch(call, cores=8)]
    if not call.is_backward:
        launches += fattn.tensor_launches(call, cores=8)
    for launch in launches:
        made = buffers.make(call, launch.buffers, launch.scratch, "cpu", seed=1)
        counting.run_on_harness(launch, made)
        assert buffers.errors(call, made, False, "cpu")[1] < buffers.TOLERANCE[call.dtype]


@needs_emulator
@pytest.mark.parametrize("call", [call for call in SMALL if call.op == "gated_delta_rule"], ids=str)
def test_peers_of_linear_attention(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = [llama_metal, mlx_metal] if call.head_dim == 128 else [llama_metal]
    for peer in registry.PEERS:
        if peer not in taken and peer.version() != "not installed":
            with pytest.raises(UnsupportedCallError, match=f"{peer.IMPL} has no"):
                registry.launch(peer, call)
    taken = [peer for peer in taken if peer.version() != "not installed"]
    assert all(error_of_every_plan(peer, call) < buffers.TOLERANCE[call.dtype] for peer in taken)
    step = replace(call, op="gated_delta_step")
    assert all(registry.launch(peer, step) == registry.launch(peer, call) for peer in taken)
    monkeypatch.setitem(buffers._DERIVED, "transposed_initial_state", lambda call, made: made["state"])
    assert all(error_of_every_plan(peer, call) > 0.1 for peer in taken), "the control"


FEATURES = {
    "a paged cache": Call("paged_decode", 8, 2, 128, 1, 512, block_size=16),
    "a cache of int8": Call("decode", 8, 2, 128, 1, 512, kv_format="int8"),
    "sequences of different lengths": Call("decode", 8, 2, 128, 1, 512, batch=2, lengths=(512, 100)),
    "values that are columns of the keys": Call("decode", 8, 1, 576, 1, 512, latent_dim=512),
}
TAKEN = {llama_metal: {"a cache of int8", "sequences of different lengths"}}


@pytest.mark.parametrize("peer", registry.FORWARDS, ids=lambda peer: peer.IMPL)
def test_calls_that_a_peer_refuses(peer: ModuleType) -> None:
    needs(peer)
    assert registry.launch(peer, Call("decode", 8, 2, 128, 1, 512, batch=2)).passes
    for feature, call in FEATURES.items():
        if feature in TAKEN.get(peer, set()):
            assert registry.launch(peer, call).passes
        else:
            with pytest.raises(UnsupportedCallError, match=f"{peer.IMPL} .* {feature}"):
                registry.launch(peer, call)


def test_the_build_names_peers_that_refuse_a_call() -> None:
    found, refused = build.launches(FEATURES["a paged cache"], cores=132)
    assert [launch.impl for launch in found] == ["fattn"]
    assert refused.keys() == {fattn.OLDER_IMPL, *(peer.IMPL for peer in registry.PEERS)}
    assert refused["torch-metal"] == "torch-metal has no kernel for a paged cache"
    found, refused = build.launches(Call("decode", 8, 2, 128, 1, 512), cores=132)
    assert {launch.impl for launch in found}.isdisjoint(refused) and len(found) >= 2


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize(
    "call",
    [Call("decode", 1, 1, 64, 1, 64), Call("prefill", 1, 1, 64, 64, 64, causal=True, dtype="bfloat16")],
    ids=str,
)
def test_torch_kernels_have_no_stack_on_nvidia(call: Call, tmp_path: Path) -> None:
    cubin = tmp_path / compile_pipeline(registry.launch(torch_metal, call).passes[0].pipeline, tmp_path)
    assert json.loads(cubin.with_suffix(".json").read_text())["stack_bytes"] == 0


# ---- Metal 4's tensor operations


def test_the_build_has_our_plans_on_tensor_operations() -> None:
    call = Call("prefill", 2, 2, 64, 128, 128, causal=True)
    found, refused = build.tensor_launches(call, cores=132)
    assert [launch.impl for launch in found[:2]] == ["fattn-tensor", "fattn-tensor-threadgroup"]
    pipelines = [launch.passes[0].pipeline for launch in found]
    assert [one.macros["FATTN_REGISTERS"] for one in pipelines[:2]] == ["1", "0"]
    assert {one.std for one in pipelines} == {"metal4.0"}
    assert {launch.impl for launch in found} | refused.keys() == set(build.TENSOR_IMPLS)
    found, refused = build.tensor_launches(replace(call, dtype="float32"), cores=132)
    assert not found and refused.keys() == set(build.TENSOR_IMPLS)
    usual, _ = build.launches(call, cores=132)
    assert not {launch.impl for launch in usual} & set(build.TENSOR_IMPLS)


@pytest.mark.parametrize("op", ["decode", "paged_decode"])
def test_the_build_has_decodes_and_latent_heads(op: str) -> None:
    drafts = Call(op, 8, 2, 128, 6, 512, block_size=16 if op == "paged_decode" else 0)
    found, _ = build.tensor_launches(drafts, cores=132)
    assert [launch.impl for launch in found] == ["fattn-tensor", "fattn-tensor-threadgroup"]
    assert not build.tensor_launches(replace(drafts, q_len=1), cores=132)[0], "four rows share keys"
    latent = replace(drafts, q_heads=16, kv_heads=1, head_dim=576, q_len=1, latent_dim=512)
    found, refused = build.tensor_launches(latent, cores=132)
    assert [launch.impl for launch in found] == ["fattn-tensor-threadgroup"]
    assert found[0].passes[0].pipeline.kernel == "fattn_prefill_latent_tensor"
    assert refused["fattn-tensor"] == "there is one kernel on tensor operations for this"
    usual, _ = build.launches(latent, cores=132)
    assert usual[0].passes[0].pipeline.macros["FATTN_VALUE_IN_KEY"] == "true"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_kernels_on_tensor_operations_have_no_stack_on_nvidia(head_dim: int, tmp_path: Path) -> None:
    found, _ = build.tensor_launches(Call("prefill", 1, 1, head_dim, 64, 64, dtype="bfloat16"), cores=132)
    for launch in found:
        cubin = tmp_path / compile_pipeline(launch.passes[0].pipeline, tmp_path)
        assert json.loads(cubin.with_suffix(".json").read_text())["stack_bytes"] == 0
