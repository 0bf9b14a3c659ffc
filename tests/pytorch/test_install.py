"""install(): plain calls of torch's attention reach torch_fattn at the dispatcher; nothing else changes."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.attention
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_fattn
from tests.conftest import counted_launches
from tests.helpers.processes import run_python
from tests.pytorch.test_sdpa import operands

SDPA = "aten::scaled_dot_product_attention"


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    """Every test leaves torch's attention as it was."""
    torch_fattn.reset_report()
    yield
    torch_fattn.uninstall()
    assert not torch_fattn.report().installed
    assert torch.nn.attention.current_flash_attention_impl() is None


def routes() -> bool:
    """Whether a plain call reaches our kernels."""
    with counted_launches() as launches:
        F.scaled_dot_product_attention(*operands())
    return launches.get("fattn_prefill", 0) > 0


def test_on_and_off() -> None:
    assert not routes()
    torch_fattn.install()
    kernels = torch._C._dispatch_dump(SDPA)
    for _ in range(3):
        torch_fattn.install()  # no new information
        assert routes() and torch_fattn.report().installed
        torch_fattn.uninstall()
        torch_fattn.uninstall()
        assert not routes() and not torch_fattn.report().installed
        assert torch._C._dispatch_dump(SDPA) == kernels


def test_contexts_nest_and_restore() -> None:
    with torch_fattn.installed():
        with torch_fattn.installed():
            assert routes()
        assert routes()
        torch_fattn.uninstall()
        assert routes(), "the block goes on"
    assert not routes()
    torch_fattn.install()
    with contextlib.suppress(KeyError), torch_fattn.installed():
        raise KeyError
    assert routes()


def test_contexts_of_threads_overlap() -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with torch_fattn.installed():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with torch_fattn.installed():
        thread.start()
        inside.wait()
    assert routes(), "the other block goes on"
    leave.set()
    thread.join()
    assert not routes()


CALLS_WHILE_IT_IS_TURNED = """
import threading
import torch
import torch.nn.functional as F
import torch_fattn

torch_fattn.install()
query, key, value = (torch.randn(1, 2, 4, 16, device="mps") for _ in range(3))
done = threading.Event()

def turn():
    while not done.is_set():
        with torch_fattn.installed():
            pass
        torch_fattn.uninstall()

thread = threading.Thread(target=turn)
thread.start()
for _ in range(2000):
    leaf = query.clone().requires_grad_()
    F.scaled_dot_product_attention(leaf, key, value).sum().backward()
    F.scaled_dot_product_attention(query, key, value)
done.set()
thread.join()
"""


def test_other_threads_may_call_while_it_is_turned() -> None:
    """In a separate process: removing kernels from torch's table during a call crashes it."""
    done = run_python(["-c", CALLS_WHILE_IT_IS_TURNED])
    assert done.returncode == 0, done.stderr[-2000:]


def test_torchs_own_switch() -> None:
    assert "fattn" in torch.nn.attention.list_flash_attention_impls()
    torch.nn.attention.activate_flash_attention_impl("fattn")
    with torch_fattn.installed():
        assert routes()
    assert routes(), "who turned it on turns it off"
    torch.nn.attention.restore_flash_attention_impl()
    assert not routes()
    torch.nn.attention.activate_flash_attention_impl("fattn")
    with torch_fattn.installed():
        pass
    torch_fattn.uninstall()
    assert not routes(), "ours turns it off too"
    torch_fattn.install()
    torch.nn.attention.restore_flash_attention_impl()  # behind our back
    assert not routes()
    torch_fattn.install()
    assert routes()
    torch.nn.attention.restore_flash_attention_impl()
    with torch_fattn.installed():
        assert routes()
    assert not routes(), "a block leaves off what was turned off"


def test_another_implementation_comes_back() -> None:
    calls: list[str] = []

    class Handle:
        def remove(self) -> None:
            calls.append("off")

    def activate() -> Handle:
        calls.append("on")
        return Handle()

    torch.nn.attention.register_flash_attention_impl("another", register_fn=activate)
    torch.nn.attention.activate_flash_attention_impl("another")
    with torch_fattn.installed():
        assert routes() and torch.nn.attention.current_flash_attention_impl() == "fattn"
    assert torch.nn.attention.current_flash_attention_impl() == "another" and calls == ["on", "off", "on"]
    torch.nn.attention.restore_flash_attention_impl()


