"""Too many rows, wide heads, layouts, and different sizes and dtypes; see __init__.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import torch_fattn
from tests.helpers import problems
from tests.helpers.accuracy import expected
from tests.helpers.problems import Problem
from tests.helpers.public_calls import heads
from tests.helpers.refusals import (
    QUANTISED,
    WIDE,
    WRITTEN,
    Refusal,
    exact,
    of,
    of_op,
    of_write,
    run,
    written,
)
from tests.helpers.wrong_calls import Arguments
from torch_fattn import reference

GROUPED = WIDE | {"query": heads(1, 4, 3, 584)}
FOUR = torch.tensor([4], dtype=torch.int32)
LONGER = heads(2, 4, 65, 64)  # more rows than keys
TREE = torch.eye(65, dtype=torch.bool) | (torch.arange(65) < 3)


def _tree_as_mask() -> Tensor:
    """bool [2, 1, 65, 32]: all keys are of the newest 65."""
    draft = torch.arange(32) - (of("decode")["seq_lens"][:, None] - 65)
    return TREE[:, draft.clamp(max=64)].transpose(0, 1)[:, None]


def _by_torch(keys: int = 5) -> Callable[[], Tensor]:
    """F.scaled_dot_product_attention as the message advises: the last row sees all these keys."""
    mask = torch.ones(3, 5, dtype=torch.bool).tril(keys - 3)
    return lambda: F.scaled_dot_product_attention(**GROUPED, attn_mask=mask, enable_gqa=True)


def _too_wide(option: str) -> Refusal:
    """Heads of 584 with an option: torch's attention computes the same, unless the option changes scores."""
    value = next(
        value for value in problems.OPTIONS[option].values if value != problems.OPTIONS[option].values[0]
    )
    sizes = (1, 4, 2, 3, 5, 584, 584)
    case = problems.build(Problem(0, "decode", torch.float32, *sizes, **{option: value}))
    arguments, _ = case.arguments("cpu")
    operands = [case.clean[name] for name in ("query", "key", "value")]
    exact, _ = expected(case)

    def by_torch() -> Tensor:
        return F.scaled_dot_product_attention(
            *operands, attn_mask=case.visible, scale=case.problem.scale, enable_gqa=True
        )

    refused = partial(torch_fattn.decode, **arguments)
    if torch.allclose(by_torch().double(), exact, atol=1e-5):
        advice = "use F.scaled_dot_product_attention for this layer, with enable_gqa=True and an attn_mask of"
        return Refusal(advice, refused, by_torch, lambda: exact)
    advice = "use torch_fattn.reference.decode for this layer, in float64"
    return Refusal(advice, refused, lambda: reference.decode(**arguments)[0], lambda: exact)


def _gradients(**changes: Any) -> Callable[[], Tensor]:
    return lambda: torch_fattn.prefill_backward(**of("prefill_backward", **changes))[0]


HALVED = of("prefill_backward")["grad_out"].half()
WIDE_GRADIENTS: Arguments = {n: each[..., :264] for n, each in WIDE.items()}
WIDE_GRADIENTS |= {
    "grad_out": heads(1, 2, 3, 264, seed=3),
    "grad_lse": None,
    "out": None,
    "lse": heads(1, 2, 3),
}


REFUSALS: list[Refusal] = [
    Refusal("convert grad_out with .to(query.dtype)", _gradients(grad_out=HALVED)),
    Refusal("pass the out of the forward, or leave it out", _gradients(out=heads(2, 4, 9, 40).double()),
            _gradients(out=None)),
    Refusal("leave out_remainder out", _gradients(out_remainder=HALVED), _gradients()),
    Refusal("use F.scaled_dot_product_attention for this layer", _gradients(**WIDE_GRADIENTS)),
    *(
        Refusal(
            "use an attn_mask instead",
            run(op, query=LONGER, tree_mask=TREE, **options),
            run(op, query=LONGER, attn_mask=_tree_as_mask(), **options),
            exact(op, query=LONGER, attn_mask=_tree_as_mask(), **options),
        )
        for op, options in (("decode", {}), ("decode", QUANTISED), ("paged_decode", {}))
    ),
    Refusal("for this layer, with enable_gqa=True and an attn_mask of the keys that each row sees",
            lambda: torch_fattn.prefill(**GROUPED, is_causal=True), _by_torch(),
            lambda: reference.prefill(**GROUPED, is_causal=True)[0]),
    Refusal("for this layer, with enable_gqa=True and an attn_mask of the keys that each row sees",
            lambda: torch_fattn.decode(**GROUPED, seq_lens=FOUR), _by_torch(keys=4),
            lambda: reference.decode(**GROUPED, seq_lens=FOUR)[0]),
    *(_too_wide(name) for name, each in problems.OPTIONS.items() if "decode" in each.ops),
    of_op("query and key are [batch, heads, length, head_dim]: use .transpose(1, 2)", "prefill",
          {n: of("prefill")[n].transpose(1, 2) for n in ("query", "key", "value")}),
    of_op("key_cache [num_blocks, block_size, kv_heads, head_dim]: transpose", "paged_decode",
          {n: of("paged_decode")[n].transpose(1, 2) for n in ("key_cache", "value_cache")}),
    of_op(".expand() key to 2 sequences", "prefill",
          {n: of("prefill")[n][:1] for n in ("key", "value")},
          {n: of("prefill")[n][:1].expand(2, -1, -1, -1) for n in ("key", "value")}),
    *(
        of_op(f"convert {names[0]} and {names[1]} with .to(query.dtype)", op,
              {n: of(op)[n].double() for n in names})
        for op, names in (("prefill", ("key", "value")), ("paged_decode", ("key_cache", "value_cache")))
    ),
    of_op("convert it with .float()", "prefill", {"query": of("prefill")["query"].double()}),
    of_write("convert value with .to(key.dtype)", written(value=WRITTEN["value"].float())),
    of_write("convert it with .to(torch.int64)", written(slot_mapping=WRITTEN["slot_mapping"].short())),
    of_op("pass one entry more than there are sequences in both", "varlen_prefill",
          {"cu_seqlens_q": of("varlen_prefill")["cu_seqlens_q"][:2]}),
]  # fmt: skip
