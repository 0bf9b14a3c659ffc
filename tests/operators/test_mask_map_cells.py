"""mask_map: the map of every kind and layout of mask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torch_fattn
from tests.conftest import Checked, counted_launches, needs_emulator
from tests.helpers import problems
from tests.helpers.problems import Problem
from tests.helpers.wrong_calls import refusal
from tests.mutation.trial import of_map
from torch_fattn import reference

fattn = torch.ops.fattn
f32, f16, bf16 = problems.DTYPES
MASKS = [torch.bool, f32, f16, bf16]


def drawn(dtype: torch.dtype, *size: int, seed: int = 0) -> Tensor:
    batch, heads, *rows_and_keys = size
    sizes = (batch, heads, heads, *rows_and_keys, 8, 8)
    problem = Problem(seed, "prefill", f16, *sizes, mask=dtype, mask_pattern="patches")
    mask = problems._mask(problem, torch.Generator().manual_seed(seed))
    assert mask is not None
    return mask


@pytest.mark.parametrize(
    "size", [(1, 1, 1, 1), (2, 3, 16, 32), (1, 2, 17, 33), (2, 1, 100, 300), (1, 1, 5, 700)]
)
@pytest.mark.parametrize("dtype", MASKS, ids=str)
def test_every_cell(dtype: torch.dtype, size: tuple[int, ...], device: str, checked: Checked) -> None:
    mask = drawn(dtype, *size)
    with checked(), counted_launches() as launches:
        cells = torch_fattn.mask_map(mask.to(device))
    assert launches == ({"fattn_mask_map": 1} if device == "mps" else {})
    assert cells.dtype == torch.uint8 and cells.is_contiguous() and cells.device.type == device
    assert torch.equal(cells.cpu().double(), reference.mask_map(mask))


@pytest.mark.parametrize("dtype", [f32, f16, bf16], ids=str)
def test_special_mask_values(dtype: torch.dtype, device: str) -> None:
    """-inf hides, 0 and -0 add nothing; every other number is mixed: NaN, +inf, the lowest, a tiny one."""
    info = torch.finfo(dtype)
    for value, kind in (
        *((-torch.inf, 0), (0.0, 2), (-0.0, 2), (torch.inf, 1), (torch.nan, 1)),
        *((info.min, 1), (info.tiny, 1), (-info.tiny, 1)),
    ):
        mask = torch.full((20, 40), value, dtype=dtype)
        assert set(torch_fattn.mask_map(mask.to(device)).cpu().flatten().tolist()) == {kind}, value
        mask[3, 5] = -torch.inf
        assert torch_fattn.mask_map(mask.to(device))[0, 0, 0, 0] == (0 if kind == 0 else 1), value
        mask[:, 16:24] = -torch.inf
        assert torch_fattn.mask_map(mask.to(device))[0, 0, 0, 0] == (0 if kind == 0 else 1 + 4 * 4), value


def test_hidden_fragments(device: str) -> None:
    """The fragments of a mixed cell that no row sees: any of the four."""
    for shown in range(1, 16):
        mask = torch.tensor([bool(shown >> key // 8 & 1) for key in range(32)]).expand(40, 32).clone()
        mask[[5, 30]] = False
        expected = torch.full((3,), 1 + 4 * (15 & ~shown))
        if shown == 15:
            expected[2] = 2
        assert torch_fattn.mask_map(mask.to(device)).flatten().tolist() == expected.tolist()


@pytest.mark.parametrize("keys", [1, 7])
def test_a_fragment_without_all_of_its_keys(keys: int, device: str) -> None:
    """No fragment bit is set: one key may be expanded to all."""
    mask = torch.ones(20, keys, dtype=torch.bool)
    mask[3] = mask[:, 1:] = False
    assert torch_fattn.mask_map(mask.to(device)).flatten().tolist() == [1, 2 if keys == 1 else 1]


def test_layouts(device: str, checked: Checked) -> None:
    """Any strides and offsets; memory between the entries does not count."""
    mask = drawn(f32, 2, 3, 50, 90)
    exact = reference.mask_map(mask)
    store = torch.full((3, 2, 92, 104), torch.nan)
    store[:, :, 1:91, 3:103:2] = mask.permute(1, 0, 3, 2)
    view = store.to(device)[:, :, 1:91, 3:103:2].permute(1, 0, 3, 2)
    with checked():
        cells = torch_fattn.mask_map(view)
    assert torch.equal(cells.cpu().double(), exact)
    for dtype in MASKS:
        mask = drawn(dtype, 1, 1, 50, 90)[0, 0]
        flipped = mask.T.contiguous().to(device).T
        assert torch.equal(torch_fattn.mask_map(flipped).cpu().double(), reference.mask_map(mask))


def test_dimensions(device: str) -> None:
    """Up to four; those in which the mask is broadcast or expanded are read once."""
    mask = drawn(torch.bool, 2, 3, 50, 90).to(device)
    cells = torch_fattn.mask_map(mask)
    assert cells.shape == (2, 3, 4, 3)
    assert torch.equal(torch_fattn.mask_map(mask[0, 0]), cells[:1, :1])
    assert torch.equal(torch_fattn.mask_map(mask[0]), cells[:1])
    assert torch_fattn.mask_map(mask[0, 0, 7]).shape == (1, 1, 1, 3)
    assert torch_fattn.mask_map(mask[0, 0, 7, 9]).shape == (1, 1, 1, 1)
    expanded = mask[:, :1].expand(2, 8, 50, 90)
    assert torch.equal(torch_fattn.mask_map(expanded), cells[:, :1])
    assert torch_fattn.mask_map(mask[:, :, :1].expand(2, 3, 50, 90)).shape == (2, 3, 1, 3)
    assert torch.equal(fattn.mask_map(expanded), cells[:, :1].expand(2, 8, 4, 3))


@pytest.mark.host_only
def test_masks_that_are_refused() -> None:
    with refusal("fattn.mask_map", TypeError, "attn_mask is torch.int64 and must be torch.bool"):
        fattn.mask_map(torch.zeros(3, 3, dtype=torch.int64))
    with refusal("fattn.mask_map", ValueError, "attn_mask has 5 dimensions and must have at most 4"):
        fattn.mask_map(torch.zeros(1, 1, 1, 3, 3))


@needs_emulator
@pytest.mark.parametrize("slices", [0, 1, 7])
@pytest.mark.parametrize("dtype", MASKS, ids=str)
def test_a_map_is_made_in_slices(dtype: torch.dtype, slices: int) -> None:
    of_map(dtype, 2, 3, 100, 600, slice_size=slices).run()
