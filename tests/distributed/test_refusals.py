"""What the packed form refuses as a whole, since each of its sequences alone would do."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.public_calls import heads, one_rank
from torch_fattn import distributed
from torch_fattn.distributed import Shards

pytestmark = pytest.mark.host_only


@pytest.mark.parametrize("sequences", [1, 3])
def test_slopes_of_other_sequences(sequences: int) -> None:
    packed, shards = heads(6, 4, 16), [Shards.sizes([3])] * 2
    call = one_rank(distributed.varlen_prefill)
    with pytest.raises(ValueError, match=rf"varlen_prefill: .* 2 and alibi_slopes has {sequences}; they"):
        call(packed, packed, packed, shards, alibi_slopes=torch.ones(sequences, 4))
    assert call(packed, packed, packed, shards, alibi_slopes=torch.ones(2, 4)).shape == packed.shape


def test_options_without_sequences() -> None:
    none = heads(0, 4, 16)
    call = one_rank(distributed.varlen_prefill)
    with pytest.raises(ValueError, match=r"^torch_fattn.distributed.varlen_prefill: softcap -1 is not"):
        call(none, none, none, [], softcap=-1.0)
    assert call(none, none, none, [], softcap=1.0).shape == none.shape
