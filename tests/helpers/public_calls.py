"""Every public function, and a valid call of each, from which the tests make wrong calls."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import torch_fattn
from tests.helpers import wrong_calls
from tests.helpers.logits_problems import LogitsProblem
from tests.helpers.public_caches import OF_CACHES, Arguments, heads, linear_rows
from torch_fattn import patterns
from torch_fattn.distributed import Shards
from torch_fattn.integrations import comfyui
from torch_fattn.operators import BACKWARDS, LINEAR, LOGITS_OPERATORS, OPERATORS, ROTARY

_Thing = TypeVar("_Thing")
# Modules whose public names are those of torch_fattn.
INNER = tuple(
    f"torch_fattn.{room}"
    for room in (
        *("commands", "distributed.", "inspection", "integrations.pytorch", "operators", "runtime"),
        "tuning",
    )
)
# Classes that only the library instantiates.
MADE_BY_THE_LIBRARY = {
    "CacheStats",
    "CacheStep",
    "CompiledKernel",
    "Explanation",
    "Fallback",
    "Report",
    "StateStep",
    "Warmup",
}


@dataclass(frozen=True)
class Public:
    """A public function or method. `call` takes the keywords of `valid`."""

    name: str  # with which its errors begin
    function: Callable[..., Any]
    options: Callable[..., Any] | None = None  # whose keywords it takes, too
    made: type | None = None  # the class of a constructor

    @property
    def names(self) -> set[str]:
        """The names with which its errors may begin. `explain` and `warmup` raise the errors of the
        operator."""
        if self.name in ("torch_fattn.explain", "torch_fattn.warmup"):
            return {self.name, "fattn.prefill"}
        return {self.name, "fattn attention in _Attention"} if ".transformers." in self.name else {self.name}

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        own = dict(inspect.signature(self.function).parameters)
        own.pop("self", None)
        if self.options is not None:
            theirs = inspect.signature(self.options).parameters
            # These take more than the keywords of the other function.
            every = self.name in (
                "torch_fattn.explain",
                "torch_fattn.integrations.comfyui.attention_override",
            )
            own |= {n: each for n, each in theirs.items() if every or each.kind is each.KEYWORD_ONLY}
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return {n: each for n, each in own.items() if each.kind not in kinds}


OPTIONS = {
    "torch_fattn.explain": torch_fattn.prefill,
    "torch_fattn.shared_prefix_decode": torch_fattn.decode,
    "torch_fattn.shared_prefix_paged_decode": torch_fattn.decode,
    "torch_fattn.integrations.comfyui.attention_override": comfyui._attention,
}


def find() -> dict[str, Public]:
    """Walks the package, so that a new module, class or function is found."""
    found: dict[Any, Public] = {}
    for module in _modules():
        for name in public_names() if module is torch_fattn else getattr(module, "__all__", ()):
            for public in _members(module.__name__, name, getattr(module, name)):
                found.setdefault((name, inspect.unwrap(public.function)), public)
    return {public.name: public for public in found.values()}


def public_names() -> list[str]:
    """What the package has at its top besides modules; `__all__` is a part of it."""
    return [
        name
        for name, each in vars(torch_fattn).items()
        if not name.startswith("_") and name != "annotations" and not inspect.ismodule(each)
    ]


def _modules() -> Iterator[Any]:
    yield torch_fattn
    for info in pkgutil.walk_packages(torch_fattn.__path__, "torch_fattn."):
        if any(part.startswith("_") for part in info.name.split(".")[1:]) or info.name.startswith(INNER):
            continue
        yield importlib.import_module(info.name)


def _members(module: str, name: str, thing: Any) -> Iterator[Public]:
    if inspect.isclass(thing) and not issubclass(thing, BaseException):
        own = [base for base in thing.__mro__ if base.__module__.startswith("torch_fattn.")]
        methods = {k: v for base in reversed(own) for k, v in vars(base).items()}
        for method, function in methods.items():
            if inspect.isfunction(function) and (not method.startswith("_") or method == "__init__"):
                if method != "__init__" or name not in MADE_BY_THE_LIBRARY:
                    full = name if method == "__init__" else f"{name}.{method}"
                    made = thing if method == "__init__" else None
                    yield Public(full, function, OPTIONS.get(full), made)
    elif inspect.isfunction(thing):
        full = f"{module}.{name}"
        if module == "torch_fattn" and hasattr(torch.ops.fattn, name) and name != "sdpa":
            full = f"fattn.{name}"
        yield Public(full, thing, OPTIONS.get(full))


def _int32(*numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def _shared() -> Arguments:
    query, prefix = heads(2, 4, 1, 16), heads(1, 2, 6, 16)
    own = heads(2, 2, 4, 16)
    arguments = {"query": query, "prefix_key": prefix, "prefix_value": prefix, "key": own, "value": own}
    return arguments | {"seq_lens": _int32(1, 4)}


def _shared_blocks() -> Arguments:
    pool = heads(5, 2, 2, 16)
    arguments = {"query": heads(2, 4, 1, 16), "key_cache": pool, "value_cache": pool}
    return arguments | {
        "block_tables": _int32([0, 1, 2], [0, 1, 3]),
        "seq_lens": _int32(5, 6),
        "shared_blocks": 2,
    }


def _sparse() -> Arguments:
    arguments = {
        "query": heads(2, 4, 3, 16),
        "key": heads(2, 2, 10, 16),
        "value": heads(2, 2, 10, 16, seed=1),
    }
    indices = torch.tensor([3, 9, -1, 0], dtype=torch.int32).expand(2, 3, 4).clone()
    return arguments | {"indices": indices, "seq_lens": _int32(10, 4)}


def _full_blocks() -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    count, index = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    return BlockMask.from_kv_blocks(0 * count, index, count, index)


def _masked_blocks() -> Arguments:
    operands = {n: heads(1, 2, 40, 16) for n in ("query", "key", "value")}
    return operands | {"block_mask": torch.tensor([[[[True, False]] * 2]]), "block_size": (32, 32)}


def _quantised() -> Arguments:
    stored, scales = torch_fattn.reference.quantise(heads(3, 2, 32), "int8")
    return {"stored": stored, "scales": scales, "kv_format": "int8"}


def _flash() -> Arguments:
    return {"q": heads(2, 3, 4, 16), "k": heads(2, 5, 2, 16), "v": heads(2, 5, 2, 16)}


def _flash_varlen() -> Arguments:
    arguments = {"cu_seqlens_q": _int32(0, 3, 4), "cu_seqlens_k": _int32(0, 5, 6)}
    return arguments | {"max_seqlen_q": 3, "max_seqlen_k": 5}


def _flash_cache() -> Arguments:
    arguments = {"q": heads(2, 1, 4, 16), "k": heads(2, 1, 2, 16), "v": heads(2, 1, 2, 16)}
    caches = {"k_cache": heads(2, 8, 2, 16), "v_cache": heads(2, 8, 2, 16)}
    rotary = {"rotary_cos": heads(8, 4), "rotary_sin": heads(8, 4)}
    return arguments | caches | rotary | {"cache_seqlens": _int32(3, 5)}


def _comfyui() -> Arguments:
    q = heads(1, 3, 32)
    return {"func": lambda q, *_, **__: q, "q": q, "k": q, "v": q, "heads": 2}


def _block_mask() -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, q_idx, kv_idx: q_idx != kv_idx, None, None, 3, 5, device="cpu")


def _flex() -> Arguments:
    key = heads(1, 2, 5, 16)
    operands = {"query": heads(1, 2, 3, 16), "key": key, "value": key}
    return operands | {"score_mod": lambda score, *_: score, "block_mask": _block_mask()}


class _Patcher:
    model_options: dict[str, Any] = {}

    def clone(self) -> _Patcher:
        return self


class _Attention(torch.nn.Module):
    is_causal = True


def _transformers() -> Arguments:
    module = _Attention().eval()
    x = heads(1, 2, 3, 16)
    return {"module": module, "query": x, "key": x, "value": x, "attention_mask": None}


def one_rank(thing: _Thing) -> _Thing:
    """Returns the function across ranks, or its arguments, after this process became the only rank."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return thing


