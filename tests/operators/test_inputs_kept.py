"""No function changes or returns memory of its caller: with every tensor argument given, at sizes of 1, where
conversions, expansions and copies have nothing to do, and at 0. But for the caches that are written."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn, varlen_attn_out

import torch_fattn
from tests.helpers.operator_calls import (
    DIM,
    FORMATS,
    OPERATORS,
    SIZES,
    Sizes,
    operand,
    operator_call,
    public_operators,
    written_by,
)
from tests.helpers.problems import TENSORS
from tests.helpers.public_calls import public_names
from tests.helpers.tensors import tensors_in
from torch_fattn import PagedKVCache, StaticKVCache, flash_attn
from torch_fattn.integrations import comfyui
from torch_fattn.integrations.diffusers import _Attention
from torch_fattn.integrations.transformers import attend
from torch_fattn.operators.prefix_and_suffix import FITTED

Function = Callable[..., Any]


CACHES = ("key_cache", "value_cache", "key_scales", "value_scales", "k_cache", "v_cache")  # that are written


# ---- the checker


def bits_of(tensor: Tensor) -> Tensor:
    """A copy of the whole storage."""
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    return whole.cpu().clone()


def share_memory(a: Tensor, b: Tensor) -> bool:
    a_storage, b_storage = a.untyped_storage(), b.untyped_storage()
    same = a_storage._cdata == b_storage._cdata
    return same or 0 != a_storage.data_ptr() == b_storage.data_ptr()


def check_kept(
    function: Function, arguments: dict[str, Any], written: tuple[str, ...] = (), kept: Any = ()
) -> None:
    """`written`: arguments that the function must write. `kept`: other tensors of the caller."""
    owned = {name: list(tensors_in(given)) for name, given in {**arguments, "kept": kept}.items()}
    before = {name: [bits_of(t) for t in tensors] for name, tensors in owned.items()}
    results = [list(tensors_in(function(**arguments))) for _ in range(2)]
    for name, tensors in owned.items():
        for tensor, bits in zip(tensors, before[name], strict=True):
            assert name in written or torch.equal(bits_of(tensor), bits), f"{name} was changed"
            for result in results[0] + results[1]:
                assert not share_memory(result, tensor), f"a result is memory of {name}"
    for a, b in combinations(results[0] + results[1], 2):
        assert not share_memory(a, b), "two results are one memory"


# ---- every operator


WRAPPERS = sorted(
    name
    for name in public_names()
    if inspect.isfunction(getattr(torch_fattn, name))
    and any(
        "Tensor" in str(p.annotation)
        for p in inspect.signature(getattr(torch_fattn, name)).parameters.values()
    )
)


# Options that come with another one.
NEEDS = {"slots": "state", "has_initial_state": "state", "A_log": "dt_bias", "dt_bias": "A_log"}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("op", "kv_format"), OPERATORS)
def test_operators(op: str, kv_format: str, size: str, device: str) -> None:
    arguments = operator_call(op, SIZES[size], device, kv_format)
    check_kept(getattr(torch.ops.fattn, op), arguments, written_by(op))
    if "softcap" in inspect.signature(getattr(torch_fattn, op)).parameters:
        check_kept(getattr(torch.ops.fattn, op), {**arguments, "softcap": 2.0}, written_by(op))
    if op in ("prefill", "decode", "paged_decode"):
        check_kept(getattr(torch.ops.fattn, op), {**arguments, "token_major_out": True}, written_by(op))
    # One option alone: each is another way through.
    schema = getattr(torch.ops.fattn, op).default._schema
    optional = {a.name for a in schema.arguments if "Optional[Tensor]" in str(a.type)} & arguments.keys()
    for name in optional - {"mask_map", "key_scales", "value_scales"} if size in ("ones", "no keys") else ():
        with_it = (name, NEEDS.get(name))
        others = {other for other in optional if other not in with_it and "_scales" not in other}
        alone = {n: None if n in others else given for n, given in arguments.items()}
        check_kept(getattr(torch.ops.fattn, op), alone, written_by(op))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", WRAPPERS)
def test_python_functions(name: str, size: str, device: str) -> None:
    s = SIZES[size]
    prefixed = name.startswith("shared_prefix")
    op = name.removeprefix("shared_prefix_").removeprefix("sparse_")
    function = getattr(torch_fattn, name)
    arguments = operator_call(op, s, device, "auto")
    if "return_lse" in inspect.signature(function).parameters:
        arguments["return_lse"] = True
    if prefixed:
        arguments = {n: each for n, each in arguments.items() if n not in TENSORS or n in FITTED}
    if name == "shared_prefix_decode":
        prefix = operand("key", op, Sizes(1, s.heads, s.rows, s.keys), device, "auto")
        mask = operand("attn_mask", op, Sizes(s.batch, s.heads, s.rows, 2 * s.keys), device, "auto")
        arguments |= {"prefix_key": prefix, "prefix_value": torch.rand_like(prefix), "attn_mask": mask}
    elif name == "shared_prefix_paged_decode":
        arguments["shared_blocks"] = 1 if size == "ones" else 0
        if size == "ones":
            del arguments["tree_mask"]  # needs keys after the prefix
    elif name == "sparse_decode":
        arguments = {n: arguments[n] for n in arguments.keys() & inspect.signature(function).parameters}
        arguments["indices"] = torch.randint(-1, 3, (s.batch, s.rows, 2), device=device)
    check_kept(function, arguments, written_by(op) if not prefixed else ())


def test_every_public_function_is_there() -> None:
    assert set(public_operators()) <= {op for op, _ in OPERATORS}
    others = {"shared_prefix_decode", "shared_prefix_paged_decode", "sparse_decode"}
    assert set(WRAPPERS) == set(public_operators()) | others


# ---- flash-attn's functions


def flash_call(name: str, s: Sizes, device: str) -> dict[str, Any]:
    """All tensors of its signature."""

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    def starts(length: int) -> Tensor:
        return (torch.arange(s.batch + 1) * length).to(torch.int32).to(device)

    packed, writes = "varlen" in name, name == "flash_attn_with_kvcache"
    rows, keys = ((s.batch * n,) if packed else (s.batch, n) for n in (s.rows, s.keys))
    new = rows if writes else keys
    given: dict[str, Any] = {"q": randn(*rows, s.heads, DIM), "qkv": randn(*rows, 3, s.heads, DIM)}
    given |= {name: randn(*new, s.heads, DIM) for name in ("k", "v")}
    given |= {name: randn(*keys, s.heads, DIM) for name in ("k_cache", "v_cache")}
    given |= {"kv": randn(*keys, 2, s.heads, DIM), "alibi_slopes": randn(s.heads), "causal": True}
    given |= {"rotary_cos": randn(4, DIM // 2), "rotary_sin": randn(4, DIM // 2)}
    given |= {"cache_seqlens": torch.zeros(s.batch, dtype=torch.int32, device=device)}
    if packed:
        given |= {name: starts(s.rows) for name in ("cu_seqlens", "cu_seqlens_q")}
        given |= {"cu_seqlens_k": starts(s.keys), "max_seqlen_k": s.keys}
        given |= {"max_seqlen": s.rows, "max_seqlen_q": s.rows}
    given |= {"return_attn_probs": True, "return_softmax_lse": True}
    signature = inspect.signature(getattr(flash_attn, name)).parameters
    return {name: given[name] for name in given if name in signature}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", flash_attn.__all__)
def test_flash_attn(name: str, size: str, device: str) -> None:
    arguments = flash_call(name, SIZES[size], device)
    check_kept(getattr(flash_attn, name), arguments, CACHES)
    if "rotary_cos" in arguments:
        names = ("k", "v", "rotary_cos", "rotary_sin")
        check_kept(getattr(flash_attn, name), {n: a for n, a in arguments.items() if n not in names})


# ---- caches, which write their own memory


def memory_of(cache: PagedKVCache | StaticKVCache) -> list[Tensor]:
    return [*cache._layers.tensors(), cache._tables.blocks, cache._tables.lengths]


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("kind", ["paged", "static"])
def test_caches(kind: str, kv_format: str, device: str) -> None:
    """`keys` and `values` are views by their description."""
    options: dict[str, Any] = {"dtype": torch.float32, "device": device, "kv_format": kv_format}
    cache: Any
    if kind == "paged":
        cache = PagedKVCache(1, 4, 1, DIM, block_size=1, max_sequences=2, **options)
        sequence = cache.allocate()
        steps = [cache.extend([sequence], 1)]
        cache.append(0, steps[0], *torch.randn(2, 1, 1, DIM, device=device))
        fork = cache.fork(sequence)
        steps.append(cache.extend([fork], 1))
    else:
        cache = StaticKVCache(1, 1, 4, 1, DIM, **options)
        steps = [cache.extend(tokens=1)]
        cache.append(0, steps[0], *torch.randn(2, 1, 1, DIM, device=device))
        steps.append(cache.extend(tokens=1))
    for a in tensors_in(steps):
        assert not any(share_memory(a, own) for own in memory_of(cache)), "a step is memory of the cache"
    new = [(step.seq_lens, step.positions, step.slot_mapping) for step in steps]
    for a, b in ((a, b) for a in new[0] for b in new[1]):
        assert not share_memory(a, b), "two steps are one memory"
    arguments = {"layer": 0, "step": steps[1]}
    rows = {name: torch.randn(1, 1, DIM, device=device) for name in ("key", "value")}
    check_kept(cache.append, {**arguments, **rows})
    own = {"sinks": torch.randn(1, device=device), "alibi_slopes": torch.randn(1, device=device)}
    query = torch.randn(1, 1, 1, DIM, device=device)
    for more in ({}, own, {"shared_prefix": True} if kind == "paged" else {}):
        call = {**arguments, "query": query, "return_lse": True, **more}
        check_kept(cache.decode, call, kept=memory_of(cache))
    if kind == "paged":
        call = {**arguments, "query": query[0], "return_lse": True, **own}
        check_kept(cache.prefill, call, kept=memory_of(cache))
        cache.free(fork)
    else:
        cache.reset()


# ---- what other libraries call


@pytest.mark.parametrize("size", SIZES)
def test_integrations(size: str, device: str) -> None:
    s = SIZES[size]
    query, key, value = (operand(name, "prefill", s, device, "auto") for name in ("query", "key", "value"))
    mask = operand("attn_mask", "prefill", s, device, "auto")
    with torch_fattn.installed():
        for given in (None, mask):
            sdpa = {"query": query, "key": key, "value": value, "attn_mask": given}
            check_kept(F.scaled_dot_product_attention, sdpa)
            token_major = {"query": query.transpose(1, 2), "key": key.transpose(1, 2)}
            token_major |= {"value": value.transpose(1, 2), "attn_mask": given}
            check_kept(_Attention(theirs), token_major)
            comfy = {"q": query, "k": key, "v": value, "heads": s.heads, "mask": given}
            for flag in ("skip_reshape", "skip_output_reshape"):
                comfy[flag] = True
                check_kept(functools.partial(comfyui.attention_override, theirs), comfy)
    layer = nn.Module().eval()
    sinks = torch.randn(s.heads, device=device)
    if min(s.batch, s.heads, s.rows, s.keys) > 0:
        hugging = {"module": layer, "query": query, "key": key, "value": value, "attention_mask": mask}
        check_kept(attend, {**hugging, "s_aux": sinks})
        bias = {"position_bias": mask.clone(), "attention_mask": None, "is_causal": False}
        check_kept(attend, {**hugging, **bias})


def theirs(*_: Any, **__: Any) -> Tensor:
    """Replaces the function of the other library."""
    return torch.zeros(1)


@pytest.mark.parametrize("size", [name for name in SIZES if name not in ("no batch", "no heads")])
def test_varlen_attn(size: str) -> None:
    s = SIZES[size]
    names = ("query", "key", "value", "cu_seqlens_q", "cu_seqlens_k")
    query, key, value, cu_q, cu_k = (operand(n, "varlen_prefill", s, "mps", "auto") for n in names)
    arguments = {"query": query, "key": key, "value": value, "cu_seq_q": cu_q, "cu_seq_k": cu_k}
    arguments |= {"max_q": s.rows, "max_k": s.keys}
    with torch_fattn.installed():
        check_kept(varlen_attn, arguments)
        out = torch.empty_like(query)
        before = {name: bits_of(t) for name, t in arguments.items() if isinstance(t, Tensor)}
        varlen_attn_out(out, **arguments)
        assert all(torch.equal(bits, bits_of(arguments[name])) for name, bits in before.items())


# ---- the controls


@pytest.mark.host_only
def test_a_function_that_returns_its_input_is_caught() -> None:
    sinks = torch.randn(1)
    check_kept(lambda sinks: sinks.clone(), {"sinks": sinks})
    for aliases in (
        lambda sinks: sinks.view(1, 1, 1),
        lambda sinks: (sinks + 1, [sinks.expand(1).contiguous()]),
    ):
        with pytest.raises(AssertionError, match="a result is memory of sinks"):
            check_kept(aliases, {"sinks": sinks})


@pytest.mark.host_only
def test_a_function_that_writes_its_input_is_caught() -> None:
    memory = torch.randn(4)
    for writes in (lambda x: x.add_(1).sum(), lambda x: torch.as_strided(x, (4,), (1,), 0).mul_(2).sum()):
        with pytest.raises(AssertionError, match="x was changed"):
            check_kept(writes, {"x": memory[1:2]})
        check_kept(writes, {"x": memory[1:2]}, written=("x",))


@pytest.mark.host_only
def test_results_that_share_are_caught() -> None:
    constant = torch.zeros(1)
    with pytest.raises(AssertionError, match="two results are one memory"):
        check_kept(lambda x: constant, {"x": torch.randn(1)})
    with pytest.raises(AssertionError, match="two results are one memory"):
        check_kept(lambda x: (x + 1).expand(2, 1).unbind(0), {"x": torch.randn(1)})
