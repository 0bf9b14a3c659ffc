"""What `import torch_fattn` must not import, and the marks that stand in for torch._dynamo's."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch._dynamo

from torch_fattn.distributed import context
from torch_fattn.runtime.tracing import constant_in_graphs

pytestmark = pytest.mark.host_only
IMPORTED = """
import sys, torch
before = {*sys.modules}
import torch_fattn
torch_fattn.flash_attn.flash_attn_func
print(*({*sys.modules} - before))
"""


def test_import_is_light() -> None:
    """Beside torch, only the standard library: neither transformers nor an emulator, which torch loads."""
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-c", IMPORTED]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    imported = [name for name in done.stdout.split() if name.partition(".")[0] not in sys.stdlib_module_names]
    assert "torch_fattn" in imported
    assert not [name for name in imported if not name.startswith("torch_fattn")]


def test_a_marked_function_is_a_constant_of_a_graph() -> None:
    calls = []

    def answer() -> bool:
        calls.append(1)
        return bool(sys.intern("yes"))  # which torch.compile cannot trace

    def add(x: torch.Tensor, function: object = constant_in_graphs(answer)) -> torch.Tensor:
        return x + 1 if function() else x - 1  # type: ignore[operator]

    compiled = torch.compile(add, fullgraph=True, backend="eager")
    x = torch.zeros(2)
    assert compiled(x).tolist() == compiled(x).tolist() == [1.0, 1.0]
    assert len(calls) == 1


def test_attention_of_a_block_breaks_a_graph() -> None:
    attention = context._attention()
    assert attention._torchdynamo_disable  # type: ignore[attr-defined]
    assert attention.__name__ == "scaled_dot_product_attention"
