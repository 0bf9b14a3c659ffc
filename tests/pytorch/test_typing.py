"""A user's script type-checks under `mypy --strict` against the installed package; a wrong one does not."""

from __future__ import annotations

import inspect
import re
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

import torch_fattn
from tests.helpers.public_calls import public_names
from torch_fattn.operators import options

pytestmark = pytest.mark.host_only

EVERY_OPERATOR = """
import torch
import torch_fattn
from torch_fattn import CacheStep, PagedKVCache, StaticKVCache, flash_attn
from torch_fattn.integrations.transformers import register, unregister
from typing_extensions import assert_type

Both = tuple[torch.Tensor, torch.Tensor]
One = torch.Tensor
t = torch.zeros(1)


def of(some: bool, static: StaticKVCache, paged: PagedKVCache, step: CacheStep) -> None:
    assert_type(torch_fattn.prefill(t, t, t), One)
    assert_type(torch_fattn.prefill(t, t, t, return_lse=True), Both)
    assert_type(torch_fattn.prefill(t, t, t, return_lse=some), One | Both)
    assert_type(torch_fattn.decode(t, t, t, return_lse=False), One)
    assert_type(torch_fattn.decode(t, t, t, return_lse=True), Both)
    assert_type(torch_fattn.paged_decode(t, t, t, t, t), One)
    assert_type(torch_fattn.paged_decode(t, t, t, t, t, return_lse=True), Both)
    assert_type(torch_fattn.paged_prefill(t, t, t, t, t, t, 1, is_causal=some), One)
    assert_type(torch_fattn.paged_prefill(t, t, t, t, t, t, 1, is_causal=some, return_lse=True), Both)
    assert_type(torch_fattn.varlen_prefill(t, t, t, t, t, 1, 1), One)
    assert_type(torch_fattn.varlen_prefill(t, t, t, t, t, 1, 1, return_lse=True), Both)
    gradients = torch_fattn.prefill_backward(t, None, t, t, t, None, t)
    assert_type(gradients, tuple[One, One, One, One | None, One | None])
    of_packed = torch_fattn.varlen_prefill_backward(t, None, t, t, t, None, t, t, t, 1, 1)
    assert_type(of_packed, tuple[One, One, One, One | None, One | None])
    assert_type(torch_fattn.merge(t, t), One)
    assert_type(torch_fattn.merge(t, t, return_lse=True), Both)
    assert_type(torch_fattn.shared_prefix_decode(t, t, t, t, t, t), One)
    assert_type(torch_fattn.shared_prefix_decode(t, t, t, t, t, t, return_lse=True), Both)
    assert_type(torch_fattn.shared_prefix_paged_decode(t, t, t, t, t, 1), One)
    assert_type(torch_fattn.shared_prefix_paged_decode(t, t, t, t, t, 1, return_lse=True), Both)
    assert_type(torch_fattn.sdpa(t, t, t, is_causal=some), One)
    assert_type(torch_fattn.report().share, float)
    assert_type(flash_attn.flash_attn_func(t, t, t, causal=True), One)
    assert_type(flash_attn.flash_attn_func(t, t, t, return_attn_probs=True), tuple[One, One, One])
    assert_type(flash_attn.flash_attn_qkvpacked_func(t, return_attn_probs=True), tuple[One, One, One])
    assert_type(flash_attn.flash_attn_varlen_func(t, t, t, t, t, 1, 1), One)
    assert_type(flash_attn.flash_attn_varlen_func(t, t, t, t, max_seqlen_q=1, s_aux=t, fa_version=3), One)
    assert_type(flash_attn.flash_attn_varlen_func(t, t, t, t, t, 1, 1, return_softmax_lse=True), Both)
    assert_type(flash_attn.flash_attn_with_kvcache(t, t, t), One)
    assert_type(flash_attn.flash_attn_with_kvcache(t, t, t, return_softmax_lse=True), Both)
    assert_type(flash_attn.flash_attn_with_kvcache(t, t, t, return_softmax_lse=some), One | Both)
    assert_type(torch_fattn.softmax(t), One)
    assert_type(torch_fattn.softcap(t, 5.0), One)
    assert_type(torch_fattn.mask_map(t), One)
    assert_type(torch_fattn.rms_norm(t, t, gate=t), One)
    assert_type(torch_fattn.rotary(t, t, t, t, style="pairs"), Both)
    assert_type(torch_fattn.rotary_write(t, t, t, t, t, t, t, start=1), One)
    assert_type(static.append_rotated(0, step, t, t, t, t, t, eps=1e-5), One)
    assert_type(static.decode(0, step, t), One)
    assert_type(static.decode(0, step, t, return_lse=True), Both)
    assert_type(paged.decode(0, step, t, shared_prefix=True), One)
    assert_type(paged.decode(0, step, t, return_lse=True), Both)
    assert_type(paged.prefill(0, step, t), One)
    assert_type(paged.prefill(0, step, t, return_lse=some), One | Both)
    assert_type(torch_fattn.launch_counts(), dict[str, int])
    register(on_unsupported="sdpa")
    unregister()
"""
WRONG = """
import torch
import torch_fattn
from torch_fattn.integrations.transformers import register

query = torch.randn(1, 8, 64, 64)
torch_fattn.prefill(query, query, query, return_lse=True).shape
out, lse = torch_fattn.decode(query, query, query).shape.numel()
torch_fattn.varlen_prefill(query, query, query, query, query, 64, 64, causal=True)
register(on_unsupported="eager")
"""


