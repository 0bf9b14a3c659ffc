"""torch.compile and export with install(): graphs hold torch_fattn's ops, or what torch puts there."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.compiler.config as compiler_config
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

import torch_fattn
from tests.conftest import counted_launches
from tests.helpers.processes import run_python
from tests.pytorch.test_sdpa import operands


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    torch_fattn.reset_report()
    yield
    torch_fattn.uninstall()


def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True) * 2


def by_name(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch_fattn.sdpa(query, key, value, is_causal=True) * 2


def graph_of(function: Callable[..., Tensor], *arguments: Tensor, **options: Any) -> tuple[list[str], Tensor]:
    ops: list[str] = []

    def keep(module: torch.fx.GraphModule, example: Any) -> Any:
        ops.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return make_boxed_func(module.forward)

    backend = aot_autograd(fw_compiler=keep)
    return ops, torch.compile(function, backend=backend, fullgraph=True, **options)(*arguments)


@pytest.mark.parametrize("context", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [plain, by_name])
def test_graphs_hold_our_op(function: Callable[..., Tensor], dynamic: bool, context: Any) -> None:
    with torch_fattn.installed(), context(), counted_launches() as launches:
        ops, out = graph_of(function, *operands(), dynamic=dynamic)
    assert "fattn.prefill.default" in ops and not any("softmax" in op for op in ops)
    assert launches.get("fattn_prefill") == 1
    exact = plain(*(t.cpu().double() for t in operands()))
    assert (out.cpu().double() - exact).abs().max() < 1e-6
    report = torch_fattn.report()
    assert report.traced > 0 and report.routed == 0, "a graph's op is not counted as a call"


def test_without_install_graphs_are_torchs() -> None:
    """The control."""
    with torch.no_grad():
        ops, _ = graph_of(plain, *operands())
    assert not any("fattn" in op for op in ops) and torch_fattn.report().traced == 0


@pytest.mark.parametrize("training", ["auto", "fused"])
@pytest.mark.parametrize("function", [plain, by_name])
@pytest.mark.filterwarnings("ignore:torch_fattn.sdpa")
def test_gradients_of_compiled_code(function: Callable[..., Tensor], training: Any) -> None:
    """Both graphs hold torch_fattn's ops, unless the call is small and the choice left to the rule."""
    mine, theirs = ([t.requires_grad_() for t in operands()] for _ in range(2))
    ops: list[str] = []

    def keep(graph: Any, _: Any) -> Any:
        ops.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch_fattn.install(training=training)
    compiled = torch.compile(function, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    compiled(*mine).square().sum().backward()
    torch_fattn.uninstall()
    plain(*theirs).square().sum().backward()
    for a, b in zip(mine, theirs, strict=True):
        assert a.grad is not None and b.grad is not None
        assert torch.allclose(a.grad.cpu(), b.grad.cpu(), atol=1e-5)
    report, is_ours = torch_fattn.report(), training == "fused"
    for op in ("fattn.attention.default", "fattn.prefill_backward.default"):
        assert (op in ops) == is_ours
    assert (report.traced > 0) == is_ours and report.routed == report.fell_back == 0
    assert [(f.reason, f.traced > 0) for f in report.fallbacks] == [("small_training", True)] * (not is_ours)


TRACED_BEFORE = """
import torch
import torch_fattn
from tests.pytorch.test_install_compile import graph_of, operands, plain

def is_ours():
    torch.compiler.reset()
    return "fattn.prefill.default" in graph_of(plain, *operands())[0]

before = is_ours()
with torch_fattn.installed():
    print(before, is_ours())
print(is_ours())
"""


def test_a_trace_before_the_first_installation_is_not_kept() -> None:
    done = run_python(["-c", TRACED_BEFORE])
    assert done.stdout == "False True\nFalse\n", done.stdout + done.stderr


class Attention(torch.nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_is_torchs_and_runs_ours(strict: bool) -> None:
    """An exported program contains torch's op, so that it runs anywhere."""
    with torch_fattn.installed():
        program = torch.export.export(Attention(), tuple(operands()), strict=strict)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets == ["aten.scaled_dot_product_attention.default"]
    for exported in (program, program.run_decompositions()):
        with torch_fattn.installed(), counted_launches() as launches:
            out = exported.module()(*operands())
        assert launches.get("fattn_prefill") == 1
        exact = F.scaled_dot_product_attention(*(t.cpu() for t in operands()))
        assert torch.allclose(out.cpu(), exact, atol=1e-6)


ONE_COMPILED_CALL = """
import sys
import torch
import torch.nn.functional as F

if sys.argv[1] == "installed":
    import torch_fattn
    torch_fattn.install()
attention = torch.compile(F.scaled_dot_product_attention)
try:
    attention(*(torch.ones(1, 2, 8, 16, device="mps") for _ in range(3)))
except torch._inductor.exc.InductorError as error:
    print(error)  # on Linux nothing else can be generated for mps; what matters is that it is tried
print(dict(torch._dynamo.utils.counters["aot_autograd"]))
"""


def test_the_caches_of_torch_are_separate(tmp_path: Path) -> None:
    """A process that does not install must not be given the graph of one that does: it may lack our ops."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    calls = ("installed", "plain", "installed")
    message = [run_python(["-c", ONE_COMPILED_CALL, how], env=environment).stdout for how in calls]
    assert ["autograd_cache_hit" in text for text in message] == [False, False, True], message


def test_the_tag_of_caches_is_shared_by_threads() -> None:
    tags: list[str] = []
    with torch_fattn.installed():
        thread = threading.Thread(target=lambda: tags.append(compiler_config.cache_key_tag))
        thread.start()
        thread.join()
    assert "torch_fattn" in tags[0] and compiler_config.cache_key_tag == ""
