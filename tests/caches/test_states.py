"""torch_fattn.linear_attention: StateCache in random histories against the reference of whole sequences, and
the functions with states as results."""

from __future__ import annotations

import random
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import counted_launches
from tests.helpers.faults import with_faults
from tests.helpers.public_caches import STATE_SIZES, linear_rows, linear_weights
from tests.helpers.synchronisations import Synchronisations
from tests.helpers.tensors import same_bits
from torch_fattn import CacheFullError, reference
from torch_fattn.linear_attention import StateCache, StateStep, causal_conv1d, gated_delta_rule
from torch_fattn.operators import delta

LAYERS, WORDS = 2, 40


def states(device: str, **changes: Any) -> StateCache:
    return StateCache(**(STATE_SIZES | {"num_layers": LAYERS, "num_slots": 4, "device": device} | changes))


def close(out: Tensor, exact: Tensor) -> bool:
    return torch.allclose(out.cpu().double(), exact.cpu().double(), rtol=1e-4, atol=1e-4)


class Model:
    """Layers with random weights, beside each other. A token is a number, with random projections."""

    def __init__(self, device: str) -> None:
        def on_device(tensors: dict[str, Any]) -> dict[str, Tensor]:
            return {name: each.to(device) for name, each in tensors.items()}

        self.words = [on_device(linear_rows(WORDS, seed)) for seed in range(LAYERS)]
        self.weights = [on_device(linear_weights(seed)) for seed in range(LAYERS)]

    def run(self, cache: StateCache, step: StateStep, tokens: list[int]) -> Tensor:
        """The results of all layers."""
        rows = [{name: each[tokens] for name, each in words.items()} for words in self.words]
        return torch.stack([cache.run(n, step, **rows[n], **self.weights[n]) for n in range(LAYERS)])

    def exact(self, tokens: list[int]) -> Tensor:
        """The results of a whole sequence."""
        results = []
        for words, weights in zip(self.words, self.weights, strict=True):
            rows = {name: each[tokens][None] for name, each in words.items()}
            new = {"conv_state": torch.zeros(1, 48, 3), "state": torch.zeros(1, 2, 16, 8)}
            results.append(reference.gated_delta_step(**rows, **weights, **new)[0])
        return torch.stack(results)


class History:
    def __init__(self, seed: int, device: str) -> None:
        self.rng, self.model, self.cache = random.Random(seed), Model(device), states(device)
        self.tokens: dict[int, list[int]] = {}
        self.faults = 0
        for memory in self.cache._memory:
            memory.fill_(torch.nan)

    def call(self, function: Any, *arguments: Any, **keywords: Any) -> Any:
        def check_unchanged() -> None:
            assert {s: self.cache.length(s) for s in self.cache.sequences} == lengths
            assert self.cache.free_slots == 4 - len(lengths)

        lengths = {s: len(tokens) for s, tokens in self.tokens.items()}
        result, failures = with_faults(lambda: function(*arguments, **keywords), check_unchanged, range(1000))
        self.faults += failures
        return result

    def act(self) -> None:
        cache, rng = self.cache, self.rng
        action = rng.choice(("allocate", "extend", "drafts", "drafts", "truncate", "fork", "free", "reset"))
        one = rng.choice(cache.sequences) if cache.sequences else None
        if action in ("allocate", "fork") and cache.free_slots == 0:
            with pytest.raises(CacheFullError, match=r"4 sequences are allocated, the most"):
                cache.allocate()
        elif action == "allocate" or one is None:
            number = self.call(cache.allocate, rng.choice((None, rng.randrange(2**40))))
            self.tokens[number] = []
        elif action == "fork":
            self.tokens[self.call(cache.fork, one)] = [*self.tokens[one]]
        elif action == "free" and len(cache.sequences) > 2:
            self.call(cache.free, one)
            del self.tokens[one]
        elif action == "reset":
            self.call(cache.reset, one)
            self.tokens[one] = []
        elif action == "truncate":
            self.truncate(one)
        else:
            self.extend(action == "drafts")
        assert {s: cache.length(s) for s in cache.sequences} == {s: len(t) for s, t in self.tokens.items()}

    def truncate(self, sequence: int) -> None:
        own = self.cache._sequences[sequence]
        if own.least > 0:
            with pytest.raises(ValueError, match=f"length {own.least - 1} is not from {own.least} to"):
                self.cache.truncate(sequence, own.least - 1)
        length = self.rng.randint(own.least, own.length)
        self.call(self.cache.truncate, sequence, length)
        del self.tokens[sequence][length:]

    def extend(self, drafts: bool) -> None:
        every = self.cache.sequences
        chosen = self.rng.choice((every, self.rng.sample(every, self.rng.randint(1, len(every)))))
        counts = [self.rng.choice((0, 1, 1, 2, 5))] * len(chosen)
        if not drafts and self.rng.random() < 0.3:
            counts = [self.rng.randint(0, 20) for _ in chosen]
        new = [[self.rng.randrange(WORDS) for _ in range(count)] for count in counts]
        step: StateStep = self.call(self.cache.extend, chosen, counts, drafts=drafts)
        out = self.model.run(self.cache, step, [*chain(*new)])
        for sequence, tokens, own in zip(chosen, new, out.split(counts, 1), strict=True):
            self.tokens[sequence] += tokens
            exact = self.model.exact(self.tokens[sequence])
            assert close(own, exact[:, exact.shape[1] - len(tokens) :])


