"""`python -m torch_fattn doctor | explain | demo | bench`."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import torch
from torch import Tensor

from .plans import OPERATORS, explain

DTYPES = ("float32", "float16", "bfloat16")


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["bench"]:
        return _bench(arguments[1:])
    options = _parser().parse_args(arguments)
    if options.command == "doctor":
        from . import doctor

        return doctor.main()
    if options.command == "demo":
        from . import demo

        return demo.main(options.model, options.dtype, options.new_tokens)
    return _explain(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torch_fattn", description="Attention for PyTorch on Apple GPUs."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "doctor", help="versions, device and a self-test; exit status 1 if something is wrong"
    )

    demo = commands.add_parser(
        "demo", help="a transformers model generates on the GPU, checked against the CPU"
    )
    demo.add_argument("--model", metavar="PATH", help="a local checkpoint; default: a small random Llama")
    demo.add_argument("--dtype", choices=DTYPES, default="float32")
    demo.add_argument("--new-tokens", type=int, default=48, metavar="N")

    commands.add_parser(
        "bench", add_help=False, help="times, or counts, beside the peers; needs the source checkout"
    )

    plan = commands.add_parser("explain", help="how a call of these shapes would run on a GPU")
    plan.add_argument("op", choices=OPERATORS)
    plan.add_argument("--batch", type=int, default=1)
    plan.add_argument("--heads", type=int, default=32, help="query heads")
    plan.add_argument("--kv-heads", type=int, help="key-value heads; default: as many as query heads")
    plan.add_argument("--q-len", type=int, help="query rows; default: 1, for prefill --kv-len")
    plan.add_argument("--kv-len", type=int, default=1024, help="keys; decode: the capacity of the cache")
    plan.add_argument("--head-dim", type=int, default=128)
    plan.add_argument("--value-dim", type=int, help="default: --head-dim")
    plan.add_argument("--block-size", type=int, default=16, help="paged_decode: keys per block")
    plan.add_argument("--parts", type=int, default=2, help="merge: partial results")
    plan.add_argument("--dtype", choices=DTYPES, default="float16")
    plan.add_argument("--causal", action="store_true", help="prefill: is_causal")
    plan.add_argument("--device-name", help="plan for a GPU of this name; default: Apple M1")
    plan.add_argument("--family", type=int, help="its MTLGPUFamilyApple number")
    plan.add_argument("--cores", type=int, help="its number of cores")
    plan.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _bench(arguments: list[str]) -> int:
    """Hands over to the bench, which is a package of the checkout and not of the wheel."""
    checkout = Path(__file__).resolve().parent.parent
    if not (checkout / "bench" / "command.py").exists():
        print(
            "torch_fattn bench: it is part of the source checkout, not of the wheel; clone the repository, "
            "install it with `pip install --no-build-isolation -e .` and run this again.",
            file=sys.stderr,
        )
        return 1
    sys.path.insert(0, str(checkout))
    return int(importlib.import_module("bench.command").main(arguments))


def _explain(options: argparse.Namespace) -> int:
    keywords = {"is_causal": options.causal} if options.op == "prefill" else {}
    try:
        plan = explain(
            options.op,
            *_operands(options),
            **keywords,
            device_name=options.device_name,
            family=options.family,
            cores=options.cores,
        )
    except (RuntimeError, TypeError, ValueError) as refusal:
        print(refusal, file=sys.stderr)
        return 1
    print(plan.json if options.json else plan)
    return 0


def _operands(options: argparse.Namespace) -> list[Tensor]:
    """Tensors of the asked shapes, without memory."""
    kv_heads = options.kv_heads or options.heads
    value_dim = options.value_dim or options.head_dim
    q_len = options.q_len or (options.kv_len if options.op == "prefill" else 1)

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=getattr(torch, options.dtype), device="meta")

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    if options.op == "merge":
        rows = (options.parts, options.batch, options.heads, q_len)
        return [floats(*rows, options.head_dim), torch.empty(rows, device="meta")]
    query = floats(options.batch, options.heads, q_len, options.head_dim)
    if options.op == "paged_decode":
        blocks = -(-options.kv_len // options.block_size)
        pool = (options.batch * blocks, options.block_size, kv_heads)
        tables = integers(options.batch, blocks)
        return [
            query,
            floats(*pool, options.head_dim),
            floats(*pool, value_dim),
            tables,
            integers(options.batch),
        ]
    cache = (options.batch, kv_heads, options.kv_len)
    operands = [query, floats(*cache, options.head_dim), floats(*cache, value_dim)]
    return operands + ([integers(options.batch)] if options.op == "decode" else [])


if __name__ == "__main__":
    sys.exit(main())
