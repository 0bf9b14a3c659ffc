"""Decodes over one cache in every format, and prints the size of each and the error of its result.

    python examples/quantised.py [--device mps] [--keys 2048]

A few channels of the keys and values are large, as in real models. `torch_fattn.reference.quantise`, the
definition of the formats, quantises them; a model writes its cache with `torch_fattn.cache_write`.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import torch_fattn
from torch_fattn.reference import quantise

HEADS, KV_HEADS, DIM = 8, 2, 64


def normal_with_large_channels(keys: int) -> Tensor:
    channels = torch.ones(DIM)
    channels[::16] = 3.0
    return torch.randn(1, KV_HEADS, keys, DIM) * channels


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode over quantised caches.")
    parser.add_argument("--device", default="mps" if torch.backends.mps.is_available() else "cpu")
    parser.add_argument("--keys", type=int, default=2048)
    options = parser.parse_args()

    torch.manual_seed(0)
    query = torch.randn(1, HEADS, 1, DIM).to(options.device)
    key, value = (normal_with_large_channels(options.keys) for _ in range(2))
    exact = torch_fattn.decode(query, key.to(options.device), value.to(options.device)).cpu()
    print(f"{'cache':10} {'bytes':>10}   largest error, of results up to {exact.abs().max().item():.2f}")

    def report(name: str, tensors: list[Tensor], out: Tensor) -> None:
        size = sum(tensor.nbytes for tensor in tensors)
        print(f"{name:10} {size:>10,}   {(out.float().cpu() - exact).abs().max().item():.4f}")

    half = [tensor.half().to(options.device) for tensor in (query, key, value)]
    report("float16", half[1:], torch_fattn.decode(*half))
    for kv_format in ("int8", "fp8_e4m3", "int4"):
        (keys, key_scales), (values, value_scales) = (quantise(x, kv_format) for x in (key, value))
        assert key_scales is not None and value_scales is not None
        cache = [tensor.to(options.device) for tensor in (keys, values, key_scales, value_scales)]
        out = torch_fattn.decode(
            half[0], cache[0], cache[1], key_scales=cache[2], value_scales=cache[3], kv_format=kv_format
        )
        report(kv_format, cache, out)


if __name__ == "__main__":
    main()
