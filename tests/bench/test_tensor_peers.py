"""Kernels on Metal 4's tensor operations in the bench for an NVIDIA GPU: ours, MLX's and torch's."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("softmetal.testing", reason="the peers run on softmetal, which is for Linux")

from bench.backends.cuda import build
from bench.cases.calls import Call
from softmetal.testing.cuda import compile_pipeline

pytestmark = pytest.mark.host_only


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
