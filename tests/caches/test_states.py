"""torch_fattn.linear_attention: StateCache in random histories against plain decoding, bit by bit; a hybrid
model with both caches against the same without; and the functions with states as results."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_fattn
from tests.conftest import counted_launches
from tests.helpers.faults import with_faults
from tests.helpers.synchronisations import Synchronisations
from tests.helpers.tensors import same_bits, tensors_in
from torch_fattn import CacheFullError, PagedKVCache, reference
from torch_fattn.linear_attention import StateCache, StateStep, causal_conv1d, gated_delta_rule
from torch_fattn.operators import delta

LAYERS, SLOTS, KEY_HEADS, HEADS, KEY_DIM, DIM, WIDTH = 2, 4, 1, 2, 16, 8, 4
CHANNELS = 2 * KEY_HEADS * KEY_DIM + HEADS * DIM
SHAPES: dict[str, tuple[int, ...]] = dict.fromkeys(("query", "key"), (KEY_HEADS, KEY_DIM))
SHAPES |= {"value": (HEADS, DIM), "z": (HEADS, DIM), "a": (HEADS,), "b": (HEADS,)}
WORDS = 40
OF_A_SEQUENCE = (1, CHANNELS, WIDTH - 1), (1, HEADS, KEY_DIM, DIM)  # its states in a layer


def states(device: str, **changes: Any) -> StateCache:
    sizes: dict[str, Any] = {"num_layers": LAYERS, "num_slots": SLOTS, "key_dim": KEY_DIM, "value_dim": DIM}
    sizes |= {"num_key_heads": KEY_HEADS, "num_value_heads": HEADS, "dtype": torch.float32}
    return StateCache(**(sizes | {"device": device} | changes))


def equal(a: Any, b: Any) -> bool:
    """Bit by bit on the GPU. On the CPU, torch's functions round by the length of a vector."""
    pairs = zip(tensors_in(a), tensors_in(b), strict=True)
    return all(same_bits(x, y) if x.is_mps else torch.allclose(x, y, rtol=1e-5, atol=1e-5) for x, y in pairs)


class Layer:
    """Random weights, and random projections of tokens."""

    def __init__(self, seed: int, device: str) -> None:
        self.generator, self.device = torch.Generator().manual_seed(seed), device
        self.weights = {"A_log": self.rows(HEADS), "dt_bias": self.rows(HEADS)}
        self.weights |= {"conv_weight": self.rows(CHANNELS, WIDTH), "conv_bias": self.rows(CHANNELS)}
        self.weights |= {"norm_weight": self.rows(DIM)}

    def rows(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device)

    def tokens(self, count: int) -> dict[str, Tensor]:
        return {name: self.rows(count, *shape) for name, shape in SHAPES.items()}


class Plain:
    """Decoding token by token: the states of each sequence and layer after each of its tokens."""

    def __init__(self, layers: list[Layer]) -> None:
        self.layers, self.states = layers, dict[int, list[list[tuple[Tensor, Tensor]]]]()

    def add(self, sequence: int) -> None:
        conv, state = (torch.zeros(shape, device=self.layers[0].device) for shape in OF_A_SEQUENCE)
        self.states[sequence] = [[(conv, state)] for _ in self.layers]

    def run(self, sequence: int, layer: int, token: dict[str, Tensor]) -> Tensor:
        conv, state = (each.clone() for each in self.states[sequence][layer][-1])
        rows = {name: each[None, None] for name, each in token.items()}
        weights = self.layers[layer].weights
        out = torch_fattn.gated_delta_step(**rows, **weights, conv_state=conv, state=state)
        self.states[sequence][layer].append((conv, state))
        return out[0, 0]

    def fork(self, sequence: int, copy: int) -> None:
        self.states[copy] = [[*layer] for layer in self.states[sequence]]

    def truncate(self, sequence: int, length: int) -> None:
        for layer in self.states[sequence]:
            del layer[length + 1 :]


