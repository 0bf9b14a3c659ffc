"""The layout as a kernel of the Hugging Face Hub: complete, in its own namespace, and valid to `kernels`."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.conftest import EMULATED, why_no_gpu
from torch_fattn.runtime import versions

TOOL = Path(__file__).resolve().parents[2] / "tools" / "hub_kernel.py"
pytestmark = pytest.mark.host_only


@pytest.fixture(scope="module")
def tool() -> dict[str, Any]:
    return runpy.run_path(str(TOOL))


@pytest.fixture(scope="module")
def layout(tool: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    tool["lay_out"](folder)
    return folder


def test_no_operator_is_in_the_package_s_own_namespace(layout: Path) -> None:
    registered = 0
    for file in [*layout.rglob("*.cpp"), *layout.rglob("*.mm")]:
        text = file.read_text()
        assert not re.search(r'\bTORCH_LIBRARY\w*\(fattn\b|"fattn::', text), file
        registered += len(re.findall(r"HUB_TORCH_LIBRARY\w*\(TORCH_EXTENSION_NAME", text))
    assert registered >= 8
    for file in layout.rglob("*.py"):
        text = file.read_text()
        compile(text, str(file), "exec")
        code = re.sub(r'""".*?"""', "", text, flags=re.DOTALL)
        assert not re.search(r'torch\.ops\.fattn\.[a-z_]|"fattn::', code), file
        assert not re.search(r"^(from|import) torch_fattn\b", code, re.MULTILINE), file
        if "_hub." in code:
            ups = len(file.relative_to(layout / "torch-ext" / "torch_fattn").parts)
            assert f"\nfrom {'.' * ups} import _ops as _hub\n" in code, file


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("torch.ops.fattn.prefill(x)", "_hub.ops.prefill(x)"),
        ('getattr(torch.ops.fattn, f"_plan_{op}")', 'getattr(_hub.ops, f"_plan_{op}")'),
        ('register_fake(f"fattn::{op}", y)', 'register_fake(_hub.add_op_namespace_prefix(f"{op}"), y)'),
        ('implementation = "fattn"', None),
        ("# all work is in `torch.ops.fattn`", None),
    ],
)
def test_what_becomes_of_a_name(tool: dict[str, Any], before: str, after: str | None) -> None:
    head = '"""Text."""\n\nfrom __future__ import annotations\n'
    found = tool["in_the_namespace"](f"{head}\n{before}\n", "..")
    if after is None:
        assert found == f"{head}\n{before}\n"
    else:
        assert found == f"{head}\nfrom .. import _ops as _hub\n\n{after}\n"


def test_all_that_is_compiled_is_listed(layout: Path) -> None:
    text = (layout / "build.toml").read_text()
    listed = set(re.findall(r'"((?:csrc|torch-ext)/[^"]+)"', text))
    there = {str(f.relative_to(layout)) for end in ("cpp", "mm") for f in layout.rglob(f"*.{end}")}
    assert listed == there and any(name.endswith("executor.mm") for name in there)
    assert "fattn_prefill" in (layout / "csrc" / "generated" / "kernel_sources.inc").read_text()
    for file in layout.rglob("*.h"):
        for included in re.findall(r'#include "([^"]+)"', file.read_text()):
            assert (file.parent / included).exists() or (layout / "csrc" / included).exists(), (
                file,
                included,
            )


def test_variants_are_named_as_the_hub_names_them(
    tool: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    for minor in range(versions.TORCH[0][1], versions.TORCH[1][1] + 1):
        assert tool["variant_name"](f"2.{minor}.1") == f"torch2{minor}-metal-aarch64-darwin"


def test_kernels_takes_it(tool: dict[str, Any], layout: Path, tmp_path: Path) -> None:
    """`kernels` parses what its builder and its loader read; the control has a key that it does not know."""
    rust = pytest.importorskip("kernels._rust", reason="pip install 'kernels>=0.17'")
    if not hasattr(rust, "Build"):
        pytest.skip("this version of kernels does not parse build.toml")
    assert rust.Build.open(layout).general is not None
    (tmp_path / "build.toml").write_text((layout / "build.toml").read_text() + "unknown = 1\n")
    with pytest.raises(ValueError, match="unknown"):
        rust.Build.open(tmp_path)
    metadata = rust.Metadata.from_bytes(json.dumps(tool["metadata"]("_torch_fattn_metal_0")).encode())
    assert metadata.name.python_name == "torch_fattn" and str(metadata.backend.backend_type) == "metal"


USE = """
import copy, os, sys
import torch, transformers
from transformers import LlamaConfig, LlamaForCausalLM
repository, folder = sys.argv[1:]
config = LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, vocab_size=50)
model = LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()
model.save_pretrained(folder)
ids, mask = torch.randint(0, 50, (2, 30)), torch.ones(2, 30, dtype=torch.long)
mask[0, :7] = 0
hub = LlamaForCausalLM.from_pretrained(folder, attn_implementation=repository, allow_all_kernels=True)
hub = hub.to("mps").eval()
with torch.no_grad():
    expected = model(ids, attention_mask=mask).logits
    found = hub(ids.to("mps"), attention_mask=mask.to("mps")).logits.cpu()
assert ((found - expected) * mask[..., None]).abs().max() < 1e-5
(kernel,) = [sys.modules[name] for name in sys.modules if name.startswith("_torch_fattn") and "." not in name]
assert kernel.launch_counts()["fattn_prefill"] == 2 and "torch_fattn" not in sys.modules
assert not hasattr(torch.ops.fattn, "prefill")
import torch_fattn  # both in one process
query = torch.randn(1, 2, 20, 64).to("mps")
assert torch.equal(torch_fattn.prefill(query, query, query), kernel.prefill(query, query, query))
assert kernel.launch_counts()["fattn_prefill"] == 3 and torch_fattn.launch_counts()["fattn_prefill"] == 1
"""


def test_transformers_takes_it_from_a_local_folder(tmp_path: Path) -> None:
    """A build in the layout of `kernels`, under the name of a repository."""
    if reason := why_no_gpu():
        pytest.skip(reason)
    pytest.importorskip("kernels", reason="pip install 'transformers[kernels]'")
    if not transformers.utils.is_kernels_available():
        pytest.skip("transformers takes another version of kernels: pip install 'transformers[kernels]'")
    flags = {}
    if EMULATED:
        from softmetal.testing import build_environment

        flags = build_environment()
    environ = {**os.environ, **flags, "HF_HUB_OFFLINE": "1", "LOCAL_KERNELS": f"a/b={tmp_path / 'hub'}"}
    build = [sys.executable, str(TOOL), "build", str(tmp_path / "hub")]
    subprocess.run(build, check=True, env=environ)
    subprocess.run([sys.executable, "-c", USE, "a/b", str(tmp_path / "model")], check=True, env=environ)
