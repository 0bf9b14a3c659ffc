"""Rotary embedding and cache writes in one launch: tokens, bits, caches that were copied and cropped, and
where a model's own functions run."""

from __future__ import annotations

import contextlib
import copy
import importlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicLayer, StaticLayer
from transformers.models.llama import modeling_llama

from tests.conftest import counted_launches
from tests.helpers.synchronisations import Synchronisations
from tests.transformers.tiny_configs import tiny_configs
from tests.transformers.tiny_models import (
    COMMON,
    DEVICE,
    EXPERTS,
    LAYERS,
    MIXED,
    TOLERANCE,
    WINDOW,
    generate,
    largest_logit_error,
    pair,
    prompt,
)
from torch_fattn.integrations.transformers import PagedCache, register, report, unregister
from torch_fattn.integrations.transformers.compat import CACHE
from torch_fattn.integrations.transformers.fusion import layers, norms, rotary, running, tables
from torch_fattn.integrations.transformers.fusion.deferred import Deferred
from torch_fattn.integrations.transformers.fusion.launches import BESIDES, Launches

# The form of their rotary function.
FAMILIES = {
    "llama": "halves, a column per number",
    "qwen3": "halves, a column per number",
    "phi3": "halves, a column per number, or part of a head",
    "gemma3_text": "halves, a column per number",
    "gpt_oss": "halves, a column per pair",
    "deepseek_v3": "pairs_to_halves, the first half",
    "hunyuan_v1_dense": "halves, a column per number",  # whose norms follow the rotation
    "cohere": "pairs, each column twice, products in float32",
    "olmo2": "halves, a column per number",
    "glm4": "pairs, the first half, or part of a head",
    "smollm3": "halves, a column per number",
    "glm4_moe": "halves, a column per number, or part of a head",
    "helium": "pairs, the first half",
    "apertus": "halves, a column per number",
    "nanochat": "halves, the other way round",
    "qwen3_5_text": "halves, a column per number, or part of a head",
    "qwen3_next": "halves, a column per number, or part of a head",
    "gemma2": "halves, a column per number",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_eager(family: str) -> None:
    """Beams and left padding; then a static cache."""
    config = list(tiny_configs(family))[1]
    if getattr(config, "sliding_window", None) is not None:
        config.sliding_window = WINDOW
    ours, eager = pair(AutoModelForCausalLM, config)
    with torch.no_grad():
        for (name, mine), theirs in zip(ours.named_parameters(), eager.parameters(), strict=True):
            if "norm" in name:  # initial weights are all alike
                mine.copy_(theirs.add_(0.3 * torch.randn(theirs.shape)))
    layers_without = family in ("smollm3", "qwen3_5_text", "qwen3_next")
    static = {"cache_implementation": "static", "disable_compile": True}
    for options in ({"num_beams": 2}, static):
        ids, mask = prompt(12, padding=3)
        with counted_launches() as launches:
            mine = generate(ours, ids, mask, 8, **options)
        assert launches["fattn_rotary"] == 8 * (config.num_hidden_layers - layers_without)
        theirs = generate(eager, ids, mask, 8, **options)
        assert largest_logit_error(mine, theirs) < TOLERANCE
        assert mine.sequences.tolist() == theirs.sequences.tolist()
    assert FAMILIES[family] in report(ours).rotary.values()


def functions(family: str, name: str = "apply_rotary_pos_emb") -> tuple[Callable[..., Any], ...]:
    """A family's own rotary function, and what replaces it."""
    file = f"transformers.models.{family}.modeling_{family}"
    module: Any = importlib.import_module(file)
    rotary.fuse([type("Module", (), {"__module__": file})()])
    ours = getattr(module, name)
    return ours.__wrapped__, ours


def operands(dtype: torch.dtype, columns: int = 16, of_table: torch.dtype | None = None) -> list[Tensor]:
    angles = 50 * torch.rand(2, 3, columns // 2)
    tables = (torch.cat((each, each), -1) for each in (angles.cos(), angles.sin()))
    query, key = (torch.randn(2, 3, n, 16, device=DEVICE).to(dtype).transpose(1, 2) for n in (4, 2))
    query[1, 2, 0, 5] = torch.nan
    return [query, key, *(each.to(DEVICE, of_table or dtype) for each in tables)]


def rotated(function: Callable[..., Any], *arguments: Tensor, **options: Any) -> tuple[bool, list[Tensor]]:
    """Whether the results of a function in a fused model waited, and the results."""
    with running.run(True):
        results = function(*arguments, **options)
    return isinstance(results[0], Deferred), [each + 0 for each in results]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "family", ["llama", "phi3", "gpt_oss", "cohere", "glm4", "helium", "olmo2", "deepseek_v3"]
)
def test_bits(family: str, dtype: torch.dtype) -> None:
    """A NaN stays in its head."""
    theirs, ours = functions(family, "apply_rotary_pos_emb" + "_interleave" * (family == "deepseek_v3"))
    columns, of_table = 8 if family in ("phi3", "glm4") else 16, torch.float32 if family == "olmo2" else dtype
    query, key, cos, sin = operands(dtype, columns, of_table)
    if family == "cohere":
        cos, sin = (each[..., :8].repeat_interleave(2, -1) for each in (cos, sin))
    if family == "gpt_oss":
        cos, sin = (each[..., :8].mT.contiguous().mT for each in (cos, sin))
    waited, results = rotated(ours, query, key, cos, sin)
    assert waited and results[0][1, 2, 0].isnan().any()
    assert not results[0].nan_to_num()[0].isnan().any() and not results[0][:, 3].isnan().any()
    expected = list(theirs(query, key, cos, sin))
    torch.testing.assert_close(results, expected, rtol=0, atol=0, equal_nan=True)
    assert family != "llama" or results[0].stride() == expected[0].stride()


@pytest.mark.parametrize("case", ["gradient", "other axis", "lengths", "float32 table", "autocast"])
def test_calls_of_the_own_function(case: str) -> None:
    theirs, ours = functions("llama")
    given = operands(torch.bfloat16)
    options, context = {}, contextlib.nullcontext()
    if case == "gradient":
        given[0].requires_grad_()
    if case == "other axis":
        given[:2], options = [each.transpose(1, 2) for each in given[:2]], {"unsqueeze_dim": 2}
    if case == "lengths":
        given[1] = given[1][:, :, :1]
    if case == "float32 table":
        given[2:] = [each.float() for each in given[2:]]
    if case == "autocast":
        context = torch.autocast(DEVICE, torch.bfloat16)
    with context:
        waited, results = rotated(ours, *given, **options)
        expected = theirs(*given, **options)
    assert not waited
    assert results[0].requires_grad == (case == "gradient")
    torch.testing.assert_close(results, list(expected), rtol=0, atol=0, equal_nan=True)


def test_steps_between() -> None:
    """They may change in place what waits, keep a copy, and flatten what lies as in memory."""
    theirs, ours = functions("llama")
    query, key, cos, sin = (each.nan_to_num() for each in operands(torch.float32))
    norm = modeling_llama.LlamaRMSNorm(16).to(DEVICE)
    with torch.no_grad():
        expected = 3 * theirs(2 * norm(query), norm(key), cos, sin)[0]
        assert norms.fuse(norm) == ""
        with running.run(True):
            heads = norm(query), norm(key)
            copies = copy.deepcopy(heads[1]), pickle.loads(pickle.dumps(heads[1]))
            flat = norm(key).transpose(1, 2).flatten(0, 1)
            heads[0].mul_(2)
            rotated = ours(*heads, cos, sin)[0]
            rotated.mul_(3)
    assert type(heads[1]) is type(rotated) is Deferred
    assert (rotated - expected).abs().max() < TOLERANCE
    for each in (*copies, flat.unflatten(0, (2, 3)).transpose(1, 2)):
        assert type(each) is Tensor and each.tolist() == heads[1].tolist()


def test_two_forms_of_one_table() -> None:
    query, key, cos, sin = (each.nan_to_num() for each in operands(torch.float32))
    both = functions("llama"), functions("nanochat")
    with running.run(True):
        for theirs, ours in both:
            assert torch.equal(ours(query, key, cos, sin)[0] + 0, theirs(query, key, cos, sin)[0])


def model_of(family: str, implementation: str = "fattn", **fields: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **COMMON | fields)
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval().to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "scaling"),
    [
        ("llama", {}),
        ("gpt_oss", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}),
        ("cohere", {}),
        ("olmo2", {}),
        ("gemma3_text", {}),
        ("llama", {"rope_type": "dynamic", "factor": 2.0}),
    ],
)
def test_tables(family: str, scaling: dict[str, Any], dtype: torch.dtype) -> None:
    """Tables have the bits of the model's own; a dynamic form computes its own."""
    fields = {"rope_parameters": {"rope_theta": 1e4} | scaling} if scaling else {}
    model = model_of(family, **fields)
    embedding = model.model.rotary_emb
    x, ids = torch.empty(2, 3, 64, dtype=dtype, device=DEVICE), torch.randint(0, 1 << 17, (2, 3)).to(DEVICE)
    of_layer = ("sliding_attention",) if family == "gemma3_text" else ()
    own = embedding(x, ids, *of_layer)
    tables.fuse([embedding])
    launches = Launches(model)
    with running.run(True), launches.count():
        ours = embedding(x, ids, *of_layer)
    assert (launches.parts[BESIDES] <= 5) == (scaling.get("rope_type") != "dynamic")
    for mine, theirs in zip(ours, own, strict=True):
        assert mine.dtype is theirs.dtype and torch.equal(mine, theirs)


