"""flash-attn's documented behaviour, in float64 and one sequence at a time."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LIMITS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
WINDOWS = ((-1, -1), (-1, -1), (4, 0), (3, 5), (-1, 2), (7, -1), (0, 3))


@dataclass(frozen=True)
class Options:
    """Options that all functions have."""

    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    scale: float | None = None
    slopes: Tensor | None = None  # [H] or [B, H]
    sinks: Tensor | None = None  # [H]

    def arguments(self, device: str) -> dict[str, Any]:
        return {
            "causal": self.causal,
            "window_size": self.window,
            "softcap": self.softcap,
            "softmax_scale": self.scale,
            "alibi_slopes": None if self.slopes is None else self.slopes.to(device),
            **({} if self.sinks is None else {"learnable_sink": self.sinks.to(device)}),
        }

    def attend(self, b: int, q: Tensor, k: Tensor, v: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        """Sequence b, whose keys before the first are none: q `[Lq, H, D]`; out like it, and lse
        `[H, Lq]`."""
        q, k, v = (t.double().transpose(0, 1) for t in (q, k, v))
        k, v = (t.repeat_interleave(q.shape[0] // t.shape[0], dim=0) for t in (k, v))
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if self.scale is None else self.scale)
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        row, key = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
        position = row + k.shape[1] - q.shape[1]
        if self.slopes is not None:
            slopes = self.slopes.double().expand(b + 1, -1)[b] if self.slopes.dim() == 1 else self.slopes[b]
            scores = scores - slopes.double()[:, None, None] * (position - key).abs()
        left, right = self.window[0], 0 if self.causal else self.window[1]
        seen = (key >= first).expand(position.shape[0], -1)
        seen = seen & (key >= position - left) if left >= 0 else seen
        seen = seen & (key <= position + right) if right >= 0 else seen
        scores = scores.masked_fill(~seen, -torch.inf)
        lse = torch.logsumexp(scores, dim=-1)
        if self.sinks is not None:
            lse = torch.logaddexp(lse, self.sinks.double()[:, None])
        weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0)[..., None])
        # Hidden keys may hold anything.
        return (weights @ v.masked_fill(~seen.any(0)[:, None], 0.0)).transpose(0, 1), lse


def draw_options(rng: random.Random, batch: int, heads: int) -> Options:
    slopes = rng.choice((None, None, torch.rand(heads), torch.rand(batch, heads)))
    return Options(
        causal=rng.random() < 0.5,
        window=rng.choice(WINDOWS),
        softcap=rng.choice((0.0, 0.0, 5.0)),
        scale=rng.choice((None, None, 0.2)),
        slopes=slopes,
    )


def rotated(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x `[L, H, D]`, column by column, as the rotation of a complex number; NaN without an angle."""
    out, half = x.double().clone(), cos.shape[1]
    known = positions.clamp(max=cos.shape[0] - 1)
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        turn = torch.complex(cos[known, i].double(), sin[known, i].double())[:, None]
        turned = torch.complex(x[..., a].double(), x[..., b].double()) * turn
        out[..., a], out[..., b] = turned.real, turned.imag
    return out.masked_fill((positions != known)[:, None, None], torch.nan).to(x.dtype)


def check(out: Tensor, lse: Tensor, exact: Tensor, exact_lse: Tensor, slack: float = 1.0) -> None:
    assert out.is_contiguous() and lse.is_contiguous()
    assert out.shape == exact.shape and lse.shape == exact_lse.shape
    limit = LIMITS[out.dtype] * slack
    assert torch.allclose(out.cpu().double(), exact, atol=limit, rtol=limit, equal_nan=True)
    assert torch.allclose(lse.cpu().double(), exact_lse, atol=limit * 4, rtol=1e-3, equal_nan=True)


def bits(tensor: Tensor) -> Tensor:
    """Replaces NaN, so that NaN equals NaN."""
    return tensor.cpu().contiguous().view(torch.uint8)
