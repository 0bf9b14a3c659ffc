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


def _warm(*arguments: Any, **options: Any) -> Callable[[], Any]:
    return lambda: torch_fattn.warmup(*arguments, **options)


def _planned(**options: Any) -> Callable[[], Any]:
    x = torch.empty(1, 1, 1, 8, device="meta")
    return lambda: torch_fattn.explain("merge", x[None], x[None][..., 0], **options)


M3 = {"family": 9, "cores": 10}
HALF = torch.zeros(1, 16, dtype=torch.uint8)
REFUSALS: list[Refusal] = [
    Refusal("an Apple M1", _planned(family=99), lambda: _planned()().device_name, lambda: "Apple M1"),
    Refusal("write one or leave it out", _planned(device_name=" ", **M3), _planned(**M3)),
    Refusal("give family and cores with it", _planned(device_name="Apple M3", family=9),
            _planned(device_name="Apple M3", **M3)),
    Refusal("give family 10 or another name", _planned(device_name="Apple M5", **M3),
            _planned(device_name="Apple M5", family=10, cores=10)),
    Refusal('use the name of a function of torch_fattn that takes tensors, such as "prefill"',
            lambda: torch_fattn.explain("atention")),
    Refusal("leave it out for that of this machine", lambda: _route(macos="26"), _route,
            lambda: _route(**dict(zip(("macos", "torch_version"), system_and_torch(), strict=True)))),
    Refusal("pass one of at most 63", run("prefill", q_offset=2**70), run("prefill", q_offset=2**63 - 1)),
    Refusal("or give family and cores", _planned(chip="M9"), _planned(**M3)),
    Refusal("int8", lambda: reference.quantise(torch.zeros(1, 32), "int3")),
    *(Refusal("write (op, keywords) for each", _warm(calls, **options),
              _warm([("merge", {"heads": 1, "head_dim": 8})]))
      for calls, options in (
          (["merge"], {}), ([("merge",)], {}), ([("merge", None)], {}), ([], {"heads": 2}))),
    Refusal("pass an operator, or a list of (op, keywords)", _warm(3), _warm([])),
    Refusal("pass for example torch.float16 or 'float16'", _warm("merge", dtype="half")),
    Refusal("pass True or False, or tensors for all operands",
            _warm("decode", kv_len=64, head_dim=8, seq_lens=torch.ones(1, dtype=torch.int32)),
            _warm("decode", kv_len=64, head_dim=8, seq_lens=True)),
    *(Refusal("pass one of at least 1", _warm("merge", heads=heads)) for heads in (1.5, None, True)),
    *(Refusal("pass a number of at least 1", _warm("merge", heads=heads)) for heads in (0, [4, 0])),
    Refusal("pass for example torch.float16 or 'float16'", _warm("prefill", mask="int8")),
    Refusal("the sizes are dtype, batch", _warm("prefill", head_dims=64)),
    Refusal('such as "prefill"', _warm("gemm")),
    Refusal("leave it out", _warm("prefill", kv_format="int8")),
    Refusal("leave it out, since the operands have sizes", _warm("softmax", scores=HALF.float(), heads=4)),
    Refusal("the arguments by position are outs, lses", _warm("merge", lses=HALF.float())),
    Refusal("the arguments are scores, softcap", _warm("softmax", logits=HALF.float())),
    Refusal("leave it out for keys of dtype", _warm("decode", kv_format="int3")),
    Refusal("pass scales", lambda: reference.dequantise(HALF, None, "int4"),
            lambda: reference.dequantise(HALF, torch.zeros(1, 1, 2), "int4")),
    Refusal('use it with "fp8_e4m3" alone',
            lambda: reference.quantise(torch.zeros(1, 32), "int8", scales=False),
            lambda: reference.quantise(torch.zeros(1, 32), "fp8_e4m3", scales=False)),
]  # fmt: skip