def continued(model: PreTrainedModel) -> list[Tensor]:
    """The logits of what follows a prompt, in caches that were copied, cropped and reordered."""
    logits = []

    def step(cache: DynamicCache, *tokens: int) -> None:
        ids = torch.tensor(tokens, device=DEVICE).expand(cache_rows(cache), -1)
        ids = ids + torch.arange(ids.shape[0], device=DEVICE)[:, None]
        logits.append(model(ids, **{CACHE: cache}).logits[:, -1])
        for layer in cache.layers:
            assert layer.keys.shape == layer.values.shape

    def cache_rows(cache: DynamicCache) -> int:
        return cache.layers[0].keys.shape[0] if cache.layers and cache.get_seq_length() else 2

    with torch.no_grad():
        first = DynamicCache(config=model.config)
        step(first, *range(3, 12))
        shallow = copy.copy(first)
        shallow.layers = [copy.copy(layer) for layer in first.layers]
        copies = [copy.deepcopy(first), shallow, pickle.loads(pickle.dumps(first))]
        for token in range(20, 26):
            step(first, token)
            for n, each in enumerate(copies):
                step(each, token + 5 * n)
        if not any(layer.is_sliding for layer in first.layers):
            first.crop(-2)
            step(first, 50)
        first.reorder_cache(torch.tensor([1, 0], device=DEVICE))
        step(first, 51, 52)
        first.batch_repeat_interleave(2)
        step(first, 53)
        first.batch_select_indices(torch.tensor([0, 3], device=DEVICE))
        step(first, 54)
    return logits


