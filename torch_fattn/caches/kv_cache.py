"""`KVCache`: what both cache classes share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from ..operators.attention import paged_prefill
from ..operators.cache_write import cache_write
from ..operators.options import CachePrefillOptions, CacheRotaryOptions
from ..operators.return_lse import method_with_lse
from ..operators.rotary import rotary_write
from ..runtime.signatures import is_checked, public
from .memory import Layers
from .sequences import CachedSequence, counts_of
from .step import CacheStep
from .tables import Tables

if TYPE_CHECKING:
    from typing_extensions import Unpack


CACHE = {"key_cache": "the cache", "value_cache": "the cache"}  # in the operators' errors


class KVCache:
    """Methods of `StaticKVCache` and `PagedKVCache`, which document them as their own."""

    _name: ClassVar[str]  # in errors
    _layers: Layers
    _tables: Tables
    _block_size: int
    _change: int = 0  # the count of changes to the cache
    _last: CacheStep | None = None  # if the next step can continue it

    def _get(self, method: str, sequence: int) -> CachedSequence:
        """Raises unless the cache has the sequence."""
        raise NotImplementedError

    @public("KVCache.append", inherited=True, names=CACHE)
    def append(self, layer: int, step: CacheStep, key: Tensor, value: Tensor | None = None) -> None:
        """Stores the step's keys `[tokens, kv_heads, head_dim]` and values `[tokens, kv_heads, value_dim]`. A
        latent cache takes no values."""
        self._check_step("append", layer, step)
        rows = self._layers.new_rows(f"{self._name}.append", key, value)
        cache = self._layers.operands(layer)
        cache_write(*rows, *cache, step.slot_mapping, **self._layers.options(layer))
        self._set_appended(layer, step)

    @public("KVCache.append_rotated", options="rotary_write", inherited=True, names=CACHE)
    def append_rotated(
        self,
        layer: int,
        step: CacheStep,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cos: Tensor,
        sin: Tensor,
        **options: Unpack[CacheRotaryOptions],
    ) -> Tensor:
        """`torch_fattn.rotary` of query and key, and `append`, in one launch. The cache has the same bits.

        Args:
            query, key, value: the new tokens, `[tokens, heads, dim]` each, as in `append` and `prefill`.
            cos, sin: `[tokens, columns]`, the rows of the tables at `step.positions`.

        Returns:
            the rotated query, `[tokens, heads, head_dim]`.
        """
        name = f"{self._name}.append_rotated"
        self._check_step("append_rotated", layer, step)
        if self._layers.shape.is_latent:
            raise ValueError(
                f"{name}: a latent cache stores no value; rotate the key with torch_fattn.rotary, and "
                "append() it"
            )
        rows = {"query": query, "key": key, "value": value}
        for what, given in (*rows.items(), ("cos", cos), ("sin", sin)):
            step._check_packed(name, given, what, "heads, dim" if what in rows else "columns")
        for what, given in rows.items():
            self._layers.check_kind(name, what, given)
        # A batch of one sequence, whatever the step's are: every token has a slot.
        out = rotary_write(
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            cos[None],
            sin[None],
            *self._layers.operands(layer),
            step.slot_mapping[None],
            token_major_out=True,
            **self._layers.options(layer),
            **options,
        )
        self._set_appended(layer, step)
        return out[0].transpose(0, 1)

    def _set_appended(self, layer: int, step: CacheStep) -> None:
        step._appended.add(layer)
        if step.slot_mapping.shape[0] > 0:
            self._layers.written.add(layer)

    @method_with_lse
    @public("KVCache.prefill", options="paged_prefill", inherited=True, names=CACHE)
    def prefill(
        self,
        layer: int,
        step: CacheStep,
        query: Tensor,
        *,
        is_causal: bool = True,
        return_lse: bool = False,
        **options: Unpack[CachePrefillOptions],
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`torch_fattn.paged_prefill` of query `[tokens, heads, head_dim]`, all new tokens of the step, with
        its options and result. Rows are causal, as in `decode`, unless is_causal is False."""
        self._check_read("prefill", layer, step, query)
        self._add_options("prefill", layer, options)
        operands = (*self._layers.operands(layer), step.block_tables, step.seq_lens, step.cu_seqlens_q)
        return paged_prefill(
            *(query, *operands, step.max_seqlen_q), is_causal=is_causal, return_lse=return_lse, **options
        )

    def _add_options(self, method: str, layer: int, options: Any) -> None:
        """Adds the options that the cache sets."""
        options.update(self._layers.options(layer))

    def _growing(
        self, method: str, sequences: Sequence[int], tokens: int | Sequence[int]
    ) -> tuple[list[CachedSequence], list[int]]:
        """The sequences, and a number of new tokens for each."""
        name = f"{self._name}.{method}"
        growing = [self._get(method, sequence) for sequence in sequences]
        counts = counts_of(name, sequences, tokens)
        for sequence, own in zip(sequences, growing, strict=True):
            self._check_filled(method, sequence, self._layers.written, own.length)
        return growing, counts

    def _new_step(
        self,
        numbers: Sequence[int],
        growing: Sequence[CachedSequence],
        counts: Sequence[int],
        after: Sequence[list[int]],
        shared_blocks: int = 0,
    ) -> CacheStep:
        """The sequences have the blocks `after` it. An error changes nothing on the host."""
        if last := self._continued(numbers, growing, counts):
            tensors = self._tables.continued(last._tensors, growing, last.max_seqlen_q, after)
        else:
            tensors = self._tables.extended(growing, counts, max(map(len, after), default=0))
        if is_checked():
            self._layers.erase(tensors.numbers[1])
        self._change += 1
        step = CacheStep(
            sequences=tuple(numbers),
            lengths=tuple(own.length + count for own, count in zip(growing, counts, strict=True)),
            seq_lens=tensors.seq_lens,
            positions=tensors.numbers[0],
            slot_mapping=tensors.numbers[1],
            block_tables=tensors.block_tables,
            cu_seqlens_q=tensors.cu_seqlens_q,
            max_seqlen_q=max(counts, default=0),
            shared_blocks=shared_blocks,
            _layers=self._layers,
            _counts=tuple(counts),
            _change=self._change,
            _lacking=frozenset().union(*(own.filled.lacking(self._layers.every) for own in growing)),
            _tensors=tensors,
        )
        is_even = 0 < min(counts, default=0) == step.max_seqlen_q <= self._block_size
        self._last = step if is_even else None
        return step

    def _continued(
        self, numbers: Sequence[int], growing: Sequence[CachedSequence], counts: Sequence[int]
    ) -> CacheStep | None:
        """The last step, if it added as many tokens to the same sequences and none has changed since."""
        last = self._last
        if last is None or last.sequences != tuple(numbers) or last._counts != tuple(counts):
            return None
        return last if all(own.changed == last._change for own in growing) else None

    def _grow(self, step: CacheStep, own: CachedSequence, count: int, blocks: list[int]) -> None:
        """Adds the step's tokens to a sequence, which then has these blocks."""
        if count > 0:
            own.filled.add(own.length, step._appended, self._layers.every)
            own.changed, own.length, own.blocks = step._change, own.length + count, blocks

    def _shrinking(self, sequence: int, length: int) -> CachedSequence:
        own = self._get("truncate", sequence)
        if not 0 <= length <= own.length:
            raise ValueError(
                f"{self._name}.truncate: length {length} is not from 0 to {own.length}, the tokens of "
                f"sequence {sequence}; pass how many to keep"
            )
        return own

    def _cut(self, sequences: Sequence[CachedSequence], length: int) -> list[int]:
        """Drops the tokens after the first `length`. Returns the blocks that are now empty."""
        self._tables.begin(sequences)
        for own in sequences:
            self._tables.set_length(own.row, length)
        self._tables.done(sequences)
        self._change += 1
        empty = []
        for own in sequences:
            own.changed = self._change
            empty += own.cut(length, self._block_size)
        return empty

    def _check_read(self, method: str, layer: int, step: CacheStep, query: Tensor) -> None:
        name = f"{self._name}.{method}"
        self._check_step(method, layer, step)
        step._check_appended(name, layer)
        if method == "decode":
            step._check_query(name, query)
        else:
            step._check_packed(name, query, "query", "heads, head_dim")
        self._layers.check_kind(name, "query", query)
        self._check_written(method, layer, step)

    def _decode_packed(
        self,
        decode: Callable[..., Any],
        layer: int,
        step: CacheStep,
        query: Tensor,
        return_lse: bool,
        options: Any,
    ) -> Any:
        """`decode` of packed rows, with packed results."""
        rows = step._unpacked(f"{self._name}.decode", query)
        out, lse = decode(layer, step, rows, **{**options, "token_major_out": True, "return_lse": True})
        out = out.transpose(1, 2).flatten(0, 1)
        return (out, lse.transpose(0, 1).flatten(1).contiguous()) if return_lse else out

    def _check_step(self, method: str, layer: int, step: CacheStep) -> None:
        """Raises for a step of another cache, or one whose sequences have changed since."""
        name = f"{self._name}.{method}"
        self._layers.check(name, layer)
        if step._layers is not self._layers:
            raise ValueError(
                f"{name}: this step belongs to another cache; use the one that extend() of this cache "
                "returned"
            )
        for sequence in step.sequences if step._change != self._change else ():
            if self._get(method, sequence).changed > step._change:
                raise ValueError(
                    f"{name}: sequence {sequence} has changed since this step; use the step of a later "
                    "extend()"
                )
        if layer in step._lacking:
            for sequence, length, count in zip(step.sequences, step.lengths, step._counts, strict=True):
                self._check_filled(method, sequence, {layer}, length - count)

    def _check_filled(self, method: str, sequence: int, layers: AbstractSet[int], length: int) -> None:
        """Raises if one of the layers lacks one of the first `length` tokens."""
        gap = self._get(method, sequence).filled.gap(layers, length)
        if gap is not None:
            layer, position = gap
            raise ValueError(
                f"{self._name}.{method}: layer {layer} does not have the tokens of sequence {sequence} from "
                f"position {position} on; append() the rest of their step, or drop them with "
                f"truncate({sequence}, {position})"
            )

    def _check_written(self, method: str, layer: int, step: CacheStep) -> None:
        """With FATTN_CHECK=1, raises for a key that was not written after its `extend`."""
        if not is_checked():
            return
        for sequence in step.sequences:
            places = [*self._get(method, sequence).places(self._block_size)]
            written = self._layers.is_written(layer, [slot for _, slot in places])
            if not all(written):
                position = places[written.index(False)][0]
                raise ValueError(
                    f"{self._name}.{method}: position {position} of sequence {sequence} was never written in "
                    f"layer {layer}; drop it with truncate({sequence}, {position}) and append it again"
                )
