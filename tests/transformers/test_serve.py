"""`transformers serve` over `fattn`, also under load: many clients at once, some of which leave, a pool too
small for all of them, and a signal. Answers are those of single runs, and no block is lost."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils.import_utils import is_serve_available

import torch_fattn
from tests.conftest import counted_launches, decodes
from tests.transformers.tiny_models import DEVICE, LAYERS, VOCAB, pair, tiny
from torch_fattn.integrations.transformers import NAME, __main__, compat

pytestmark = pytest.mark.skipif(
    not (is_serve_available() and find_spec("accelerate")),
    reason="needs pip install 'transformers[serving]' accelerate",
)
BLOCK_SIZE = 8
BLOCKS = 24  # of eight tokens: room for 4 or 5 of the requests at a time
WORDS = [f"w{n}" for n in range(VOCAB - 3)]  # of the checkpoint's tokenizer
CLIENTS = 32
NEW_TOKENS = 8
PATIENCE = 60.0  # seconds, for any one answer
SYSTEM = [random.Random(0).sample(WORDS, 16), random.Random(1).sample(WORDS, 16)]  # two blocks each


def prompt(number: int) -> str:
    """One of two system prompts, and words of its own."""
    draw = random.Random(number)
    return " ".join(SYSTEM[number % 2] + draw.choices(WORDS, k=draw.randint(1, 9)))


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
    pair(AutoModelForCausalLM, tiny("llama"), "eager")[1].save_pretrained(folder)
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


class Server:
    """`transformers serve` in this process, so that the state of its cache can be read."""

    def __init__(self, checkpoint: Path, port: int, continuous: bool) -> None:
        from transformers.cli.serve import Serve

        self.model, self.url = str(checkpoint), f"http://localhost:{port}/v1/chat/completions"
        self.serving = Serve(
            force_model=self.model,
            attn_implementation=NAME,
            continuous_batching=continuous,
            device=DEVICE,
            dtype="float32",
            cb_num_blocks=BLOCKS,
            cb_block_size=BLOCK_SIZE,
            cb_max_batch_tokens=64,
            port=port,
            non_blocking=True,
        )
        end = time.monotonic() + PATIENCE
        while True:  # its thread may not listen yet
            try:
                socket.create_connection(("localhost", port)).close()
                return
            except ConnectionRefusedError:
                assert time.monotonic() < end, "the server does not listen"
                time.sleep(0.01)

    @property
    def batches(self) -> Any:
        return self.serving._generation_state._cb_manager._cb.batch_processor  # type: ignore[union-attr]

    @property
    def free_blocks(self) -> int:
        cache = self.batches.cache
        if hasattr(cache, "get_num_free_blocks"):
            return int(cache.get_num_free_blocks())
        pool, allocators = cache.pool, cache.cache_allocators.values()
        free = sum(pool.num_free_sectors * each.blocks_per_sector for each in allocators)
        # Blocks of a prefix that no request uses are kept, and taken when no other is free.
        kept = sum(len(each.ledger.cached_blocks) for each in allocators)
        return int(free + kept + sum(pool.count_free_blocks(each.index) for each in allocators))

    def is_idle(self) -> bool:
        scheduler = self.batches.scheduler
        return not (scheduler.active_requests or scheduler.waiting_requests)

    def wait_until_idle(self) -> None:
        """The server notices that a client is gone when it next writes to it."""
        end = time.monotonic() + PATIENCE
        while not self.is_idle():
            assert time.monotonic() < end, "requests of clients that are gone still run"
            time.sleep(0.01)

    def body(self, text: str, stream: bool = False, new_tokens: int = NEW_TOKENS) -> dict[str, Any]:
        message = {"role": "user", "content": text}
        return {
            "model": self.model,
            "messages": [message],
            "max_tokens": new_tokens,
            "temperature": 0,
            "stream": stream,
        }

    async def ask(self, client: Any, number: int) -> str:
        answer = await client.post(self.url, json=self.body(prompt(number)), timeout=PATIENCE)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    async def ask_and_leave(self, client: Any, number: int) -> None:
        """Closes the connection after the first token, or without reading anything."""
        body = self.body(prompt(number), stream=True, new_tokens=60)
        async with client.stream("POST", self.url, json=body, timeout=PATIENCE) as answer:
            if number % 3:
                async for _line in answer.aiter_lines():
                    break

    async def give_up(self, client: Any, number: int) -> None:
        import httpx

        with contextlib.suppress(httpx.TimeoutException):
            await client.post(self.url, json=self.body(prompt(number), new_tokens=60), timeout=0.05)

    def run(self, *requests: Any) -> list[Any]:
        import httpx

        async def all_of_them() -> list[Any]:
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(limits=limits) as client:
                return await asyncio.gather(*(method(client, number) for method, number in requests))

        return asyncio.run(all_of_them())


@pytest.fixture
def server(
    checkpoint: Path, serve_takes_fattn: None, free_port: int, request: pytest.FixtureRequest
) -> Iterator[Server]:
    started = Server(checkpoint, free_port, continuous=getattr(request, "param", True))
    yield started
    started.serving.kill_server()


@pytest.mark.parametrize("server", [True, False], ids=["continuous", "one by one"], indirect=True)
def test_answers(server: Server, single: Any) -> None:
    with counted_launches() as launches:
        answers = [*server.run((server.ask, 0)), *server.run((server.ask, 1))]
    assert decodes(launches) >= 2 * (NEW_TOKENS - 1) * LAYERS
    assert [answer.split() for answer in answers] == [single(number).split() for number in (0, 1)]
    assert answers[0] != answers[1]


def test_many_clients(server: Server, single: Any) -> None:
    """32 at a time over a pool for 4 or 5, while eight others come and go away."""
    server.run((server.ask, 0))
    all_blocks = server.free_blocks
    asked = [(server.ask, number) for number in range(CLIENTS)]
    leaving = [(server.ask_and_leave, number) for number in range(100, 106)]
    leaving += [(server.give_up, number) for number in range(106, 108)]
    requests = asked + leaving
    random.Random(0).shuffle(requests)
    with counted_launches() as launches:
        answers = server.run(*requests)
        server.wait_until_idle()
    assert decodes(launches) > 0 and launches["fattn_prefill"] > 0
    of_asked = {n: a for (method, n), a in zip(requests, answers, strict=True) if method == server.ask}
    wrong = {n: answer for n, answer in of_asked.items() if answer.split() != single(n).split()}
    assert len(of_asked) == CLIENTS and not wrong
    assert len({*of_asked.values()}) > CLIENTS // 2, "answers that are all alike show nothing"
    assert server.free_blocks == all_blocks, "blocks of clients that are gone"
    assert server.run((server.ask, 1)) == [of_asked[1]], "and it goes on"


@pytest.mark.parametrize("rounds", [4, 32])
def test_memory_is_flat(server: Server, single: Any, rounds: int) -> None:
    """Neither the device's memory nor the number of tensors grows from one round to the next."""
    held = []
    for n in range(rounds):
        numbers = range(n % 3, n % 3 + CLIENTS)
        answers = server.run(*((server.ask, number) for number in numbers))
        server.run(*((server.ask_and_leave, number) for number in range(100, 104)))
        server.wait_until_idle()
        assert [answer.split() for answer in answers] == [single(number).split() for number in numbers]
        gc.collect()
        tensors = sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())
        held.append((torch.mps.current_allocated_memory(), server.free_blocks, tensors))
    memory, blocks, tensors_held = zip(*held[2:], strict=True)
    assert max(memory) - min(memory) < 2**16 and len({*blocks}) == 1
    assert max(tensors_held) - min(tensors_held) < 50


