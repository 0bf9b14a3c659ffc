"""Shards of numbers of numpy, and tensors of every dtype that `unshard` makes whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.pool import Pool, World
from tests.helpers.tensors import same_bits
from torch_fattn.distributed import Shards, unshard

pytestmark = pytest.mark.host_only


@pytest.mark.parametrize("make", [Shards.contiguous, Shards.zigzag, lambda *n: Shards.round_robin(*n, 3)])
def test_numbers_of_numpy(make: Callable[[Any, Any], Shards]) -> None:
    """Ranks compare the checksums of their shards."""
    assert make(np.int64(10), np.int64(2)).checksum == make(10, 2).checksum != make(11, 2).checksum


WHOLE = torch.arange(15).view(5, 3)
# gloo's own collectives know neither int16 nor float8.
DTYPES = (torch.bool, torch.int16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64)


def is_made_whole(world: World, dtype: torch.dtype) -> bool:
    shards, whole = Shards.sizes([2, 3]), WHOLE.to(dtype)
    out = unshard(shards.take(whole, 0, world.rank), 0, shards, world.group)
    return out.dtype == dtype and same_bits(out, whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unshard_of_every_dtype(ranks: Pool, dtype: torch.dtype) -> None:
    assert ranks.run(2, is_made_whole, dtype) == [True, True]
