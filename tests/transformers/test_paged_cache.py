"""`generate` over a PagedCache gives the tokens that it gives over transformers' DynamicCache."""

from __future__ import annotations

import copy
import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DynamicCache,
    PreTrainedModel,
    T5Config,
)
from transformers.cache_utils import DynamicLayer

from tests.conftest import counted_launches, decodes
from tests.transformers.calls import Call
from tests.transformers.tiny_models import COMMON, DEVICE, LAYERS, pair, prompt, tiny
from torch_fattn import CacheFullError, PagedKVCache, reference
from torch_fattn.integrations.transformers import PagedCache, register, unregister
from torch_fattn.integrations.transformers.compat import CACHE
from torch_fattn.integrations.transformers.paged_cache import CACHE_NAME, cache_of

NEW_TOKENS = 12
PROMPT = 20
MODELS = {name: tiny(name) for name in ("llama", "mistral", "gemma3", "gpt_oss")}
MODELS["odd heads"] = tiny("llama", head_dim=20)
PAGED = {"cache_implementation": CACHE_NAME}


def generate(model: PreTrainedModel, padding: int = 0, batch: int = 2, **options: Any) -> Any:
    ids, mask = prompt(PROMPT, padding, batch)
    return model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        do_sample=False,
        return_dict_in_generate=True,
        **({"max_new_tokens": NEW_TOKENS} | options),
    )


def check_blocks(cache: PagedKVCache, sequences: int) -> None:
    """No block is lost: those in use are those of its sequences, and all are free once these are."""
    assert len(cache.sequences) == sequences
    in_use = {block for sequence in cache.sequences for block in cache.blocks(sequence)}
    stats = cache.stats
    assert len(in_use) == stats.blocks - stats.free_blocks
    for sequence in cache.sequences:
        cache.free(sequence)
    assert cache.free_blocks == stats.blocks