@pytest.mark.parametrize("seed", range(8))
def test_history(seed: int, device: str) -> None:
    """Packed prompts, tokens, and drafts, of which some are kept; forks do not depend on each other."""
    history = History(seed, device)
    for _ in range(40):
        history.act()
    assert history.faults > 10


def test_drafts_have_the_bits_of_plain_decoding() -> None:
    model, plain, drafted = Model("mps"), states("mps"), states("mps")
    tokens = [3, 14, 15, 9, 26, 5]
    one, other = plain.allocate(), drafted.allocate()
    expected = torch.cat([model.run(plain, plain.extend([one]), [token]) for token in tokens], 1)
    for kept in (2, 0, 1, 3):
        done = drafted.length(other)
        drafts = tokens[done : done + kept] + [0] * (3 - kept)  # the others are wrong
        out = model.run(drafted, drafted.extend([other], 3, drafts=True), drafts)
        drafted.truncate(other, done + kept)
        assert same_bits(out[:, :kept], expected[:, done : done + kept])
    drafted.fork(other)  # runs the last drafts
    slots = [cache._sequences[number].slot for cache, number in ((plain, one), (drafted, other))]
    both = [
        [memory[slot] for memory in cache._memory]
        for cache, slot in zip((plain, drafted), slots, strict=True)
    ]
    assert same_bits(*both)


def test_rule_with_states_as_results(device: str) -> None:
    """Packed sequences, one of them empty: the reference's final states, and unchanged initial ones."""
    tokens, weights = linear_rows(21), linear_weights()
    call: dict[str, Tensor] = {name: tokens[name][None] for name in ("query", "key", "value")}
    call |= {"g": tokens["a"][None], "beta": tokens["b"][None]}
    call["cu_seqlens"] = torch.tensor([0, 8, 8, 21]).int()
    call |= {name: weights[name] for name in ("A_log", "dt_bias")}
    call = {name: each.to(device) for name, each in call.items()}
    state: Tensor | None = None
    exact_state = torch.zeros(3, 2, 16, 8, dtype=torch.float64)
    for _ in range(2):
        before, copy = state, None if state is None else state.clone()
        with counted_launches() as launches:
            out, state = gated_delta_rule(**call, initial_state=before, output_final_state=True)
        assert bool(launches) is (device == "mps") and state is not None and same_bits([before], [copy])
        assert close(gated_delta_rule(**call, initial_state=before)[0], out)
        assert close(out, reference.gated_delta_rule(**call, state=exact_state)) and close(state, exact_state)


def test_convolution_with_states_as_results(device: str) -> None:
    x, weight = (torch.randn(shape).to(device) for shape in ((1, 21, 6), (6, 4)))
    whole, tail = causal_conv1d(x, weight, activation="silu", output_final_state=True)
    assert tail is not None and same_bits(tail, x[0, -4:].T[None])
    assert close(whole, reference.causal_conv1d(x, weight, activation="silu"))
    first, state = causal_conv1d(x[:, :8], weight, activation="silu", output_final_state=True)
    for initial in (state, x[:, 5:8].mT):
        before = initial.clone()
        rest, none = causal_conv1d(x[:, 8:], weight, activation="silu", initial_state=initial)
        assert close(torch.cat((first, rest), 1), whole) and none is None and same_bits(initial, before)


