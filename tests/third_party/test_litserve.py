"""LitServe, a server around `model.generate`, over `fattn` and a PagedCache; where litserve is installed."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import torch_fattn
from tests.transformers.clients import CLIENTS, PATIENCE, prompt
from tests.transformers.conftest import checkpoint, free_port, single  # noqa: F401 - fixtures

pytestmark = pytest.mark.skipif(not find_spec("litserve"), reason="needs pip install litserve")


async def ask(client: Any, url: str, number: int, timeout: float = PATIENCE) -> dict[str, Any]:
    import httpx

    with contextlib.suppress(httpx.TimeoutException):
        answer = await client.post(f"{url}/predict", json={"prompt": prompt(number)}, timeout=timeout)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())
    assert timeout < PATIENCE
    return {}


async def ask_all(url: str) -> list[dict[str, Any]]:
    """32 clients, and 8 that give up."""
    import httpx

    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None)) as client:
        leaving = [ask(client, url, number, timeout=0.05) for number in range(100, 108)]
        staying = [ask(client, url, number) for number in range(CLIENTS)]
        return (await asyncio.gather(*leaving, *staying))[len(leaving) :]


def test_many_clients(checkpoint: Path, free_port: int, single: Any) -> None:  # noqa: F811
    import httpx

    from tests.third_party.litserve_api import BLOCKS

    url = f"http://localhost:{free_port}"
    command = [sys.executable, "-m", "tests.third_party.litserve_api", str(checkpoint), str(free_port)]
    log = checkpoint / "litserve.txt"
    root = Path(torch_fattn.__file__).parents[1]
    with log.open("w") as out, subprocess.Popen(command, cwd=root, stdout=out, stderr=out) as process:
        try:
            end = time.monotonic() + 120
            while True:
                assert process.poll() is None and time.monotonic() < end, log.read_text()
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                        break
                time.sleep(0.1)
            answers = asyncio.run(ask_all(url))
            process.send_signal(signal.SIGINT)
            process.wait(timeout=PATIENCE)
        finally:
            process.kill()
    assert [answer["text"].split() for answer in answers] == [single(n).split() for n in range(CLIENTS)]
    assert max(answer["batch"] for answer in answers) > 1, "none was in a batch"
    assert {answer["free_blocks"] for answer in answers} == {BLOCKS}