@pytest.mark.parametrize("lost", ["free", "blocks"])
def test_control_lost_blocks(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that keeps its blocks, and a block that no sequence has."""
    ours, _ = pair(AutoModelForCausalLM, MODELS["llama"])
    cache = PagedCache(ours.config, 40)
    with torch.no_grad():
        ours(prompt(PROMPT)[0].to(DEVICE), past_key_values=cache)
    (paged,) = cache.caches
    blocks = PagedKVCache.blocks
    twins: dict[str, Any] = {"free": lambda *_: None, "blocks": lambda *given: blocks(*given)[1:]}
    with monkeypatch.context() as patched, pytest.raises(AssertionError):
        patched.setattr(PagedKVCache, lost, twins[lost])
        check_blocks(paged, 2)
    check_blocks(paged, 2)


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_generate(name: str, beams: int, padding: int, calls: list[Call]) -> None:
    """With beams the cache's sequences fork, and padding is not stored."""
    ours, eager = pair(AutoModelForCausalLM, MODELS[name])
    with counted_launches() as launches:
        mine = generate(ours, padding, num_beams=beams, **PAGED)
    # Heads or tokens that are padded are not written by the rotation.
    apart = NEW_TOKENS if name == "odd heads" else padding > 0
    assert launches.get("fattn_cache_write", 0) == LAYERS * apart
    assert launches["fattn_prefill"] == LAYERS and decodes(launches) == LAYERS * (NEW_TOKENS - 1)
    packed = {"paged_prefill"} if padding else set()
    assert {call.op for call in calls} == {"paged_decode", *packed}, "nothing is gathered"
    assert mine.sequences.tolist() == generate(eager, padding, num_beams=beams).sequences.tolist()
    assert any(len(set(tokens)) > 1 for tokens in mine.sequences[:, PROMPT:].tolist())
    for cache in mine[CACHE].caches:
        lengths = [cache.length(sequence) for sequence in cache.sequences]
        whole = PROMPT + NEW_TOKENS - 1
        assert sorted(lengths) == [whole - padding] * beams + [whole] * beams
        check_blocks(cache, 2 * beams)


@pytest.mark.parametrize("way", ["assistant", "sliding assistant", "prompt lookup"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_assisted_generation(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejected drafts are dropped from the cache. A draft model with windows has more keys than its mask, in
    5.17."""
    ours, eager = pair(AutoModelForCausalLM, MODELS[name])
    other: dict[str, Any] = {"prompt_lookup_num_tokens": 3}
    if "assistant" in way:
        torch.manual_seed(1)
        config = copy.deepcopy(MODELS["llama" if way == "assistant" else "gemma3"])
        draft = AutoModelForCausalLM.from_config(config, attn_implementation="fattn").eval().to(DEVICE)
        draft.generation_config.assistant_confidence_threshold = 0.0  # or one token is drafted at a time
        other = {"assistant_model": draft}
    dropped: list[int] = []
    truncate = PagedKVCache.truncate

    def recording(cache: PagedKVCache, sequence: int, length: int) -> None:
        dropped.append(cache.length(sequence) - length)
        truncate(cache, sequence, length)

    monkeypatch.setattr(PagedKVCache, "truncate", recording)
    mine = generate(ours, batch=1, **PAGED, max_new_tokens=30, **other)
    assert any(dropped), "no draft was rejected"
    theirs = generate(eager, batch=1, max_new_tokens=30)
    assert mine.sequences.tolist() == theirs.sequences.tolist()
    cache = mine[CACHE]
    assert cache.get_seq_length() == cache.caches[0].length(cache.caches[0].sequences[0])


class RoundedLayer(DynamicLayer):
    """Keys and values as that format stores them."""

    kv_format = "int8"

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        rounded = (
            reference.dequantise(*reference.quantise(each.cpu(), self.kv_format), self.kv_format)
            for each in (key_states, value_states)
        )
        return super().update(*(each.to(key_states) for each in rounded))


@pytest.mark.parametrize("kv_format", ["int8", "fp8_e4m3", "int4"])
def test_quantised(kv_format: str, calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny("llama", head_dim=32)
    ours, eager = pair(AutoModelForCausalLM, config)
    options: dict[str, Any] = {"output_logits": True, "min_new_tokens": NEW_TOKENS}
    mine = generate(ours, 5, cache_config={"kv_format": kv_format}, **PAGED, **options)
    stored = torch.int8 if kv_format == "int8" else torch.uint8
    assert all(call["key_cache"].dtype is stored and call["kv_format"] == kv_format for call in calls)
    monkeypatch.setattr(RoundedLayer, "kv_format", kv_format)
    rounded = DynamicCache()
    rounded.layers, rounded.layer_class_to_replicate = [RoundedLayer() for _ in range(LAYERS)], None
    theirs = generate(eager, 5, past_key_values=rounded, **options)
    exact = generate(eager, 5, **options)
    first = [(a.logits[0].cpu() - b.logits[0]).abs().max() for a, b in ((mine, theirs), (mine, exact))]
    assert first[0] < 1e-4 < first[1], "stored in that format, and in no other"
    assert mine.sequences.tolist() == theirs.sequences.tolist()


def bytes_on_device() -> int:
    gc.collect()
    return int(torch.mps.current_allocated_memory())


@pytest.mark.parametrize("kv_format", ["auto", "int8", "fp8_e4m3", "int4"])
def test_memory(kv_format: str) -> None:
    """By the allocator: DynamicCache holds 2 bytes for each element, and this cache those of its format."""
    dim, tokens, batch = 64, 128, 2
    config = tiny("llama", head_dim=dim)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="fattn").eval().to(DEVICE).half()
    ids = torch.randint(3, 60, (batch, tokens), device=DEVICE)
    grown = []
    caches: list[Any] = [DynamicCache(), PagedCache(config, batch * tokens // 16, kv_format=kv_format)]
    with torch.no_grad():
        model(ids, past_key_values=DynamicCache())
        model(ids, past_key_values=PagedCache(config, batch * tokens // 16, kv_format=kv_format))
        for cache in caches:
            before = bytes_on_device()
            model(ids, past_key_values=cache, logits_to_keep=1)
            grown.append(bytes_on_device() - before)
    rows = LAYERS * 2 * batch * tokens * COMMON["num_key_value_heads"]
    row = {"auto": 2 * dim, "int8": dim + 4, "fp8_e4m3": dim + 4, "int4": dim // 2 + dim // 32 * 4}[kv_format]
    (paged,) = caches[1].caches
    assert grown[0] == 2 * rows * 2 * dim  # a fused model leaves room for as many tokens
    tables = paged.stats.memory_bytes - rows * row
    assert grown[1] == rows * row + tables and 0 < tables < 2**16


def test_rows_of_the_batch_move(calls: list[Call]) -> None:
    """batch_repeat_interleave and batch_select_indices, as `generate` of other strategies calls them."""
    ours, _ = pair(AutoModelForCausalLM, MODELS["llama"])
    ids, _ = prompt(PROMPT)
    steps = []
    for cache in (PagedCache(ours.config, 40), DynamicCache(config=ours.config)):
        with torch.no_grad():
            ours(ids.to(DEVICE), past_key_values=cache)
            cache.batch_repeat_interleave(2)
            token = torch.tensor([[5], [6], [7], [8]], device=DEVICE)
            first = ours(token, past_key_values=cache).logits
            cache.batch_select_indices(torch.tensor([True, False, True, True], device=DEVICE))
            cache.reorder_cache(torch.tensor([2, 0, 2], device=DEVICE))
            cache.crop(-1)
            last = ours(token[:3], past_key_values=cache).logits
            assert cache.get_seq_length() == PROMPT + 1
        steps.append((first.cpu(), last.cpu()))
    for mine, theirs in zip(*steps, strict=True):
        assert (mine - theirs).abs().max() < 1e-4
    cache = PagedCache(ours.config, 40)
    with torch.no_grad():
        ours(ids.to(DEVICE), past_key_values=cache)
    cache.reset()
    assert cache.get_seq_length() == 0 and not cache.caches[0].sequences
    assert cache.caches[0].free_blocks == 40


def test_a_full_cache_is_unchanged() -> None:
    ours, _ = pair(AutoModelForCausalLM, MODELS["gemma3"])
    ids, _ = prompt(PROMPT)
    cache = PagedCache(ours.config, 4)
    with torch.no_grad():
        before = ours(ids.to(DEVICE), past_key_values=cache).logits
        with pytest.raises(CacheFullError, match=r": 4 blocks .* 0 of 4 .*; make the PagedCache with a l"):
            ours(torch.full((2, 40), 5, device=DEVICE), past_key_values=cache)
        assert cache.get_seq_length() == PROMPT
        assert {each.length(s) for each in cache.caches for s in each.sequences} == {PROMPT}
        cache.crop(-PROMPT)
        assert torch.equal(ours(ids.to(DEVICE), past_key_values=cache).logits, before)


def both_steps(models: Any, caches: Any, tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The logits of the newest tokens, of a forward over each cache."""
    place = torch.arange(caches[0].get_seq_length(), 99)[None, : tokens.shape[1]]
    with torch.no_grad():
        mine, theirs = (
            model(
                tokens.to(model.device),
                attention_mask=None if mask is None else mask.to(model.device),
                position_ids=place.to(model.device),
                past_key_values=cache,
            ).logits[:, -1]
            for model, cache in zip(models, caches, strict=True)
        )
    return mine.cpu(), theirs


@pytest.mark.parametrize("hidden", ["nothing", "the first tokens", "a token in the middle"])
@pytest.mark.parametrize("padded", ["nowhere", "left", "right"])
def test_a_mask_that_changes(padded: str, hidden: str) -> None:
    """Padding is not stored, and what is stored cannot be hidden: the mask of a later forward that hides
    other tokens is refused. Reordering and dropping tokens keep what was padding."""
    models = pair(AutoModelForCausalLM, MODELS["llama"])
    ids, mask = prompt(PROMPT, 3 if padded == "left" else 0)
    if padded == "right":
        mask[0, -3:] = 0
    caches = PagedCache(models[0].config, 16), DynamicCache()
    new, order, more = torch.full((2, 2), 7), torch.tensor([1, 0]), torch.ones(2, 2, dtype=torch.long)
    both_steps(models, caches, ids, mask)
    for cache in caches:
        cache.reorder_cache(order)
        cache.crop(-2)
    mask = torch.cat((mask[order, :-2], more), 1)
    later = torch.cat((mask, more), 1)
    later[:, slice(0, 2) if hidden == "the first tokens" else slice(9, 11)] = 0
    mine, theirs = both_steps(models, caches, new, mask)
    assert (mine - theirs).abs().max() < 2e-5
    if padded != "nowhere" or hidden != "nothing":
        with pytest.raises(
            NotImplementedError, match="hides other tokens .*; pass the mask of all tokens in"
        ):
            both_steps(models, caches, new, None if hidden == "nothing" else later)
        assert caches[0].get_seq_length() == PROMPT
    mine, theirs = both_steps(models, caches, new, torch.cat((mask, more), 1))
    assert (mine - theirs).abs().max() < 2e-5


def test_a_chunk_of_padding_alone() -> None:
    """It stores nothing, and later tokens do not see it."""
    models = pair(AutoModelForCausalLM, MODELS["llama"])
    ids, mask = prompt(12, batch=1)
    mask[0, 5:7] = 0
    caches = PagedCache(models[0].config, 8), DynamicCache()
    for begin, end in ((0, 5), (5, 7), (7, 12)):
        mine, theirs = both_steps(models, caches, ids[:, begin:end], mask[:, :end])
    assert (mine - theirs).abs().max() < 2e-5
    (blocks,) = caches[0].caches
    assert [blocks.length(sequence) for sequence in blocks.sequences] == [10]


def test_padding_between_tokens_and_a_window() -> None:
    """It is not stored, and so would not be counted. The layers with full attention do not mind."""
    new, more = torch.full((2, 2), 7), torch.ones(2, 2, dtype=torch.long)
    for name in ("llama", "gemma3"):
        models = pair(AutoModelForCausalLM, MODELS[name])
        for length, refused in ((PROMPT, name == "gemma3"), (4, False)):  # all keys are in the window
            ids, mask = prompt(length)
            mask[0, -2:] = 0
            caches = PagedCache(models[0].config, 16), DynamicCache()
            both_steps(models, caches, ids, mask)
            mask = torch.cat((mask, more), 1)
            if refused:
                with pytest.raises(
                    NotImplementedError, match="between tokens.*; pad on the left, or use Dyn"
                ):
                    both_steps(models, caches, new, mask)
            else:
                mine, theirs = both_steps(models, caches, new, mask)
                assert (mine - theirs).abs().max() < 2e-5


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("where", ["append", "mlp"])  # in the attention of a layer, or behind it
@pytest.mark.parametrize("failing", range(LAYERS))
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_forward_that_fails_in_a_layer(
    name: str, failing: int, where: str, padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one is refused, whether the cache was empty or not, until `crop` or `reset`."""
    ours, _ = pair(AutoModelForCausalLM, MODELS[name])
    ids, mask = (each.to(DEVICE) for each in prompt(PROMPT, padding))

    def forward(first: int, last: int) -> Tensor:
        with torch.no_grad():
            given = {"attention_mask": mask[:, :last], CACHE: cache}
            return ours(ids[:, first:last], **given, logits_to_keep=1).logits

    def fails(called: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == -1:
                raise MemoryError("no memory")
            return called(*arguments, **options)

        return call

    left = -1
    if where == "append":
        for name in ("append", "append_rotated"):
            monkeypatch.setattr(PagedKVCache, name, fails(getattr(PagedKVCache, name)))
    else:
        for layer in ours.model.layers:
            monkeypatch.setattr(layer.mlp, "forward", fails(layer.mlp.forward))
    cache = PagedCache(ours.config, 16)
    expected = forward(0, PROMPT)
    is_whole = where == "mlp" and failing == LAYERS - 1  # behind the last attention
    for start in (0, 12):
        cache.reset()
        if start:
            forward(0, start)
        for _ in range(2):
            left = failing
            with pytest.raises(MemoryError):
                forward(start, PROMPT)
            if not is_whole and (start or where == "append"):
                refused: list[Any] = [partial(forward, start, PROMPT), partial(cache.crop, -1)]
                for call in (*refused, partial(cache.batch_repeat_interleave, 2)):
                    with pytest.raises(RuntimeError, match=r": a layer lacks .*; crop\(\) all tokens of"):
                        call()
            cache.crop(start - PROMPT)
            assert cache.get_seq_length() == start
        assert torch.allclose(forward(start, PROMPT), expected, atol=1e-5)
        cache.crop(start - PROMPT)
        left = failing
        with pytest.raises(MemoryError):
            forward(start, PROMPT)
    cache.reset()
    assert torch.equal(forward(0, PROMPT), expected)
    check_blocks(cache.caches[0], 2)


@pytest.mark.parametrize("other", ["sdpa", "eager"])
def test_other_attention_cannot_read_it(other: str) -> None:
    ours, _ = pair(AutoModelForCausalLM, copy.deepcopy(MODELS["llama"]), other)
    with pytest.raises(
        NotImplementedError, match='PagedCache: .* load the model with attn_implementation="fattn"'
    ):
        generate(ours, **PAGED)


def test_latent_attention_cannot_read_it() -> None:
    """The model's own code reads the stored latents, whatever the attention function."""
    dims = {"kv_lora_rank": 16, "q_lora_rank": 16, "first_k_dense_replace": LAYERS, "num_key_value_heads": 4}
    dims |= {"head_dim": 8, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    ours, _ = pair(AutoModelForCausalLM, DeepseekV3Config(**(COMMON | dims)))
    with pytest.raises(NotImplementedError, match="latent attention.; use DynamicCache for it$"):
        generate(ours, **PAGED)


@pytest.mark.host_only
def test_models_that_it_does_not_take() -> None:
    with pytest.raises(NotImplementedError, match="PagedCache: a model of T5Config has an encoder"):
        PagedCache(T5Config(), 4)
    chunked = tiny("llama", layer_types=["chunked_attention"] * LAYERS, attention_chunk_size=8)
    with pytest.raises(NotImplementedError, match="chunked_attention layers are not implemented"):
        PagedCache(chunked, 4)
    with pytest.raises(
        ValueError, match=r"PagedCache.crop: tokens_to_remove is 3; to drop n tokens, pass -n"
    ):
        PagedCache(tiny("llama"), 4).crop(3)


def test_calls_that_it_does_not_take() -> None:
    ours, _ = pair(AutoModelForCausalLM, MODELS["llama"])
    ids = prompt(PROMPT)[0].to(DEVICE)
    with pytest.raises(NotImplementedError, match="a PagedCache has no backward"):
        ours(ids, past_key_values=PagedCache(ours.config, 8))
    cache = PagedCache(ours.config, 8)
    with torch.no_grad():
        whole = torch.ones(2, 1, PROMPT, PROMPT, dtype=torch.bool, device=DEVICE).tril()
        with pytest.raises(NotImplementedError, match="4D mask"):
            ours(ids, attention_mask=whole, past_key_values=cache)
        ours(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="the batch has 1 sequences and the cache 2"):
            ours(ids[:1], past_key_values=cache)
        restarting = torch.arange(PROMPT, device=DEVICE)[None] % 7
        with pytest.raises(NotImplementedError, match="positions restart, .*; pass use_cache=False"):
            ours(ids, position_ids=restarting, past_key_values=PagedCache(ours.config, 8))


@pytest.mark.host_only
def test_a_setting_of_another_cache() -> None:
    with pytest.raises(ValueError, match='cache_config has \'nbits\', .*; pass {"kv_format": "int8"}'):
        cache_of(tiny("llama"), 1, 20, {"nbits": 4})
    assert cache_of(tiny("llama"), 1, 20, {"kv_format": "int4"}).get_seq_length() == 0


@pytest.mark.host_only
def test_the_name_comes_and_goes() -> None:
    from transformers import GenerationConfig, GenerationMixin

    assert GenerationConfig(cache_implementation=CACHE_NAME).cache_implementation == CACHE_NAME
    unregister()
    with pytest.raises(ValueError, match="Invalid `cache_implementation`"):
        GenerationConfig(cache_implementation=CACHE_NAME)
    before = GenerationMixin._prepare_cache_for_generation
    register()
    register()
    unregister()
    assert GenerationMixin._prepare_cache_for_generation is before