def test_import_changes_and_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    script = (
        "import warnings; warnings.simplefilter('error'); import torch; "
        f"a = torch._C._dispatch_dump('{SDPA}'); import torch_fattn; "
        f"assert a == torch._C._dispatch_dump('{SDPA}'); torch_fattn.install(); "
        f"assert a != torch._C._dispatch_dump('{SDPA}')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    with caplog.at_level(logging.INFO), warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_fattn.install()
    assert not caplog.records


@pytest.mark.parametrize("context", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
def test_grad_modes(context: Callable[[], Any]) -> None:
    with torch_fattn.installed(), context():
        out = F.scaled_dot_product_attention(*operands(), is_causal=True)
    assert torch_fattn.report().routed == 1 and not out.requires_grad
    exact = F.scaled_dot_product_attention(*(t.cpu().double() for t in operands()), is_causal=True)
    assert (out.cpu().double() - exact).abs().max() < 1e-6


def test_transforms_are_torchs() -> None:
    query, key, value = operands()
    exact = F.scaled_dot_product_attention(*(t.cpu() for t in (query, key, value)))

    def total(query: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value).sum()

    gradient = torch.func.grad(total)(query)
    with torch_fattn.installed(), counted_launches() as launches:
        mapped = torch.func.vmap(F.scaled_dot_product_attention, in_dims=(1, 1, 1), out_dims=1)
        together = mapped(*(t.unsqueeze(1) for t in (query, key, value))).squeeze(1)
        assert torch.equal(torch.func.grad(total)(query), gradient)
    assert not launches
    assert torch.allclose(together.cpu(), exact, atol=1e-6)


@pytest.mark.parametrize(
    ("backends", "reason"),
    [
        (SDPBackend.MATH, {"math_asked": 1}),
        (SDPBackend.FLASH_ATTENTION, {}),
        ([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION], {}),
    ],
)
def test_sdpa_kernel(backends: Any, reason: dict[str, int]) -> None:
    with torch_fattn.installed(), sdpa_kernel(backends):
        F.scaled_dot_product_attention(*operands())
    assert torch_fattn.report().fallbacks_by_reason() == reason
    assert torch_fattn.report().routed == (0 if reason else 1)


class Wrapped(Tensor):
    """A subclass that sees the ops below torch's functions."""

    seen: list[str] = []

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        self = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        self.inner = inner
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(func))
        unwrap = lambda x: x.inner if isinstance(x, Wrapped) else x  # noqa: E731
        out = func(*(unwrap(a) for a in args), **{k: unwrap(v) for k, v in (kwargs or {}).items()})
        return torch.utils._pytree.tree_map_only(Tensor, Wrapped, out)


def test_a_subclass_sees_the_same_calls() -> None:
    query, key, value = operands()
    seen = []
    for context in (torch_fattn.installed, contextlib.nullcontext):
        Wrapped.seen = []
        with context():
            F.scaled_dot_product_attention(Wrapped(query), Wrapped(key), Wrapped(value))
        seen.append(Wrapped.seen)
    assert seen[0] == seen[1] and not any("fattn" in op for op in seen[0])
    assert torch_fattn.report().fallbacks_by_reason() == {"subclass": 1}


class Plain(Tensor):
    """A subclass that changes nothing."""


@pytest.mark.parametrize(
    "operand_of",
    [Wrapped, lambda t: t.as_subclass(Plain), Tensor.detach],
    ids=["wrapper", "subclass", "plain"],
)
@pytest.mark.parametrize("rank", [4, 5])
def test_sdpa_counts_a_call_once(rank: int, operand_of: Callable[[Tensor], Tensor]) -> None:
    """torch_fattn.sdpa gives subclasses to torch's function, which install() routes."""
    operand = operand_of(torch.randn(*[2] * (rank - 2), 9, 16, device="mps"))
    with torch_fattn.installed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_fattn.sdpa(operand, operand, operand)
    assert torch_fattn.report().calls == 1


def test_an_internal_refusal_does_not_surface() -> None:
    """So many batches are above a limit here and nothing to torch."""
    query = torch.randn(2**30 + 1, 1, 0, 8, device="mps")
    with torch_fattn.installed(), counted_launches() as launches:
        out = F.scaled_dot_product_attention(query, query, query)
    assert out.shape == query.shape and not launches
    report = torch_fattn.report()
    assert report.fallbacks_by_reason() == {"refused": 1}
    assert "batch 1073741825 is above" in report.fallbacks[0].example


# The second where a Mac has no buffer of that size at all.
WORDS_OF_THE_ALLOCATOR = "^(MPS backend out of memory|Invalid buffer size)"


def test_out_of_memory_is_no_refusal() -> None:
    """torch's way needs no less, and who frees memory and calls again must hear of it."""
    query = torch.zeros(1, 1, 1, 576, device="mps").expand(4000, 16000, 64, 576)
    with torch_fattn.installed(), pytest.raises(RuntimeError, match=WORDS_OF_THE_ALLOCATOR):
        F.scaled_dot_product_attention(query, query[:, :, :1], query[:, :, :1])
    assert torch_fattn.report().calls == 0


A_LIBRARY_BEFORE_US = """
import torch
import torch.nn.functional as F
import torch_fattn

def theirs(query, key, value, *arguments, **options):
    seen.append(query.shape)
    return torch.zeros_like(query)

seen, libraries = [], []
for key in KEYS:
    libraries.append(torch.library.Library("aten", "IMPL"))
    libraries[-1].impl("scaled_dot_product_attention", theirs, key)
wide, even = (torch.randn(1, 2, 5, dim, device="mps") for dim in (584, 16))
with torch_fattn.installed():
    F.scaled_dot_product_attention(even, even, even)
    assert not seen
    F.scaled_dot_product_attention(wide, wide, wide)
    F.scaled_dot_product_attention(even.clone().requires_grad_(), even, even)
    assert len(seen) == 2
    report = torch_fattn.report()
    assert report.routed == 1 and report.fallbacks_by_reason() == {"head_dim": 1, "small_training": 1}, report
    for library in libraries:
        library._destroy()
    exact = F.scaled_dot_product_attention(wide.cpu(), wide.cpu(), wide.cpu())
    for leaf in (wide, wide.clone().requires_grad_()):
        for context in (torch.enable_grad, torch.inference_mode):
            with context():
                out = F.scaled_dot_product_attention(leaf, wide, wide)
            assert torch.allclose(out.detach().cpu(), exact, atol=1e-5)
            assert out.requires_grad == (leaf.requires_grad and context is torch.enable_grad)
F.scaled_dot_product_attention(wide, wide, wide)
assert len(seen) == 2
"""


@pytest.mark.parametrize("keys", [["MPS"], ["AutogradMPS"], ["MPS", "AutogradMPS"]])
def test_a_library_before_us(keys: list[str]) -> None:
    """Its kernels get what we leave, each call counted once; when it is gone, torch's own do."""
    done = run_python(["-c", f"KEYS = {keys}\n{A_LIBRARY_BEFORE_US}"])
    assert done.returncode == 0, done.stderr[-2000:]


def test_multihead_attention_and_encoder() -> None:
    attention = nn.MultiheadAttention(64, 4, batch_first=True).eval()
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, batch_first=True), 2).eval()
    x = torch.randn(2, 9, 64)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 6:] = True
    with torch.no_grad():
        expected = attention(x, x, x, need_weights=False)[0], encoder(x, src_key_padding_mask=padding)
        on_gpu, attention, encoder = x.to("mps"), attention.to("mps"), encoder.to("mps")
        with torch_fattn.installed():
            ours = (
                attention(on_gpu, on_gpu, on_gpu, need_weights=False)[0],
                encoder(on_gpu, src_key_padding_mask=padding.to("mps")),
            )
    assert torch_fattn.report().routed == 3 and torch_fattn.report().share == 1.0
    for a, b in zip(ours, expected, strict=True):
        rows = ~padding if a.shape == expected[1].shape and b is expected[1] else torch.ones_like(padding)
        assert torch.allclose(a.cpu()[rows], b[rows], atol=1e-5)


