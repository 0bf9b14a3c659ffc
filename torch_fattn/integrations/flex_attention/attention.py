"""`flex_attention`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from operator import and_
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from ...operators import block_mask as block_masks
from ...operators.attention import prefill
from ...operators.differentiable import attention, needs_gradient
from ...operators.head_padding import pad_heads, without_padding
from ...operators.mask_map import mask_map
from ...operators.visibility import expanded_blocks, masked
from ...runtime.signatures import public
from ...runtime.tensor_checks import check_shape
from ...runtime.tracing import untraced
from .positions import Box, boxes_of, meet, options_of
from .score_mods import NAME, biases_of, modified_by
from .tracing import INDICES, evaluate, everywhere, symbols_of, trace


class _Seen(NamedTuple):
    """The visible keys of a BlockMask: those in a box and, if there are blocks or a mask, visible in them."""

    boxes: list[Box]
    mask: Tensor | None = None
    mask_map: Tensor | None = None
    blocks: tuple[Tensor, tuple[int, int]] | None = None  # and their size


class _Prepared(NamedTuple):
    """The cached results of a BlockMask."""

    state: Any  # of its lists of blocks
    held: tuple[Any, ...]  # objects that `state` identifies by address
    places: Tensor  # the blocks in which mask_mod is evaluated
    blocks: tuple[Tensor, tuple[int, int]] | None  # if there are no such places
    mask_mod: str = ""  # its trace, if nothing that it reads can change
    seen: _Seen = _Seen([])  # by that mask_mod


_prepared: WeakKeyDictionary[BlockMask, _Prepared] = WeakKeyDictionary()


@public("torch_fattn.integrations.flex_attention.mask_of")
def mask_of(block_mask: BlockMask) -> Tensor:
    """The bool mask `[B, H, Lq, Lk]` of a BlockMask, True = attend, for `torch_fattn.prefill` with
    `mask_map=torch_fattn.mask_map(block_mask)`. B and H are those of the BlockMask, and may be 1. As in
    FlexAttention's kernels, `mask_mod` is evaluated only in listed blocks that are not full.

    Raises ValueError for a slice whose seq_lengths were not set. Listed blocks out of range are ignored; with
    FATTN_CHECK=1 in the environment they raise ValueError.
    """
    return block_masks.mask_of("torch_fattn.integrations.flex_attention.mask_of", block_mask)


@public(NAME)
@untraced(f"{NAME} traces score_mod and mask_mod itself")
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """`torch.nn.attention.flex_attention.flex_attention` on the kernels of `torch_fattn.prefill`, with
    gradients of query, key and value.

    Args:
        query: `[B, Hq, Lq, D]`, float32, float16 or bfloat16. D is up to 576, or 256 where gradients are
            needed.
        key, value: `[B or 1, Hkv, Lk, D]` and `[B or 1, Hkv, Lk, Dv]`. `Hkv != Hq` needs enable_gqa.
        score_mod: `score_mod(score, b, h, q_idx, kv_idx)`. It may apply a soft cap, add biases, and hide keys
            by -inf. Every call traces it on the host. ALiBi, causality, windows and prefixes become options;
            everything else becomes an attn_mask, which every call makes.
        block_mask: of `[B or 1, Hq or 1, Lq, Lk]`. The first call makes its mask and map and caches them with
            it; causality, windows and prefixes become options instead, and a BlockMask of full blocks only a
            block_mask. If mask_mod reads tensors, every call
            makes the mask. Changes to the lists of blocks are detected by tensor versions, so writes through
            `.data` are missed.
        kernel_options: ignored: results do not depend on them.
        return_lse: also return the natural logarithm of each row's softmax denominator, float32
            `[B, Hq, Lq]`.
        return_aux: the same as `AuxOutput.lse`, if `AuxRequest(lse=True)`.

    Returns:
        out `[B, Hq, Lq, Dv]`. A row that sees no key is 0, with lse -inf.

    Raises:
        NotImplementedError: a score_mod of another form, with advice; max_scores.
        TypeError: dtypes.
        ValueError: shapes, devices.

    The interface is FlexAttention's (Dong et al. 2024).
    """
    for what, operand in (("query", query), ("key", key), ("value", value)):
        check_shape(NAME, what, operand, ("batch", "heads", "length", "head_dim"))
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(
            f"{NAME}: {query.shape[1]} query heads and {key.shape[1]} key-value heads differ; pass "
            "enable_gqa=True"
        )
    if return_aux is not None and return_lse:
        raise ValueError(f"{NAME}: return_lse and return_aux are both set; pass return_aux alone")
    if return_aux is not None and return_aux.max_scores:
        raise NotImplementedError(f"{NAME}: max_scores is not implemented; pass AuxRequest(lse=True) only")
    batch, heads, rows, _dim = query.shape
    if key.shape[0] == value.shape[0] == 1:
        key, value = (operand.expand(batch, -1, -1, -1) for operand in (key, value))
    shape, device = (batch, heads, rows, key.shape[2]), query.device
    seen = _Seen([Box()]) if block_mask is None else _seen_through(block_mask, shape, device)
    options: dict[str, Any] = {}
    if score_mod is not None and min(shape) > 0:
        seen, options = _modified(score_mod, seen, shape, device)
    if seen.mask_map is not None:
        options["mask_map"] = seen.mask_map
    mask = seen.mask
    if seen.blocks is not None:
        if mask is None:
            options["block_mask"], options["block_size"] = seen.blocks
        else:
            mask = masked(mask, expanded_blocks(*seen.blocks, rows, shape[3]))
    options |= {"q_offset": 0, **(options_of(seen.boxes, rows, shape[3]) or {})}
    value_dim = value.shape[-1]
    query, key, value, options["scale"] = pad_heads(query, key, value, scale)
    op = attention if needs_gradient(query, key, value) else prefill
    out, lse = op(query, key, value, mask, return_lse=True, **options)
    out = without_padding(out, value_dim)
    if return_aux is not None:
        return out, AuxOutput(lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


def _modified(
    score_mod: Callable[..., Tensor], seen: _Seen, shape: tuple[int, int, int, int], device: torch.device
) -> tuple[_Seen, dict[str, Any]]:
    """The keys that a score_mod leaves visible, and the options for its scores. Biases other than ALiBi are
    added to the mask."""
    softcap, (biases, all_conditions) = modified_by(score_mod, device)
    options: dict[str, Any] = {"softcap": softcap}
    boxes, mask = seen.boxes, seen.mask
    conditions = []
    for condition in all_conditions:
        both = meet(boxes, boxes_of(*condition) or [])
        if options_of(both, *shape[2:]) is None:
            conditions.append(condition)
        else:
            boxes = both
    if conditions:

        def holds(known: dict[str, Tensor]) -> Tensor:
            return reduce(and_, (evaluate(value, known).bool() == wanted for value, wanted in conditions))

        shown = everywhere(holds, symbols_of(*(value for value, _ in conditions)), shape, device)
        mask = shown if mask is None else mask & shown
    slopes, bias = biases_of(biases, options_of(boxes, *shape[2:]) or {"is_causal": False}, shape, device)
    if slopes is not None:
        options["alibi_slopes"] = slopes
    if bias is not None:
        mask = bias if mask is None else torch.where(mask, bias, -torch.inf)
    return _Seen(boxes, mask, seen.mask_map if mask is seen.mask else None, seen.blocks), options


def _seen_through(block_mask: BlockMask, shape: tuple[int, int, int, int], device: torch.device) -> _Seen:
    batch, heads, rows, keys = shape
    of_batch, of_heads = block_mask.kv_num_blocks.shape[:2]
    if of_batch not in (1, batch) or of_heads not in (1, heads) or block_mask.seq_lengths != (rows, keys):
        raise ValueError(
            f"{NAME}: block_mask is for {[of_batch, of_heads, *block_mask.seq_lengths]} and the call for "
            f"{list(shape)}; make it with create_block_mask(mask_mod, None, None, {rows}, {keys})"
        )
    if block_mask.kv_num_blocks.device != device:
        raise ValueError(
            f"{NAME}: block_mask is on {block_mask.kv_num_blocks.device} and query on {device}; move it with "
            f'.to("{device}")'
        )
    traced = trace(block_mask.mask_mod, INDICES, device)
    # torch reads the lists modulo their batch and heads, and calls mask_mod with the real indices.
    read = INDICES if traced is None else traced.symbols
    heads_of_mask = batch if "b" in read else of_batch, heads if "h" in read else of_heads
    state, held = _state_of(block_mask, heads_of_mask)
    # Evaluating one row of blocks is cheaper than waiting for the device.
    waits = state is not None and min(shape) > 0 and block_mask.kv_num_blocks.shape[2] > 1
    prepared = _prepared.get(block_mask)
    if prepared is None or state is None or prepared.state != state:
        places = block_masks.places_of(NAME, block_mask, heads_of_mask, waits)
        is_whole = waits and len(places) == 0
        prepared = _Prepared(state, held, places, block_masks.blocks_of(NAME, block_mask, is_whole))
        if state is not None:
            _prepared[block_mask] = prepared
    if prepared.blocks is not None:
        return _Seen([Box()], blocks=prepared.blocks)
    if state is None or traced is None or traced.reads:
        return _Seen([Box()], block_masks.mask_of(NAME, block_mask, heads_of_mask, prepared.places))
    if prepared.mask_mod != repr(traced):
        mask = block_masks.mask_of(NAME, block_mask, heads_of_mask, prepared.places)
        boxes = boxes_of(traced) or []
        is_options = waits and options_of(boxes, rows, keys) is not None
        if is_options:  # unless the lists of blocks differ from mask_mod
            modified = everywhere(lambda known: evaluate(traced, known), traced.symbols, shape, device)
            is_options = bool((mask == modified).all())
        seen = _Seen(boxes) if is_options else _Seen([Box()], mask, mask_map(mask))
        prepared = _prepared[block_mask] = prepared._replace(mask_mod=repr(traced), seen=seen)
    return prepared.seen


def _state_of(block_mask: BlockMask, heads_of_mask: tuple[int, int]) -> tuple[Any, tuple[Any, ...]]:
    """A state that changes with the BlockMask, and the objects whose identity is part of it. None if changes
    cannot be detected: inference tensors have no version, and memory that torch cannot resize may have other
    owners, such as a numpy array."""
    fields = block_mask.as_tuple()
    lists = [each for each in fields if isinstance(each, Tensor)]
    storages = [each.untyped_storage() for each in lists]
    if any(each.is_inference() for each in lists) or not all(each.resizable() for each in storages):
        return None, ()
    # Tensors of inference mode cannot be saved for a backward. Divisions return the default dtype.
    state = [
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        heads_of_mask,
        *(each for each in fields if isinstance(each, int)),
    ]
    for each, storage in zip(lists, storages, strict=True):
        view = each.storage_offset(), each.shape, each.stride()
        state.append((id(each), each._version, storage.data_ptr(), *view))
    return state, (*lists, *storages)
