"""What flash-attn's functions share: their options as those of the operators."""

from __future__ import annotations

from torch import Tensor

Result = Tensor | tuple[Tensor, Tensor, Tensor]
Window = tuple[int | None, int | None]  # -1, and in later versions of flash-attn None, is no limit


def window(window_size: Window) -> dict[str, int]:
    left, right = (-1 if side is None else max(side, -1) for side in window_size)
    return {"window_left": left, "window_right": right}


def sees_no_later_key(causal: bool, window_size: Window) -> bool:
    return causal or window_size[1] == 0


def causal_alibi(op: str, slopes: Tensor | None, causal: bool, window_size: Window) -> dict[str, Tensor]:
    """torch_fattn's ALiBi is slope * (j - i), which is flash-attn's where no key is later than its row."""
    if slopes is None:
        return {}
    if slopes.dim() != 1 or not sees_no_later_key(causal, window_size):
        raise NotImplementedError(
            f"torch_fattn.{op}: alibi_slopes of {slopes.dim()} dimensions with causal={causal} are not "
            "supported; pass one slope for each head and causal=True, or each sequence to flash_attn_func"
        )
    return {"alibi_slopes": slopes}


def refuse_dropout(op: str, dropout_p: float) -> None:
    if dropout_p != 0.0:
        raise NotImplementedError(
            f"torch_fattn.{op}: dropout_p {dropout_p} is not 0 and there is no dropout; use "
            "F.scaled_dot_product_attention for training"
        )


def result(out: Tensor, lse: Tensor, with_lse: bool) -> Result:
    return (out, lse, out.new_empty(0)) if with_lse else out
