"""`report`: what was fused in a model, and the kernels of a decode step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from ....runtime.signatures import public
from ..compat import CACHE
from . import models, running
from .launches import BESIDES, Launches

_PROMPT = 4


@dataclass(frozen=True)
class Report:
    """`fused` are names of norms, `mixers` those of layers of linear attention, and `rotary` those of rotary
    functions, with the form that each has. `left` are those that were not fused, and why. `before` and
    `after` are the kernels of a decode step without and with fusion, by part; parts of layers count those of
    one layer, the mean of those that ran. They are empty for encoders and encoder-decoders."""

    fused: tuple[str, ...]
    mixers: tuple[str, ...]
    rotary: dict[str, str]
    left: dict[str, str]
    before: dict[str, float]
    after: dict[str, float]

    def __str__(self) -> str:
        lines = [f"fused: {len(self.fused)} norms"]
        lines += [f"fused: {len(self.mixers)} layers of linear attention"] * bool(self.mixers)
        lines += [f"fused: {name} ({form})" for name, form in self.rotary.items()]
        for why, left in Counter(self.left.values()).items():
            names = [name for name in self.left if self.left[name] == why]
            lines.append(f"not fused: {names[0] if left == 1 else left}, because {why}")
        if self.before:
            lines.append(f"{'kernels of a decode step':40} {'before':>7} {'after':>7}")
        for part, count in self.before.items():
            lines.append(f"{part:40} {count:7.4g} {self.after.get(part, 0):7.4g}")
        return "\n".join(lines)


@public("torch_fattn.integrations.transformers.report", ahead=False)
def report(model: PreTrainedModel) -> Report:
    """Runs a prompt and a decode step of the model twice, without and with fusion, and counts the kernels of
    the step. Print the result.

    Operators that write memory are counted, on any device: a model on the CPU shows what mps would launch.
    """
    models.prepare_all(model)
    before, after = _kernels_of_step(model, fused=False), _kernels_of_step(model, fused=True)
    found = models.fused_in(model)
    rotary = {name: str(form) for name, form in found.rotary.items() if not isinstance(form, str)}
    left = {name: why for name, why in found.rotary.items() if isinstance(why, str)}
    return Report(found.norms, found.mixers, rotary, {**found.left, **left}, before, after)


def _kernels_of_step(model: PreTrainedModel, fused: bool) -> dict[str, float]:
    if not model.can_generate() or model.config.is_encoder_decoder:
        return {}
    ids = torch.arange(1, 1 + _PROMPT, device=model.device)[None]
    with_cache: dict[str, Any] = {CACHE: DynamicCache(config=model.config), "use_cache": True}
    launches = Launches(model)
    enabled = running.enable(fused)
    try:
        with torch.no_grad(), running.counted():
            model(ids, **with_cache)
            with launches.count():
                model(ids[:, :1], **with_cache)
    finally:
        running.enable(enabled)
    layers = max(launches.layers, 1)
    return {
        part: kernels / (1 if part == BESIDES else layers)
        for part, kernels in launches.parts.items()
        if kernels
    }
