"""Linear attention: which calls have the same bits, what stays in its sequence, and costs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_fattn
from tests.conftest import Checked, needs_emulator
from tests.helpers.linear_problems import CONV, RULE, STATES, STEP, call_of
from tests.helpers.problems import DTYPES
from tests.helpers.tensors import same_bits

f32 = torch.float32
TOKENS = ("query", "key", "value", "z", "g", "beta", "a", "b", "x")
RULES: list[dict[str, Any]] = [
    {"dims": (32, 16), "group": 2, "channel_decay": False, "raw_gates": False},
    {"dims": (32, 16), "group": 1, "channel_decay": True, "raw_gates": False},
]
STEPS: list[dict[str, Any]] = [
    {"dims": (64, 64), "group": 4, "channel_decay": False},  # two heads at a time
    {"dims": (64, 256), "group": 2, "channel_decay": False},  # in rounds
    {"dims": (128, 128), "group": 1, "channel_decay": True},
]
OF_RULES, OF_STEPS = ([(op, each) for each in some] for op, some in ((RULE, RULES), (STEP, STEPS)))
OF_CONV = [(CONV, {"spare_columns": 2, "activation": "silu"})]
WHOLE = {  # a length, and pieces that have its bits
    RULE: (45, ((8, 37), (24, 21), (40, 5))),
    STEP: (6, ((1,) * 6,)),
    CONV: (40, ((1, 39), (16, 24), (21, 19), (39, 1))),
}


def run(op: str, call: dict[str, Any], pieces: tuple[int, ...] = (), **changes: Any) -> list[Tensor]:
    """The result, of tokens in pieces or all at once, and the states after them. Those of the call stay."""
    call = call | changes
    call |= {name: call[name].clone() for name in STATES if name in call}
    tokens = {name: call[name].split(pieces or call[name].shape[1], 1) for name in TOKENS if name in call}
    outs = [
        getattr(torch_fattn, op)(**call | {name: parts[n] for name, parts in tokens.items()})
        for n in range(max(len(pieces), 1))
    ]
    return [torch.cat(outs, 1), *(call[name] for name in STATES if name in call)]


def part(call: dict[str, Any], sequences: slice, tokens: slice = slice(None)) -> dict[str, Any]:
    found = {name: call[name][sequences, tokens] for name in TOKENS if name in call}
    return call | found | {name: call[name][sequences] for name in STATES if name in call}


@pytest.mark.parametrize(
    ("op", "shape", "dtype"),
    [
        *((*each, dtype) for each in (*OF_RULES, *OF_CONV) for dtype in DTYPES),
        *((*each, f32) for each in OF_STEPS),
    ],
)
def test_pieces_and_sequences(op: str, shape: dict[str, Any], dtype: torch.dtype, device: str) -> None:
    """Cut at multiples of 8 in the rule and elsewhere anywhere, alone, and packed: the bits of one batch."""
    length, cuts = WHOLE[op]
    call = call_of(op, device, batch=3, length=length, dtype=dtype, **shape)
    whole = run(op, call)
    for pieces in cuts:
        assert same_bits(run(op, call, pieces), whole), pieces
    for n in range(3):
        assert same_bits(run(op, part(call, slice(n, n + 1))), [each[n : n + 1] for each in whole])
    if op != STEP and device == "mps":
        packed = {name: call[name].flatten(0, 1)[None] for name in TOKENS if name in call}
        packed["cu_seqlens"] = torch.tensor([0, 1, 2, 2, 3], device=device).mul(length).int()
        out, state = run(op, call | packed, state=call["state"][[0, 1, 1, 2]])
        assert same_bits([out[0].unflatten(0, (3, length)), state[[0, 1, 3]]], whole)
        assert same_bits(state[2], call["state"][1])


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize(("op", "shape"), [*OF_RULES, *OF_CONV, *OF_STEPS])
def test_what_is_not_finite(op: str, shape: dict[str, Any], number: float, device: str) -> None:
    """It stays in its sequence, and reaches no earlier chunk of it."""
    call = call_of(op, device, batch=3, length=min(WHOLE[op][0], 21), dtype=f32, **shape)
    whole = run(op, call)
    for name in (name for name in TOKENS if name in call):
        bad, at = call[name].clone(), 13 if op != STEP else 4
        bad[1, at] = -number if name == "g" else number
        found = run(op, call | {name: bad})
        assert same_bits([each[::2] for each in found], [each[::2] for each in whole])
        first = at // 8 * 8 if op == RULE else at
        assert same_bits(found[0][1, :first], whole[0][1, :first])
        assert number == torch.inf or found[0][1].isnan().any()


def test_operands_in_the_memory_of_the_state(device: str, checked: Checked) -> None:
    """They are copied before the state is written."""
    call = call_of(RULE, device, batch=1, length=12, dtype=f32, float_gates=True, **RULES[1])
    numbers = call["state"].flatten()
    call |= {"A_log": numbers[:2], "dt_bias": numbers[40:104].view(2, 32)}
    call["beta"] = numbers[9:33].view(1, 12, 2)
    expected = run(RULE, call)
    with checked():
        out = torch_fattn.gated_delta_rule(**call)
    assert same_bits([out, call["state"]], expected)


@pytest.mark.parametrize("shape", STEPS, ids=str)
def test_drafts(shape: dict[str, Any]) -> None:
    """Without writes both states stay, and a call with counts accepts some of the tokens."""
    call = call_of(STEP, "mps", **shape)
    drafted = run(STEP, call, writes_state=False)
    assert same_bits(drafted, [run(STEP, call)[0], *(call[name] for name in STATES)])
    counts = torch.tensor([2, 5], dtype=torch.int32, device="mps")
    out, *states = run(STEP, call, counts=counts)
    for n, count in enumerate((2, 5)):
        accepted = [out[n : n + 1, :count], *(state[n : n + 1] for state in states)]
        assert same_bits(accepted, run(STEP, part(call, slice(n, n + 1), slice(count))))
        assert not out[n, count:].any()


def test_counts_out_of_range(device: str) -> None:
    call = call_of(STEP, device, batch=3)
    found = run(STEP, call, counts=torch.tensor([-5, 0, 1000], dtype=torch.int32, device=device))
    assert same_bits([each[2] for each in found], [each[2] for each in run(STEP, call)])
    assert not found[0][:2].any() and same_bits(found[2][:2], call["state"][:2])


@pytest.mark.parametrize("op", [RULE, STEP, CONV])
def test_a_pool_without_states(op: str, device: str) -> None:
    """Any slot skips its sequence: the result is 0."""
    call = call_of(op, device, batch=3)
    call |= {name: call[name][:0] for name in STATES if name in call}
    slots = torch.tensor([0, -(2**31), 2**31 - 1], dtype=torch.int32, device=device)
    assert not run(op, call, slots=slots)[0].any()


@needs_emulator
@pytest.mark.parametrize(
    ("op", "shape", "length"),
    [
        *((RULE, each | {"dims": (128, 128)}, 24) for each in RULES),
        *((STEP, each, length) for each in STEPS for length in (1, 16)),
    ],
)
def test_states_are_read_and_written_once(op: str, shape: dict[str, Any], length: int) -> None:
    """The rule at D = 128: 50 products for 8 tokens and 8 columns, and 160 floats of scratch per chunk and
    head."""
    import softmetal

    for writes in (True, False):
        call = call_of(op, "mps", batch=1, length=length, writes_state=writes, **shape)
        with softmetal.checks(count_bytes=True), softmetal.record() as launches:
            getattr(torch_fattn, op)(**call)
        plan = torch_fattn.explain(op, **call).data
        slot, size = str(plan["passes"][-1]["bindings"]["state"]), 4 * call["state"].numel()
        assert launches[-1]["buffers_read"][slot] == size
        assert launches[-1]["buffers_written"].get(slot, 0) == size * writes
        if op == RULE:
            chunks_of_heads = 3 * call["state"].shape[1]
            products = [launch["counters"]["products"] for launch in launches]
            assert products == [0, 50 * chunks_of_heads * 128 // 8]
            assert plan["scratch_bytes"] == 4 * 160 * chunks_of_heads


@needs_emulator
def test_a_token_of_a_convolution_is_read_once() -> None:
    """But for the window before every sixteenth token, and the columns of the state."""
    import softmetal

    x, weight = torch.randn(1, 64, 32).to("mps"), torch.randn(32, 4).to("mps")
    with softmetal.checks(count_bytes=True), softmetal.record() as launches:
        torch_fattn.causal_conv1d(x, weight)
    [launch] = launches
    assert launch["buffers_read"]["0"] == 4 * 32 * (64 + 3 * 3)
    assert launch["buffers_written"]["3"] == 4 * 32 * 64


@pytest.mark.host_only
@pytest.mark.parametrize(
    ("sizes", "changes", "threads", "groups"),
    [
        ((16, 32, 128, 128), {}, 512, 16),  # Qwen3-Next: a threadgroup for each key head
        ((16, 32, 128, 128), {"moves": True}, 512, 32),  # or for each value head, which leave its state
        ((16, 32, 128, 128), {"writes_state": False}, 512, 32),
        ((16, 48, 64, 64), {}, 256, 16),
        ((4, 16, 32, 32), {}, 512, 4),  # value heads side by side
        ((2, 4, 256, 256), {}, 512, 2),
        ((2, 2, 64, 200), {}, 416, 2),  # rounds of 104 columns, the last of 96
    ],
)
def test_threads(sizes: tuple[int, ...], changes: dict[str, Any], threads: int, groups: int) -> None:
    key_heads, value_heads, dim, value_dim = sizes
    shape = {"dims": (dim, value_dim), "key_heads": key_heads, "group": value_heads // key_heads}
    call = call_of(STEP, "meta", **shape, channel_decay=False, **changes)
    [launch] = torch_fattn.explain(STEP, **call, family=7, cores=8).passes
    assert (launch["threads"], launch["grid"]) == ([threads, 1, 1], [groups, 2, 1])


@pytest.mark.host_only
@pytest.mark.parametrize("op", [RULE, STEP])
def test_no_registers_spill(op: str) -> None:
    """On M1 and M2, by Mesa's compiler, up to 128 columns; a core holds 512 threads of a step. Of 256 columns
    the kernels that have a state spill, but for a step with a decay per channel."""
    compiler = pytest.importorskip("softmetal.testing.agx")
    if not compiler.is_built():
        pytest.skip("needs the AGX compiler")
    from bench.backends import agx
    from bench.peers import fattn

    for channel_decay, dim in itertools.product((False, True), (64, 128, 256)):
        shape = {"dims": (dim, dim), "channel_decay": channel_decay, "group": 1 if channel_decay else 2}
        shape |= {"dtype": torch.float16, "layout": "contiguous", "float_gates": False, "length": 8}
        call = call_of(op, "meta", **shape, use_qk_l2norm_in_kernel=True)
        for step in torch_fattn.explain(op, **call, family=7, cores=8).passes:
            cost = compiler.compile_kernel(agx._kernel(fattn.pass_of(step, "float16"), fast_math=False))
            may_spill = dim == 256 and (
                step["kernel"] == "fattn_gated_delta_scan" or op == STEP and not channel_decay
            )
            assert (cost.spills + cost.fills > 0) == may_spill, (step["kernel"], shape)
            assert op == RULE or cost.resident_threads == 512
