"""`PagedAttention`: `decode` of a paged cache, with groups of sequences that share a prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from ..operators.attention import paged_decode
from ..operators.options import CacheDecodeOptions
from ..operators.shared_prefix import shared_prefix_paged_decode
from ..runtime.signatures import public
from .blocks import GONE
from .groups import Group, find_groups, in_order
from .kv_cache import CACHE, KVCache
from .sequences import CachedSequence, Window
from .step import CacheStep

if TYPE_CHECKING:
    from typing_extensions import Unpack


class PagedAttention(KVCache):
    """`decode` of `PagedKVCache`, which documents it as its own."""

    _name = "PagedKVCache"
    _window: Window
    _sequences: dict[int, CachedSequence]

    @overload
    def decode(
        self,
        layer: int,
        step: CacheStep,
        query: Tensor,
        *,
        shared_prefix: bool = ...,
        return_lse: Literal[False] = ...,
        **options: Unpack[CacheDecodeOptions],
    ) -> Tensor: ...
    @overload
    def decode(
        self,
        layer: int,
        step: CacheStep,
        query: Tensor,
        *,
        shared_prefix: bool = ...,
        return_lse: Literal[True],
        **options: Unpack[CacheDecodeOptions],
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def decode(
        self,
        layer: int,
        step: CacheStep,
        query: Tensor,
        *,
        shared_prefix: bool = ...,
        return_lse: bool,
        **options: Unpack[CacheDecodeOptions],
    ) -> Tensor | tuple[Tensor, Tensor]: ...
    @public("PagedKVCache.decode", options="paged_decode", names=CACHE)
    def decode(
        self,
        layer: int,
        step: CacheStep,
        query: Tensor,
        *,
        shared_prefix: bool = False,
        return_lse: bool = False,
        **options: Unpack[CacheDecodeOptions],
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`torch_fattn.paged_decode` of query `[batch, heads, rows, head_dim]`, the newest tokens of the
        step's sequences, with its options and result. Packed rows `[tokens, heads, head_dim]`, the same
        number for each sequence, give packed results.

        With `shared_prefix`, sequences that begin with the same blocks form groups, and each group reads its
        common blocks once (`torch_fattn.shared_prefix_paged_decode`). A result may then depend, in its last
        bits, on sequences with the same first block. Use it for long common prompts: a group adds a second
        decode and a merge.
        """
        if query.dim() == 3:
            packed = {**options, "shared_prefix": shared_prefix}
            return self._decode_packed(self.decode, layer, step, query, return_lse, packed)
        self._check_read("decode", layer, step, query)
        self._check_window(step, query)
        self._add_options("decode", layer, options)
        key, value = self._layers.operands(layer)
        tables, seq_lens = step.block_tables, step.seq_lens
        groups = self._find_groups(step, query.shape[2]) if shared_prefix else []
        if not any(group.blocks for group in groups):
            return paged_decode(query, key, value, tables, seq_lens, return_lse=return_lse, **options)
        results = []
        for group in groups:
            operands = (group.of(query), key, value, group.of(tables), group.of(seq_lens), group.blocks)
            own: Any = {**options, **_of_sequences(group, options)}
            results.append(shared_prefix_paged_decode(*operands, return_lse=True, **own))
        outs, lses = zip(*results, strict=True)
        if options.get("token_major_out"):
            out = in_order([each.transpose(1, 2) for each in outs], groups).transpose(1, 2)
        else:
            out = in_order(outs, groups)
        return (out, in_order(lses, groups)) if return_lse else out

    def _check_window(self, step: CacheStep, query: Tensor) -> None:
        fewest = min(step._counts, default=0)
        if self._window.left >= 0 and query.shape[2] > max(fewest, 1):
            raise ValueError(
                f"{self._name}.decode: query has {query.shape[2]} rows of each sequence and one has {fewest} "
                "new tokens, before which its window has released keys; pass all new tokens of the step to "
                f"{self._name}.prefill, packed as its keys are"
            )

    def _find_groups(self, step: CacheStep, rows: int) -> list[Group]:
        """Groups by whole visible blocks before the first row."""
        if rows not in step._groups:
            tables = []
            for sequence in map(self._sequences.__getitem__, step.sequences):
                whole = max(sequence.length - rows, 0) // self._block_size
                blocks = sequence.blocks[:whole]
                tables.append(blocks[: blocks.index(GONE)] if sequence.hidden and GONE in blocks else blocks)
            step._groups[rows] = find_groups(tables)
        return step._groups[rows]

    def _add_options(self, method: str, layer: int, options: Any) -> None:
        """Adds the cache's window too, since older blocks are gone."""
        super()._add_options(method, layer, options)
        if self._window.left < 0:
            return
        for name, own in (("window_left", self._window.left), ("sink_tokens", self._window.sink_tokens)):
            if options.setdefault(name, own) != own:
                raise ValueError(
                    f"PagedKVCache.{method}: {name} {options[name]} is not {own}, for which the cache keeps "
                    "blocks; leave it out"
                )


def _of_sequences(group: Group, options: Any) -> dict[str, Tensor]:
    """The per-sequence options of the group's members."""
    tree = options.get("tree_mask")
    of_tree = 3 if tree is not None and tree.dtype == torch.bool else 2
    dims = {"attn_mask": 4, "tree_mask": of_tree, "alibi_slopes": 2}
    given = ((name, options.get(name), dim) for name, dim in dims.items())
    return {
        name: group.of(option)
        for name, option, dim in given
        if isinstance(option, Tensor) and option.dim() == dim and option.shape[0] > 1
    }