@pytest.mark.parametrize("room", [256, 4])
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_a_cache_that_is_continued_twice(family: str, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_STEP", room)
    model = model_of(family, **(MIXED | EXPERTS if family == "gpt_oss" else {}))
    ours = continued(model)
    register(fuse=False)
    for mine, theirs in zip(ours, continued(model), strict=True):
        assert (mine - theirs).abs().max() < TOLERANCE


def test_a_full_static_cache() -> None:
    """It refuses a token, also after a reset."""
    model, ids = model_of("llama"), prompt(8)[0].to(DEVICE)
    cache = StaticCache(config=model.config, max_cache_len=9)
    with torch.no_grad():
        for _ in range(2):
            model(ids, **{CACHE: cache})
            model(ids[:, :1], **{CACHE: cache})
            with pytest.raises(IndexError, match="out of bounds"):
                model(ids[:, :1], **{CACHE: cache})
            cache.reset()


def test_gradients_through_steps() -> None:
    """A step must not write to the memory of keys that the backward of another needs."""
    model, ids = model_of("llama").requires_grad_(False), prompt(8)[0].to(DEVICE)
    weight = model.model.layers[0].self_attn.q_proj.weight.requires_grad_()
    gradients = []
    for fuse in (True, False):
        register(fuse=fuse)
        cache = DynamicCache(config=model.config)
        logits = [model(tokens, **{CACHE: cache}).logits for tokens in (ids, ids[:, :1])]
        gradients += torch.autograd.grad(sum(each.square().sum() for each in logits), weight)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_a_step_writes_one_row() -> None:
    """Also where the prompt ran in inference mode, to whose tensors others must not write."""
    model, ids = model_of("llama"), prompt(8)[0].to(DEVICE)
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(ids, **{CACHE: cache})
    addresses = []
    with torch.no_grad():
        for _ in range(3):
            model(ids[:, :1], **{CACHE: cache})
            addresses.append(cache.layers[1].keys.data_ptr())
    assert len(set(addresses)) == 1 and cache.layers[1].keys.shape == (2, 2, 11, 16)


@pytest.mark.parametrize(("family", "expected"), [("llama", 15), ("qwen3", 15), ("phi3", 12)])
@pytest.mark.parametrize("kind", ["dynamic", "static", "paged"])
def test_kernels_of_a_step(family: str, expected: int, kind: str) -> None:
    """No more than one more in a layer of a static cache, and two for all layers of a paged one. The step
    does not wait for the GPU."""
    model = model_of(family)
    ids = prompt(8)[0].to(DEVICE)
    masks = [torch.ones(2, n, dtype=torch.long, device=DEVICE) for n in (8, 9)]
    cache: Any = DynamicCache(config=model.config)
    if kind == "static":
        cache, expected = StaticCache(config=model.config, max_cache_len=16), expected + 1
    if kind == "paged":
        cache, masks = PagedCache(model.config, 4), [None, None]
    launches = Launches(model)
    with torch.no_grad():
        with launches.count():
            model(ids, attention_mask=masks[0], **{CACHE: cache})
        of_prompt = sum(launches.parts.values()) - launches.parts[BESIDES]
        assert kind != "dynamic" or of_prompt == LAYERS * expected + 4  # and whether positions restart
        for _ in range(1 + (kind == "paged")):  # the second step continues the first
            launches.parts.clear()
            with launches.count(), Synchronisations() as found:
                model(ids[:, :1], attention_mask=masks[1], **{CACHE: cache}).logits.argmax(-1)
    assert found.ops == []
    assert launches.parts.pop(BESIDES) <= 17
    assert sum(launches.parts.values()) == LAYERS * expected + 2 * (kind == "paged")


@pytest.mark.parametrize("room", [{}, {"cache_implementation": "static", "disable_compile": True}])
def test_kernels_of_generate(room: dict[str, Any]) -> None:
    """Besides the layers, the second token and the third launch as many."""
    model, (ids, mask) = model_of("llama", dtype="bfloat16"), prompt(8)
    counts = []
    for tokens in (2, 3):
        launches = Launches(model)
        with launches.count():
            generate(model, ids, mask, tokens, **room)
        counts.append(launches.parts[BESIDES])
    assert counts[1] - counts[0] <= (31 if room else 25)


def replaced() -> list[Any]:
    seams = [modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaRotaryEmbedding.forward]
    return [*seams, DynamicLayer.update, StaticLayer.update]


def test_other_models_and_unregister() -> None:
    ours, other = model_of("llama"), model_of("llama", "sdpa")
    for model, fuse in ((ours, True), (other, True), (ours, True), (ours, False), (ours, True)):
        register(fuse=fuse)
        cache, is_fused = DynamicCache(config=model.config), fuse and model is ours
        with torch.no_grad(), counted_launches() as launches:
            model(prompt(8)[0].to(DEVICE), **{CACHE: cache})
        assert launches.get("fattn_rotary", 0) == LAYERS * is_fused
        assert sum(map(norms.is_fused, model.modules())) == (2 * LAYERS + 1) * is_fused
        assert cache.layers[0].keys.is_contiguous() == (not is_fused)
    theirs, copied = [each.__wrapped__ for each in replaced()], copy.deepcopy(ours)
    unregister()
    assert replaced() == theirs and "__call__" not in vars(PreTrainedModel)
    assert not any(map(norms.is_fused, ours.modules()))
    for norm in filter(norms.is_fused, copied.modules()):
        assert norm(torch.ones(1, norm.weight.shape[0]).to(DEVICE)).isfinite().all()