class History:
    def __init__(self, seed: int, device: str) -> None:
        self.rng, self.cache = random.Random(seed), states(device)
        self.layers = [Layer(seed + layer, device) for layer in range(LAYERS)]
        self.plain, self.faults = Plain(self.layers), 0
        for memory in self.cache._memory:
            memory.fill_(torch.nan)

    def call(self, function: Any, *arguments: Any, **keywords: Any) -> Any:
        def state() -> Any:
            return [(s, self.cache.length(s)) for s in self.cache.sequences], self.cache.free_slots

        before = state()

        def check_unchanged() -> None:
            assert state() == before

        result, failures = with_faults(lambda: function(*arguments, **keywords), check_unchanged, range(1000))
        self.faults += failures
        return result

    def run(self, actions: int) -> None:
        cache, plain, rng = self.cache, self.plain, self.rng
        for _ in range(actions):
            action = rng.choice(("allocate", "extend", "drafts", "drafts", "truncate", "fork", "free"))
            one = rng.choice(cache.sequences) if cache.sequences else None
            if action in ("allocate", "fork") and cache.free_slots == 0:
                with pytest.raises(CacheFullError, match=r"4 sequences are allocated, the most"):
                    cache.allocate()
            elif action == "allocate" or one is None:
                plain.add(self.call(cache.allocate, rng.choice((None, 1000 - len(plain.states)))))
            elif action == "fork":
                plain.fork(one, self.call(cache.fork, one))
            elif action == "free" and len(cache.sequences) > 2:
                self.call(cache.free, one)
            elif action == "truncate":
                self.truncate(one)
            else:
                self.extend(action == "drafts")
            self.check()

    def truncate(self, sequence: int) -> None:
        own = self.cache._sequences[sequence]
        if own.least > 0:
            with pytest.raises(ValueError, match=f"length {own.least - 1} is not from {own.least} to"):
                self.cache.truncate(sequence, own.least - 1)
        length = self.rng.randint(own.least, own.length)
        self.call(self.cache.truncate, sequence, length)
        self.plain.truncate(sequence, length)

    def extend(self, drafts: bool) -> None:
        chosen = self.rng.sample(self.cache.sequences, self.rng.randint(1, len(self.cache.sequences)))
        count = self.rng.choice((0, 1, 1, 2, 5))
        step: StateStep = self.call(self.cache.extend, chosen, count, drafts=drafts)
        for number, layer in enumerate(self.layers):
            tokens = layer.tokens(count * len(chosen))
            out = self.cache.run(number, step, **tokens, **layer.weights)
            rows = (
                (s, {name: each[n * count + t] for name, each in tokens.items()})
                for n, s in enumerate(chosen)
                for t in range(count)
            )
            plain = [self.plain.run(s, number, token) for s, token in rows]
            assert equal(out, torch.stack(plain) if plain else out)

    def check(self) -> None:
        """The states of sequences without drafts, and of the others before those."""
        for sequence, own in self.cache._sequences.items():
            assert own.length == len(self.plain.states[sequence][0]) - 1
            for layer, after in enumerate(self.plain.states[sequence]):
                mine = [memory[own.slot, layer] for memory in self.cache._memory]
                exact = [each[0] for each in after[own.begin if own.step and own.step.drafts else -1]]
                assert equal(mine, exact)


@pytest.mark.host_only
@pytest.mark.parametrize("seed", range(16))
def test_history(seed: int) -> None:
    """Drafts, of which some are kept, equal plain decoding; forks do not depend on each other."""
    history = History(seed, "cpu")
    history.run(40)
    assert history.faults > 10


@pytest.mark.parametrize("seed", range(16, 24))
def test_history_on_mps(seed: int) -> None:
    history = History(seed, "mps")
    history.run(40)
    assert history.faults > 10