def test_launches_of_a_server() -> None:
    """A step like the one before launches nothing besides its layers; kept drafts take one launch per layer.
    Nothing waits for the GPU."""
    cache, model = states("mps"), Model("mps")
    sequences = [cache.allocate() for _ in range(3)][::2]
    model.run(cache, cache.extend(sequences, 2), [1, 2, 3, 4])
    for drafts, kept, expected in ((True, 1, 2), (True, 0, 4), (False, 2, 2), (False, 2, 2)):
        with Synchronisations() as found, counted_launches() as launches:
            model.run(cache, cache.extend(sequences, 2, drafts=drafts), [1, 2, 3, 4])
        assert launches == {"fattn_gated_delta_step": expected} and not found.ops
        for sequence in sequences:
            cache.truncate(sequence, cache.length(sequence) - 2 + kept)


@pytest.mark.host_only
def test_refusals() -> None:
    cache, model = states("cpu", static=True), Model("cpu")
    assert cache.sequences == (0, 1, 2, 3) and cache.free_slots == 0

    def refused(words: str, call: Any, *arguments: Any, error: Any = ValueError, **more: Any) -> None:
        with pytest.raises(error, match=rf"^StateCache\.{words}"):
            call(*arguments, **more)

    def run(number: int, step: StateStep, count: int = 4) -> Tensor:
        return cache.run(number, step, **linear_rows(count), **linear_weights())

    step = cache.extend()
    refused("run: layer 2 is not one of this cache's 2; count from 0", run, 2, step, error=IndexError)
    refused(r"run: query has shape \[3, 1, 16\] and the step 4 new tokens; pass", run, 0, step, 3)
    run(0, step)
    refused(r"run: layer 0 has begun this step; extend\(\)", run, 0, step)
    refused(
        r"extend: layer 1 has not run the last step of sequence 0; run it, or reset\(0\)", cache.extend, [0]
    )
    with pytest.raises(CacheFullError, match=r"^StateCache\.fork: 4 sequences"):
        cache.fork(0)
    cache.reset()
    assert not cache._memory[0].any() and cache.length(3) == 0
    for other in (step, states("cpu", static=True).extend()):
        refused("run: step is not the last one of its sequences; pass the newest", run, 1, other)

    for drafts in (False, True):  # a model fails before its first layer, and before its second with drafts
        step = cache.extend(drafts=drafts)
        if drafts:
            run(0, step)
        refused(rf"extend: layer {int(drafts)} .* sequence 0; run it, or truncate\(0, 0\)", cache.extend)
        for sequence in cache.sequences:
            cache.truncate(sequence, 0)
    for counts in (17, (2, 2, 0, 2)):
        refused("extend: .* the same number of each", cache.extend, tokens=counts, drafts=True)
    model.run(cache, cache.extend(drafts=True), [1, 2, 3, 4])
    cache.extend([0])
    refused("truncate: length 0 is not from 1 to 2, .* reset", cache.truncate, 0, 0)
    refused("allocate: sequence 3 is in use; give another number, or none", cache.allocate, 3)
    cache.free(3)
    refused("length: sequence 3 is not allocated; pass a number that", cache.length, 3)

    step = cache.extend([1, 2], (1, 3))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(delta, "gated_delta_rule", None)
        run(0, step)
    refused(r"run: layer 0 has begun this step; .* reset\(\) its sequences", run, 0, step)
    for call, sequences in ((cache.extend, [2]), (cache.fork, 2)):
        refused(r"\w+: layer 0 has not run .* sequence 2; run it, or reset\(2\)", call, sequences)
    cache.reset(1)
    half = {name: each.half() for name, each in linear_rows(1).items()}
    step = cache.extend([1])
    wide = linear_weights() | {"conv_weight": torch.zeros(48, 5)}
    refused("run: the cache .*make it with the sizes", cache.run, 0, step, **linear_rows(1), **wide)
    refused(
        r"run: query is torch.float16 and the cache torch.float32; make it with dtype=torch.float16$",
        *(cache.run, 0, step),
        **half,
        **linear_weights(),
        error=TypeError,
    )
    batched = {name: each[:, None] for name, each in linear_rows(1).items()}
    refused("run: query has shape .* pass packed rows", cache.run, 0, step, **batched, **linear_weights())
    for sizes, words in (
        ({"num_value_heads": 3, "num_key_heads": 2}, "3 num_value_heads cannot share 2 num_key_heads; give"),
        ({"key_dim": 20}, "key_dim 20"),
    ):
        with pytest.raises(ValueError, match=f"^StateCache: {words}"):
            states("cpu", **sizes)
