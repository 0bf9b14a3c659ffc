"""`python -m torch_fattn tune` of calls that need gradients: forward and backward, torch's and ours."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.commands.test_tune import ONE, PREFILL, Tune, half_with_eight, tune
from tests.conftest import counted_launches
from tests.helpers.tuned import install, this_chip
from torch_fattn.tuning.candidates import Subject
from torch_fattn.tuning.choice import against_torch
from torch_fattn.tuning.tuned_file import path_of

__all__ = ["install", "tune"]

TRAINING, CAUSAL = (Subject(kernel, "float16", 1, 64, 64) for kernel in ("training", "training_causal"))


@pytest.mark.host_only
def test_forward_and_backward_have_routes_of_their_own() -> None:
    """Dense and causal calls. torch's are kept, too: the report names them."""
    for subject, other in ((TRAINING, CAUSAL), (CAUSAL, TRAINING)):
        ours, torchs = {0: 1.0, 1: 1.0}, {0: 0.5, 1: 1.25}
        short, route = against_torch(subject, ours, torchs, {}, 0.0, ("26.2", "2.14"))
        assert (short.to, short.gain, short.max_length) == ("torch", 2.0, 512)
        assert against_torch(subject, ours, {0: 0.98, 1: 1.02}, {}, 0.0, ("26.2", "2.14")) == []
        assert (route.op, route.to, route.gain) == (subject.kernel, "fattn", 1.25)
        assert (route.dtype, route.dim, route.min_length, route.max_length) == ("float16", 64, 513, None)
        assert subject.is_of(route) and not other.is_of(route) and not PREFILL.is_of(route)
        assert bool(subject.options) == (subject is CAUSAL)


def test_training_is_timed(tune: Tune) -> None:
    def routes(arguments: str, training: float, to: str = "fattn") -> list[tuple[str, str, int, float]]:
        tune.made_up(half_with_eight, training=training)
        said.append(tune(f"--anyway --head-dim 64 {arguments}"))
        found = tune.kept("routes")
        return [(r["op"], r["dtype"], r["min_length"], r["gain"]) for r in found if r["to"] == to]

    said: list[str] = []
    kinds = ("training", "training_causal")
    both = [(kind, "float16", length, 1.25) for kind in kinds for length in (64, 513)]
    assert routes("--op training --dtype float16", 1.0) == []
    assert routes("--op training --dtype float16", 1.25, to="torch") == both
    assert routes("--op training --dtype float16", 0.8) == both
    assert "dense calls with gradients of D 64 and 64 to 512 rows: fattn is 1.25 times as fast" in said[-1]
    assert "causal calls with gradients of D 64 and 513 and more rows: fattn is 1.25 times" in said[-1]
    assert routes("--op prefill", 0.5) == both, "what was not timed now is kept"
    assert len(routes("", 0.5)) == 3 * len(both)
    assert routes("--op training", 1.0) == []
    routes("--op training", 0.8)
    assert tune("--show").count("training_causal bfloat16: causal calls with gradients of D 64") == 2


@pytest.mark.parametrize("who", ["torch", "fattn"])
def test_a_backward_that_does_not_fit(who: str, tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no route, and the tuning goes on."""
    owner, name = {"torch": (F, "scaled_dot_product_attention"), "fattn": (torch.ops.fattn, "attention")}[who]

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("MPS backend out of memory\nand more")

    monkeypatch.setattr(owner, name, full)
    message = tune(f"{ONE} --op training")
    first = f"dropped      2 that this GPU does not run, first training float16 D 1 to 64, {who}: MPS backend"
    assert f"{first} out of memory\n" in message and "timed        2 kinds of calls" in message
    assert not path_of(this_chip()).exists()


def test_training_end_to_end(tune: Tune) -> None:
    """Both lengths, dense and causal: ours compiles once and is timed twice under two names."""
    with counted_launches() as launches:
        assert "timed        2 kinds of calls" in tune(f"{ONE} --op training")
    kernels = ("fattn_prefill", "fattn_backward_query", "fattn_backward_key")
    assert [launches[kernel] for kernel in kernels] == [2 * 2 * 2 * 2] * 3
