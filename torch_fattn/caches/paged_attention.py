"""`PagedAttention`: the calls of a paged cache that a layer makes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor

from ..operators.attention import MAX_DECODE_ROWS, paged_decode, paged_prefill
from ..operators.options import DecodeOptions, PagedPrefillOptions
from ..operators.shared_prefix import shared_prefix_paged_decode
from ..runtime.signatures import public
from .blocks import GONE
from .groups import Group, find_groups, in_order
from .memory import Layers
from .sequences import PagedSequence, Window
from .step import CacheStep

if TYPE_CHECKING:
    from typing_extensions import Unpack


class PagedAttention:
    """`append`, `decode` and `prefill` of `PagedKVCache`, which documents them as its own."""

    _layers: Layers
    _block_size: int
    _window: Window
    _sequences: dict[int, PagedSequence]

    def _check_current(self, method: str, step: CacheStep) -> None:
        """Raises if a sequence of the step has changed since."""
        raise NotImplementedError

    def _note_filled(self, step: CacheStep) -> None:
        """Every layer has the tokens of the step."""
        raise NotImplementedError

    @public("PagedKVCache.append")
    def append(self, layer: int, step: CacheStep, key: Tensor, value: Tensor | None = None) -> None:
        """The keys `[tokens, kv_heads, head_dim]` and values `[tokens, kv_heads, value_dim]` of the step; no
        values if the cache is latent."""
        self._check("append", layer, step)
        tokens = step.slot_mapping.shape[0]
        rows = self._layers.new_rows("PagedKVCache.append", key, value, tokens)
        self._layers.write(layer, step.slot_mapping, *rows)
        step._appended.add(layer)
        if len(step._appended) == len(self._layers):
            self._note_filled(step)

    @overload
    def decode(
        self,
        layer: int,
        step: CacheStep,
        query: Tensor,
        *,
        shared_prefix: bool = ...,
        return_lse: Literal[False] = ...,
        **options: Unpack[DecodeOptions],
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
        **options: Unpack[DecodeOptions],
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
        **options: Unpack[DecodeOptions],
    ) -> Tensor | tuple[Tensor, Tensor]: ...
    @public("PagedKVCache.decode", options="paged_decode")
    def decode(
        self,
        layer: int,
        step: CacheStep,
        query: Tensor,
        *,
        shared_prefix: bool = False,
        return_lse: bool = False,
        **options: Unpack[DecodeOptions],
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`torch_fattn.paged_decode` of query `[batch, heads, rows, head_dim]`, the newest tokens of the
        step's sequences, with its options and result.

        With `shared_prefix`, sequences that begin with the same blocks form groups, and each group reads its
        common blocks once (`torch_fattn.shared_prefix_paged_decode`). The blocks of the step's sequences
        decide on the groups; bits of a result depend on no sequence with another first block. Use it for long
        common prompts: a group adds a second decode and a merge.
        """
        self._check("decode", layer, step)
        step._check_appended("PagedKVCache.decode", layer)
        step._check_query("PagedKVCache.decode", query)
        self._layers.check_query("PagedKVCache.decode", query)
        if query.shape[2] > MAX_DECODE_ROWS:
            raise NotImplementedError(
                f"PagedKVCache.decode: {query.shape[2]} query rows per sequence are above {MAX_DECODE_ROWS}; "
                "pass all new tokens of the step to PagedKVCache.prefill, packed as its keys are"
            )
        assert step.block_tables is not None
        key, value = self._layers.operands(layer)
        stored: Any = self._layers.options(layer)
        options.update(stored)
        self._fit_window("decode", options)
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

    def _find_groups(self, step: CacheStep, rows: int) -> list[Group]:
        """By whole blocks before all rows that are not hidden."""
        if rows not in step._groups:
            tables = []
            for sequence in map(self._sequences.__getitem__, step.sequences):
                whole = max(sequence.length - rows, 0) // self._block_size
                blocks = sequence.blocks[:whole]
                tables.append(blocks[: blocks.index(GONE)] if sequence.hidden and GONE in blocks else blocks)
            step._groups[rows] = find_groups(tables)
        return step._groups[rows]

    @overload
    def prefill(
        self,
        layer: int,
        step: CacheStep,
        query: Tensor,
        *,
        return_lse: Literal[False] = ...,
        **options: Unpack[PagedPrefillOptions],
    ) -> Tensor: ...
    @overload
    def prefill(
        self,
        layer: int,
        step: CacheStep,
        query: Tensor,
        *,
        return_lse: Literal[True],
        **options: Unpack[PagedPrefillOptions],
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def prefill(
        self,
        layer: int,
        step: CacheStep,
        query: Tensor,
        *,
        return_lse: bool,
        **options: Unpack[PagedPrefillOptions],
    ) -> Tensor | tuple[Tensor, Tensor]: ...
    @public("PagedKVCache.prefill", options="paged_prefill")
    def prefill(
        self,
        layer: int,
        step: CacheStep,
        query: Tensor,
        *,
        return_lse: bool = False,
        **options: Unpack[PagedPrefillOptions],
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`torch_fattn.paged_prefill` of query `[tokens, heads, head_dim]`, all new tokens of the step as its
        keys are, with its options and result."""
        self._check("prefill", layer, step)
        step._check_appended("PagedKVCache.prefill", layer)
        step._check_packed("PagedKVCache.prefill", query)
        self._layers.check_query("PagedKVCache.prefill", query)
        self._fit_window("prefill", options)
        assert step.block_tables is not None and step.cu_seqlens_q is not None
        operands = (*self._layers.operands(layer), step.block_tables, step.seq_lens, step.cu_seqlens_q)
        stored: Any = self._layers.options(layer)
        options.update(stored)
        return paged_prefill(query, *operands, step.max_seqlen_q, return_lse=return_lse, **options)

    def _fit_window(self, method: str, options: Any) -> None:
        """Adds the window of the cache, behind which blocks are gone."""
        if self._window.left < 0:
            return
        for name, own in (("window_left", self._window.left), ("sink_tokens", self._window.sink_tokens)):
            if options.setdefault(name, own) != own:
                raise ValueError(
                    f"PagedKVCache.{method}: {name} {options[name]} is not {own}, for which the cache keeps "
                    "blocks; leave it out"
                )

    def _check(self, method: str, layer: int, step: CacheStep) -> None:
        self._layers.check(f"PagedKVCache.{method}", layer)
        step._check_cache(f"PagedKVCache.{method}", self)
        self._check_current(method, step)


def _of_sequences(group: Group, options: Any) -> dict[str, Tensor]:
    """The options that differ between sequences, for those of the group."""
    dims = {"attn_mask": 4, "tree_mask": 2, "alibi_slopes": 2}
    given = ((name, options.get(name), dim) for name, dim in dims.items())
    return {
        name: group.of(option)
        for name, option, dim in given
        if isinstance(option, Tensor) and option.dim() == dim and option.shape[0] > 1
    }
