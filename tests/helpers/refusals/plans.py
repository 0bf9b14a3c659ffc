"""Refusals of `explain`, `warmup` and the formats of the reference; see __init__.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import torch_fattn
from tests.helpers.refusals import Refusal, run
from torch_fattn import reference
from torch_fattn.integrations.pytorch.routing import system_and_torch


def _route(**machine: str) -> Any:
    query = torch.empty(1, 8, 512, 128, dtype=torch.float16, device="meta")
    return torch_fattn.explain("prefill", query, query, query, family=10, **machine).route


def _warm(*arguments: Any, **options: Any) -> Callable[[], list[str]]:
    return lambda: [kernel.kernel for kernel in torch_fattn.warmup(*arguments, **options).kernels]


def _planned(**options: Any) -> Callable[[], str]:
    x = torch.empty(1, 1, 1, 8, device="meta")
    return lambda: torch_fattn.explain("merge", x[None], x[None][..., 0], **options).device_name


M3 = {"family": 9, "cores": 10}
REFUSALS: list[Refusal] = [
    Refusal("an Apple M1", _planned(family=99), _planned(), lambda: "Apple M1"),
    Refusal(
        "write one or leave it out", _planned(device_name=" ", **M3), _planned(**M3), lambda: "an Apple GPU"
    ),
    Refusal("give family and cores with it", _planned(device_name="Apple M3", family=9),
            _planned(device_name="Apple M3", **M3), lambda: "Apple M3"),
    Refusal("give family 10 or another name", _planned(device_name="Apple M5", **M3),
            _planned(device_name="Apple M5", family=10, cores=10), lambda: "Apple M5"),
    Refusal('use the name of a function of torch_fattn that takes tensors, such as "prefill"',
            lambda: torch_fattn.explain("atention"), lambda: torch_fattn.explain("prefill").op,
            lambda: "prefill"),
    Refusal("leave it out for that of this machine", lambda: _route(macos="26"), _route,
            lambda: _route(**dict(zip(("macos", "torch_version"), system_and_torch(), strict=True)))),
    Refusal(
        "pass one of at most 63", run("prefill", q_offset=2**70), run("prefill", q_offset=15), run("prefill")
    ),
    Refusal("or give family and cores", _planned(chip="M9"), _planned(**M3),
            lambda: "an Apple GPU"),
    Refusal("int8", lambda: reference.quantise(torch.zeros(1, 32), "int3"),
            lambda: reference.quantise(torch.zeros(1, 32), "int8", scales=True)[0],
            lambda: torch.zeros(1, 32)),
    Refusal("write (op, keywords) for each", _warm(["merge"]),
            _warm([("merge", {"heads": 1, "head_dim": 8})]), lambda: ["fattn_merge"]),
    Refusal("pass an operator, or a list of (op, keywords)", _warm(3), _warm([]), lambda: []),
    Refusal("pass for example torch.float16 or 'float16'", _warm("merge", dtype="half"),
            _warm([]), lambda: []),
    Refusal("pass True or False, or tensors for all operands",
            _warm("decode", kv_len=64, head_dim=8, seq_lens=torch.ones(1, dtype=torch.int32)),
            _warm("decode", kv_len=64, head_dim=8, seq_lens=True), lambda: ["fattn_decode_vector"]),
    Refusal("pass one of at least 1", _warm("merge", heads=1.5), _warm([]), lambda: []),
    Refusal("pass a number of at least 1", _warm("merge", heads=0), _warm([]), lambda: []),
    Refusal("leave it out for keys of dtype", _warm("decode", kv_format="int3"), _warm([]), lambda: []),
    Refusal("pass scales", lambda: reference.dequantise(torch.zeros(1, 16, dtype=torch.uint8), None, "int4"),
            lambda: reference.dequantise(torch.zeros(1, 16, dtype=torch.uint8), torch.zeros(1, 1, 2), "int4"),
            lambda: torch.zeros(1, 32)),
    Refusal('use it with "fp8_e4m3" alone',
            lambda: reference.quantise(torch.zeros(1, 32), "int8", scales=False),
            lambda: reference.quantise(torch.zeros(1, 32), "fp8_e4m3", scales=False)[0],
            lambda: torch.zeros(1, 32)),
]  # fmt: skip