# A valid call of each on the CPU; for a method also the object, under "self".
VALID: dict[str, Callable[[], Arguments]] = {
    **{
        f"{room}.{op}": lambda op=op: wrong_calls.valid(op, "cpu")  # type: ignore[misc]
        for op in (*OPERATORS, *BACKWARDS, *ROTARY, *LINEAR, "cache_write", "rms_norm")
        for room in ("fattn", "torch_fattn.reference")
    },
    "fattn.mask_map": lambda: {"attn_mask": heads(20, 40) > 0},
    "torch_fattn.reference.mask_map": lambda: {"attn_mask": heads(20, 40) > 0},
    **{
        f"{room}.{op}": lambda op=op: LogitsProblem(0, op, torch.float32, (3, 8), cap=2.0).call(heads(3, 8))  # type: ignore[misc]
        for op in LOGITS_OPERATORS
        for room in ("fattn", "torch_fattn.reference")
    },
    "torch_fattn.reference.quantise": lambda: {"x": heads(3, 32), "kv_format": "int8"},
    "torch_fattn.reference.dequantise": _quantised,
    "fattn.attention": lambda: wrong_calls.valid("prefill", "cpu"),
    "fattn.varlen_attention": lambda: wrong_calls.valid("varlen_prefill", "cpu"),
    "torch_fattn.sdpa": lambda: {n: heads(1, 2, 3, 16) for n in ("query", "key", "value")},
    "torch_fattn.shared_prefix_decode": _shared,
    "torch_fattn.shared_prefix_paged_decode": _shared_blocks,
    "torch_fattn.sparse_decode": _sparse,
    "torch_fattn.explain": lambda: {"op": "prefill"} | wrong_calls.valid("prefill", "cpu"),
    "torch_fattn.warmup": lambda: {"calls": []},
    **{
        f"torch_fattn.distributed.{op}": lambda op=op: one_rank(wrong_calls.valid(op, "cpu"))  # type: ignore[misc]
        for op in ("decode", "paged_decode")
    },
    "torch_fattn.distributed.prefill": lambda: one_rank(
        wrong_calls.valid("prefill", "cpu") | {"query_shards": "replicated"}
    ),
    "torch_fattn.distributed.varlen_prefill": lambda: one_rank(
        {
            "query": heads(4, 4, 16),
            "key": heads(4, 2, 16),
            "value": heads(4, 2, 16),
            "shards": [Shards.sizes([3]), Shards.sizes([1])],
        }
    ),
    "torch_fattn.linear_attention.causal_conv1d": lambda: {
        **{"x": heads(2, 3, 5), "weight": heads(5, 4), "initial_state": heads(2, 5, 3)},
        "output_final_state": True,
    },
    "torch_fattn.linear_attention.gated_delta_rule": lambda: {
        **{name: rows[None] for name, rows in linear_rows(3).items() if name in ("query", "key", "value")},
        **{"g": -heads(1, 3, 2).abs(), "beta": heads(1, 3, 2), "initial_state": heads(1, 2, 16, 8)},
        "output_final_state": True,
    },
    "torch_fattn.distributed.explain": lambda: {
        "op": "prefill",
        **{n: heads(1, 2, 3, 16) for n in ("query", "key", "value")},
        "ranks": 1,
    },
    "torch_fattn.distributed.unshard": lambda: one_rank(
        {"own": heads(2, 5), "dim": 1, "shards": Shards.sizes([5])}
    ),
    "Shards": lambda: {"runs": (((0, 4),), ((4, 2),))},
    "Shards.count": lambda: {"self": Shards.sizes([3, 2]), "rank": 1},
    "Shards.take": lambda: {"self": Shards.sizes([3, 2]), "all_positions": heads(2, 5), "dim": 1, "rank": 0},
    "Shards.join": lambda: {"self": Shards.sizes([3]), "parts": [heads(2, 3)], "dim": 1},
    "ShardedCache": lambda: one_rank({"block_size": 4}),
    **OF_CACHES,
    "CompiledKernel.is_launched_by": lambda: {"self": _kernel(), "launch": {"kernel": "fattn_merge"}},
    "torch_fattn.flash_attn.flash_attn_func": _flash,
    "torch_fattn.flash_attn.flash_attn_kvpacked_func": lambda: {
        "q": heads(2, 3, 4, 16),
        "kv": heads(2, 5, 2, 2, 16),
    },
    "torch_fattn.flash_attn.flash_attn_qkvpacked_func": lambda: {"qkv": heads(2, 3, 3, 4, 16)},
    "torch_fattn.flash_attn.flash_attn_varlen_func": lambda: {
        "q": heads(4, 4, 16),
        "k": heads(6, 2, 16),
        "v": heads(6, 2, 16),
        **_flash_varlen(),
    },
    "torch_fattn.flash_attn.flash_attn_varlen_kvpacked_func": lambda: {
        "q": heads(4, 4, 16),
        "kv": heads(6, 2, 2, 16),
        **_flash_varlen(),
    },
    "torch_fattn.flash_attn.flash_attn_varlen_qkvpacked_func": lambda: {
        "qkv": heads(4, 3, 4, 16),
        "cu_seqlens": _int32(0, 3, 4),
        "max_seqlen": 3,
    },
    "torch_fattn.flash_attn.flash_attn_with_kvcache": _flash_cache,
    "torch_fattn.integrations.comfyui.apply": lambda: {"model": _Patcher()},
    "torch_fattn.integrations.comfyui.attention_override": _comfyui,
    "torch_fattn.integrations.flex_attention.flex_attention": _flex,
    "torch_fattn.integrations.flex_attention.mask_of": lambda: {"block_mask": _block_mask()},
    "torch_fattn.patterns.pooled_scores": lambda: {"query": heads(1, 4, 40, 16), "key": heads(1, 2, 9, 16)},
    "torch_fattn.patterns.top_blocks": lambda: {"scores": heads(1, 2, 3, 4), "density": 0.5},
    "torch_fattn.patterns.mass_blocks": lambda: {"scores": heads(1, 2, 3, 4), "mass": 0.5},
    "torch_fattn.patterns.tile_order": lambda: {"grid": [4, 6], "tile": [2, 3]},
    "torch_fattn.patterns.neighborhood": lambda: {"grid": [4, 6], "window": [1, 1]},
    "torch_fattn.patterns.of_block_mask": lambda: {"block_mask": _full_blocks()},
    "torch_fattn.patterns.attention_with_means": _masked_blocks,
    "Pattern": lambda: {"select": lambda query, key: None},
    "Pattern.attention": lambda: {
        "self": patterns.Pattern(0.5),
        **{n: heads(1, 2, 3, 16) for n in ("query", "key", "value")},
    },
    "PagedCache": lambda: {"config": _model().config, "num_blocks": 4},
    "torch_fattn.integrations.transformers.attend": _transformers,
    "torch_fattn.integrations.transformers.register": lambda: {"on_unsupported": "error", "fuse": True},
    "torch_fattn.integrations.transformers.report": lambda: {"model": _model()},
    "torch_fattn.integrations.transformers.use_packed": lambda: {"model": _model()},
}
# Functions without such a call, and why: they change the process, take no arguments, or are internal.
LEFT_OUT = {
    **{
        f"PagedCache.{method}": "transformers alone calls it"
        for method in ("batch_repeat_interleave", "batch_select_indices", "crop", "reorder_cache", "update")
    },
    "torch_fattn.install": "it would change the calls of all later tests; test_training.py has its refusal",
    "torch_fattn.integrations.diffusers.register": "needs diffusers: tests/integrations/test_long_models.py",
    "torch_fattn.distributed.context_parallel": "a context: tests/distributed/test_context.py",
    "torch_fattn.integrations.transformers.attend_paged": "transformers alone calls it, with its own cache",
    "torch_fattn.integrations.transformers.attend_sharded": "transformers alone calls it, with its cache",
    "torch_fattn.integrations.transformers.make_sharded_mask": "transformers alone calls it",
    "torch_fattn.integrations.transformers.make_mask": "transformers alone calls it, with a model's config",
}


def _kernel() -> Any:
    return torch_fattn.CompiledKernel("fattn_merge", "merge.metal", {}, {}, 0.0, 0.0, False)


def _model() -> Any:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    return transformers.LlamaForCausalLM(config)
