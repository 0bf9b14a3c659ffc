"""Operands that llama.cpp's two attention kernels share: shapes, strides, the mask, and a copy of the last
keys, padded to a whole step."""

from __future__ import annotations

from ..cases.calls import Call
from . import llama_source
from .launch import Pass
from .llama_source import Constants

_Q8_0 = (32, 34)  # elements and bytes of a block
QUERY, OUT = "query_float32", "out_float32"


class Operands:
    """The operands of a call, for a kernel that takes `step` keys at a time."""

    def __init__(self, call: Call, step: int) -> None:
        self.call = call
        self.step = step
        # llama.cpp has neither causal attention nor sequence lengths: a mask hides keys instead.
        self.needs_mask = bool(call.lengths) or call.hides_keys
        self.pads = call.kv_len % step != 0
        if call.kv_format:
            elements, size = _Q8_0
            self.row_bytes, self.row_units = call.head_dim // elements * size, call.head_dim // elements
            self.key, self.value = "key_q8_0", "value_q8_0"
        else:
            self.row_bytes, self.row_units = call.head_dim * call.element_bytes, call.head_dim
            self.key, self.value = "key", "value"

    @property
    def mask(self) -> str:
        """The mask's buffer, or another one if no mask is read."""
        return "mask" if self.needs_mask else QUERY

    @property
    def last_keys_bytes(self) -> int:
        """Size of the last keys of every head, with their part of the mask."""
        call = self.call
        return self.step * (2 * self.row_bytes * call.kv_heads + 2 * call.q_len) * call.batch

    def fields(self) -> dict[str, int | float]:
        """Shapes and strides, by their names in the structs of kernel arguments."""
        call = self.call
        query, key = 4 * call.head_dim, self.row_bytes
        values: dict[str, int | float] = {
            **_shape("ne0", 1, call.q_len, call.q_heads, call.batch),
            **_shape("nb0", 1, *_strides(query, call.q_len, call.q_heads)),
            **{"ne11": call.kv_len, "ne_12_2": call.kv_heads, "ne_12_3": call.batch},
            **_shape("nb1", 1, *_strides(key, call.kv_len, call.kv_heads)),
            **_shape("nb2", 1, *_strides(key, call.kv_len, call.kv_heads)),
            **{"ns10": self.row_units, "ns20": self.row_units},
            **{"ne1": call.q_heads, "ne2": call.q_len, "ne3": call.batch},
            **{"scale": call.scale, "max_bias": 0.0, "m0": 1.0, "m1": 1.0, "logit_softcap": 0.0},
            **{"n_head_log2": 1 << (call.q_heads.bit_length() - 1), "n_kv_max_padded": 0},
        }
        if not self.needs_mask:
            return values | _shape("ne3", 0, 0, 0, 0, 0) | _shape("nb3", 1, 0, 0, 0)
        return {
            **values,
            **_shape("ne3", 0, call.kv_len, call.q_len, 1, call.batch),
            **_shape("nb3", 1, *_strides(2 * call.mask_pitch, call.q_len, 1)),
        }

    def pad(self) -> Pass:
        """Returns the pass that copies the last, partial step of keys and pads it."""
        call, kernel = self.call, "kernel_flash_attn_ext_pad"
        constants: Constants = {
            "FC_flash_attn_ext_pad_has_mask": self.needs_mask,
            "FC_flash_attn_ext_pad_ncpsg": self.step,
        }
        source = llama_source.auxiliary_source(kernel, "FC_flash_attn_ext_pad_has_mask")
        arguments: dict[int, str | bytes] = {
            0: llama_source.kargs("flash_attn_ext_pad", self.fields()),
            **{1: self.key, 2: self.value, 3: self.mask, 4: "last_keys"},
        }
        pipeline = llama_source.pipeline(call, source, kernel, 32, constants)
        return Pass(pipeline, (self.step, call.kv_heads, call.batch), (32, 1, 1), arguments)


def _shape(name: str, first: int, *values: int) -> dict[str, int | float]:
    """Numbers the values of a field: "ne0" from 1 gives ne01, ne02, ..."""
    return {f"{name}{first + i}": value for i, value in enumerate(values)}


def _strides(row: int, rows: int, heads: int) -> tuple[int, int, int]:
    return row, row * rows, row * rows * heads