def test_an_interrupt(checkpoint: Path, free_port: int) -> None:
    """SIGINT in the middle of a stream ends the command and the stream."""
    import httpx

    options = ["--continuous-batching", "--device", DEVICE, "--dtype", "float32", "--port", str(free_port)]
    options += ["--cb-num-blocks", "64", "--cb-block-size", "8", "--cb-max-batch-tokens", "64"]
    package = "torch_fattn.integrations.transformers"
    command = [sys.executable, "-m", package, "serve", str(checkpoint), *options]
    root = Path(torch_fattn.__file__).parents[1]
    log = checkpoint / "log.txt"
    with log.open("w") as out, subprocess.Popen(command, cwd=root, stdout=out, stderr=out) as process:
        try:
            end = time.monotonic() + 120
            while True:
                assert process.poll() is None and time.monotonic() < end, log.read_text()
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"http://localhost:{free_port}/health", timeout=5).status_code == 200:
                        break
                time.sleep(0.1)
            body = {"model": str(checkpoint), "max_tokens": 40, "temperature": 0, "stream": True}
            body["messages"] = [{"role": "user", "content": prompt(0)}]
            with contextlib.suppress(httpx.TransportError):
                url = f"http://localhost:{free_port}/v1/chat/completions"
                with httpx.stream("POST", url, json=body, timeout=PATIENCE) as answer:
                    lines = answer.iter_lines()
                    assert next(lines)
                    process.send_signal(signal.SIGINT)
                    for _line in lines:
                        pass  # it ends
            code = process.wait(timeout=PATIENCE)
        finally:
            process.kill()
    assert code in (0, 1, -signal.SIGINT, 128 + signal.SIGINT), log.read_text()
    assert "torch_fattn" not in "".join(log.read_text().partition("Traceback")[1:]), log.read_text()


def test_names_of_attention(request: pytest.FixtureRequest) -> None:
    from transformers.cli.serving import model_manager

    with pytest.raises(ValueError, match="Unsupported attention implementation: 'fattn'"):
        model_manager.ModelManager(attn_implementation=NAME)
    request.getfixturevalue("serve_takes_fattn")
    assert model_manager.ModelManager(attn_implementation=NAME).attn_implementation == NAME
    with pytest.raises(ValueError, match="Unsupported attention implementation: 'fatn'"):
        model_manager.ModelManager(attn_implementation="fatn")


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
