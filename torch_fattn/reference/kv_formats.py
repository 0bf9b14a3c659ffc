"""The formats of quantised caches, in plain PyTorch: the exact bits that `cache_write` stores, and the
numbers that they represent.

| kv_format | storage of a row of D | scales of a row | a stored element q is |
|---|---|---|---|
| `"int8"` | int8 `[D]` | float32, `max abs / 127` | `q * scale`, q from -127 to 127 |
| `"fp8_e4m3"` | uint8 `[D]` | float32, `max abs / 448`, or none | `q * scale`, or `q` |
| `"int4"` | uint8 `[D / 2]`, even columns in low nibbles | float16 `[D / 32, 2]` | `minimum + q * scale` |

Elements are rounded to the nearest q, ties to even. The maximum error of an element x, in exact arithmetic,
with `max abs` of its row, and min and max of its group of 32 columns:

| int8 | `max abs / 253` |
| fp8_e4m3 without scales | `abs(x) / 16` or `2 ** -10`, the larger; beyond +-448 x is stored as +-448 |
| fp8_e4m3 with scales | `abs(x) / 15.9` or `max abs / 450_000`, the larger |
| int4 | `scale / 1.99`, where scale is at most `(max - min) / 14.9 + abs(min) / 15_000 + 2 ** -23` |

Special values:
- A NaN or an infinity makes its whole row (int8, scaled fp8) or group (int4) NaN, and nothing else. fp8
  without scales keeps each NaN where it is, and stores an infinity as 448.
- Numbers below float32's smallest normal, 2**-126, count as 0, as they do on GPUs. So does a scale: a row
  whose largest number is below about 1e-36 becomes 0.
- int4 has float16 scales: values beyond +-65504 are stored as +-65504.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..operators.kv_formats import INT4_GROUP, KV_FORMATS, check_format, formats_where, head_dim
from ..runtime.signatures import public

__all__ = ["dequantise", "quantise"]

_INT8_MAX = 127.0
_E4M3_MAX = 448.0
_INT4_MAX = 15.0
_HALF_MAX = 65504.0
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


@public("torch_fattn.reference.quantise")
def quantise(x: Tensor, kv_format: str, *, scales: bool = True) -> tuple[Tensor, Tensor | None]:
    """Quantises rows `[..., D]`. Returns the stored rows and their scales, on the same device. `scales=False`
    is for fp8_e4m3."""
    check_format("torch_fattn.reference.quantise", kv_format)
    if not x.is_floating_point() or x.dim() == 0:
        raise TypeError(
            f"torch_fattn.reference.quantise: x is {x.dtype} of {x.dim()} dimensions; pass rows [..., D] of "
            "a floating dtype"
        )
    if x.shape[-1] == 0 or (kv_format == "int4" and x.shape[-1] % INT4_GROUP):
        raise ValueError(
            f"torch_fattn.reference.quantise: rows of {x.shape[-1]} columns cannot be stored as {kv_format}; "
            f"pass at least one, and for int4 groups of {INT4_GROUP}"
        )
    if not scales and not KV_FORMATS[kv_format].may_lack_scales:
        raise ValueError(
            f"torch_fattn.reference.quantise: scales=False leaves {kv_format} without meaning; use it with "
            f"{formats_where(lambda kind: kind.may_lack_scales)} alone"
        )
    rows = _flushed(x.detach().cpu().float())
    if kv_format == "int4":
        stored, scale = _int4_of(rows)
        return stored.to(x.device), scale.to(x.device)
    largest, codes_of = _CODES[kv_format]
    if not scales:
        return codes_of(rows).to(x.device), None
    scale = _flushed(rows.abs().amax(-1) / largest)
    scale = scale.masked_fill(~rows.isfinite().all(-1), float("nan"))
    q = (rows / scale[..., None]).where((scale > 0)[..., None], 0.0)
    return codes_of(q).to(x.device), scale.to(x.device)


@public("torch_fattn.reference.dequantise")
def dequantise(stored: Tensor, scales: Tensor | None = None, kv_format: str = "auto") -> Tensor:
    """The numbers `[..., D]` of a cache `[..., columns]`, in float64 on the CPU. Floating-point caches are
    converted directly."""
    check_format("torch_fattn.reference.dequantise", kv_format, "auto")
    _check_stored(stored, scales, kv_format)
    stored = stored.detach().cpu()
    scales = None if scales is None else scales.detach().cpu().double()
    if kv_format == "int4" and scales is not None:
        nibbles = torch.stack((stored & 15, stored >> 4), dim=-1).flatten(-2).double()
        scale, minimum = scales.repeat_interleave(INT4_GROUP, dim=-2).unbind(-1)
        return minimum + nibbles * scale
    if (bits := _BITS[kv_format]) is not None:
        stored = stored.view(bits)
    return stored.double() if scales is None else stored.double() * scales[..., None]


def _check_stored(stored: Tensor, scales: Tensor | None, kv_format: str) -> None:
    name = "torch_fattn.reference.dequantise"
    kind = KV_FORMATS.get(kv_format)
    if kind is not None and kind.dtype == torch.uint8 != stored.dtype:
        raise TypeError(f"{name}: stored is {stored.dtype} and must be torch.uint8 for {kv_format}")
    if scales is None:
        if kv_format == "int4":
            raise ValueError(f"{name}: an int4 cache needs scales; pass scales")
        return
    shape = list(stored.shape[:-1])
    if kv_format in KV_FORMATS:
        dim = head_dim(stored.shape[-1] if stored.dim() else 0, kv_format)
        shape = list(KV_FORMATS[kv_format].scales(shape, dim)[0])
    if list(scales.shape) != shape:
        raise ValueError(
            f"{name}: scales has shape {list(scales.shape)} and must be {shape} for a cache of shape "
            f"{list(stored.shape)}"
        )


def _flushed(x: Tensor) -> Tensor:
    """Flushes subnormal numbers and -0 to 0."""
    return x.masked_fill(x.abs() < _SMALLEST_NORMAL, 0.0)


def _int8_of(x: Tensor) -> Tensor:
    return x.round().to(torch.int8)


def _e4m3_of(x: Tensor) -> Tensor:
    """The nearest e4m3; values beyond its range saturate. The only NaN is 0x7f, and 0 is never -0."""
    codes = x.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill(codes == 0x80, 0).masked_fill(x.isnan(), 0x7F)


# The largest code and the rounding to codes, of formats with one scale per row.
_CODES = {"int8": (_INT8_MAX, _int8_of), "fp8_e4m3": (_E4M3_MAX, _e4m3_of)}
# The dtype whose bits are stored; None: the stored numbers themselves.
_BITS = {"auto": None, "int8": None, "fp8_e4m3": torch.float8_e4m3fn}


def _int4_of(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds the minimum down and the scale up, so that 0 to 15 cover the whole group."""
    groups = rows.unflatten(-1, (-1, INT4_GROUP))
    good = groups.isfinite().all(-1)
    groups = groups.clamp(-_HALF_MAX, _HALF_MAX).nan_to_num(0.0)
    minimum = _to_half(groups.amin(-1), towards=-_HALF_MAX)
    width = _flushed((groups.amax(-1) - minimum.float()) / _INT4_MAX)
    scale = _to_half(width, towards=_HALF_MAX)
    q = (groups - minimum.float()[..., None]) / scale.float()[..., None]
    q = q.where((good & (scale > 0))[..., None], 0.0).round().to(torch.uint8).flatten(-2)
    # Under autocast, stack would convert float16.
    scales = torch.stack((scale.float(), minimum.float()), dim=-1).half()
    scales = scales.masked_fill(~good[..., None], float("nan"))
    return q[..., 0::2] | q[..., 1::2] << 4, scales


def _to_half(x: Tensor, towards: float) -> Tensor:
    """Rounds x to float16 towards `towards`. Never returns -0."""
    half = x.half()
    passed = (half.float() > x) if towards < 0 else (half.float() < x)
    return torch.where(passed, half.nextafter(torch.full_like(half, towards)), half) + 0.0
