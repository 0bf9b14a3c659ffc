"""Wrong calls of cache_write: one clear sentence each, nothing launched, nothing written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_fattn
from tests.conftest import counted_launches
from tests.helpers.cache_problems import FORMATS, Arguments, valid


def without(*names: str) -> Callable[[Arguments], Arguments]:
    return lambda _: dict.fromkeys(names)


def change(name: str, function: Callable[[Tensor], Tensor]) -> Callable[[Arguments], Arguments]:
    return lambda a: {name: function(a[name])}


def both(function: Callable[[Tensor], Tensor], *names: str) -> Callable[[Arguments], Arguments]:
    return lambda a: {name: function(a[name]) for name in names}


def dims(dim: int) -> Callable[[Arguments], Arguments]:
    return both(lambda x: torch.zeros(*x.shape[:-1], dim, dtype=x.dtype, device=x.device), "key", "key_cache")


CACHES = ("key_cache", "value_cache")
# The format of the call, what is wrong, the exception, and words that the sentence must hold.
WRONG: list[tuple[str, str, Callable[[Arguments], Arguments], type[Exception], list[str]]] = [
    ("float", "key of rank 4", change("key", lambda x: x[None]), ValueError, ["key", "4"]),
    ("float", "cache of rank 3", change("key_cache", lambda x: x[0]), ValueError, ["key_cache", "3"]),
    (
        "float",
        "slots of rank 2",
        change("slot_mapping", lambda x: x[None]),
        ValueError,
        ["slot_mapping", "2"],
    ),
    ("float", "float slots", change("slot_mapping", lambda x: x.float()), TypeError, ["float32", "int64"]),
    ("float", "two slots", change("slot_mapping", lambda x: x[:2]), ValueError, ["token count", "3", "2"]),
    ("float", "two values", change("value", lambda x: x[:2]), ValueError, ["token count", "3", "2"]),
    ("float", "one head", change("key", lambda x: x[:, :1]), ValueError, ["head count", "1", "2"]),
    ("float", "D differs", change("key", lambda x: x[..., :56]), ValueError, ["head_dim", "56", "64"]),
    ("float", "blocks differ", change("value_cache", lambda x: x[:3]), ValueError, ["num_blocks", "4", "3"]),
    (
        "float",
        "sizes differ",
        change("value_cache", lambda x: x[:, :1]),
        ValueError,
        ["block_size", "2", "1"],
    ),
    ("float", "D of 12", dims(12), ValueError, ["12", "8"]),
    ("float", "D of 584", dims(584), NotImplementedError, ["584", "576"]),
    ("float", "blocks of 0", both(lambda x: x[:, :0], *CACHES), ValueError, ["block_size", "0"]),
    ("float", "integer key", change("key", lambda x: x.int()), TypeError, ["int32"]),
    ("float", "float32 value", change("value", lambda x: x.float()), TypeError, ["float16", "float32"]),
    ("float", "float32 rows", both(lambda x: x.float(), "key", "value"), TypeError, ["float32", "float16"]),
    ("float", "half a pair", change("key_cache", lambda x: x.float()), TypeError, ["float32", "float16"]),
    ("float", "cache on the CPU", change("key_cache", lambda x: x.cpu()), ValueError, ["key_cache", "cpu"]),
    ("float", "slots on the CPU", change("slot_mapping", lambda x: x.cpu()), ValueError, ["cpu", "mps"]),
    (
        "float",
        "expanded cache",
        change("key_cache", lambda x: x[:1].expand(4, -1, -1, -1)),
        ValueError,
        ["key_cache", "share memory", "[0, 128, 64, 1]"],
    ),
    (
        "float",
        "overlapping slots",
        change("value_cache", lambda x: x.as_strided((4, 2, 2, 96), (384, 190, 95, 1))),
        ValueError,
        ["value_cache", "share memory"],
    ),
    (
        "float",
        "columns apart",
        change("key_cache", lambda x: torch.zeros(4, 2, 64, 2, device="mps").half().mT),
        ValueError,
        ["key_cache", "contiguous"],
    ),
    ("float", "scales", lambda a: scales_of(a), ValueError, ["key_scales", "float16", "leave it out"]),
    ("float", "unknown format", lambda _: {"kv_format": "int3"}, ValueError, ["int3", "fp8_e4m3"]),
    ("float", "format of halves", lambda _: {"kv_format": "int4"}, TypeError, ["int4", "uint8", "float16"]),
    ("float", "int16 caches", both(lambda x: x.short(), *CACHES), TypeError, ["dtype"]),
    ("int8", "no scales", without("key_scales", "value_scales"), ValueError, ["int8", "key_scales"]),
    ("int8", "half scales", change("key_scales", lambda x: x.half()), TypeError, ["float16", "float32"]),
    ("int8", "scales for one", without("value_scales"), ValueError, ["key_scales", "both"]),
    (
        "int8",
        "scales too few",
        change("value_scales", lambda x: x[:3]),
        ValueError,
        ["[3, 2, 2]", "[4, 2, 2]"],
    ),
    ("int8", "scales on the CPU", change("key_scales", lambda x: x.cpu()), ValueError, ["key_scales", "cpu"]),
    (
        "int8",
        "expanded scales",
        change("key_scales", lambda x: x[:1].expand(4, -1, -1)),
        ValueError,
        ["key_scales", "share memory"],
    ),
    ("fp8_e4m3", "format not named", lambda _: {"kv_format": "auto"}, ValueError, ["uint8", "name it"]),
    ("int4", "no scales", without("key_scales", "value_scales"), ValueError, ["int4", "key_scales"]),
    (
        "int4",
        "scales apart",
        change("key_scales", lambda x: torch.zeros(4, 2, 2, 2, 2, device="mps").half().mT),
        ValueError,
        ["key_scales", "last two dimensions"],
    ),
    (
        "int4",
        "half a group",
        lambda a: {"value": a["value"][..., :80], "value_cache": a["value_cache"][..., :40]},
        ValueError,
        ["head_dim 80", "int4", "32"],
    ),
    (
        "int4",
        "scales of a larger head",
        lambda a: {"value": a["value"][..., :64], "value_cache": a["value_cache"][..., :32]},
        ValueError,
        ["[4, 2, 2, 3, 2]", "[4, 2, 2, 2, 2]"],
    ),
]


def scales_of(arguments: Arguments) -> Arguments:
    shape = arguments["key_cache"].shape[:-1]
    return {name: torch.ones(shape, device="mps") for name in ("key_scales", "value_scales")}


def refusal_of(arguments: Arguments) -> tuple[type[Exception], str]:
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as caught:
        torch.ops.fattn.cache_write(**arguments)
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("kv_format", "function", "error", "words"),
    [pytest.param(f, c, e, w, id=f"{f}-{what}") for f, what, c, e, w in WRONG],
)
def test_wrong_call(
    kv_format: str, function: Callable[[Arguments], Arguments], error: type[Exception], words: list[str]
) -> None:
    arguments = valid(kv_format)
    arguments |= function(arguments)
    tensors = {name: a for name, a in arguments.items() if isinstance(a, Tensor)}
    before = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
    with counted_launches() as launches:
        raised, sentence = refusal_of(arguments)
    assert raised is error, sentence
    assert sentence.startswith("fattn.cache_write: ") and "\n" not in sentence and len(sentence) < 300
    for word in words:
        assert word in sentence, sentence
    assert launches == {}
    for name, tensor in before.items():
        mine, other = (x.cpu().contiguous().view(torch.uint8) for x in (tensors[name], tensor))
        assert torch.equal(mine, other)
    with FakeTensorMode() as mode:
        fakes = {n: mode.from_tensor(a) if isinstance(a, Tensor) else a for n, a in arguments.items()}
        assert refusal_of(fakes) == (raised, sentence), "the same words without data"


@pytest.mark.parametrize("kv_format", FORMATS)
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
        with pytest.raises(ValueError, match=f"cache_write: {name} is a negated view") as refusal:
            torch_fattn.cache_write(**arguments | {name: torch._neg_view(plain[name])})
        assert "\n" not in str(refusal.value)


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
    with pytest.raises(ValueError, match="begin at the same memory"):
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