# Most of torch, in which mypy would spend half a minute, and no type of ours.
OF_TORCH = ("_dynamo", "_inductor", "_functorch", "_export", "_higher_order_ops", "_prims", "distributed")
OF_TORCH += ("ao", "export", "fx", "jit", "onnx", "testing", "sparse", "optim", "nn.functional", "_refs")


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """mypy's output for each script, with the package where pip installs it."""
    folder = tmp_path_factory.mktemp("typing")
    builder = venv.EnvBuilder(symlinks=True)
    builder.create(folder / "venv")
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    source = Path(torch_fattn.__file__).parent
    shutil.copytree(
        source, packages / "torch_fattn", ignore=shutil.ignore_patterns("*.so", "__pycache__", "_archives")
    )
    (packages / "others.pth").write_text("\n".join(site.getsitepackages()))
    skipped = ",".join(f"torch.{part}.*" for part in OF_TORCH)
    (folder / "mypy.ini").write_text(f"[mypy]\n[mypy-sympy.*,numpy.*,{skipped}]\nfollow_imports = skip\n")
    scripts = {"every_operator": EVERY_OPERATOR, "wrong": WRONG}
    for name, text in scripts.items():
        (folder / f"{name}.py").write_text(text)
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            f"--config-file={folder / 'mypy.ini'}",
            "--no-error-summary",
        ]
        + ["--python-executable", str(folder / "venv/bin/python"), *(f"{name}.py" for name in scripts)],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert not run.stderr, run.stderr
    lines = [line for line in run.stdout.splitlines() if ": error:" in line]
    assert all(line.split(".py:")[0] in scripts for line in lines), run.stdout
    return {name: [line for line in lines if line.startswith(f"{name}.py:")] for name in scripts}


def test_every_operator_has_the_type_of_what_it_returns(errors: dict[str, list[str]]) -> None:
    assert errors["every_operator"] == []


def test_control_wrong_lines(errors: dict[str, list[str]]) -> None:
    """The last four lines are wrong, each in its own way."""
    numbers = [int(line.split(":")[1]) for line in errors["wrong"]]
    last = len(WRONG.splitlines())
    assert sorted(set(numbers)) == list(range(last - 3, last + 1)), errors["wrong"]


OPTIONS = {
    "prefill": options.PrefillOptions,
    "decode": options.DecodeOptions,
    "paged_decode": options.DecodeOptions,
    "paged_prefill": options.PagedPrefillOptions,
    "varlen_prefill": options.VarlenPrefillOptions,
    "cache_write": options.StorageOptions,
    "rotary": options.RotaryOptions,
    "rotary_write": options.RotaryWriteOptions,
    "prefill_backward": options.PrefillOptions,
    "varlen_prefill_backward": options.VarlenPrefillOptions,
}


@pytest.mark.parametrize("op", OPTIONS)
def test_the_options_match_the_schema(op: str) -> None:
    """In its order and with its defaults, for the operator and its reference."""
    schema = [each for each in getattr(torch.ops.fattn, op).default._schema.arguments if each.kwarg_only]
    wanted = [(e.name, e.default_value if e.has_default_value() else inspect.Parameter.empty) for e in schema]
    own = {"out_remainder"} if op.endswith("_backward") else set()  # before the shared keywords
    wanted.sort(key=lambda each: each[0] not in own)
    assert {name for name, default in wanted if default is not inspect.Parameter.empty} == {
        *OPTIONS[op].__annotations__,
        *own,
    }
    for function in (getattr(torch_fattn, op), getattr(torch_fattn.reference, op)):
        parameters = inspect.signature(function).parameters.values()
        shown = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "return_lse"}
        assert [*shown.items()] == wanted
        assert not any(p.kind is p.VAR_KEYWORD for p in parameters)


def test_is_causal_has_one_default() -> None:
    """False, or none; rows of a decode are causal."""
    found = {
        name: inspect.signature(each).parameters["is_causal"].default
        for name in public_names()
        if callable(each := getattr(torch_fattn, name)) and not isinstance(each, type)
        if "is_causal" in inspect.signature(each).parameters
    }
    assert found.pop("paged_prefill") is inspect.Parameter.empty and found.pop("sparse_decode") is True
    assert {*found} >= {"prefill", "attention", "varlen_prefill", "varlen_attention", "sdpa"}
    assert not any(found.values())
    t = torch.zeros(1)
    with pytest.raises(TypeError, match="is_causal"):
        torch_fattn.paged_prefill(t, t, t, t, t, t, 1)  # type: ignore[call-overload]


@pytest.mark.parametrize("op", OPTIONS)
def test_help_has_a_text_for_every_argument(op: str) -> None:
    function = getattr(torch_fattn, op)
    args = inspect.getdoc(function).partition("Args:\n")[2].partition("\n\nReturns:")[0]
    texts = [names.split(", ") for names in re.findall(r"^    (\w+(?:, \w+)*): \S", args, re.MULTILINE)]
    assert sorted(sum(texts, [])) == sorted(inspect.signature(function).parameters)


def test_help_prefers_the_text_of_the_function() -> None:
    """An option whose meaning differs: the other texts are those of the type."""
    of_prefill, of_varlen, of_paged = (
        inspect.getdoc(getattr(torch_fattn, op)) for op in ("prefill", "varlen_prefill", "paged_decode")
    )
    assert of_prefill.count("q_offset: ") == of_varlen.count("q_offset: ") == 1
    assert "    q_offset: absolute position of row 0. Default" in of_prefill
    assert "    q_offset: absolute position of row 0 of every sequence." in of_varlen
    assert of_paged.count("value_scales: ") == 1 and "key_scales, value_scales: `[num_blocks" in of_paged
    assert of_prefill.count("    sinks: `[Hq]`") == of_paged.count("    sinks: `[Hq]`") == 1
