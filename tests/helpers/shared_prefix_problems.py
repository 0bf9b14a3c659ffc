"""Problems of tests/helpers/problems.py in which all sequences begin with the same keys, and the operands of
`shared_prefix_decode` and `shared_prefix_paged_decode` for them, with NaN wherever no row looks."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from tests.helpers import drawing, features, problems
from tests.helpers.problems import Case, Problem
from torch_fattn.operators.options import PointwiseOptions

# Whether the prefix and the suffixes are dense or paged; "pool": both in one pool.
KINDS = ("dense", "paged_suffix", "pool")
# Few head sizes: each is compiled for the rows of a sequence, and for those of all sequences.
HEAD_DIMS = ((64, 64, False), (128, 64, False), (80, 40, False))
WIDE_HEAD_DIMS = ((192, 128, False), (64, 40, True), (576, 512, True))
EVERY_DIMS = (*((*dims, False) for dims in problems.HEAD_DIMS), *problems.WIDE_HEAD_DIMS)


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


def draw(count: int, seed: int = 0) -> list[SharedProblem]:
    rng = random.Random(seed)
    return [_draw_one(rng, i) for i in range(count)]


def _draw_one(rng: random.Random, index: int) -> SharedProblem:
    kind = KINDS[index % len(KINDS)]
    for_prefill = rng.random() < 0.3  # many rows, and nothing that the prefills do not take
    dims = rng.choice(HEAD_DIMS if for_prefill else HEAD_DIMS + WIDE_HEAD_DIMS)
    head_dim, value_dim, value_in_key = dims
    q_heads, kv_heads = rng.choice(problems.GROUPS)
    q_len = rng.choice((1, 1, 2, rng.randint(1, 16)))
    batch = 40 * kv_heads // (q_heads * q_len) + 1 if for_prefill else rng.choice((1, 2, 3, 7))
    tree = rng.choice((None, None, "shared", "each"))
    least_own = q_len if tree else q_len - 1
    block_size = rng.choice((1, 8, 16, 32)) if kind != "dense" else 0
    prefix = rng.choice((0, rng.randint(1, 20), rng.randint(1, 300)))
    capacity = least_own + rng.choice((0, rng.randint(0, 40), rng.randint(0, 150)))
    if block_size:
        prefix, capacity = (-(-length // block_size) * block_size for length in (prefix, capacity))
    if prefix + capacity == 0:
        capacity = max(block_size, 1)
    while (
        not for_prefill
        and batch > 1
        and batch * q_heads * q_len * (prefix + capacity) * head_dim > problems.MAX_WORK / 2
    ):
        batch -= 1
    suffixes = [rng.choice((least_own, rng.randint(least_own, capacity), capacity)) for _ in range(batch)]
    lengths: list[int] | None = [prefix + suffix for suffix in suffixes]
    if kind == "dense" and rng.random() < 0.3:
        lengths = None
    elif kind == "pool" and rng.random() < 0.3:
        assert lengths is not None
        lengths[rng.randrange(batch)] = 0
    plain = not for_prefill and dims in HEAD_DIMS
    formats = drawing.kv_formats(head_dim, value_dim) if plain else ("float",)
    rows = q_heads // kv_heads * q_len if plain else 1
    dtype, kv_format = features.types_for(rng, 0, "decode", EVERY_DIMS.index(dims), rows, formats)
    whole = Problem(
        index,
        "paged_decode" if block_size else "decode",
        problems.DTYPES[dtype],
        batch,
        q_heads,
        kv_heads,
        q_len,
        prefix + capacity,
        head_dim,
        value_dim,
        value_in_key,
        layouts=(rng.choice(("contiguous", "offset", "token_major", "padded_rows")),) * 3,
        mask=rng.choice(problems.MASKS) if not for_prefill and rng.random() < 0.5 else None,
        mask_broadcast=(rng.random() < 0.5,) * 2 + (rng.random() < 0.5, rng.random() < 0.2),
        seq_lens=None if lengths is None else tuple(lengths),
        block_size=block_size,
        shared_keys=prefix,
        window_left=rng.choice((-1, 10**9) if for_prefill else (-1, 0, 30, 200, 10**9)),
        sink_tokens=rng.choice((0, 0, 2, 40, 300)),
        sinks=rng.random() < 0.3,
        alibi_slopes=not for_prefill and rng.random() < 0.4,
        tree=tree,
        kv_format=kv_format,
        **{name: rng.choice(problems.OPTIONS[name].values) for name in PointwiseOptions.__annotations__},
    )
    return SharedProblem(whole, prefix, kind)


def build(shared: SharedProblem) -> tuple[Case, dict[str, Any]]:
    """The case of the whole, for the float64 reference, and the arguments of the function on the CPU."""
    p, prefix = shared.whole, shared.prefix
    case = problems.build(p)
    arguments, _ = case.arguments("cpu")
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
        arguments["prefix_value"] = arguments["prefix_key"][..., : p.value_dim]
    if p.block_size:
        arguments["block_tables"] = arguments["block_tables"][:, blocks:].contiguous()
    if p.seq_lens is not None:
        arguments["seq_lens"] = arguments["seq_lens"] - prefix
    if "kv_format" in arguments:
        arguments["prefix_kv_format"] = arguments["kv_format"]
    return case, arguments
