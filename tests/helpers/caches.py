"""Keys and values as a cache stores them, for the problems of tests/helpers/problems.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.helpers.kv_formats import GROUPED, known, name_of
from tests.helpers.layouts import Operand
from torch_fattn.reference import dequantise, quantise

# Poison for the elements of a cache: large numbers, and NaN if the format has one.
_POISON = {"float": torch.nan, "int8": 127, "fp8_e4m3": 0x7F, "int4": 0xFF}


def poison(kv_format: str) -> float:
    return known(_POISON, kv_format, "tests/helpers/caches.py")


@dataclass
class Cache:
    """The rows of a key or value [B, Hkv, Lk, *] as a cache stores them, their scales [B, Hkv, Lk, *] in one
    dimension, and the numbers that both represent."""

    stored: Tensor
    scales: Tensor | None
    clean: Tensor

    @classmethod
    def of(cls, values: Tensor, kv_format: str) -> Cache:
        if kv_format == "float":
            return cls(values, None, values)
        name = name_of(kv_format)
        stored, scales = quantise(values, name, scales=name == kv_format)
        flat = None if scales is None else scales.flatten(3) if name in GROUPED else scales[..., None]
        return cls(stored, flat, dequantise(stored, scales, name))


def as_scales(operand: Operand, kv_format: str) -> Operand:
    """Scales in the shape that the ops take them in, from one last dimension."""
    size, stride = operand.size[:-1], operand.stride[:-1]
    if kv_format in GROUPED:
        size, stride = (*size, operand.size[-1] // 2, 2), (*stride, 2, 1)
    return Operand(operand.base, size, stride, operand.offset)


def first_scales(scales: Operand, dim: int, kv_format: str) -> Operand:
    """The scales of the first columns of each row."""
    size = (*scales.size[:-2], dim // 32, 2) if kv_format in GROUPED else scales.size
    return Operand(scales.base, size, scales.stride, scales.offset)
