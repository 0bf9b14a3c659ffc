"""Every model family of transformers that builds from a small generic config: `fattn` against `eager`.

    python -m tests.transformers.sweep                          # all families; rewrites docs/models.md
    python -m tests.transformers.sweep --only llama bloom       # prints, writes nothing

Families are the entries of transformers' Auto mappings. The same weights run eager attention on the CPU and
`fattn` on a device, without padding, with padding left and right, with a batch of one, and through
`generate`. Each case is one of

    matches     every output at a real token agrees, and `attend` really ran
    refuses     a NotImplementedError that says what to do, or transformers refuses the name at construction
    not used    the model never called `attend`, and its output is eager's
    differs     the outputs do not agree: no family may
    fails       any other exception: loud, but not a refusal

and a family is what its cases are; `not built` if eager attention itself does not build or run. What is
refused runs again under `register(on_unsupported="sdpa")`; "runs under sdpa" says which of them then
give what eager attention gives.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import huggingface_hub
import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto as auto

from tests.transformers.family_table import record
from tests.transformers.tiny_configs import VOCAB, tiny_configs
from torch_fattn.integrations.transformers import NAME, attend, make_mask, register, unregister
from torch_fattn.integrations.transformers.operators import compute

KINDS: dict[str, tuple[Any, Any]] = {
    "causal": (transformers.AutoModelForCausalLM, auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "masked": (transformers.AutoModelForMaskedLM, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    "seq2seq": (transformers.AutoModelForSeq2SeqLM, auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    # Only those that are in none of the others.
    "base": (transformers.AutoModel, auto.MODEL_MAPPING_NAMES),
}
LENGTH = 20  # more than decode takes at once
PADDED = 4
NEW_TOKENS = 3
LARGEST_MODEL = 20_000_000
# Initial weights are so small that a wrong attention hardly moves the outputs.
WEIGHT_GAIN = 3.0
# Relative to the largest output, in float32; dropping the mask must change the output VISIBLE times as much.
TOLERANCE = 1e-4
VISIBLE = 10


class NotBuiltError(Exception):
    """The generic config, or the generic inputs, are not enough for this family."""


@dataclass
class Case:
    verdict: str
    why: str = ""


@dataclass
class Watch:
    """Counts the calls of the attention function; `blind` makes it ignore every mask."""

    calls: int = 0
    blind: bool = False

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *args: Any,
        **kw: Any,
    ) -> tuple[Tensor, None]:
        self.calls += 1
        if self.blind:
            return compute(query, key, value, None, None, causal=False, scale=kw.get("scaling")), None
        return attend(module, query, key, value, attention_mask, *args, **kw)


@contextmanager
def watching() -> Iterator[Watch]:
    watch = Watch()
    AttentionInterface.register(NAME, watch.attend)
    AttentionMaskInterface.register(NAME, make_mask)
    try:
        yield watch
    finally:
        AttentionInterface.register(NAME, attend)


def families() -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    seen: set[str] = set()
    for kind, (_, names) in KINDS.items():
        found += [(kind, name) for name in sorted(names) if kind != "base" or name not in seen]
        seen |= set(names)
    return found


def build(kind: str, config: PreTrainedConfig, implementation: str) -> PreTrainedModel:
    torch.manual_seed(0)
    random.seed(0)
    model = KINDS[kind][0].from_config(config, attn_implementation=implementation)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and not weight.any():
                weight.normal_(std=0.02)  # a projection that starts at zero would hide the layers before it
            if weight.ndim == 2 and "embed" not in name:
                weight.mul_(WEIGHT_GAIN)
    if model.can_generate() and model.generation_config.decoder_start_token_id is None:
        model.generation_config.decoder_start_token_id = 1
    return model.eval()


def build_eager(kind: str, name: str) -> tuple[int, PreTrainedModel]:
    """The first attempt at a config whose model runs, and its number. No two models ever share a config:
    transformers writes the attention implementation into it."""
    last_error: BaseException = NotBuiltError("the config cannot be shrunk")
    for attempt, config in enumerate(tiny_configs(name)):
        try:
            with torch.device("meta"):
                weights = sum(p.numel() for p in KINDS[kind][0].from_config(config).parameters())
            if weights > LARGEST_MODEL:
                raise NotBuiltError(f"{weights // 1_000_000} million weights after shrinking")
            model = build(kind, list(tiny_configs(name))[attempt], "eager")
            run(model, "plain", inputs_of(model, "plain"))
        except Exception as error:  # whatever a family needs that a generic config lacks
            last_error = error
            continue
        return attempt, model
    raise NotBuiltError(short(last_error))


def cases_of(model: PreTrainedModel, kind: str) -> list[str]:
    if model.main_input_name != "input_ids":
        return ["plain"]
    generates = kind in ("causal", "seq2seq") and model.can_generate()
    return ["plain", "left", "right", "single"] + ["generate"] * generates


def inputs_of(model: PreTrainedModel, case: str) -> dict[str, Tensor]:
    batch = 1 if case == "single" else 2
    generator = torch.Generator().manual_seed(1)
    if model.main_input_name == "pixel_values":
        size = getattr(model.config, "image_size", 32)
        height, width = (size, size) if isinstance(size, int) else (32, 32)
        return {"pixel_values": torch.randn(batch, 3, height, width, generator=generator)}
    if model.main_input_name != "input_ids":
        raise NotBuiltError(f"its main input is {model.main_input_name}")
    ids = torch.randint(3, VOCAB - 2, (batch, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    if case in ("left", "single", "generate"):
        mask[0, :PADDED] = 0
    if case == "right":
        mask[0, -PADDED:] = 0
    inputs = {"input_ids": ids * mask, "attention_mask": mask}
    if model.config.is_encoder_decoder and case != "generate":
        decoder_ids = torch.randint(3, VOCAB - 2, (batch, LENGTH), generator=generator)
        inputs |= {"decoder_input_ids": decoder_ids, "decoder_attention_mask": mask.clone()}
    return inputs


@torch.no_grad()
def run(model: PreTrainedModel, case: str, inputs: dict[str, Tensor]) -> Tensor:
    """The first output, or the logits of every generated token."""
    torch.manual_seed(2)
    on_device = {k: v.to(model.device) for k, v in inputs.items()}
    if case == "generate":
        steps = model.generate(
            **on_device,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            num_beams=1,
            output_logits=True,
            return_dict_in_generate=True,
        ).logits
        return torch.stack([step.float().cpu() for step in steps], dim=1)
    first = model(**on_device)[0]
    if not isinstance(first, Tensor):
        raise NotBuiltError("its first output is not a tensor")
    return first.float().cpu()


def compare(watch: Watch, eager: PreTrainedModel, ours: PreTrainedModel, case: str) -> Case | None:
    """None if eager attention cannot run the case. The reference runs on the CPU. If the results differ, they
    are compared with eager attention on the same device, where the rest of the model may fail or round
    differently."""
    inputs = inputs_of(eager, case)
    verdict = compare_with(watch, eager, ours, case, inputs)
    if verdict and verdict.verdict in ("differs", "fails") and ours.device != eager.device:
        verdict = compare_with(watch, eager.to(ours.device), ours, case, inputs)
        eager.cpu()
    return verdict


def compare_with(
    watch: Watch, eager: PreTrainedModel, ours: PreTrainedModel, case: str, inputs: dict[str, Tensor]
) -> Case | None:
    try:
        theirs = run(eager, case, inputs)
    except Exception:
        return None
    if not theirs.isfinite().all():
        return None
    watch.calls = 0
    try:
        mine = run(ours, case, inputs)
    except Exception as error:
        refused = isinstance(error, NotImplementedError) and str(error).startswith("fattn attention")
        return Case("refuses" if refused else "fails", short(error))
    calls = watch.calls
    error = relative_error(mine, theirs, case, inputs)
    if not error < TOLERANCE:
        return Case("differs", f"by {error:.1e} of the largest output")
    if not calls:
        return Case("not used")
    if case == "single":
        watch.blind = True
        try:
            blind = relative_error(run(ours, case, inputs), theirs, case, inputs)
        finally:
            watch.blind = False
        if not blind > VISIBLE * TOLERANCE:
            return Case("differs", f"blind to its mask: without it, {blind:.1e}")
    return Case("matches")


def relative_error(mine: Tensor, theirs: Tensor, case: str, inputs: dict[str, Tensor]) -> float:
    if mine.shape != theirs.shape:
        return float("inf")
    error = (mine - theirs).abs()
    real = inputs.get("attention_mask")
    if real is not None and case != "generate" and error.shape[:2] == real.shape:
        error = error[real.bool()]
    return (error.max() / theirs.abs().max().clamp(min=1e-6)).item()


def runs_under_sdpa(kind: str, name: str, device: str, only: list[str] | None = None) -> bool:
    """Whether a family that is refused gives eager's outputs once other attention may run it."""
    register(on_unsupported="sdpa")
    try:
        cases = sweep_family(kind, name, device, only)
    finally:
        unregister()
    return {case.verdict for case in cases.values()} <= {"matches", "not used"} and bool(cases)


