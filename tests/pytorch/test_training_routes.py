"""Which calls that need gradients run here: the rule, timed routes, the choice of the user and the report."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_fattn
from tests.conftest import counted_launches
from tests.helpers.tuned import Install, file_of, install
from tests.pytorch.test_sdpa import by_install, operands
from tests.pytorch.test_training import OURS, assert_same, gradients, leaves, undone
from torch_fattn.integrations.pytorch.routing import system_and_torch
from torch_fattn.tuning import tuned_file
from torch_fattn.tuning.tuned_file import TunedRoute

__all__ = ["install", "undone"]


@contextlib.contextmanager
def way_of(training: Any = "auto") -> Iterator[Callable[..., str]]:
    """A function that tells who runs a call of these sizes, without running it."""
    torch_fattn.install(training=training)

    def way(q_len: int, heads: int = 8, requires_grad: bool = True) -> str:
        with FakeTensorMode():
            query = torch.empty(1, heads, q_len, 64, device="mps", requires_grad=requires_grad)
            out = F.scaled_dot_product_attention(query, query, query)
        if out.grad_fn is None:
            return "no gradient"
        return "fattn" if out.grad_fn.name() == OURS else "torch"

    yield way


def longest_of_torch() -> int:
    """torch keeps a float32 matrix, 4 bytes for each of 8 heads, row and key. Large ones are ours."""
    return int((torch.mps.recommended_max_memory() // 256 / 4 / 8) ** 0.5)


def test_the_rule() -> None:
    longest = longest_of_torch()
    with way_of("auto") as way:
        assert way(longest - 1) == "torch" and way(longest + 1) == "fattn"
        assert way(longest // 2) == "torch" and way(longest // 2, heads=33) == "fattn"
        assert way(9, requires_grad=False) == "no gradient"
    with way_of("fused") as way:
        assert way(9) == way(longest + 1) == "fattn"
    with way_of("off") as way:
        assert way(9) == way(longest + 1) == "torch"


TIMED = TunedRoute("training_causal", "float32", 16, 64, 512, "fattn", *system_and_torch())


@pytest.fixture
def timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install: Install) -> Callable[..., str]:
    """Writes a file with these routes and reads it, as a new process does. Returns its provenance."""
    monkeypatch.setenv("FATTN_CACHE", str(tmp_path))
    monkeypatch.delenv("FATTN_TUNING", raising=False)

    def write(*routes: TunedRoute) -> str:
        file = file_of([], list(routes))
        tuned_file.write(file)
        tuned_file.load_all(torch_fattn.__version__)
        return file.provenance

    return write


OTHERS: dict[str, dict[str, Any]] = {
    "torch is faster": {"to": "torch"},
    "dense calls": {"op": "training"},
    "plain calls": {"op": "prefill"},
    "dtype": {"dtype": "float16"},
    "head size": {"dim": 24},
    "length": {"min_length": 65},
    "macOS": {"macos": "1.2"},
    "torch": {"torch": "2.9"},
}


@pytest.mark.parametrize("other", ["", *OTHERS])
def test_a_small_call_is_of_the_faster(other: str, timed: Callable[..., str]) -> None:
    """If exactly such calls were timed; the others are the control."""
    tensors = operands(*[(1, 2, 64, 16)] * 3)
    exact = gradients(F.scaled_dot_product_attention, [t.cpu().double() for t in tensors], is_causal=True)
    why = timed(replace(TIMED, **OTHERS.get(other, {})))
    torch_fattn.install()
    with counted_launches() as launches:
        mine = gradients(F.scaled_dot_product_attention, tensors, is_causal=True)
    assert_same(mine, exact)
    report = torch_fattn.report()
    if not other:
        kernels = ("fattn_prefill", "fattn_backward_query", "fattn_backward_key")
        assert [launches[kernel] for kernel in kernels] == [1] * 3
        assert report.routed_by["training"] == report.calls == 1
        assert report.bytes_saved == 4 * 2 * 64 * (64 - 17)
        return
    assert not launches and report.fallbacks_by_reason() == {"small_training": 1}
    why = why if OTHERS[other] == {"to": "torch"} else "not timed on this GPU"
    assert report.fallbacks[0].example.endswith(why)
    assert "python -m torch_fattn tune finds out" in str(report)


def test_memory_is_checked_before_times(timed: Callable[..., str]) -> None:
    """A timed route never keeps a large matrix, and a choice of the user precedes both."""
    longest = longest_of_torch()
    route = replace(TIMED, op="training", dim=64, max_length=None)
    for to in ("torch", "fattn"):
        timed(replace(route, to=to))
        with way_of("auto") as way:
            assert way(longest - 1) == to and way(longest + 1) == "fattn"
        with way_of("fused") as way:
            assert way(longest - 1) == "fattn"
        with way_of("off") as way:
            assert way(longest - 1) == way(longest + 1) == "torch"


def test_the_choice_is_undone_with_the_installation() -> None:
    for training in ("fused", "off"):
        torch_fattn.install(training=training)  # type: ignore[arg-type]
        assert torch.ops.fattn._training() == training
        torch_fattn.uninstall()
        assert torch.ops.fattn._training() == "auto"
    with pytest.raises(ValueError, match='torch_fattn.install: training is "?\'?on.*pass "auto", "fused" or'):
        torch_fattn.install(training="on")  # type: ignore[arg-type]
    assert not torch_fattn.report().installed


@pytest.mark.host_only
def test_explain_shows_the_route() -> None:
    """That of calls with gradients, by the memory of an M1 with 8 GB."""
    longest = int((5726630912 // 256 / 4 / 8) ** 0.5)

    def route(length: int, grad_lse: Any = None, **options: Any) -> Any:
        query, key = (torch.empty(1, heads, length, 64, device="meta") for heads in (8, 2))
        operands = (query, grad_lse, query, key, key, None, query[..., 0])
        return torch_fattn.explain("prefill_backward", *operands, **options).route

    assert route(longest).to == "torch" and route(longest + 1).to == "fattn"
    kept = 4 * 8 * longest**2 / 1e6
    assert route(longest).why.startswith(f"torch keeps {kept:.1f} MB, the limit is 22.4 MB; torch may be")
    assert route(longest + 1).why.endswith("; torch would keep a large matrix")
    torch_fattn.install(training="off")
    assert str(route(longest + 1)).startswith("left to torch's own kernels: torch keeps 2")
    assert route(longest + 1).why.endswith('; training="off"')
    torch_fattn.install(training="fused")
    assert route(9).to == "fattn" and route(9, is_causal=True, scale=0.2).to == "fattn"
    assert route(9, softcap=1.0) is None, "torch has no softcap"
    assert route(9, grad_lse=torch.empty(1, 8, 9, device="meta")) is None, "nor does it return lse"
    assert route(9, is_causal=True, q_offset=1) is None


def test_the_route_matches_the_call() -> None:
    """On this GPU."""
    longest = longest_of_torch()
    for length in (longest - 1, longest + 1):
        with way_of("auto") as way:
            taken = way(length)
        query = torch.empty(1, 8, length, 64, device="mps")
        plan = torch_fattn.explain("prefill_backward", query, None, query, query, query, None, query[..., 0])
        assert plan.route is not None and plan.route.to == taken
        assert f"a plain call with gradients is {str(plan.route)[:5]}" in str(plan)


def test_the_report_shows_routes_and_memory() -> None:
    tensors = leaves(operands((2, 4, 90, 16), (2, 4, 120, 16), (2, 4, 120, 16)))
    torch_fattn.install()
    F.scaled_dot_product_attention(*tensors)
    torch_fattn.install(training="fused")
    for _ in range(3):
        F.scaled_dot_product_attention(*tensors)
    torch_fattn.install(training="off")
    F.scaled_dot_product_attention(*tensors)
    report = torch_fattn.report()
    assert report.routed_by["training"] == report.routed == 3
    assert report.fallbacks_by_reason() == {"small_training": 1, "gradients": 1}
    matrix, ours = 4 * 2 * 4 * 90 * 120, 4 * 2 * 4 * 90 * (1 + 16)
    assert report.bytes_saved == 3 * (matrix - ours)
    text = str(report)
    assert "3  by fattn.attention, with gradients: torch's own would keep 890 kB more" in text
    assert f"torch keeps {matrix / 1e6:.1f} MB, the limit is " in text and 'install(training="off")' in text
    torch_fattn.reset_report()
    assert torch_fattn.report().bytes_saved == 0


def test_sdpa_follows_the_choice() -> None:
    tensors = leaves(operands())
    for training, ways in (("auto", {"small_training": 1}), ("off", {"gradients": 1}), ("fused", {})):
        torch_fattn.install(training=training)  # type: ignore[arg-type]
        torch_fattn.reset_report()
        with pytest.warns(UserWarning, match="training") if training == "off" else contextlib.nullcontext():
            torch_fattn.sdpa(*tensors)
        assert torch_fattn.report().fallbacks_by_reason() == ways
    assert by_install(*tensors).grad_fn.name() == OURS  # type: ignore[union-attr]