def test_cpu_tensors_are_not_seen() -> None:
    with torch_fattn.installed():
        F.scaled_dot_product_attention(*(t.cpu() for t in operands()))
    assert torch_fattn.report().calls == 0


def test_the_report_reads_well() -> None:
    with torch_fattn.installed():
        for _ in range(3):
            F.scaled_dot_product_attention(*operands())
        F.scaled_dot_product_attention(*operands(*[(2, 4, 9, 584)] * 3), is_causal=True)
        report = torch_fattn.report()
    assert (report.calls, report.routed, report.fell_back, report.share) == (4, 3, 1, 0.75)
    text = str(report)
    assert text.startswith("torch_fattn is installed: 3 of 4 attention calls routed (75%)\n")
    assert "head_dim: a head size is not from 1 to 576" in text
    assert "e.g. query [2, 4, 9, 584] torch.float32" in text and "is_causal" in text
    assert "need_weights=True" in text
    assert str(torch_fattn.report()).startswith(
        "3 of 4 attention calls routed (75%); torch_fattn is not installed now\n"
    )
    torch_fattn.reset_report()
    assert torch_fattn.report().calls == 0 and not torch_fattn.report().fallbacks


def test_every_reason_has_a_message() -> None:
    from torch_fattn.integrations.pytorch.report import REASONS

    assert list(REASONS) == list(torch.ops.fattn._fallbacks(traced=False))
    assert torch.ops.fattn._reason_name(1) == "gradients"
