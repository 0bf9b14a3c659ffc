"""The result of a layer has the layout that the model needs, `[B, L, H, D]`, without a copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from tests.transformers.tiny_models import DEVICE, LAYERS, pair, prompt, tiny
from torch_fattn.integrations.transformers import attend, attention, operators
from torch_fattn.integrations.transformers.visibility import write_pattern

BATCH, HEADS, KV_HEADS, DIM, KEYS = 2, 4, 2, 16, 40
COPIES = ("clone", "copy_", "_to_copy", "contiguous", "_reshape_copy")


class Copies(TorchDispatchMode):
    """The shapes of the tensors copied inside, and the operators of fattn that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in COPIES:
            self.shapes.append(tuple(result.shape))
        if func.namespace == "fattn" and not func.overloadpacket.__name__.startswith("_"):
            self.operators.append(func.overloadpacket.__name__)
        return result


def token_major(heads: int, length: int) -> Tensor:
    """Operands in the layout of a layer's projections."""
    return torch.randn(BATCH, length, heads, DIM).to(DEVICE).transpose(1, 2)


def layer_call(rows: int, seq_lens: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value and the mask of causal rows, whose filled length only the device knows."""
    filled = torch.tensor(KEYS - 3, device=DEVICE) if seq_lens else KEYS
    pattern = write_pattern(BATCH, KEYS, filled, KEYS, None, DEVICE)
    return token_major(HEADS, rows), token_major(KV_HEADS, KEYS), token_major(KV_HEADS, KEYS), pattern


CASES = {
    "prefill": (20, False, "decode"),
    "decode": (1, False, "decode"),
    "decode_rows": (5, False, "decode"),
    "static_decode": (5, True, "decode"),
    "static_prefill": (20, True, "decode"),
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_copied(name: str) -> None:
    rows, seq_lens, op = CASES[name]
    arguments = layer_call(rows, seq_lens)
    with torch.no_grad(), Copies() as copies:
        out, _ = attend(nn.Module(), *arguments)
        out.reshape(BATCH, rows, -1).contiguous()  # as every model does
    assert copies.operators == [op]
    assert out.shape == (BATCH, rows, HEADS, DIM) and out.is_contiguous()
    assert copies.shapes == []


@pytest.mark.parametrize(("op", "rows"), [("prefill", 20), ("decode", 5)])
def test_control_heads_first(op: str, rows: int) -> None:
    """The operators' other layout takes the copy, and it is noticed."""
    query, key, value, _ = layer_call(rows, False)
    with torch.no_grad(), Copies() as copies:
        out, _ = getattr(torch.ops.fattn, op)(query, key, value)
        out.transpose(1, 2).reshape(BATCH, rows, -1)
    assert copies.operators == [op] and copies.shapes == [(BATCH, rows, HEADS, DIM)]


@pytest.mark.parametrize("length", [5, 20])
def test_a_whole_model(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every layer, the output projection reads the operator's own memory."""
    ours, _ = pair(AutoModelForCausalLM, tiny("llama"))
    results, multiplied = [], []

    def remember(*arguments: Any, **options: Any) -> Tensor:
        results.append(operators.compute(*arguments, **options))
        return results[-1]

    monkeypatch.setattr(attention, "compute", remember)
    for layer in ours.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, inputs: multiplied.append(inputs[0]))
    with torch.no_grad():
        ours(prompt(length)[0].to(DEVICE), use_cache=False)
    assert len(results) == len(multiplied) == LAYERS
    for mine, theirs in zip(results, multiplied, strict=True):
        assert mine.data_ptr() == theirs.data_ptr()