def sweep_family(kind: str, name: str, device: str, only: list[str] | None = None) -> dict[str, Case]:
    """The verdict of each case, or of "build" alone."""
    try:
        with watching() as watch:
            return _sweep_family(watch, kind, name, device, only)
    except NotBuiltError as error:
        return {"build": Case("not built", str(error))}


def _sweep_family(watch: Watch, kind: str, name: str, device: str, only: list[str] | None) -> dict[str, Case]:
    attempt, eager = build_eager(kind, name)
    try:
        ours = build(kind, list(tiny_configs(name))[attempt], NAME)
    except NotImplementedError as error:  # a table of attention classes by name
        return {
            "build": Case("refuses" if str(error).startswith("fattn attention") else "fails", short(error))
        }
    ours.load_state_dict(eager.state_dict())
    ours.to(device)
    cases = [case for case in cases_of(eager, kind) if not only or case in only]
    compared = {case: compare(watch, eager, ours, case) for case in cases}
    return {case: verdict for case, verdict in compared.items() if verdict is not None}


def verdict_of(cases: dict[str, Case]) -> dict[str, str]:
    """The worst of the cases. Why eager attention does not run is not recorded."""
    for verdict in ("differs", "fails", "not built", "refuses", "not used", "matches"):
        chosen = {name: case for name, case in cases.items() if case.verdict == verdict}
        if chosen:
            whys = (case.why for case in chosen.values() if case.why and verdict != "not built")
            why = next(whys, "")
            partly = "" if len(chosen) == len(cases) else " ".join(chosen)
            return {k: v for k, v in {"verdict": verdict, "only": partly, "why": why}.items() if v}
    return {"verdict": "not built"}


