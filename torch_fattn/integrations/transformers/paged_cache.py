"""`PagedCache`: keys and values of `generate` in a `torch_fattn.PagedKVCache`, and the attention over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs

from ...caches import CacheFullError, CacheStep, PagedKVCache
from ...caches.memory import check_sizes
from ...operators.differentiable import needs_gradient
from ...operators.head_padding import HEAD_STEP, pad_heads, without_padding
from ...operators.kv_formats import check_format
from ...runtime.signatures import public
from .call import Call
from .fusion.deferred import plain, waiting
from .packing import restarts_of
from .support import FLASH_NAME
from .support import NAME as ATTENTION_NAME
from .unsupported import (
    MeaningRefusedError,
    refusal_of_operator,
    refuse_keywords,
    refuse_meaning,
    refuse_training,
)
from .visibility import read

NAME = "PagedCache"
CACHE_NAME = "fattn_paged"
_BLOCK_SIZE = 16
_USE_DYNAMIC = "use DynamicCache for this model"
_SETTINGS = {"num_blocks", "block_size", "kv_format"}
_KINDS = {"full_attention": False, "sliding_attention": True}


def _refuse_failed() -> NoReturn:
    raise RuntimeError(
        f"{NAME}: a layer lacks the tokens of a forward that failed, and others have them; crop() all tokens "
        "of that forward, or reset() the PagedCache"
    )


class _Group:
    """Layers that see the same keys, and so share the block table of each sequence."""

    def __init__(self, sizes: dict[str, Any], config: PreTrainedConfig) -> None:
        self.layers = 0
        self.config = config
        self.sequences: list[int] = []  # one per row of the batch
        self._real: Tensor | None = None  # bool [B, n]: which tokens are stored; None: all
        self.cache: PagedKVCache | None = None
        self._sizes = sizes
        self._step: tuple[CacheStep, Tensor | None] | None = None
        self._done: dict[int, bool] = {}  # layers that the step has reached: whether they have its tokens

    def allocate(self, key: Tensor, value: Tensor) -> PagedKVCache:
        """Returns the cache, with a sequence for each row of `key` and `value` `[B, Hkv, n, D]`; creates it
        on first use."""
        if self.cache is None:
            head_dim, value_dim = (
                operand.shape[-1] + -operand.shape[-1] % HEAD_STEP for operand in (key, value)
            )
            self.cache = PagedKVCache(
                self.layers,
                num_kv_heads=key.shape[1],
                head_dim=head_dim,
                value_dim=value_dim,
                dtype=key.dtype,
                device=key.device,
                max_sequences=2**20,  # tables grow as they are needed
                **self._sizes,
            )
        if not self.sequences:
            self.sequences = [self.cache.allocate() for _ in range(key.shape[0])]
        return self.cache

    def step(
        self, layer: int, batch: int, rows: int, real: Tensor | None, has_window: bool
    ) -> tuple[CacheStep, Tensor | None]:
        """Makes room for new tokens, once for all layers of a forward. If some are padding (`real` `[B, n]`,
        stored tokens included, is False), also returns the indices of the others among all `batch * rows`."""
        assert self.cache is not None
        if len(self.sequences) != batch:
            raise ValueError(
                f"{NAME}: the batch has {batch} sequences and the cache {len(self.sequences)}; make a cache "
                "for each batch"
            )
        if self._step is None or layer in self._done:
            if self.lacks_tokens:
                _refuse_failed()
            counts, kept = [rows] * batch, None
            gaps = 0
            if real is None:
                agrees = self._real is None or bool(self._real.all())
            else:
                new, before = real[:, -rows:], real[:, :-rows]
                same = before if self._real is None else before == self._real
                runs = torch.nn.functional.pad(real, (1, 0)).long().diff().eq(1).sum(-1).max()
                *counts, agrees, gaps = torch.cat((new.sum(-1), same.all()[None], runs[None] - 1)).tolist()
                if min(counts) < rows:
                    kept = new.flatten().nonzero()[:, 0]
            if not agrees:
                raise MeaningRefusedError(
                    f"{NAME}: attention_mask hides other tokens than the padding that came before; pass the "
                    "mask of all tokens in every forward, or use DynamicCache"
                )
            if has_window and gaps > 0:
                raise MeaningRefusedError(
                    f"{NAME}: a window would not count the padding between tokens, which is not stored; pad "
                    "on the left, or use DynamicCache"
                )
            stored = None if real is None else real.clone()
            self._step, self._done = (self._extend(self.cache, counts), kept), {}
            self._real = stored
        self._done[layer] = False
        return self._step

    @property
    def lacks_tokens(self) -> bool:
        """Whether a layer that the step has reached lacks its tokens."""
        return not all(self._done.values())

    def finish(self, layer: int) -> None:
        self._done[layer] = True
        if len(self._done) == self.layers and all(self._done.values()):
            self._step = None  # frees its memory

    def _extend(self, cache: PagedKVCache, counts: Sequence[int]) -> CacheStep:
        try:
            return cache.extend(self.sequences, counts)
        except CacheFullError as error:  # its advice is for callers of PagedKVCache
            what = str(error).partition("; ")[0].partition(": ")[2]
            raise CacheFullError(
                f"{NAME}: {what}; make the PagedCache with a larger num_blocks, or pass fewer tokens"
            ) from None
        except ValueError:
            _refuse_failed()

    def select(self, rows: Sequence[int]) -> None:
        """Selects these rows of the batch, with repetitions."""
        if self.cache is None:
            return
        for row in set(range(len(self.sequences))).difference(rows):
            self.cache.free(self.sequences[row])
        first = dict.fromkeys(rows)
        before, self.sequences = self.sequences, []
        for row in rows:
            self.sequences.append(before[row] if row in first else self.cache.fork(before[row]))
            first.pop(row, None)
        self._real = None if self._real is None else self._real[list(rows)]
        self._step = None

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens, padding included."""
        stored = [length] * len(self.sequences)
        if self._real is not None:
            self._real = self._real[:, :length]
            stored = self._real.sum(-1).tolist()
        for sequence, count in zip(self.sequences, stored, strict=True):
            assert self.cache is not None
            self.cache.truncate(sequence, min(self.cache.length(sequence), count))
        self._step, self._done = None, {}

    def free(self) -> None:
        for sequence in self.sequences:
            assert self.cache is not None
            self.cache.free(sequence)
        self.sequences, self._real, self._step, self._done = [], None, None, {}


