"""`transformers serve`, in this process, over `fattn`, with continuous batching and without."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils.import_utils import is_serve_available

import torch_fattn
from tests.conftest import decodes
from tests.transformers.tiny_models import DEVICE, LAYERS
from torch_fattn.integrations.transformers import NAME, __main__

pytestmark = pytest.mark.skipif(
    not (is_serve_available() and find_spec("accelerate")),
    reason="needs pip install 'transformers[serving]' accelerate",
)
PROMPT = "w5 w9 w40 w3 w17"


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


@pytest.mark.usefixtures("serve_takes_fattn")  # it restores what main changes
@pytest.mark.parametrize("missing", ["a package of the extra", "one that it imports"])
def test_without_the_packages_of_serving(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["", "serve", "m"])
    if missing == "one that it imports":
        monkeypatch.setitem(sys.modules, "transformers.cli.transformers", None)
    else:
        monkeypatch.setattr(__main__, "is_serve_available", lambda: False)
    with pytest.raises(SystemExit, match=r"run `pip install 'transformers\[serving\]'"):
        __main__.main()


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