class Hybrid:
    """Two linear layers and one of attention, with random weights."""

    def __init__(self, device: str) -> None:
        self.layers, of = [Layer(seed, device) for seed in range(LAYERS)], Layer(11, device)
        self.words, self.head = of.rows(2, WORDS, 32).unbind()
        self.into = {name: of.rows(32, *shape) / 6 for name, shape in SHAPES.items()}
        self.out, self.attention = of.rows(HEADS * DIM, 32) / 4, of.rows(32, 3, 2, 16) / 6

    def says(self, ids: list[int], linear: Any, attend: Any) -> list[int]:
        """The word after each. The functions compute what depends on other tokens."""
        x = self.words[torch.tensor(ids, device=self.words.device)]
        for number, layer in enumerate(self.layers):
            tokens = {name: torch.tensordot(x, weight, 1) for name, weight in self.into.items()}
            x = x + linear(number, tokens | layer.weights).flatten(1) @ self.out
        x = x + attend(*torch.tensordot(x, self.attention, 1).unbind(1)).flatten(1)
        return (x @ self.head.T).argmax(1).tolist()

    def says_at_once(self, ids: list[int]) -> list[int]:
        """`says` of a whole sequence, by the reference."""

        def linear(_: int, operands: dict[str, Tensor]) -> Tensor:
            rows = {name: each[None] if name in SHAPES else each for name, each in operands.items()}
            conv, state = (torch.zeros(shape) for shape in OF_A_SEQUENCE)
            return reference.gated_delta_step(**rows, conv_state=conv, state=state)[0].float()

        def attend(*rows: Tensor) -> Tensor:
            out, _lse = reference.prefill(*(each.transpose(0, 1)[None] for each in rows), is_causal=True)
            return out[0].transpose(0, 1).float()

        return self.says(ids, linear, attend)


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_a_hybrid_model(device: str) -> None:
    """Prompts in chunks, then drafts of which some are right: the words are those without caches."""
    rng, lengths = random.Random(0), (21, 4, 9)
    exact = [[rng.randrange(WORDS) for _ in range(length)] for length in lengths]
    for ids in exact:
        for _ in range(16):
            ids.append(Hybrid("cpu").says_at_once(ids)[-1])
    assert all(len({*ids[-16:]}) > 4 for ids in exact), "the words depend on the past"
    keys = PagedKVCache(1, 40, 2, 16, block_size=4, dtype=torch.float32, device=device)
    model, linear = Hybrid(device), states(device)
    sequences = [linear.allocate(keys.allocate()) for _ in exact]

    def run(ids: list[list[int]], **options: Any) -> list[list[int]]:
        counts = [len(own) for own in ids]
        step, of_linear = keys.extend(sequences, counts), linear.extend(sequences, counts, **options)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys.append(0, step, key, value)
            return keys.prefill(0, step, query)

        words = iter(model.says(sum(ids, []), lambda n, rows: linear.run(n, of_linear, **rows), attend))
        return [[next(words) for _ in own] for own in ids]

    run([ids[:3] for ids in exact])
    words = run([ids[3:length] for ids, length in zip(exact, lengths, strict=True)])
    found, kept = [own[-1:] for own in words], []
    while min(map(len, found)) < 10:
        drafts = []
        for ids, own in zip(exact, found, strict=True):
            new, right = ids[len(ids) - 16 + len(own) :][:3], rng.randrange(4)
            drafts.append([own[-1], *new[:right], *((word + 1) % WORDS for word in new[right:])])
        words = run(drafts, drafts=True)
        for sequence, own, given, said in zip(sequences, found, drafts, words, strict=True):
            kept.append(next((n for n in range(3) if said[n] != given[n + 1]), 3) + 1)
            own += said[: kept[-1]]
            for cache in (keys, linear):
                cache.truncate(sequence, cache.length(sequence) - 4 + kept[-1])
    assert {*kept} == {1, 2, 3, 4}
    for ids, own in zip(exact, found, strict=True):
        assert own == ids[len(ids) - 16 :][: len(own)]


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_states_as_results(device: str) -> None:
    """Packed sequences, one of them empty: the reference's final states, and unchanged initial ones."""
    layer, cu_seqlens = Layer(0, device), torch.tensor([0, 8, 8, 21], dtype=torch.int32, device=device)
    tokens = {name: rows[None] for name, rows in layer.tokens(21).items()}
    rows = [tokens[name] for name in ("query", "key", "value", "a", "b")]
    raw = {"A_log": layer.weights["A_log"], "dt_bias": layer.weights["dt_bias"]}
    exact_state = torch.zeros(3, HEADS, KEY_DIM, DIM, dtype=torch.float64)
    exact = reference.gated_delta_rule(*rows, exact_state, cu_seqlens=cu_seqlens, **raw)
    with counted_launches() as launches:
        out, state = gated_delta_rule(*rows, output_final_state=True, cu_seqlens=cu_seqlens, **raw)
    assert bool(launches) is (device == "mps") and state is not None
    assert torch.allclose(out.cpu().double(), exact, atol=1e-5)
    assert torch.allclose(state.cpu().double(), exact_state, atol=1e-5)
    assert gated_delta_rule(*rows, **raw)[1] is None

    before = state.clone()
    again, last = gated_delta_rule(
        *rows, initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens, **raw
    )
    assert same_bits(state, before) and not same_bits(again, out) and same_bits(last[1], state[1])
    assert same_bits(gated_delta_rule(*rows, initial_state=state, cu_seqlens=cu_seqlens, **raw)[0], again)

    x, weight = layer.rows(1, 21, 6), layer.rows(6, WIDTH)
    whole, tail = causal_conv1d(x, weight, activation="silu", output_final_state=True)
    assert tail is not None and same_bits(tail, x[0, -WIDTH:].T[None])
    parts, state = [], None
    for part in x.split(8, 1):
        out, state = causal_conv1d(
            part, weight, initial_state=state, output_final_state=True, activation="silu"
        )
        parts.append(out)
    assert equal(torch.cat(parts, 1), whole) and same_bits(state, tail)
    out, state = causal_conv1d(x[:, 8:], weight, activation="silu", initial_state=x[:, 5:8].mT)
    assert equal(out, whole[:, 8:]) and state is None


