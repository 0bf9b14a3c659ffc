"""`transformers serve`, in this process, over `fattn`, with continuous batching and without."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from transformers.utils.import_utils import is_serve_available

import torch_fattn
from tests.conftest import decodes
from tests.transformers.tiny_models import COMMON, DEVICE, LAYERS, VOCAB, WEIGHT_GAIN
from torch_fattn.integrations.transformers import NAME, __main__, compat

pytestmark = pytest.mark.skipif(
    not (is_serve_available() and find_spec("accelerate")),
    reason="needs pip install 'transformers[serving]' accelerate",
)
WORDS = [f"w{n}" for n in range(VOCAB - 3)]
PROMPT = "w5 w9 w40 w3 w17"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    vocabulary = {word: n for n, word in enumerate(["<pad>", "<unk>", "<s>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**COMMON))
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


@pytest.fixture(params=[True, False], ids=["continuous", "one by one"])
def server(
    checkpoint: Path, serve_takes_fattn: None, free_port: int, request: pytest.FixtureRequest
) -> Iterator[Any]:
    from transformers.cli.serve import Serve

    serving = Serve(
        force_model=str(checkpoint),
        attn_implementation=NAME,
        continuous_batching=request.param,
        device=DEVICE,
        dtype="float32",
        cb_num_blocks=16,
        cb_block_size=8,
        cb_max_batch_tokens=32,
        port=free_port,
        non_blocking=True,
    )
    yield f"http://localhost:{free_port}"
    serving.kill_server()


def test_chat_completion(server: str, checkpoint: Path) -> None:
    import httpx

    torch_fattn.reset_launch_counts()
    answer = httpx.post(
        f"{server}/v1/chat/completions",
        json={
            "model": str(checkpoint),
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": 6,
            "temperature": 0,
            "stream": False,
        },
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    launches = torch_fattn.launch_counts()
    assert decodes(launches) >= 5 * LAYERS, "of six tokens; decode may take the short prompt too"
    eager = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager").eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        wanted = eager.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
    text = answer.json()["choices"][0]["message"]["content"]
    assert text.split() == tokenizer.decode(wanted, skip_special_tokens=True).split()
    assert len(set(text.split())) > 1


def test_serve_alone_does_not_take_the_name() -> None:
    from transformers.cli.serving.model_manager import ModelManager

    with pytest.raises(ValueError, match="Unsupported attention implementation: 'fattn'"):
        ModelManager(attn_implementation=NAME)


def test_other_names_are_refused_as_before(serve_takes_fattn: None) -> None:
    from transformers.cli.serving.model_manager import ModelManager

    assert ModelManager(attn_implementation=NAME).attn_implementation == NAME
    with pytest.raises(ValueError, match="Unsupported attention implementation: 'fatn'"):
        ModelManager(attn_implementation="fatn")


@pytest.mark.parametrize(
    ("given", "added"),
    [
        (["serve", "m"], ["--attn-implementation", "fattn"]),
        (["serve", "m", "--attn-implementation=sdpa"], []),
        (["serve", "--attn-implementation", "eager"], []),
        (["version"], []),
    ],
)
def test_the_default(given: list[str], added: list[str]) -> None:
    assert __main__.with_default(given) == [*given, *added]
