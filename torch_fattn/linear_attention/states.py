"""`StateCache`: the states of a model's linear layers during generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..caches.memory import check_bytes, check_sizes
from ..caches.sequences import counts_of
from ..caches.step import CacheFullError
from ..caches.tables import on_device
from ..operators import DTYPES, delta
from ..operators.rms_norm import rms_norm
from ..runtime.signatures import public, shown
from ..runtime.tensor_checks import check_available

_NAMES = {  # in the operator's errors
    "conv_state": "the cache",
    "state": "the cache",
    "allocate a column for each token that the next ones see": "make it with the sizes of this layer",
}
_SIZES = {  # the same, for the constructor
    "value heads cannot share": "num_value_heads cannot share",
    "key heads; pass": "num_key_heads; give",
    "query/key head_dim": "key_dim",
    "value head_dim": "value_dim",
}
_MOST = 2**31 - 1  # tokens of a step, whose starts are int32


def _is_few(counts: Sequence[int]) -> bool:
    """Whether a `gated_delta_step` takes these tokens of each sequence."""
    return len({*counts}) <= 1 and max(counts, default=0) <= delta.MAX_STEP_LENGTH


class _Sequence:
    def __init__(self, number: int, slot: int) -> None:
        self.number = number
        self.slot = slot
        self.length = 0
        self.begin = 0  # its tokens before its last step
        self.step: StateStep | None = None  # the last one

    @property
    def least(self) -> int:
        """The length to which it can go back."""
        return self.length if self.step is None or self.step._begun else self.begin


@dataclass(frozen=True, eq=False, repr=False)
class StateStep:
    """New tokens of some sequences, packed in the order of the sequences, with the tensors that the operators
    need. Do not write to them: steps share them."""

    sequences: tuple[int, ...]
    counts: tuple[int, ...]  # new tokens of each
    drafts: bool  # the states get those that are kept, in the next step
    slots: Tensor  # of the sequences, int32 [batch]
    cu_seqlens: Tensor  # where each sequence's new tokens begin, and the end, int32 [batch + 1]
    _owners: tuple[_Sequence, ...]
    _begun: set[int] = field(default_factory=set)  # layers that wrote to states
    _ran: dict[int, Callable[..., Tensor] | None] = field(default_factory=dict)
    """The layers that have run it; of drafts, what runs those that are kept."""

    def __repr__(self) -> str:  # without tensors: reading them waits for the GPU
        return f"StateStep(sequences={self.sequences}, counts={self.counts}, drafts={self.drafts})"


class StateCache:
    """The convolution and recurrent states of a model's linear layers. A sequence has one slot, of the same
    size at every length.

        step = states.extend(sequences, tokens)  # once for all layers
        out = states.run(layer, step, query, key, value, z, a, b, ...)  # before the convolution

    Args:
        num_layers: linear layers of the model.
        num_slots: the largest number of sequences at one time.
        num_key_heads, num_value_heads, key_dim, value_dim: the heads of a layer, and their columns. The
            convolution is over the channels of query, key and value, in this order.
        conv_width: columns of its weight. A slot keeps conv_width - 1 tokens.
        dtype: of the model's activations. Recurrent states are float32.
        device: default "mps".
        static: sequences 0 to num_slots - 1 exist from the start, for a fixed batch.

    A state cannot go back: what `truncate` may drop has to be added as drafts. If a model fails between two
    layers, `extend` raises ValueError for the step's sequences until the others run it, or `reset` empties
    them. The class is not thread-safe.
    """

    @public("StateCache", names=_SIZES)
    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_key_heads: int,
        num_value_heads: int,
        key_dim: int,
        value_dim: int,
        *,
        conv_width: int = 4,
        dtype: torch.dtype = torch.float16,
        device: torch.device | str = "mps",
        static: bool = False,
    ) -> None:
        name, heads = "StateCache", {"num_key_heads": num_key_heads, "num_value_heads": num_value_heads}
        check_sizes(name, 1, num_layers=num_layers, **heads, key_dim=key_dim, value_dim=value_dim)
        check_sizes(name, 2, conv_width=conv_width)
        check_sizes(name, 0, num_slots=num_slots)
        check_available(name, device)
        if dtype not in DTYPES.values():
            raise TypeError(
                f"{name}: dtype {dtype} is not torch.float32, torch.float16 or torch.bfloat16; give "
                "one of them"
            )
        channels = 2 * num_key_heads * key_dim + num_value_heads * value_dim
        sizes = ((channels, conv_width - 1), (num_value_heads, key_dim, value_dim))
        for size in sizes:
            check_bytes(name, 4, num_slots, num_layers, *size)
        # The states of a slot are contiguous: one launch clears or copies those of all layers.
        with torch.inference_mode(False):  # they outlive inference mode
            self._memory = tuple(
                torch.zeros(num_slots, num_layers, *size, dtype=kind, device=device)
                for size, kind in zip(sizes, (dtype, torch.float32), strict=True)
            )
        conv_state, state = self._of(0)
        new, of_head = conv_state.new_empty, state.new_empty(num_value_heads)
        query = new(num_slots, 0, num_key_heads, key_dim)
        value = new(num_slots, 0, num_value_heads, value_dim)
        rows = (query, query, value, value, value[..., 0], value[..., 0])
        weights = (of_head, of_head, new(channels, conv_width), None, new(value_dim))
        # The operator has the errors for sizes: a call without tokens.
        delta.gated_delta_step(*rows, *weights, conv_state, state)
        self._numbers = partial(on_device, device=self._memory[0].device, dtype=torch.int32)
        self._every = frozenset(range(num_layers))
        self._free = [*reversed(range(num_slots))]
        self._sequences: dict[int, _Sequence] = {}
        self._next = 0
        self._last: StateStep | None = None
        for _ in range(num_slots) if static else ():
            self.allocate()

    @property
    def sequences(self) -> tuple[int, ...]:
        return tuple(self._sequences)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def nbytes(self) -> int:
        """The memory of all slots."""
        return sum(memory.nbytes for memory in self._memory)

    @public("StateCache.length")
    def length(self, sequence: int) -> int:
        """The sequence's tokens, drafts included."""
        return self._get("length", sequence).length

    @public("StateCache.allocate")
    def allocate(self, sequence: int | None = None) -> int:
        """Creates a sequence without tokens, and returns its number: `sequence`, such as that of a
        `PagedKVCache`, or by default one that was never used.

        CacheFullError: all slots are in use. ValueError: the number is in use.
        """
        number = self._next if sequence is None else sequence
        if number in self._sequences:
            raise ValueError(
                f"StateCache.allocate: sequence {shown(number)} is in use; give another number, or none"
            )
        self._check_room("allocate")
        own = _Sequence(number, self._free[-1])
        self._clear(own)
        self._free.pop()
        self._sequences[number] = own
        self._next = max(self._next, number + 1)
        return number

    @public("StateCache.fork")
    def fork(self, sequence: int, target: int | None = None) -> int:
        """Creates a sequence with a copy of this one's states, and returns its number, `target` or a new one.
        Errors are those of `allocate` and `extend`."""
        source = self._get("fork", sequence)
        self._check_room("fork")
        self._settle("fork", [source])
        number = self.allocate(target)
        own = self._sequences[number]
        own.length = source.length
        for memory in self._memory:
            memory[own.slot].copy_(memory[source.slot])
        return number

    @public("StateCache.free")
    def free(self, sequence: int) -> None:
        """Frees the sequence's slot."""
        own = self._get("free", sequence)
        own.step = None
        self._free.append(own.slot)
        del self._sequences[sequence]

    @public("StateCache.reset")
    def reset(self, sequence: int | None = None) -> None:
        """Empties a sequence, by default every one."""
        for own in self._sequences.values() if sequence is None else [self._get("reset", sequence)]:
            self._clear(own)

    @public("StateCache.truncate")
    def truncate(self, sequence: int, length: int) -> None:
        """Keeps the first `length` tokens of the sequence, and drops rejected drafts of its last step. The
        next `extend` of one of the step's sequences runs those that are kept, in one launch per layer.
        ValueError: the states have the others.
        """
        own = self._get("truncate", sequence)
        is_draft = own.step is not None and own.step.drafts
        if length not in (range(own.least, own.length + 1) if is_draft else (own.least, own.length)):
            raise ValueError(
                f"StateCache.truncate: length {length} is not from {own.least} to {own.length}, and states "
                f"cannot go back; extend() with drafts=True, or reset() sequence {sequence}"
            )
        if length == own.least < own.length:
            own.step = None
        own.length = length

    @public("StateCache.extend")
    def extend(
        self,
        sequences: Sequence[int] | None = None,
        tokens: int | Sequence[int] = 1,
        *,
        drafts: bool = False,
    ) -> StateStep:
        """Begins a step with new tokens of these sequences, by default of all: one number for all, or one for
        each.

        Args:
            drafts: `truncate` may drop the tokens: up to 16, the same number of each sequence. Those that
                are kept are run again from the same operands, which must not change before that.

        ValueError: the numbers are not one for each sequence, a sequence is given twice, or a layer has not
        run the last step of one.
        """
        name, numbers = "StateCache.extend", self.sequences if sequences is None else tuple(sequences)
        owners = tuple(self._get("extend", number) for number in numbers)
        counts = tuple(counts_of(name, numbers, tokens))
        if drafts and not _is_few(counts):
            raise ValueError(
                f"{name}: {min(counts)} to {max(counts)} drafts of a sequence do not fit a gated_delta_step; "
                f"add the same number of each, up to {delta.MAX_STEP_LENGTH}"
            )
        if sum(counts) > _MOST:
            raise ValueError(f"{name}: {sum(counts)} new tokens are above 2^31 - 1; add fewer in a step")
        self._settle("extend", owners)
        last = self._last
        if last is not None and (last._owners, last.counts) == (owners, counts):
            slots, cu_seqlens = last.slots, last.cu_seqlens
        else:
            slots = self._numbers([own.slot for own in owners])
            cu_seqlens = self._numbers([0, *accumulate(counts)])
        self._last = step = StateStep(numbers, counts, drafts, slots, cu_seqlens, owners)
        for own, count in zip(owners, counts, strict=True):
            if count > 0:
                own.begin, own.length, own.step = own.length, own.length + count, step
        return step

    @public("StateCache.run", names=_NAMES)
    def run(
        self,
        layer: int,
        step: StateStep,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        z: Tensor,
        a: Tensor,
        b: Tensor,
        A_log: Tensor,  # noqa: N803
        dt_bias: Tensor,
        conv_weight: Tensor,
        conv_bias: Tensor | None,
        norm_weight: Tensor,
        *,
        gate: str = "silu",
        eps: float = 1e-6,
        scale: float | None = None,
    ) -> Tensor:
        """`torch_fattn.gated_delta_step` of the step's tokens, packed (`[tokens, heads, dim]`, ..), with the
        layer's states. More than 16 tokens of a sequence, or not the same number of each, run as
        `causal_conv1d`, `gated_delta_rule` and `rms_norm`. Returns `[tokens, Hv, Dv]`."""
        if layer not in self._every:
            raise IndexError(
                f"StateCache.run: layer {layer} is not one of this cache's {len(self._every)}; count from 0"
            )
        owners = [own for own, count in zip(step._owners, step.counts, strict=True) if count > 0]
        if any(own.step is not step or self._sequences.get(own.number) is not own for own in owners):
            raise ValueError(
                "StateCache.run: step is not the last one of its sequences; pass the newest that extend() "
                "returned"
            )
        if layer in step._ran or layer in step._begun:
            raise ValueError(
                f"StateCache.run: layer {layer} has begun this step; extend() for the next tokens, or if it "
                "failed, reset() its sequences"
            )
        rows = {"query": query, "key": key, "value": value, "z": z, "a": a, "b": b}
        tokens = sum(step.counts)
        for what, each in rows.items():
            if each.shape[:1] != (tokens,) or each.dim() > (2 if what == "b" else 3):
                raise ValueError(
                    f"StateCache.run: {what} has shape {list(each.shape)} and the step {tokens} new tokens; "
                    "pass packed rows, one for each"
                )
        if query.dtype != self._memory[0].dtype:
            raise TypeError(
                f"StateCache.run: query is {query.dtype} and the cache {self._memory[0].dtype}; make it with "
                f"dtype={query.dtype}"
            )
        weights = (A_log, dt_bias, conv_weight, conv_bias, norm_weight)
        kind = self._run_few if _is_few(step.counts) else self._run_many
        run = partial(kind, layer, step, [*rows.values()], weights, gate=gate, eps=eps, scale=scale)
        out = run(writes_state=not step.drafts)
        if not step.drafts:
            step._begun.add(layer)
        step._ran[layer] = run if step.drafts else None
        return out

    def _run_few(self, layer: int, step: StateStep, rows: Any, weights: Any, **options: Any) -> Tensor:
        batch = len(step.counts), max(step.counts, default=0)
        rows = [each.unflatten(0, batch) for each in rows]
        operands: Any = (*rows, *weights, *self._of(layer))
        return delta.gated_delta_step(*operands, slots=step.slots, **options).flatten(0, 1)

    def _run_many(self, layer: int, step: StateStep, rows: Any, weights: Any, **options: Any) -> Tensor:
        conv_state, state = self._of(layer)
        # The operator has the errors for operands: a call without tokens.
        operands: Any = (*(each[None, :0] for each in rows), *weights, conv_state, state)
        delta.gated_delta_step(*operands, slots=step.slots[:1], **options)
        a_log, dt_bias, conv_weight, conv_bias, norm_weight = weights
        *mixed, z, a, b = rows
        of: dict[str, Any] = {"slots": step.slots, "cu_seqlens": step.cu_seqlens}
        x = torch.cat([each.flatten(1) for each in mixed], 1)[None]
        x = delta.causal_conv1d(x, conv_weight, conv_bias, conv_state, activation="silu", **of)
        step._begun.add(layer)
        columns = x.split([each[0].numel() for each in mixed], 2)
        heads = [part.unflatten(2, each.shape[1:]) for part, each in zip(columns, mixed, strict=True)]
        of |= {"A_log": a_log, "dt_bias": dt_bias, "scale": options["scale"]}
        operands = (*heads, a[None], b[None], state)
        out = delta.gated_delta_rule(*operands, use_qk_l2norm_in_kernel=True, **of)[0]
        norm: dict[str, Any] = {"eps": options["eps"], "norm": "float", "activation": options["gate"]}
        return rms_norm(out, norm_weight, z.reshape(out.shape), **norm)

    def _of(self, layer: int) -> tuple[Tensor, Tensor]:
        """The layer's convolution and recurrent states, of all slots."""
        return self._memory[0][:, layer], self._memory[1][:, layer]

    def _check_room(self, method: str) -> None:
        if not self._free:
            raise CacheFullError(
                f"StateCache.{method}: {len(self._sequences)} sequences are allocated, the most for this "
                "cache; free() one, or make it with a larger num_slots"
            )

    def _get(self, method: str, sequence: int) -> _Sequence:
        if sequence not in self._sequences:
            raise ValueError(
                f"StateCache.{method}: sequence {shown(sequence)} is not allocated; pass a number that "
                "allocate() or fork() returned and free() has not released"
            )
        return self._sequences[sequence]

    def _clear(self, own: _Sequence) -> None:
        own.length, own.begin, own.step = 0, 0, None
        for memory in self._memory:
            memory[own.slot].zero_()

    def _settle(self, method: str, owners: Sequence[_Sequence]) -> None:
        """Raises unless every layer has run the last steps of these sequences, and runs the drafts that they
        have kept. After a failure, the next call runs the other layers."""
        last = {own.step: own for own in reversed(owners) if own.step}
        for step, own in last.items():
            if lacking := self._every - step._ran.keys():
                undo = "reset({})" if step._begun else f"truncate({{}}, {own.begin})"
                raise ValueError(
                    f"StateCache.{method}: layer {min(lacking)} has not run the last step of sequence "
                    f"{own.number}; run it, or {undo.format(own.number)}"
                )
        for step in last:
            kept = [own.length - own.begin if own.step is step else 0 for own in step._owners]
            for layer, run in step._ran.items():
                if run is not None:
                    run(counts=self._numbers(kept))
                    step._begun.add(layer)
                    step._ran[layer] = None