class Stored(Tensor):
    """Keys or values `[B, Hkv, L, D]` of a layer, without memory; `arrived` `[B, Hkv, n, D]` are not stored
    yet. The attention function reads the cache's blocks in place. Any other use raises, since it would copy
    all keys."""

    layer: PagedLayer
    arrived: Tensor

    @staticmethod
    def of(layer: PagedLayer, arrived: Tensor, length: int) -> Stored:
        shape = (*arrived.shape[:2], length, arrived.shape[3])
        made = Stored._make_wrapper_subclass(Stored, shape, dtype=arrived.dtype, device=arrived.device)
        made.layer, made.arrived = layer, arrived
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        what = f"PagedCache: {func.__name__.partition('.')[0]} cannot read keys that are stored in blocks"
        stored = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, Stored))
        if stored.layer.group.config._attn_implementation in (ATTENTION_NAME, FLASH_NAME):
            what += ", which this model does outside of its attention function (as in latent attention)"
            raise NotImplementedError(f"{what}; use DynamicCache for it")
        raise NotImplementedError(
            f'{what}; load the model with attn_implementation="fattn", or use DynamicCache for it'
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Stored(shape={list(self.shape)}, dtype={self.dtype}, device={self.device})"


class PagedLayer(CacheLayerMixin):
    """A layer of the cache. Lengths count padding, as in transformers' own caches, though it is not
    stored."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, group: _Group, is_sliding: bool) -> None:
        super().__init__()
        self.group, self.index, self.is_sliding = group, group.layers, is_sliding
        group.layers += 1
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.group.allocate(key_states, value_states)

    def update(
        self, key_states: Tensor, value_states: Tensor, *arguments: Any, **keywords: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores nothing yet: the attention function stores the tokens, since it knows the padding."""
        length = self.length + key_states.shape[2]
        return Stored.of(self, key_states, length), Stored.of(self, value_states, length)

    def finish(self, length: int) -> None:
        """Records that the layer has all tokens of a forward."""
        self.length = length
        self.group.finish(self.index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1


def attend_stored(call: Call, attention_mask: Tensor | None) -> Tensor:
    """Attention of the newest rows over `Stored` keys and values; out is `[B, n, Hq, Dv]`, 0 for padding."""
    module, key, value = call.module, cast(Stored, call.key), cast(Stored, call.value)
    if needs_gradient(call.query, key.arrived, value.arrived, call.s_aux):
        refuse_training(module, "a PagedCache has no backward")
    if call.position_bias is not None:
        refuse_meaning(module, "a position bias over a PagedCache is not implemented", _USE_DYNAMIC)
    refuse_keywords(module, call.keywords, separates=attention_mask is not None and attention_mask.ndim == 4)
    causal = getattr(module, "is_causal", True) if call.is_causal is None else call.is_causal
    if call.rows > 1 and not causal:
        refuse_meaning(module, "rows that are not causal cannot use a PagedCache", _USE_DYNAMIC)
    real = None
    if attention_mask is not None:
        mask = read(attention_mask, call.rows, call.keys)
        if mask is None or not mask.is_causal or mask.packed is not None:
            refuse_meaning(
                module, "a PagedCache stores no padding, to which a 4D mask could apply", _USE_DYNAMIC
            )
        call, real = replace(call, mask=mask), mask.real_tokens
    if real is None and restarts_of(call.keywords.get("position_ids"), call.query, call.keys) is not None:
        refuse_meaning(
            module, "positions restart, and a row of a PagedCache is one sequence", "pass use_cache=False"
        )
    batch, rows = call.query.shape[0], call.rows
    query, new_key, new_value, scale = pad_heads(call.query, key.arrived, value.arrived, call.scaling)
    rotation = waiting(new_key)  # which padding would have launched
    options = call.options | {"scale": scale, "window_left": call.window_left}
    layer = key.layer
    try:
        cache = layer.group.allocate(key.arrived, value.arrived)
        real = None if real is None else real[:, 0, 0]
        has_window = 0 <= call.window_left < call.keys
        step, kept = layer.group.step(layer.index, batch, rows, real, has_window)
        if kept is None and rotation is not None:
            append = partial(cache.append_rotated, layer.index, step)
            rotation.store(partial(_append_rotated, append), new_value)
        else:
            new = _packed(new_key, new_value)
            if kept is not None:
                new = [operand[kept] for operand in new]
            cache.append(layer.index, step, new[0], new[1])
        query = plain(query)
        if kept is None:
            out = cache.decode(layer.index, step, query, token_major_out=True, **options).transpose(1, 2)
        else:
            out = cache.prefill(layer.index, step, _packed(query)[0][kept], is_causal=True, **options)
            out = out.new_zeros(batch * rows, *out.shape[1:]).index_copy(0, kept, out)
            out = out.unflatten(0, (batch, rows))
    except MeaningRefusedError:
        raise
    except (NotImplementedError, TypeError, ValueError) as refusal:
        raise refusal_of_operator(module, refusal) from refusal
    layer.finish(call.keys)
    return without_padding(out, value.shape[-1])


def _append_rotated(append: Callable[..., Tensor], *operands: Tensor, **options: Any) -> Tensor:
    *heads, cos, sin = operands
    batch = heads[0].shape[0]
    tables = (table.expand(batch, -1, -1).flatten(0, 1) for table in (cos, sin))
    return append(*_packed(*heads), *tables, **options).unflatten(0, (batch, -1)).transpose(1, 2)


def _packed(*operands: Tensor) -> list[Tensor]:
    """`[B, H, L, D]` as rows `[B * L, H, D]`."""
    return [operand.transpose(1, 2).flatten(0, 1) for operand in operands]


class PagedCache(Cache):
    """A cache for `generate(past_key_values=...)` of a decoder-only model with `attn_implementation="fattn"`.
    Attention reads the stored blocks in place, quantised or not.

    Args:
        config: the model's config. Layers have full attention or a sliding window.
        num_blocks: blocks of each layer, for all sequences together.
        block_size: tokens of a block.
        kv_format: "auto" (the dtype of the keys), "int8", "fp8_e4m3" or "int4", as in `PagedKVCache`. A
            prompt's attention also reads its stored keys.

    `generate(cache_implementation="fattn_paged", cache_config={"kv_format": ...})` makes a cache of the
    needed size. Padding is not stored. Beams and copies of a sequence share blocks until they differ. Layers
    with a window keep all keys. `crop` drops rejected drafts of assisted generation.

    CacheFullError: too few blocks; the cache is unchanged. RuntimeError: the previous forward failed after
    some layers had stored its tokens; `crop` undoes it.
    """

    @public(NAME)
    def __init__(
        self,
        config: PreTrainedConfig,
        num_blocks: int,
        *,
        block_size: int = _BLOCK_SIZE,
        kv_format: str = "auto",
    ) -> None:
        check_sizes(NAME, 1, num_blocks=num_blocks, block_size=block_size)
        check_format(NAME, kv_format, "auto")
        if config.is_encoder_decoder:
            raise NotImplementedError(
                f"{NAME}: a model of {type(config).__name__} has an encoder, too; use DynamicCache for it"
            )
        config = config.get_text_config(decoder=True)
        kinds, _ = get_layer_types_and_kwargs(config)
        for kind in kinds:
            if kind not in _KINDS:
                raise NotImplementedError(
                    f"{NAME}: {kind} layers are not implemented; use DynamicCache for them"
                )
        sizes = {"num_blocks": num_blocks, "block_size": block_size, "kv_format": kv_format}
        self._groups = {kind: _Group(sizes, config) for kind in dict.fromkeys(kinds)}
        self._layers: list[PagedLayer] = []
        for kind in kinds:
            self._layers.append(PagedLayer(self._groups[kind], _KINDS[kind]))
        self._before, self._rows = 0, 0  # the length before the last forward, and its tokens
        super().__init__(layers=list(self._layers))

    @property
    def caches(self) -> tuple[PagedKVCache, ...]:
        """The caches of full-attention layers and of sliding layers, after the first forward."""
        return tuple(group.cache for group in self._groups.values() if group.cache is not None)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *arguments: Any, **keywords: Any
    ) -> tuple[Tensor, Tensor]:
        length = self._layers[layer_idx].length
        if layer_idx == 0:
            if self._has_failed:
                _refuse_failed()
            self._before, self._rows = length, key_states.shape[2]
        elif length != self._before:
            _refuse_failed()
        return super().update(key_states, value_states, layer_idx, *arguments, **keywords)

    def reset(self) -> None:
        """Frees all sequences."""
        self._each(_Group.free, length=0)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select([row for row in range(self._batch()) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(torch.arange(self._batch(), device="cpu")[indices.cpu()].tolist())

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the newest `-tokens_to_remove` tokens of every sequence, or undoes a forward of that many
        tokens that failed in a layer."""
        tokens_to_remove = int(tokens_to_remove)  # assisted generation passes a tensor
        if tokens_to_remove > 0:
            raise ValueError(
                f"{NAME}.crop: tokens_to_remove is {tokens_to_remove}; to drop n tokens, pass -n"
            )
        length = self.get_seq_length()
        if self._has_failed:
            length = self._before + self._rows
            if -tokens_to_remove < self._rows:
                _refuse_failed()
        if tokens_to_remove:
            left = max(length + tokens_to_remove, 0)
            self._each(_Group.truncate, left, length=left)

    def activate_past_recording(self) -> None:
        """No effect: any number of tokens can be dropped."""

    @property
    def _has_failed(self) -> bool:
        """Whether layers in use lack tokens that others have."""
        lengths = {layer.length for layer in self._layers if layer.length}
        return len(lengths) > 1 or any(group.lacks_tokens for group in self._groups.values())

    def _batch(self) -> int:
        return max(len(group.sequences) for group in self._groups.values())

    def _select(self, rows: Sequence[int]) -> None:
        if self._has_failed:
            _refuse_failed()
        self._each(_Group.select, rows, length=self.get_seq_length())

    def _each(self, change: Any, *arguments: Any, length: int) -> None:
        for group in self._groups.values():
            change(group, *arguments)
        for layer in self._layers:
            layer.length = min(layer.length, length)


def cache_of(config: PreTrainedConfig, sequences: int, length: int, settings: dict[str, Any]) -> PagedCache:
    """A cache for that many sequences of up to that length. settings: arguments of PagedCache."""
    for name in settings.keys() - _SETTINGS:
        raise ValueError(
            f"{NAME}: cache_config has {name!r}, and takes num_blocks, block_size and kv_format; pass "
            '{"kv_format": "int8"}, "fp8_e4m3" or "int4" for a quantised cache'
        )
    size = settings.get("block_size", _BLOCK_SIZE)
    return PagedCache(config, **({"num_blocks": sequences * -(-length // size)} | settings))
