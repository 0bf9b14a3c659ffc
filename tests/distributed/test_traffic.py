"""The bytes that a rank hands to the collectives are those of `explain`, and its memory shrinks with the
ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock
from weakref import WeakValueDictionary

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.pool import Pool, World
from torch_fattn import distributed, reference
from torch_fattn.distributed import Shards, methods

pytestmark = pytest.mark.host_only

LENGTH = 96
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "decode": ("decode", {}),
    "decode of five rows": ("decode", {"rows": 5}),
    "replicated rows": ("prefill", {"rows": 20, "query_shards": "replicated"}),
    "ring": ("prefill", {"method": "ring"}),
    "causal ring": ("prefill", {"method": "ring", "is_causal": True}),
    "zigzag ring": ("prefill", {"method": "ring", "is_causal": True, "layout": "zigzag"}),
    "windows": ("prefill", {"method": "ring", "is_causal": True, "window_left": 8}),
    "keys after": ("prefill", {"method": "ring", "window_left": 0, "window_right": 8}),
    "rows": ("prefill", {"method": "rows"}),
    "heads": ("prefill", {"method": "heads", "return_lse": True}),
}


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Bytes given to torch.distributed for other ranks, by function."""
    counts: dict[str, int] = {}

    def add(name: str, tensor: Tensor, elements: int) -> None:
        counts[name] = counts.get(name, 0) + elements * tensor.element_size()

    all_gather, all_to_all, batch = dist.all_gather, dist.all_to_all_single, dist.batch_isend_irecv

    def gathered(into: list[Tensor], tensor: Tensor, group: Any) -> Any:
        add("all_gather", tensor, tensor.numel() * (len(into) - 1))
        return all_gather(into, tensor, group=group)

    def exchanged(into: Tensor, tensor: Tensor, *splits: list[int], group: Any) -> Any:
        add("all_to_all", tensor, sum(splits[1]) - splits[1][dist.get_rank(group)])
        return all_to_all(into, tensor, *splits, group=group)

    def sent(transfers: list[Any]) -> Any:
        for transfer in transfers:
            if transfer.op is dist.isend:
                add("isend", transfer.tensor, transfer.tensor.numel())
        return batch(transfers)

    with (
        mock.patch.object(dist, "all_gather", gathered),
        mock.patch.object(dist, "all_to_all_single", exchanged),
        mock.patch.object(dist, "batch_isend_irecv", sent),
    ):
        yield counts


def arguments_of(rank: int, ranks: int, options: dict[str, Any]) -> tuple[list[Tensor], dict[str, Any]]:
    """The operands of a rank, and the keywords of the call."""
    own = dict(options)
    shards = getattr(Shards, own.pop("layout", "contiguous"))(LENGTH, ranks)
    rows = own.pop("rows", None)
    whole = [torch.randn(2, heads, LENGTH, 32) for heads in (8, 4, 4)]
    key, value = (shards.take(operand, 2, rank) for operand in whole[1:])
    query = shards.take(whole[0], 2, rank) if "method" in own else whole[0][:, :, : rows or 1]
    return [query, key, value], own | {"shards": shards}


def bytes_sent(world: World, op: str, options: dict[str, Any]) -> dict[str, int]:
    operands, keywords = arguments_of(world.rank, world.ranks, options)
    with counted() as counts:
        getattr(distributed, op)(*operands, group=world.group, **keywords)
    return counts


@pytest.mark.parametrize("call", CALLS)
def test_bytes_sent(ranks: Pool, call: str) -> None:
    op, options = CALLS[call]
    for n in (1, 2, 4):
        counts = ranks.run(n, bytes_sent, op, options)
        operands, keywords = arguments_of(0, n, options)
        plan = distributed.explain(op, *operands, ranks=n, **keywords).data
        method = options.get("method", plan["method"])
        assert [sum(of_rank.values()) for of_rank in counts] == list(plan["sent_bytes"][method])
        if "method" not in options and n > 1:  # one exchange of results, beside the header
            part = operands[0].shape[:3].numel() * (32 + 4) * 4
            assert counts[0] == {"all_gather": (n - 1) * (part + distributed.exchange.HEADER_BYTES)}


