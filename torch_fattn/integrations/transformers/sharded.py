"""A cache that is sharded across processes, for `generate` with a model replicated on all of them.

    register()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="fattn_sharded")
    model.generate(**inputs, past_key_values=ShardedCache(group))

Every rank runs the whole model on the same tokens and keeps the keys and values of its blocks of positions.
Attention is `torch_fattn.distributed.decode`, or `prefill` for a prompt. Its results are bit-identical on
every rank, so the tokens are too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin
from transformers.masking_utils import causal_mask_function

from ...distributed import Shards, decode, prefill
from ...distributed.exchange import Exchange
from ...distributed.shards import positions_of
from ...operators.head_padding import pad_heads, without_padding
from ...runtime.signatures import public
from .masks import causal_window
from .packing import restarts_of, start_forward
from .unsupported import PACKING, refuse_keywords

SHARDED_NAME = "fattn_sharded"
FIRST_BLOCKS = 4  # per rank in a new cache; capacity doubles when full
FEW_ROWS = 16  # `decode` makes a mask of all its rows and the keys of this rank


class ShardedCache(Cache):
    """A cache for `attn_implementation="fattn_sharded"`.

    Args:
        group: a process group, a DeviceMesh of one dimension, or None for the default group.
        block_size: consecutive positions on one rank.
    """

    @public("ShardedCache")
    def __init__(self, group: Any = None, block_size: int = 16) -> None:
        if block_size < 1:
            raise ValueError(f"ShardedCache: block_size is {block_size} and must be at least 1")
        exchange = Exchange("ShardedCache", group)
        layer = partial(_Layer, group, exchange.rank, exchange.ranks, block_size)
        super().__init__(layer_class_to_replicate=layer)  # type: ignore[arg-type]


class _Layer(CacheLayerMixin):
    """The keys and values of a rank, `[B, Hkv, capacity, D]`."""

    is_sliding = False
    is_croppable = True
    keys: Any
    values: Any

    def __init__(self, group: Any, rank: int, ranks: int, block_size: int) -> None:
        super().__init__()
        self.group, self.rank, self.ranks, self.block_size = group, rank, ranks, block_size
        self.length = 0  # on all ranks together
        self.blocks = FIRST_BLOCKS

    @property
    def room(self) -> Shards:
        """The shards of all positions that fit the ranks' capacity."""
        return self._shards(self.blocks * self.block_size * self.ranks)

    @property
    def filled(self) -> Shards:
        return self._shards(self.length)

    def _shards(self, length: int) -> Shards:
        return Shards.round_robin(length, self.ranks, self.block_size)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        size = self.room.count(self.rank)
        self.keys, self.values = (
            states.new_empty(*states.shape[:2], size, states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != self.keys.shape[0]:
            raise ValueError(
                f"ShardedCache: {key_states.shape[0]} sequences are added to a cache of "
                f"{self.keys.shape[0]}; use a new cache"
            )
        first, length = self.length, self.length + key_states.shape[2]
        self._make_room(length)
        positions = torch.arange(first, length)
        own = positions[positions // self.block_size % self.ranks == self.rank]
        slots = own // (self.block_size * self.ranks) * self.block_size + own % self.block_size
        for memory, states in ((self.keys, key_states), (self.values, value_states)):
            memory[:, :, slots.to(self.device)] = states[:, :, (own - first).to(self.device)]
        self.length = length
        key: Any = self.keys.view_as(self.keys)
        key._fattn_layer = self  # for attend_sharded
        return key, self.values

    def _make_room(self, length: int) -> None:
        while length > self.blocks * self.block_size * self.ranks:
            self.blocks *= 2
        missing = self.blocks * self.block_size - self.keys.shape[2]
        if missing:
            self.keys, self.values = (
                torch.nn.functional.pad(memory, (0, 0, 0, missing)) for memory in (self.keys, self.values)
            )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """`-n` drops the newest n positions; `n`, as in transformers, keeps the first n."""
        number = int(tokens_to_remove)  # assisted generation passes a tensor
        kept = number if number > 0 else self.length + number
        self.length = max(min(kept, self.length), 0)

    def reset(self) -> None:
        self.length = 0


@public("torch_fattn.integrations.transformers.make_sharded_mask", ahead=False)
def make_sharded_mask(
    *,
    kv_length: int,
    config: PreTrainedConfig,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> Tensor | None:
    """The mask function: padding, bool `[B, Lk]`, or None. Layers add their windows."""
    start_forward()
    if causal_window(mask_function) is None:
        raise NotImplementedError(
            f"fattn_sharded: the masks of {type(config).__name__} are not causal; use "
            'attn_implementation="fattn", on one process'
        )
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return attention_mask[:, :kv_length].bool()


@public("torch_fattn.integrations.transformers.attend_sharded", ahead=False)
def attend_sharded(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    is_causal: bool | None = None,  # the mask function has refused other masks
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function. Returns out `[B, Lq, Hq, Dv]`."""
    layer: _Layer | None = getattr(key, "_fattn_layer", None)
    if layer is None:
        raise ValueError(
            f"fattn_sharded: {type(module).__name__} has no ShardedCache; pass past_key_values=ShardedCache()"
        )
    if dropout:
        raise NotImplementedError("fattn_sharded: there is no dropout across ranks; call model.eval()")
    rows, value_dim = query.shape[2], value.shape[3]
    is_packed = any(kwargs.get(name) is not None for name in PACKING)
    if is_packed or (attention_mask is None and restarts_of(position_ids, query, layer.length) is not None):
        raise NotImplementedError(
            "fattn_sharded: sequences are packed, and a row of a ShardedCache is one; pass each in a row of "
            "its own"
        )
    refuse_keywords(module, kwargs)
    query, key, value, scaling = pad_heads(query, key, value, scaling)
    shards = layer.room if rows <= FEW_ROWS else layer.filled
    options: dict[str, Any] = {
        "group": layer.group,
        "shards": shards,
        "scale": scaling,
        "softcap": softcap or 0.0,
        "sinks": s_aux,
        "window_left": -1 if sliding_window is None else sliding_window - 1,
        "token_major_out": True,
    }
    if attention_mask is not None:
        if attention_mask.dim() != 2:
            raise NotImplementedError(
                f"fattn_sharded: attention_mask has {attention_mask.dim()} dimensions; pass the padding, "
                "[batch, length]"
            )
        options["attn_mask"] = _own_columns(attention_mask, shards, layer.rank)
    if rows <= FEW_ROWS:
        lengths = torch.full((query.shape[0],), layer.length, dtype=torch.int32, device=query.device)
        out = decode(query, key, value, lengths, **options)
    else:
        own = shards.count(layer.rank)
        key, value = key[:, :, :own], value[:, :, :own]
        out = prefill(query, key, value, query_shards="replicated", is_causal=True, **options)
    return without_padding(out.transpose(1, 2), value_dim), None


def _own_columns(padding: Tensor, shards: Shards, rank: int) -> Tensor:
    """The padding of a rank's positions, bool `[B, 1, 1, count]`."""
    missing = shards.length - padding.shape[1]
    whole = torch.nn.functional.pad(padding, (0, missing))
    return whole.index_select(1, positions_of(shards, rank, padding.device))[:, None, None]
