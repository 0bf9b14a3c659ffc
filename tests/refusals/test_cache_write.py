"""Wrong calls of cache_write: one clear sentence each, nothing launched, nothing written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_fattn
from tests.conftest import counted_launches
from tests.helpers.cache_problems import Arguments, valid
from tests.helpers.kv_formats import KV_FORMATS
from tests.helpers.wrong_calls import (
    Change,
    Fault,
    fault,
    mistyped,
    on_cpu,
    option,
    refusal,
    sliced,
    unsupported,
    without,
)
from tests.refusals.test_bad_input import refusal_of


def change(name: str, function: Callable[[Tensor], Tensor]) -> Change:
    return lambda a: {name: function(a[name])}


def both(function: Callable[[Tensor], Tensor], *names: str) -> Change:
    return lambda a: {name: function(a[name]) for name in names}


def dims(dim: int) -> Change:
    return both(lambda x: torch.zeros(*x.shape[:-1], dim, dtype=x.dtype, device=x.device), "key", "key_cache")


CACHES = ("key_cache", "value_cache")
WRONG: dict[str, list[Fault]] = {
    "float": [
        fault("key of rank 4", sliced("key", None), "key", "4"),
        fault("cache of rank 3", sliced("key_cache", 0), "key_cache", "3"),
        fault("slots of rank 2", sliced("slot_mapping", None), "slot_mapping", "2"),
        mistyped("float slots", change("slot_mapping", lambda x: x.float()), "float32", "int64"),
        fault("two slots", sliced("slot_mapping", slice(2)), "token count", "3", "2"),
        fault("two values", sliced("value", slice(2)), "token count", "3", "2"),
        fault("one head", change("key", lambda x: x[:, :1]), "head count", "1", "2"),
        fault("D differs", change("key", lambda x: x[..., :56]), "head_dim", "56", "64"),
        fault("blocks differ", sliced("value_cache", slice(3)), "num_blocks", "4", "3"),
        fault("sizes differ", change("value_cache", lambda x: x[:, :1]), "block_size", "2", "1"),
        fault("D of 12", dims(12), "12", "8"),
        unsupported("D of 584", dims(584), "584", "576"),
        fault("blocks of 0", both(lambda x: x[:, :0], *CACHES), "block_size", "0"),
        mistyped("integer key", change("key", lambda x: x.int()), "int32"),
        mistyped("float32 value", change("value", lambda x: x.float()), "float16", "float32"),
        mistyped("float32 rows", both(lambda x: x.float(), "key", "value"), "float32", "float16"),
        mistyped("half a pair", change("key_cache", lambda x: x.float()), "float32", "float16"),
        fault("cache on the CPU", on_cpu("key_cache"), "key_cache", "cpu"),
        fault("slots on the CPU", on_cpu("slot_mapping"), "cpu", "mps"),
        fault("expanded cache", change("key_cache", lambda x: x[:1].expand(4, -1, -1, -1)), "key_cache",
              "share memory", "[0, 128, 64, 1]"),
        fault("overlapping slots",
              change("value_cache", lambda x: x.as_strided((4, 2, 2, 96), (384, 190, 95, 1))), "value_cache",
              "share memory"),
        fault("columns apart",
              change("key_cache", lambda x: torch.zeros(4, 2, 64, 2, device="mps").half().mT), "key_cache",
              "contiguous"),
        fault("scales", lambda a: scales_of(a), "key_scales", "float16", "leave it out"),
        fault("unknown format", option(kv_format="int3"), "int3", "fp8_e4m3"),
        mistyped("format of halves", option(kv_format="int4"), "int4", "uint8", "float16"),
        mistyped("int16 caches", both(lambda x: x.short(), *CACHES), "dtype"),
    ],
    "int8": [
        fault("no scales", without("key_scales", "value_scales"), "int8", "key_scales"),
        mistyped("half scales", change("key_scales", lambda x: x.half()), "float16", "float32"),
        fault("scales for one", without("value_scales"), "key_scales", "both"),
        fault("scales too few", sliced("value_scales", slice(3)), "[3, 2, 2]", "[4, 2, 2]"),
        fault("scales on the CPU", on_cpu("key_scales"), "key_scales", "cpu"),
        fault("expanded scales", change("key_scales", lambda x: x[:1].expand(4, -1, -1)), "key_scales",
              "share memory"),
    ],
    "fp8_e4m3": [fault("format not named", option(kv_format="auto"), "uint8", "name it")],
    "int4": [
        fault("no scales", without("key_scales", "value_scales"), "int4", "key_scales"),
        fault("scales apart",
              change("key_scales", lambda x: torch.zeros(4, 2, 2, 2, 2, device="mps").half().mT),
              "key_scales", "last two dimensions"),
        fault("half a group",
              lambda a: {"value": a["value"][..., :80], "value_cache": a["value_cache"][..., :40]},
              "head_dim 80", "int4", "32"),
        fault("scales of a larger head",
              lambda a: {"value": a["value"][..., :64], "value_cache": a["value_cache"][..., :32]},
              "[4, 2, 2, 3, 2]", "[4, 2, 2, 2, 2]"),
    ],
}  # fmt: skip


def scales_of(arguments: Arguments) -> Arguments:
    shape = arguments["key_cache"].shape[:-1]
    return {name: torch.ones(shape, device="mps") for name in ("key_scales", "value_scales")}


@pytest.mark.parametrize(
    ("kv_format", "fault"),
    [pytest.param(f, fault, id=f"{f}-{fault.what}") for f, faults in WRONG.items() for fault in faults],
)
def test_wrong_call(kv_format: str, fault: Fault) -> None:
    arguments = valid(kv_format)
    arguments |= fault.change(arguments)
    tensors = {name: a for name, a in arguments.items() if isinstance(a, Tensor)}
    before = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
    with refusal("fattn.cache_write", fault.error, *fault.words):
        torch.ops.fattn.cache_write(**arguments)
    for name, tensor in before.items():
        mine, other = (x.cpu().contiguous().view(torch.uint8) for x in (tensors[name], tensor))
        assert torch.equal(mine, other)
    with FakeTensorMode() as mode:
        fakes = {n: mode.from_tensor(a) if isinstance(a, Tensor) else a for n, a in arguments.items()}
        refused = refusal_of("cache_write", fakes)
    assert refused == refusal_of("cache_write", arguments), "the same words without data"


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_the_control_works(kv_format: str) -> None:
    with counted_launches() as launches:
        torch.ops.fattn.cache_write(**valid(kv_format))
    assert launches == {"fattn_cache_write": 1}


@pytest.mark.host_only
def test_negated_views() -> None:
    """A cache is not written through the copy that torch would make of one; rows may be."""
    arguments = valid("float", "cpu")
    plain = {name: arguments[name].clone() for name in CACHES}
    torch_fattn.cache_write(**arguments | plain)
    rows = {name: torch._neg_view(-arguments[name]) for name in ("key", "value")}
    torch_fattn.cache_write(**arguments | rows)
    for name in CACHES:
        assert torch.equal(arguments[name].view(torch.int16), plain[name].view(torch.int16))
        with refusal("fattn.cache_write", ValueError, f"{name} is a negated view"):
            torch_fattn.cache_write(**arguments | {name: torch._neg_view(plain[name])})


def test_int4_needs_whole_groups() -> None:
    rows, pool = torch.zeros(1, 1, 40), torch.zeros(2, 4, 1, 20, dtype=torch.uint8)
    scales = torch.zeros(2, 4, 1, 1, 2, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"key_cache head_dim 40 cannot be stored as int4, .* 32 columns"):
        torch_fattn.cache_write(
            rows,
            rows,
            pool,
            pool.clone(),
            torch.zeros(1, dtype=torch.long),
            key_scales=scales,
            value_scales=scales.clone(),
            kv_format="int4",
        )


def test_caches_that_begin_at_one_place() -> None:
    arguments = valid()
    arguments["value_cache"] = arguments["key_cache"]
    arguments["value"] = arguments["key"].clone()
    with pytest.raises(ValueError, match="begin at the same address"):
        torch_fattn.cache_write(**arguments)
    arguments["value"] = arguments["key"]
    torch_fattn.cache_write(**arguments)


def test_pools_that_interleave() -> None:
    """One tensor for both, as vLLM has it: other elements, so accepted."""
    arguments = valid() | {"value": torch.randn(3, 2, 64, device="mps").half()}
    pool = torch.zeros(4, 2, 2, 2, 64, device="mps", dtype=torch.float16)
    arguments["key_cache"], arguments["value_cache"] = pool.unbind(2)
    torch_fattn.cache_write(**arguments)
    assert torch.equal(pool[3, 0].cpu(), torch.stack((arguments["key"][2], arguments["value"][2])).cpu())
