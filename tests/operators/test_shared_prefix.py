"""A batch that shares its first keys: results against float64, bytes read, launches."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_fattn
from tests.conftest import Checked, counted_launches, decodes, needs_emulator
from tests.helpers import drawing, problems
from tests.helpers.accuracy import assert_close
from tests.helpers.cache_classes import HEADS, KV_HEADS, LAYERS, paged
from tests.helpers.kv_formats import KV_FORMATS, columns
from tests.helpers.problems import OPTIONS, Case, Problem
from torch_fattn import shared_prefix_decode, shared_prefix_paged_decode
from torch_fattn.operators import prefix_and_suffix

# Whether the prefix and the suffixes are dense or paged; "pool": both in one pool.
KINDS = ("dense", "paged_suffix", "pool")
# Few head sizes: each is compiled for the rows of a sequence, and for those of all sequences.
DIMS = ((64, 64), (128, 64), (80, 40), (192, 128), (64, 40), (576, 512))


@dataclass(frozen=True)
class SharedProblem:
    """`whole.kv_len` keys at most for each sequence, `prefix` of which are common."""

    whole: Problem
    prefix: int
    kind: str

    def __str__(self) -> str:
        return f"{self.kind}{self.prefix}-{self.whole}"

    @property
    def index(self) -> int:
        return self.whole.index


def draw() -> list[SharedProblem]:
    """The decodes among the random problems that have these head sizes."""
    drawn = (p for p in drawing.draw(600) if p.is_decode and p.q_len <= 16)
    return [with_prefix(p) for p in drawn if (p.head_dim, p.value_dim) in DIMS]


def with_prefix(p: Problem) -> SharedProblem:
    """The problem with a common prefix, and suffixes that have room for its rows."""
    rng = random.Random(p.index)
    kind = rng.choice(KINDS[1:]) if p.block_size else "dense"
    batch = p.batch
    if max(p.head_dim, p.value_dim) <= 128 and rng.random() < 0.3:  # as the prefills take it: many rows
        batch = 40 * p.kv_heads // (p.q_heads * p.q_len) + 1
        p = replace(p, kv_format="float", mask=None, alibi_slopes=False, window_left=rng.choice((-1, 10**9)))
    least_own, block = p.q_len if p.tree else p.q_len - 1, max(p.block_size, 1)
    prefix = rng.choice((0, rng.randint(1, 20), rng.randint(1, 300)))
    capacity = least_own + rng.choice((0, rng.randint(0, 40), rng.randint(0, 150)))
    prefix, capacity = (-(-length // block) * block for length in (prefix, capacity))
    if prefix + capacity == 0:
        capacity = block
    suffixes = [rng.choice((least_own, rng.randint(least_own, capacity), capacity)) for _ in range(batch)]
    lengths = [prefix + suffix for suffix in suffixes]
    if kind == "pool" and rng.random() < 0.3:
        lengths[rng.randrange(batch)] = 0
    whole = replace(
        p,
        batch=batch,
        kv_len=prefix + capacity,
        seq_lens=None if p.seq_lens is None else tuple(lengths),
        shared_keys=prefix,
    )
    return SharedProblem(whole, prefix, kind)


def build(shared: SharedProblem, device: str) -> tuple[Case, dict[str, Any]]:
    """The case of the whole, for the float64 reference, and the arguments of the function."""
    p, prefix = shared.whole, shared.prefix
    case = problems.build(p)
    arguments, _ = case.arguments(device)
    blocks = prefix // max(p.block_size, 1)
    if shared.kind == "pool":
        return case, arguments | {"shared_blocks": blocks}
    for name in ("key", "value", "key_scales", "value_scales"):
        whole = arguments.pop(name if name in arguments else f"{name}_cache", None)
        if whole is None:
            continue
        if p.block_size:
            table = arguments["block_tables"]
            common = whole[table[0, :blocks].long()].flatten(0, 1).transpose(0, 1)[None]
            arguments |= {name: whole, f"prefix_{name}": common}
        else:
            arguments |= {name: whole[:, :, prefix:], f"prefix_{name}": whole[:1, :, :prefix]}
    if p.value_in_key:
        arguments["prefix_value"] = arguments["prefix_key"][..., : columns(p.kv_format, p.value_dim)]
    if p.block_size:
        arguments["block_tables"] = arguments["block_tables"][:, blocks:].contiguous()
    if p.seq_lens is not None:
        arguments["seq_lens"] = arguments["seq_lens"] - prefix
    if "kv_format" in arguments:
        arguments["prefix_kv_format"] = arguments["kv_format"]
    return case, arguments


PROBLEMS = draw()
SAMPLE = "the sample of random problems has changed: draw more of them"


def run(shared: SharedProblem, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    function = shared_prefix_paged_decode if shared.kind == "pool" else shared_prefix_decode
    out, lse = function(**arguments, return_lse=True)
    return out, lse


def takes_prefill(shared: SharedProblem, least_rows: int) -> bool:
    p = shared.whole
    rows = p.batch * p.q_heads * p.q_len
    return (
        rows >= least_rows
        and rows > 32 * p.kv_heads
        and max(p.head_dim, p.value_dim) <= 128
        and p.kv_format == "float"
        and p.mask is None
        and not p.alibi_slopes
        and not 0 <= p.window_left < p.kv_len - 1
    )


def expected_launches(shared: SharedProblem, least_rows: int) -> dict[str, int]:
    if shared.prefix == 0:
        return {"prefill": 0, "decode": 1}
    prefill = takes_prefill(shared, least_rows)
    return {"prefill": int(prefill), "decode": 2 - prefill}


@pytest.mark.parametrize("shared", PROBLEMS, ids=str)
def test_random(
    shared: SharedProblem, device: str, checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of them may take the prefills, which else need more rows than a test has time for."""
    least_rows = 1 if shared.index // 2 % 2 else prefix_and_suffix.PREFILL_ROWS
    monkeypatch.setattr(prefix_and_suffix, "PREFILL_ROWS", least_rows)
    case, arguments = build(shared, device)
    with counted_launches() as launches, checked(order="random", seed=shared.whole.index):
        out, lse = run(shared, arguments)
    assert_close(case, out.cpu(), lse.cpu())
    counts = {
        "prefill": launches.get("fattn_prefill", 0),
        "decode": decodes(launches),
    }
    assert counts == (expected_launches(shared, least_rows) if device == "mps" else dict.fromkeys(counts, 0))


