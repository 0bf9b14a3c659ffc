"""All use of torch.distributed: the ranks of a group, the facts that they must agree on, and transfers.

NCCL sends tensors from the device. gloo sends them through host memory, since it does not support "mps".

Every call begins with an all_gather of a header of a fixed size. If sizes of a collective differ between
ranks, gloo ends the process and NCCL hangs; the header detects different shapes and refused arguments first.
"""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..runtime.signatures import shown
from .shards import Shards

_Result = TypeVar("_Result")
# Facts that must be equal on all ranks. The first is the call.
Facts = Mapping[str, Any]

_HEADER = 1 + 10  # int64: whether the rank takes part, and at most ten facts
HEADER_BYTES = 8 * _HEADER
_NEVER_SENT, _AT_ONCE = 1 << 30, timedelta(milliseconds=1)  # a tag, and a time


@dataclass
class Transfer:
    """A shard in transit. `wait` returns the received shard, or None if this rank receives none."""

    exchange: Exchange
    works: Sequence[Any]
    arriving: Tensor | None
    leaving: Tensor | None  # kept until it has been sent

    def wait(self) -> Tensor | None:
        with self.exchange.errors():
            for work in self.works:
                work.wait()
        return self.arriving


class Exchange:
    """The ranks of `group`: a process group, a DeviceMesh of one dimension, or None for the default group.
    `name` is that of the calling function, for errors."""

    def __init__(self, name: str, group: Any = None) -> None:
        self.name = name
        self.group = _process_group(name, group)
        self.rank = dist.get_rank(self.group)
        self.ranks = dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError(f"{name}: this process is not in the group; call it on the group's ranks only")

    @classmethod
    def planned(cls, name: str, ranks: int) -> Exchange:
        """Rank 0 of a hypothetical group, for plans."""
        exchange = cls.__new__(cls)
        exchange.name, exchange.group, exchange.rank, exchange.ranks = name, None, 0, ranks
        return exchange

    # ---- agreement

    def agree(self, prepare: Callable[[], tuple[Facts, _Result]]) -> _Result:
        """Runs `prepare` and compares its facts across ranks. Returns its result. If it raised on any rank,
        or facts differ, every rank raises."""
        refusal: Exception | None = None
        words = [0] * _HEADER
        try:
            facts, result = prepare()
            words[: 1 + len(facts)] = [1, *map(_number, facts.values())]
        except Exception as error:
            refusal = error
        headers = self.gather(torch.tensor(words, device="cpu")).tolist() if self.ranks > 1 else []
        if refusal is not None:
            raise refusal
        self._compare(facts, headers)
        return result

    def _compare(self, facts: Facts, headers: list[list[int]]) -> None:
        for rank, header in enumerate(headers):
            if not header[0]:
                raise RuntimeError(
                    f"{self.name}: rank {rank} refused its own arguments; see the error on that rank"
                )
        for rank, header in enumerate(headers[1:], start=1):
            for fact, first, own in zip(facts, headers[0][1:], header[1:], strict=False):
                if first == own:
                    continue
                if fact == "call":
                    raise RuntimeError(
                        f"{self.name}: rank 0 and rank {rank} call different functions; call the same one, "
                        "in the same order, on every rank"
                    )
                told = f"{fact}: {first} and {own}" if isinstance(facts[fact], int) else fact
                raise ValueError(
                    f"{self.name}: rank 0 and rank {rank} pass different {told}; they must be equal on every "
                    "rank"
                )

    # ---- transfers

    def on_wire(self, tensor: Tensor) -> Tensor:
        """The tensor, contiguous, on a device from which the group can send."""
        return tensor.to(self._wire_of(tensor.device)).contiguous()

    def gather(self, tensor: Tensor) -> Tensor:
        """Gathers tensors of one shape as `[ranks, ...]`, on this tensor's device."""
        sent = self.on_wire(tensor)
        gathered = sent.new_empty(self.ranks, *sent.shape)
        as_bytes = [each.view(-1).view(torch.uint8) for each in (sent, *gathered)]  # gloo supports few dtypes
        with self.errors():
            dist.all_gather(as_bytes[1:], as_bytes[0], group=self.group)
        return gathered.to(tensor.device)

    def gather_rows(self, tensor: Tensor, dim: int, counts: Sequence[int]) -> list[Tensor]:
        """Gathers tensors whose sizes along `dim` are `counts`."""
        most = max(counts)
        padding = [0, 0] * (tensor.dim() - 1 - dim) + [0, most - tensor.shape[dim]]
        gathered = self.gather(torch.nn.functional.pad(tensor, padding))
        return [part.narrow(dim, 0, count) for part, count in zip(gathered, counts, strict=True)]

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Sends `parts[r]` to rank r, and returns what rank r sent, of `shapes[r]` and the same dtype."""
        sizes = [torch.Size(shape).numel() for shape in shapes]
        sent = self.on_wire(torch.cat([part.reshape(-1) for part in parts]))
        received = sent.new_empty(sum(sizes))
        with self.errors():
            splits = [part.numel() for part in parts]
            dist.all_to_all_single(received, sent, sizes, splits, group=self.group)
        return unpacked(received.to(parts[0].device), shapes)

    def shift(self, leaving: Tensor | None, arriving: int, like: Tensor) -> Transfer:
        """Begins to send `leaving`, which is on the wire, to the next rank, and to receive `arriving` numbers
        of the dtype of `like` from the one before."""
        buffer = like.new_empty(arriving, device=self._wire_of(like.device)) if arriving else None
        transfers = []
        if leaving is not None and leaving.numel():
            transfers.append(self._with_peer(dist.isend, leaving, self.rank + 1))
        if buffer is not None:
            transfers.append(self._with_peer(dist.irecv, buffer, self.rank - 1))
        with self.errors():
            works = dist.batch_isend_irecv(transfers) if transfers else []
        return Transfer(self, works, buffer, leaving)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Converts torch's errors to one sentence with the name of the call."""
        try:
            yield
        except RuntimeError as error:
            self._leave()
            raise RuntimeError(
                f"{self.name}: rank {self.rank} of {self.ranks} lost the others: a rank ended, or stalled "
                f"beyond the group's timeout ({_reason(error)}); start all ranks of the group again"
            ) from error

    def _leave(self) -> None:
        """Closes this rank's connections, so that ranks that wait for it fail too. gloo closes all
        connections when a receive times out."""
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        for peer in others if "gloo" in self._backends() else []:
            with suppress(RuntimeError):
                nothing = torch.empty(1, device="cpu")
                receive = dist.irecv(nothing, group=self.group, group_src=peer, tag=_NEVER_SENT)
                if receive is not None:
                    receive.wait(_AT_ONCE)

    def _with_peer(self, operation: Any, tensor: Tensor, rank: int) -> dist.P2POp:
        peer = dist.get_global_rank(self.group, rank % self.ranks)
        return dist.P2POp(operation, tensor, peer, self.group)

    def _wire_of(self, device: torch.device) -> torch.device:
        if device.type == "cpu" and "gloo" not in self._backends() and torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        is_carried = device.type == "cuda" and "nccl" in self._backends()
        return device if is_carried else torch.device("cpu")

    def _backends(self) -> str:
        return str(dist.get_backend_config(self.group))


