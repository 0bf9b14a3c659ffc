"""Registers the attention implementation for every test of this folder, and puts it back after tests that
break it; `calls` shows what reaches the operators."""

from __future__ import annotations

import inspect
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import torch_fattn
from tests.transformers.calls import Call
from tests.transformers.clients import NEW_TOKENS, WORDS, prompt
from tests.transformers.tiny_models import WEIGHT_GAIN, tiny
from torch_fattn.integrations.transformers import NAME, compat, register


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register()
    yield
    register()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Every call of an attention operator, in order, with all its arguments by name."""
    found: list[Call] = []
    for op in ("prefill", "decode", "paged_prefill", "paged_decode", "varlen_prefill"):
        monkeypatch.setattr(torch.ops.fattn, op, _recording(op, found))
    return found


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer of words w0, w1, ..., and a chat template that joins messages."""
    folder = tmp_path_factory.mktemp("tiny")
    vocabulary = {word: n for n, word in enumerate(["<pad>", "<unk>", "<s>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny("llama"))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                weight.mul_(WEIGHT_GAIN / 2)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def serve_takes_fattn(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.cli.serving import model_manager

    monkeypatch.setattr(model_manager, "ModelManager", model_manager.ModelManager)  # and back
    compat.let_serve_take(NAME)


@pytest.fixture
def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        port: int = listening.getsockname()[1]
        return port


def _recording(op: str, found: list[Call]) -> Any:
    operator = getattr(torch.ops.fattn, op)
    signature = inspect.signature(getattr(torch_fattn, op))

    def record(*arguments: Any, **options: Any) -> Any:
        bound = signature.bind(*arguments, **options)
        bound.apply_defaults()
        found.append(Call(op, dict(bound.arguments)))
        return operator(*arguments, **options)

    return record


@pytest.fixture(scope="module")
def single(checkpoint: Path) -> Any:
    """The answer to each prompt, alone, of eager attention."""
    eager = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager").eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint)

    def answer(number: int) -> str:
        ids = tokenizer(prompt(number), return_tensors="pt").input_ids
        with torch.no_grad():
            tokens = eager.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0, ids.shape[1] :]
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    return answer