def test_windows_and_causality_save_traffic() -> None:
    sent = {}
    for call in ("ring", "causal ring", "windows"):
        operands, keywords = arguments_of(0, 4, CALLS[call][1])
        data = distributed.explain("prefill", *operands, ranks=4, **keywords).data
        sent[call] = sum(data["sent_bytes"]["ring"])
    assert sent["ring"] > 1.5 * sent["causal ring"] > 2 * sent["windows"]


@pytest.mark.parametrize("layout", ["zigzag", "round_robin"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"is_causal": True, "window_left": 8, "sink_tokens": 3},
        {"window_left": 2, "window_right": 5, "sink_tokens": 40, "q_offset": -7},
    ],
)
def test_work(layout: str, options: dict[str, Any]) -> None:
    """By the reference: a row's sum over keys that are all the same counts what it sees."""
    shards = Shards.zigzag(LENGTH, 3) if layout == "zigzag" else Shards.round_robin(LENGTH, 3, 4)
    own = [torch.empty(1, 1, count, 8, device="meta") for count in shards.counts]
    keys = torch.zeros(1, 1, LENGTH, 8)
    _, lse = reference.prefill(keys, keys, keys, **options)
    scores = shards.take(lse.exp()[0, 0], 0, 0), shards.take(lse.exp()[0, 0], 0, 1), lse.exp()
    plan = distributed.explain("prefill", own[0], own[0], own[0], ranks=3, shards=shards, **options).data
    for rank in (0, 1):
        assert plan["work"][rank] == pytest.approx(float(scores[rank].sum() / scores[2].sum()))


def attended(world: World, call: str) -> int:
    """How many shards of keys this rank attends to."""
    operands, keywords = arguments_of(world.rank, world.ranks, CALLS[call][1])
    with mock.patch.object(methods, "attend", wraps=methods.attend) as counter:
        distributed.prefill(*operands, group=world.group, **keywords)
    return counter.call_count


def test_unseen_shards_are_not_attended_to(ranks: Pool) -> None:
    assert ranks.run(4, attended, "ring") == [4, 4, 4, 4]
    assert ranks.run(4, attended, "causal ring") == [1, 2, 3, 4]
    assert ranks.run(4, attended, "windows") == [1, 2, 2, 2]
    assert ranks.run(4, attended, "keys after") == [2, 2, 2, 1], "they pass ranks that do not see them"


class LiveBytes(TorchDispatchMode):
    """The most bytes of results of operators that are alive at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, Tensor):
                self.alive[id(each)] = each
        storages = [each.untyped_storage() for each in self.alive.values()]
        self.most = max(self.most, sum({each.data_ptr(): each.nbytes() for each in storages}.values()))
        return result


def live_bytes(world: World, length: int, method: str) -> int:
    shards = Shards.zigzag(length, world.ranks)
    own = torch.randn(1, 4, shards.count(world.rank), 32)
    calls = []
    for _ in range(4):  # now and then gloo is late to release what it has sent
        with LiveBytes() as live:
            distributed.prefill(
                own, own, own, group=world.group, shards=shards, is_causal=True, method=method
            )
        calls.append(live.most)
    return min(calls)


@pytest.mark.parametrize("method", ["ring", "heads"])
def test_memory_of_a_rank(ranks: Pool, method: str) -> None:
    """It is about what `explain` says, and stays when length and ranks double."""
    two, four, twice = (max(ranks.run(n, live_bytes, 1024 * m, method)) for n, m in ((2, 1), (4, 1), (4, 2)))
    assert twice == pytest.approx(2 * four, rel=0.05) and four < 0.65 * two
    own = torch.empty(1, 4, 256, 32, device="meta")
    shards = Shards.zigzag(1024, 4)
    plan = distributed.explain("prefill", own, own, own, ranks=4, shards=shards, is_causal=True).data
    result = 256 * 4 * (32 + 1) * 4
    assert four == pytest.approx(plan["memory_bytes"][method][0] + result, rel=0.3)
