"""The peers' launch rules in bench/peers: which kernel they choose, and for which version they hold."""

from __future__ import annotations

import pytest

pytest.importorskip("softmetal")

from bench import counting
from bench.arguments import WrongArgumentError
from bench.calls import Call
from bench.peers import mlx_metal, torch_metal
from bench.peers.case import Case

from .conftest import needs_emulator

pytestmark = pytest.mark.host_only

LONG = 8192


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 4, 7, 8, 12, 16, 32])
def test_groups_that_share_keys_in_mlx(group: int, head_dim: int) -> None:
    """The instantiations in mlx-metal 0.32.4, by the names in its metallib."""
    shared = {(8, 64): 8, (8, 128): 4, (12, 128): 4, (16, 128): 2}
    case = Case("decode", 1, 2 * group, 2, head_dim, 1, LONG)
    assert mlx_metal.heads_per_read(case) == shared.get((group, head_dim))


@pytest.mark.parametrize(
    ("q_len", "kv_len", "shares"),
    [(1, LONG, True), (1, LONG - 1, False), (2, LONG, False), (1, 4 * LONG, True)],
)
def test_mlx_shares_keys_in_long_caches_for_one_row(q_len: int, kv_len: int, shares: bool) -> None:
    assert (mlx_metal.heads_per_read(Case("decode", 1, 32, 2, 128, q_len, kv_len)) is not None) == shares


@needs_emulator
@pytest.mark.parametrize(
    ("group", "head_dim", "reads"), [(8, 64, 1), (8, 128, 2), (12, 128, 3), (16, 128, 8)]
)
def test_mlx_reads_keys_so_often(group: int, head_dim: int, reads: int) -> None:
    if mlx_metal.include_folder() is None:
        pytest.skip("mlx-metal is not installed, and MLX_METAL_WHEEL names no wheel of it")
    shared, error, note = counting.count_peer(mlx_metal, Call("decode", group, 1, head_dim, 1, LONG))
    assert error < 2e-3 and note.startswith("2 passes")
    assert shared.cache_ratio == reads
    shorter = Call("decode", group, 1, head_dim, 1, 1024)
    assert counting.count_peer(mlx_metal, shorter)[0].cache_ratio == group


@pytest.mark.parametrize("version", ["2.12.1", "2.14.0", "2.15.0+cpu", "3.0"])
def test_another_torch_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("prefill", 1, 2, 1, 64, 64, 64)
    assert torch_metal.launch(case) is not None
    monkeypatch.setattr(torch_metal, "version", lambda: version)
    with pytest.raises(NotImplementedError, match=rf"torch {version.split('+')[0]}.*install torch==2\.13\.0"):
        torch_metal.launch(case)


@pytest.mark.parametrize("version", ["0.31.0", "0.32.2", "0.33.0"])
def test_another_mlx_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("decode", 1, 2, 1, 72, 1, 64)  # a head size without a kernel: nothing is read from headers
    monkeypatch.setattr(mlx_metal, "include_folder", lambda: object())
    monkeypatch.setattr(mlx_metal, "version", lambda: mlx_metal.VERSION)
    assert mlx_metal.launch(case) is None
    monkeypatch.setattr(mlx_metal, "version", lambda: version)
    with pytest.raises(NotImplementedError, match=rf"MLX {version}.*mlx-metal==0\.32\.4"):
        mlx_metal.launch(case)


def test_a_wheel_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setattr(mlx_metal.importlib.util, "find_spec", lambda _: None)
    monkeypatch.delenv("MLX_METAL_WHEEL", raising=False)
    assert mlx_metal.include_folder.__wrapped__() is None
    for wrong in ("/nonexistent.whl", __file__):
        monkeypatch.setenv("MLX_METAL_WHEEL", wrong)
        with pytest.raises(
            WrongArgumentError, match="is no readable wheel; name a wheel of mlx-metal 0.32.4"
        ):
            mlx_metal.include_folder.__wrapped__()