@pytest.mark.host_only
def test_the_problems_have_it_all() -> None:
    """The control: the problems of the test above include prefill and every option."""
    for index in (0, 1):
        some = [s for s in PROBLEMS if s.index // 2 % 2 == index and s.prefix]
        assert sum(takes_prefill(s, 1) for s in some) >= 3, SAMPLE
        for kind in KINDS:
            assert sum(s.kind == kind for s in some) >= 4, SAMPLE
    shared = [{"mask": s.whole.mask, **s.whole.options} for s in PROBLEMS if s.prefix]
    taken = prefix_and_suffix.POINTWISE | prefix_and_suffix.FITTED
    names = {name for name, each in OPTIONS.items() if (each.argument or name) in taken}
    for name in names - {"window_left", "window_right"} | {"mask"}:
        drawn = sum(bool(options.get(name)) for options in shared)
        assert drawn >= 10, f"{name}: the problems draw {drawn}"
    in_prefix = [s for s in PROBLEMS if 0 <= s.whole.window_left < s.whole.kv_len - 1 and s.prefix]
    assert len(in_prefix) >= 10, SAMPLE
    assert {s.whole.kv_format for s in PROBLEMS} == set(KV_FORMATS), SAMPLE


@pytest.mark.parametrize("limit", ["window", "mask"])
def test_an_empty_sequence_sees_no_key_of_the_prefix(limit: str, device: str) -> None:
    """Sequence 0 does not see key 15, whose value is NaN; sequence 1, which is empty, would by its row."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 2, 1, 64, generator=generator).half()
    key, value = (torch.randn(2, 16, 2, 64, generator=generator).half() for _ in range(2))
    mask = torch.ones(2, 1, 1, 32, dtype=torch.bool)
    mask[0, ..., 15] = False
    options = {"window_left": 0, "sink_tokens": 4} if limit == "window" else {"attn_mask": mask.to(device)}

    def result() -> Tensor:
        return shared_prefix_paged_decode(
            *(x.to(device) for x in (query, key, value)),
            torch.tensor([[0, 1], [-1, -1]], dtype=torch.int32, device=device),
            torch.tensor([17, 0], dtype=torch.int32, device=device),
            1,
            **options,  # type: ignore[arg-type]
        ).cpu()

    finite = result()
    value[0, 15] = torch.nan
    assert torch.equal(result(), finite) and not finite[1].any()


# ---- bytes read


def operands(batch: int, group: int, prefix: int, own: int, kv_heads: int = 2) -> dict[str, Tensor]:
    """float16 of D 64."""
    generator = torch.Generator().manual_seed(0)

    def rows(*shape: int) -> Tensor:
        return torch.randn(*shape, 64, generator=generator).half()

    return {
        "query": rows(batch, kv_heads * group, 1),
        "prefix_key": rows(1, kv_heads, prefix),
        "prefix_value": rows(1, kv_heads, prefix),
        "key": rows(batch, kv_heads, own),
        "value": rows(batch, kv_heads, own),
    }


def whole(tensors: dict[str, Tensor], name: str) -> Tensor:
    """Prefix and suffix as one dense cache."""
    batch = tensors["query"].shape[0]
    return torch.cat((tensors[f"prefix_{name}"].expand(batch, -1, -1, -1), tensors[name]), dim=2)


def keys_read(call: Any, kv_heads: int = 2) -> float:
    """Keys that a call reads, of K and V and each key-value head, once for each threadgroup."""
    import softmetal

    with softmetal.checks(count_bytes=True, count_distinct=True), softmetal.record() as launches:
        call()
        torch.mps.synchronize()
    attention = [launch for launch in launches if launch["kernel"] != "fattn_merge"]
    read = [launch["buffers_distinct"][slot] for launch in attention for slot in ("1", "2")]
    return sum(read) / (2 * kv_heads * 64 * 2)


@needs_emulator
@pytest.mark.parametrize(("batch", "group", "times"), [(4, 4, 1), (8, 4, 1), (10, 4, 2), (3, 1, 1)])
def test_the_prefix_is_read_once(batch: int, group: int, times: int) -> None:
    """All threadgroups together read the prefix once per 32 rows. decode reads it once for every sequence."""
    tensors = {name: t.to("mps") for name, t in operands(batch, group, 512, 32).items()}
    assert keys_read(lambda: shared_prefix_decode(**tensors)) == times * 512 + batch * 32
    key, value = whole(tensors, "key"), whole(tensors, "value")
    control = keys_read(lambda: torch_fattn.decode(tensors["query"], key, value))
    assert control == batch * (512 + 32)


@needs_emulator
def test_many_rows_read_it_once_per_tile_of_prefill() -> None:
    """2,048 rows of one key-value head, 64 to a tile; decode would read it for each 32."""
    tensors = {n: t.to("mps") for n, t in operands(128, 16, 64, 1, kv_heads=1).items()}
    with counted_launches() as launches:
        assert keys_read(lambda: shared_prefix_decode(**tensors), 1) == 2048 // 64 * 64 + 128
    assert launches["fattn_prefill"] == decodes(launches) == 1
    fewer = {n: t if n.startswith("prefix") else t[:127] for n, t in tensors.items()}
    with counted_launches() as launches:
        assert keys_read(lambda: shared_prefix_decode(**fewer), 1) == 2048 // 32 * 64 + 127
    assert "fattn_prefill" not in launches and decodes(launches) == 2


@needs_emulator
def test_a_window_reads_its_part_of_the_prefix() -> None:
    tensors = {name: t.to("mps") for name, t in operands(4, 2, 512, 32).items()}
    read = keys_read(lambda: shared_prefix_decode(**tensors, window_left=99, sink_tokens=5))
    # 101 keys: 69 of the prefix for the rows at position 543, and 32 more, since lengths are the GPU's.
    assert 4 * 32 + 69 + 5 <= read <= 4 * 32 + 69 + 5 + 32 + 1


@needs_emulator
def test_the_cache_class_reads_what_is_shared_once() -> None:
    """Four forks of 45 tokens, in blocks of 4: eleven blocks are shared."""
    cache = paged(num_blocks=40, dtype=torch.float16, head_dim=64)
    sequences = [cache.allocate()]
    step = cache.extend(sequences, 45)
    append(cache, step)
    sequences += [cache.fork(sequences[0]) for _ in range(3)]
    step = cache.extend(sequences, 2)
    append(cache, step)
    query = torch.randn(4, HEADS, 1, 64).half().to("mps")
    assert step.shared_blocks == 11
    assert keys_read(lambda: cache.decode(0, step, query, shared_prefix=True)) == 44 + 4 * 3
    assert keys_read(lambda: cache.decode(0, step, query)) == 4 * 47


def append(cache: torch_fattn.PagedKVCache, step: torch_fattn.CacheStep) -> None:
    """Random keys and values."""
    key, value = (cache._layers.operands(0)[side] for side in (0, 1))
    for layer in range(LAYERS):
        rows = [torch.randn(len(step.positions), KV_HEADS, t.shape[-1]).to(key) for t in (key, value)]
        cache.append(layer, step, *rows)


# ---- edges


def test_nan_in_the_prefix_reaches_its_rows(device: str) -> None:
    """A NaN in a key. One in a value leaves all sequences that share it undefined."""
    tensors = {name: t.to(device) for name, t in operands(3, 2, 40, 8).items()}
    tensors["prefix_key"][:, :, 7] = torch.nan
    mask = torch.ones(3, 1, 1, 48, dtype=torch.bool, device=device)
    mask[1, ..., 7] = False
    out = shared_prefix_decode(**tensors, attn_mask=mask).cpu()
    assert out[0].isnan().all() and out[2].isnan().all() and out[1].isfinite().all()


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiles(device: str, dynamic: bool) -> None:
    shared = next(s for s in PROBLEMS if s.kind == "dense" and s.whole.window_left >= 0 and s.whole.seq_lens)
    for some in (shared, next(s for s in PROBLEMS if s.kind == "pool" and s.prefix)):
        _, arguments = build(some, device)
        compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        for a, b in zip(compiled(some, arguments), run(some, arguments), strict=True):
            assert torch.equal(a.cpu().nan_to_num(), b.cpu().nan_to_num())


def test_large_logits_do_not_hide_how_many_keys_a_part_has(device: str) -> None:
    """Over keys that are all equally unlikely, finfo.min in float32, the result is the mean."""
    randn = partial(torch.randn, generator=torch.Generator().manual_seed(1))
    query, key, value = (randn(3, 2, length, 64) for length in (1, 5, 5))
    prefix_key, prefix_value = randn(1, 2, 30, 64), randn(1, 2, 30, 64)
    mask = torch.full((1, 1, 1, 35), torch.finfo(torch.float32).min)
    operands = [t.to(device) for t in (query, prefix_key, prefix_value, key, value)]
    out = shared_prefix_decode(*operands, attn_mask=mask.to(device))
    mean = torch.cat((prefix_value.expand(3, -1, -1, -1), value), dim=2).mean(dim=2, keepdim=True)
    torch.testing.assert_close(out.cpu(), mean, rtol=0, atol=1e-6)


@pytest.mark.host_only
def test_what_is_checked_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a tree, which are all suffix, need a key each. Blocks outside all sequences are not checked."""
    monkeypatch.setenv("FATTN_CHECK", "1")
    tensors = operands(2, 2, 40, 8)
    tensors["query"] = tensors["query"].expand(-1, -1, 3, -1)
    pools, tables = torch.zeros(2, 9, 4, 2, 64, dtype=torch.float16), torch.full((2, 4), -1)
    lengths = torch.tensor([2, 7], dtype=torch.int32)
    shared_prefix_decode(**tensors, seq_lens=lengths)
    with pytest.raises(ValueError, match=r"seq_lens\[0\] is 2 and must be at least 3"):
        shared_prefix_decode(**tensors, seq_lens=lengths, tree_mask=torch.tensor([1, 3, 5]))
    shared_prefix_decode(**tensors, seq_lens=lengths + 1, tree_mask=torch.tensor([1, 3, 5]))
    nothing = torch.zeros(2, dtype=torch.int32)
    out = shared_prefix_paged_decode(tensors["query"], *pools, tables.int(), nothing, 2)
    assert not out.any()


@pytest.mark.host_only
def test_an_option_that_the_parts_do_not_know_is_refused() -> None:
    """One that depends on positions would be wrong in the prefix, where all rows are at its last token."""
    query, key = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 4, 16)
    parts = [prefix_and_suffix.Keys(key, key, 4) for _ in range(2)]
    rows = prefix_and_suffix.Rows(query, 2)
    prefix_and_suffix.attend_both("fattn.x", rows, *parts, None, {"softcap": 3.0})
    with pytest.raises(
        NotImplementedError, match=r"^fattn\.x: of_positions is not implemented for shared prefixes"
    ):
        prefix_and_suffix.attend_both("fattn.x", rows, *parts, None, {"of_positions": 3.0})
