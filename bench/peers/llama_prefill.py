"""llama.cpp's kernel_flash_attn_ext, for 20 query rows or more and for head sizes without a vector kernel.

A threadgroup computes eight query rows of a head. Causal rows need a float16 mask. A pass over the mask
(kernel_flash_attn_ext_blk) finds the tiles of 8 rows and 64 keys that are hidden or fully visible; the time
includes this pass, but not the making of the mask. If the head size is not a multiple of 64, the kernel reads
values up to the next multiple, past the last row. Those columns do not reach the result, and the adapter's
buffer has room for them. The kernel runs unchanged: it has the barriers that Metal requires.
"""

from __future__ import annotations

from ..cases.calls import Call
from . import llama_source
from .launch import Launch, Pass
from .llama_operands import OUT, QUERY, Operands
from .llama_source import Constants

_ROWS = 8  # rows of a threadgroup: OP_FLASH_ATTN_EXT_NQPSG
_KEYS = 64  # keys of a step: OP_FLASH_ATTN_EXT_NCPSG
_COLUMNS = 64  # columns of the values are read in multiples of this
_WIDE = 512


def launch(call: Call, element: str) -> Launch | None:
    """Returns None if llama.cpp has no such kernel for this head size."""
    kernel = f"kernel_flash_attn_ext_{element}_dk{call.head_dim}_dv{call.head_dim}"
    source = _source(element, kernel)
    return None if source is None else _Tiles(call).launch(source, kernel)


def _source(element: str, kernel: str) -> str | None:
    """Returns the kernel's template with one instantiation and the conversions that it uses."""
    file = llama_source.text("kernels/fa_f16.metal")
    instantiation = llama_source.instantiation(file, kernel)
    if instantiation is None:
        return None
    conversions = llama_source.text("kernels/dequantize.h")
    return "\n".join(
        [
            "#define GGML_METAL_HAS_BF16",
            '#include "common.h"',
            *(
                llama_source.cut(conversions, rf"^template <typename type4x4>\nvoid dequantize_{one}\(.*?^}}")
                for one in dict.fromkeys(("f16", element))
            ),
            llama_source.text("kernels/fa_common.metal"),
            llama_source.cut(file, r"^#define FA_TYPES .*?(?=^#define FA_TYPES_F32)"),
            llama_source.cut(file, r"^typedef decltype.*?;"),
            instantiation,
            "",
        ]
    )


class _Tiles:
    def __init__(self, call: Call) -> None:
        self.call = call
        self.operands = Operands(call, _KEYS)
        self.tiles = -(-call.q_len // _ROWS)
        self.simdgroups = 8 if call.head_dim >= _WIDE else 4
        self.padded_dim = -(-call.head_dim // _COLUMNS) * _COLUMNS
        if self.padded_dim > call.head_dim:
            self.operands.value = "value_with_spare"

    @property
    def threadgroup_bytes(self) -> int:
        halves = _ROWS * (self.call.head_dim + 2 * self.padded_dim + 4 * _KEYS)
        return -(-2 * halves // 16) * 16

    def launch(self, source: str, kernel: str) -> Launch:
        operands = self.operands
        passes = [operands.pad()] if operands.pads else []
        passes += [self._blocks()] if operands.needs_mask else []
        passes.append(self._attend(source, kernel))
        spare = 2 * (self.padded_dim - self.call.head_dim)
        return Launch(
            llama_source.IMPL,
            passes,
            scratch={
                "last_keys": operands.last_keys_bytes + spare,
                "mask_blocks": self.tiles * -(-self.call.kv_len // _KEYS) * self.call.batch,
            },
            out_rows_first=True,
            note=f"{_ROWS} rows, {self.simdgroups} simdgroups",
        )

    def _blocks(self) -> Pass:
        """Returns the pass that marks tiles of the mask as hidden (0), mixed (1) or fully visible (2)."""
        call, kernel, prefix = self.call, "kernel_flash_attn_ext_blk", "FC_flash_attn_ext_blk_"
        constants: Constants = {f"{prefix}nqptg": _ROWS, f"{prefix}ncpsg": _KEYS}
        source = llama_source.auxiliary_source(kernel, f"{prefix}nqptg")
        arguments: dict[int, str | bytes] = {
            0: llama_source.kargs("flash_attn_ext_blk", self.operands.fields()),
            **{1: "mask", 2: "mask_blocks"},
        }
        grid = (-(-call.kv_len // _KEYS), self.tiles, call.batch)
        return Pass(llama_source.pipeline(call, source, kernel, 32, constants), grid, (32, 1, 1), arguments)

    def _attend(self, source: str, kernel: str) -> Pass:
        call, operands, prefix = self.call, self.operands, "FC_flash_attn_ext_"
        off = dict.fromkeys((f"{prefix}{name}" for name in ("has_sinks", "has_bias", "has_scap")), False)
        constants: Constants = {
            **off,
            f"{prefix}has_mask": operands.needs_mask,
            f"{prefix}has_kvpad": operands.pads,
            f"{prefix}bc_mask": operands.needs_mask and call.q_len % 8 != 0,
            f"{prefix}ns10": operands.row_units,
            f"{prefix}ns20": operands.row_units,
            f"{prefix}nsg": self.simdgroups,
        }
        threads = 32 * self.simdgroups
        pipeline = llama_source.pipeline(call, source, kernel, threads, constants, self.threadgroup_bytes)
        arguments: dict[int, str | bytes] = {
            0: llama_source.kargs("flash_attn_ext", operands.fields()),
            **{1: QUERY, 2: operands.key, 3: operands.value, 4: operands.mask, 5: QUERY},
            **{6: "last_keys", 7: "mask_blocks", 8: OUT},
        }
        return Pass(pipeline, (self.tiles, call.q_heads, call.batch), (32, self.simdgroups, 1), arguments)
