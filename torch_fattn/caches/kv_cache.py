"""`KVCache`: the calls of a layer that are the same for both cache classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

from torch import Tensor

from ..operators.attention import MAX_DECODE_ROWS, paged_prefill
from ..operators.options import PagedPrefillOptions
from ..runtime.signatures import public
from .memory import Layers
from .step import CacheStep

if TYPE_CHECKING:
    from typing_extensions import Unpack


class KVCache:
    """Methods of `StaticKVCache` and `PagedKVCache`, which document them as their own."""

    _name: ClassVar[str]  # in errors
    _layers: Layers
    _change: int  # the count of changes to the cache

    def _last_change(self, method: str, sequence: int) -> int:
        """The count of changes when the tokens of the sequence changed last."""
        raise NotImplementedError

    def _note_filled(self, step: CacheStep) -> None:
        """Every layer has the tokens of the step."""

    @public("KVCache.append", inherited=True)
    def append(self, layer: int, step: CacheStep, key: Tensor, value: Tensor | None = None) -> None:
        """The keys `[tokens, kv_heads, head_dim]` and values `[tokens, kv_heads, value_dim]` of the step; no
        values if the cache is latent."""
        self._check_step("append", layer, step)
        tokens = step.slot_mapping.shape[0]
        rows = self._layers.new_rows(f"{self._name}.append", key, value, tokens)
        self._layers.write(layer, step.slot_mapping, *rows)
        step._appended.add(layer)
        if len(step._appended) == len(self._layers):
            self._note_filled(step)

    @overload
    def prefill(
        self,
        layer: int,
        step: CacheStep,
        query: Tensor,
        *,
        is_causal: bool = ...,
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
        is_causal: bool = ...,
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
        is_causal: bool = ...,
        return_lse: bool,
        **options: Unpack[PagedPrefillOptions],
    ) -> Tensor | tuple[Tensor, Tensor]: ...
    @public("KVCache.prefill", options="paged_prefill", inherited=True)
    def prefill(
        self,
        layer: int,
        step: CacheStep,
        query: Tensor,
        *,
        is_causal: bool = True,
        return_lse: bool = False,
        **options: Unpack[PagedPrefillOptions],
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`torch_fattn.paged_prefill` of query `[tokens, heads, head_dim]`, all new tokens of the step as its
        keys are, with its options and result. They are causal, as in `decode`, unless is_causal is False."""
        self._check_step("prefill", layer, step)
        step._check_appended(f"{self._name}.prefill", layer)
        step._check_packed(f"{self._name}.prefill", query)
        self._layers.check_query(f"{self._name}.prefill", query)
        self._add_options("prefill", layer, options)
        operands = (*self._layers.operands(layer), step.block_tables, step.seq_lens, step.cu_seqlens_q)
        return paged_prefill(
            *(query, *operands, step.max_seqlen_q), is_causal=is_causal, return_lse=return_lse, **options
        )

    def _add_options(self, method: str, layer: int, options: Any) -> None:
        """Adds those that the cache decides."""
        options.update(self._layers.options(layer))

    def _check_decode(self, layer: int, step: CacheStep, query: Tensor, options: Any) -> None:
        name = f"{self._name}.decode"
        self._check_step("decode", layer, step)
        step._check_appended(name, layer)
        step._check_query(name, query)
        self._layers.check_query(name, query)
        if query.shape[2] > MAX_DECODE_ROWS and options.get("tree_mask") is None:
            raise NotImplementedError(
                f"{name}: {query.shape[2]} query rows per sequence are above {MAX_DECODE_ROWS}; pass all new "
                f"tokens of the step to {self._name}.prefill, packed as its keys are"
            )

    def _check_step(self, method: str, layer: int, step: CacheStep) -> None:
        """Raises also if a sequence of the step has changed since."""
        name = f"{self._name}.{method}"
        self._layers.check(name, layer)
        step._check_cache(name, self._layers)
        if step._change != self._change:
            for sequence in step.sequences:
                step._check_unchanged(name, sequence, self._last_change(method, sequence))