def short(error: BaseException) -> str:
    """Without the class, which differs from family to family."""
    text = " ".join(str(error).split())
    if isinstance(error, (NotImplementedError, NotBuiltError)):
        return re.sub(r"^fattn attention( in \w+)?: (\w+Model )?", "", text)
    return f"{type(error).__name__}: {text[:160].rstrip()}"


def main() -> None:
    huggingface_hub.constants.HF_HUB_OFFLINE = True  # some configs name a checkpoint of another model
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="mps", help="where fattn runs; cpu: the operators' plain path")
    parser.add_argument("--only", nargs="+", metavar="FAMILY", help="print these and write nothing")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    torch.set_num_threads(1)  # the models are too small for more
    found: dict[str, dict[str, dict[str, str]]] = {kind: {} for kind in KINDS}
    under_sdpa: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for kind, name in families():
        register()
        if args.only and name not in args.only:
            continue
        cases = sweep_family(kind, name, args.device)
        found[kind][name] = verdict_of(cases)
        if found[kind][name]["verdict"] == "refuses" and runs_under_sdpa(kind, name, args.device):
            under_sdpa[kind].append(name)
        runs = "runs under sdpa" if name in under_sdpa[kind] else ""
        whys = " ".join(f"{case} {verdict.why}".strip() for case, verdict in cases.items())
        print(kind, name, json.dumps(found[kind][name]), whys, runs, flush=True)
    if not args.only:
        record({"transformers": transformers.__version__, "families": found, "under_sdpa": under_sdpa})


if __name__ == "__main__":
    main()