def unpacked(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Splits `flat` into consecutive tensors of these shapes."""
    pieces = flat.split([torch.Size(shape).numel() for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _process_group(name: str, group: Any) -> Any:
    if not dist.is_available():
        raise NotImplementedError(
            f"{name}: this torch was built without torch.distributed; install another build"
        )
    if not dist.is_initialized():
        raise RuntimeError(
            f"{name}: there is no process group; call torch.distributed.init_process_group first"
        )
    if group is None:
        return dist.group.WORLD
    if isinstance(group, dist.DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names or ()
            raise ValueError(
                f"{name}: the mesh has {group.ndim} dimensions {names}; pass the one over which "
                'the sequence is sharded, such as mesh["cp"]'
            )
        return group.get_group()
    if group is not dist.GroupMember.NON_GROUP_MEMBER and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{name}: group is {shown(group)}; pass a process group, a DeviceMesh or None")
    return group


def _number(fact: Any) -> int:
    return fact if isinstance(fact, int) else zlib.crc32(str(fact).encode())


def _reason(error: RuntimeError) -> str:
    """torch's message without its source location and advice."""
    text = re.sub(r"^\[[^\]]*\] *", "", str(error).strip().partition("\n")[0])
    return re.split(r"\. |[.;]?$", text, maxsplit=1)[0]


def facts_of(
    name: str, query: Tensor, rows: int, kv_heads: int, value_dim: int, options: Any, *shards: Any
) -> Facts:
    """`rows`: of all ranks."""
    batch, heads, _, head_dim = query.shape
    return {
        "call": name,
        "dtype": query.dtype,
        "batch size": batch,
        "query heads": heads,
        "key-value heads": kv_heads,
        "query rows": rows,
        "head_dim": head_dim,
        "value head_dim": value_dim,
        "options": sorted((key, _compared(value)) for key, value in options.items() if value is not None),
        "shards": [_compared(each) for each in shards],
    }


def _compared(value: Any) -> str:
    if isinstance(value, Shards):
        return str(value.checksum)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return str([_compared(each) for each in value])
    # A mask has different columns on every rank, and comparing contents would wait for the device.
    return f"{value.dtype}, {value.dim()} dimensions" if isinstance(value, Tensor) else repr(value)


def is_dtensor(operand: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(operand, module.DTensor)


def refuse_dtensors(name: str, operands: Mapping[str, Tensor]) -> None:
    for what, operand in operands.items():
        if is_dtensor(operand):
            raise TypeError(f"{name}: {what} is a DTensor; pass this rank's part of it, {what}.to_local()")


def refuse_gradients(name: str, operands: Mapping[str, Tensor]) -> None:
    for what, operand in operands.items():
        if operand.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"{name}: {what} requires grad, and there are no gradients across ranks; call it under "
                "torch.no_grad()"
            )