def test_launches_of_a_server() -> None:
    """A step like the one before launches nothing besides its layers; kept drafts take one launch per layer.
    Nothing waits for the GPU."""
    linear, layers = states("mps"), [Layer(seed, "mps") for seed in range(LAYERS)]
    sequences = [linear.allocate() for _ in range(3)][::2]
    tokens = [layer.tokens(4) for layer in layers]
    linear.extend(sequences, 2, drafts=True)
    for sequence in sequences:
        linear.truncate(sequence, 0)
    for drafts, kept, expected in ((True, 1, 2), (True, 0, 4), (False, 2, 2), (False, 2, 2)):
        with Synchronisations() as found, counted_launches() as launches:
            step = linear.extend(sequences, 2, drafts=drafts)
            for number, layer in enumerate(layers):
                linear.run(number, step, **tokens[number], **layer.weights)
        assert launches == {"fattn_gated_delta_step": expected} and not found.ops
        for sequence in sequences:
            linear.truncate(sequence, linear.length(sequence) - 2 + kept)


@pytest.mark.host_only
def test_refusals() -> None:
    linear, layer = states("cpu", static=True), Layer(0, "cpu")
    assert linear.sequences == (0, 1, 2, 3) and linear.free_slots == 0

    def refused(call: Any, words: str, error: type[Exception] = ValueError) -> None:
        with pytest.raises(error, match=rf"^StateCache\.{words}"):
            call()

    def run(number: int, step: StateStep, count: int = 4) -> Tensor:
        return linear.run(number, step, **layer.tokens(count), **layer.weights)

    step = linear.extend()
    refused(lambda: run(2, step), "run: layer 2 is not one of this cache's 2; count from 0", IndexError)
    refused(lambda: run(0, step, 3), r"run: query has shape \[3, 1, 16\] and the step 4 new tokens; pass")
    run(0, step)
    refused(lambda: run(0, step), r"run: layer 0 has run this step; extend\(\)")
    for call in (linear.extend, lambda: linear.fork(0, 9)):
        refused(call, r"\w+: layer 1 has not run the last step of sequence 0; run it, or reset\(0\)")
    linear.reset()
    assert not linear._memory[0].any() and linear.length(3) == 0
    refused(lambda: run(1, step), "run: step is not the last one of its sequences; pass the newest")

    linear.extend()  # fails before its first layer
    refused(linear.extend, r"extend: layer 0 has not run .* sequence 0; run it, or truncate\(0, 0\)")
    for sequence in linear.sequences:
        linear.truncate(sequence, 0)
    for counts in (17, (2, 2, 0, 2)):
        refused(lambda c=counts: linear.extend(tokens=c, drafts=True), "extend: .* the same number of each")
    step = linear.extend(drafts=True)
    run(0, step)
    refused(linear.extend, r"extend: layer 1 has not run .* sequence 0; run it, or truncate\(0, 0\)")
    run(1, step)
    linear.extend([0])
    refused(lambda: linear.truncate(0, 0), "truncate: length 0 is not from 1 to 2, .* reset")
    refused(lambda: linear.allocate(3), "allocate: sequence 3 is in use; give another number, or none")
    linear.free(3)
    refused(lambda: linear.length(3), "length: sequence 3 is not allocated; pass a number that")
    step = linear.extend([1, 2], (1, 3))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(delta, "gated_delta_rule", None)
        run(0, step)
    refused(lambda: run(0, step), r"run: layer 0 failed in this step; reset\(\) its sequences")
    refused(lambda: linear.extend([2]), r"extend: layer 0 has not run .* sequence 2; run it, or reset\(2\)")
    linear.reset(1)
    half = {name: each.half() for name, each in layer.tokens(1).items()}
    step = linear.extend([1])
    refused(lambda: linear.run(0, step, **half, **layer.weights), "run: .*the cache", TypeError)
