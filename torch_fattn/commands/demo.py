"""`python -m torch_fattn demo`: a transformers model generates text with and without the kernels.

The same greedy generation runs on device "mps" with `attn_implementation="fattn"` and with transformers'
eager attention. Every token must be the same. The two prompts have different lengths and are padded to one
batch, so that the run includes masks.

On a Mac the model then generates again, alternating between `fattn` and `sdpa`, to measure tokens per second.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

try:
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel

    from .demo_picture import draw
except ImportError as error:
    raise SystemExit(
        f"The demo needs transformers and matplotlib: pip install 'torch-fattn[demo]' ({error})"
    ) from error

from ..inspection.compiled import compile_summary
from ..inspection.plans import launch_counts, reset_launch_counts
from ..integrations.transformers import NAME, register
from ..runtime.versions import VERSION
from .arguments import ArgumentError
from .doctor import advice_about_device, this_gpu

DEVICE = "mps"

PROMPT_LENGTH = 100
PADDING = 24  # of the second sequence, on its left
SEED = 0
OUTPUT = Path("out")
ROUNDS = 3  # of timing
TEXT = (
    "Attention lets every token of a text look at the tokens before it and gather what it needs from them. "
    "The work grows with the square of the length, and for a long time the matrix of scores was written to "
    "memory and read again. Computing it tile by tile, with a running maximum and a running sum, needs no "
    "such matrix. "
)


@dataclass
class Run:
    """One generation: its tokens, and for every step the logits, the seconds and the kernels launched."""

    tokens: list[list[int]]
    logits: Tensor  # [steps, batch, vocabulary], float32 on the CPU
    seconds: list[float]
    launches: list[dict[str, int]]

    @property
    def all_launches(self) -> dict[str, int]:
        return dict(sum(map(Counter, self.launches), Counter()))


class StepRecorder(transformers.LogitsProcessor):
    """Records each step of `generate` and returns the logits unchanged."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.launches: list[dict[str, int]] = []
        self._seen: Counter[str] = Counter()
        self._last = time.perf_counter()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = Counter(launch_counts())
        self.launches.append(dict(counts - self._seen))
        self._seen = counts
        scores[0, 0].item()  # waits for the device, so that the time includes this step's work
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now
        return scores


def main(model_path: str | None, dtype_name: str, new_tokens: int) -> int:
    """Runs the demo, writes out/demo.json and out/demo.png and returns the exit status."""
    if model_path is not None and not (model_path and Path(model_path, "config.json").is_file()):
        raise ArgumentError(f"--model {model_path!r} has no config.json; give the folder of a checkpoint")
    make_output_folder()
    if obstacles := advice_about_device():
        print(f"torch_fattn demo needs a GPU: {obstacles[0]}", file=sys.stderr)
        return 1
    register()
    model, description = load_model(model_path, getattr(torch, dtype_name))
    tokenizer = load_tokenizer(model_path)
    inputs = make_prompt(model, tokenizer)
    model.to(DEVICE)
    print(f"model        {description}, {dtype_name}")
    print(
        f"task         {new_tokens} greedy tokens after a prompt of {PROMPT_LENGTH}, batch of 2, "
        f"{PADDING} tokens of padding in one sequence\n"
    )

    def run(implementation: str) -> Run:
        model.set_attn_implementation(implementation)
        return generate(model, inputs, new_tokens)

    try:
        ours = run(NAME)
    except NotImplementedError as refusal:
        print(f"\nFAILED: this model does not run through fattn: {first_line(refusal)}")
        return 1
    compiled = compile_summary()  # before another implementation adds to it
    theirs = run("eager")
    differences, margins, problems = compare(ours, theirs)
    report: dict[str, Any] = {
        "device": this_gpu(),
        "model": f"{description}, {dtype_name}",
        "versions": {
            "torch_fattn": VERSION,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "prompt_length": PROMPT_LENGTH,
        "problems": problems + launch_problems(ours),
        "tokens": {"fattn": ours.tokens, "eager": theirs.tokens},
        "logit_difference_per_step": differences,
        "margin_per_step": margins,
        "launches": ours.all_launches,
        "launches_per_step": ours.launches,
        "seconds_per_step": {"fattn": ours.seconds, "eager": theirs.seconds},
        "tokens_per_second": tokens_per_second(lambda name: run(name).seconds, len(ours.tokens)),
    }
    print_tokens(report, tokenizer)
    launches = (f"{count} x {kernel}" for kernel, count in report["launches"].items())
    speed = (f"{name} {rate:,.1f}" for name, rate in report["tokens_per_second"].items())
    print(f"\ndevice       {report['device']['name']}")
    print(
        f"logits       differ by at most {max(differences):.2e}; the best two tokens are at least "
        f"{min(margins):.2e} apart"
    )
    print(f"launches     {', '.join(launches)}")
    print(f"first run    {sum(ours.seconds):.1f} s; its first step took {ours.seconds[0]:.1f} s")
    print(f"compiled     {compiled}; only the first run waits for this")
    print(f"tokens/s     {', '.join(speed) or 'not timed: it takes a Mac and two tokens'}")
    (OUTPUT / "demo.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    draw(report, OUTPUT / "demo.png")
    print(f"written      {OUTPUT / 'demo.json'}, {OUTPUT / 'demo.png'}")
    return 1 if report["problems"] else 0


def make_output_folder() -> None:
    """Checks before the run that results can be written."""
    try:
        OUTPUT.mkdir(exist_ok=True)
        for name in ("demo.json", "demo.png"):
            (OUTPUT / name).open("a").close()
    except OSError as error:
        raise ArgumentError(
            f"results cannot be written to {OUTPUT.absolute()} ({error.strerror}); run the demo in a folder "
            "that you may write to"
        ) from error


def load_model(path: str | None, dtype: torch.dtype) -> tuple[Any, str]:
    """The checkpoint at `path`, or a small random Llama; with eager attention, on the CPU."""
    if path is not None:
        local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        try:
            model = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, attn_implementation="eager", **local
            ).eval()
        except Exception as error:  # libraries raise different errors for a damaged checkpoint
            raise ArgumentError(
                f"--model {path!r} cannot be loaded as a causal language model ({first_line(error)}); "
                "give another checkpoint"
            ) from error
        return model, f"{path} ({model.config.model_type}, {millions(model)} M parameters)"
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    randomise(model)
    layers = "4 layers, 8 query / 2 key-value heads of 64"
    return model.to(dtype), f"Llama architecture ({layers}, {millions(model)} M random weights)"


def randomise(model: PreTrainedModel) -> None:
    """Initialises weights for distinct scores and logits with a clear maximum. With the usual initialisation,
    attention is nearly uniform and a wrong mask changes no token."""
    gains = {"q_proj": 1.6, "k_proj": 1.6, "lm_head": 4.0}
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim < 2:
                continue
            gain = next((gain for layer, gain in gains.items() if layer in name), 1.0)
            deviation = 1.0 if "embed" in name else gain * weight.shape[1] ** -0.5
            weight.normal_(0.0, deviation, generator=generator)


def millions(model: PreTrainedModel) -> str:
    return f"{sum(weight.numel() for weight in model.parameters()) / 1e6:.1f}"


def make_prompt(model: PreTrainedModel, tokenizer: Any) -> dict[str, Tensor]:
    """Two prompts, the second one shorter and padded on its left."""
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(2, vocabulary, (2, PROMPT_LENGTH), generator=torch.Generator().manual_seed(SEED))
    if tokenizer is not None:
        text = tokenizer(TEXT)["input_ids"]
        text = text * (2 * PROMPT_LENGTH // len(text) + 1)
        ids = torch.tensor(text[: 2 * PROMPT_LENGTH]).view(2, PROMPT_LENGTH)
    mask = torch.ones_like(ids)
    ids[1, :PADDING] = model.config.pad_token_id or 0
    mask[1, :PADDING] = 0
    return {"input_ids": ids, "attention_mask": mask}


def load_tokenizer(path: str | None) -> Any:
    """Loads the tokenizer; None if the model has none and prompts are random tokens."""
    if path is None:
        return None
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, ImportError, KeyError):
        return None


def generate(model: Any, inputs: dict[str, Tensor], new_tokens: int) -> Run:
    """Generates exactly `new_tokens` greedy tokens."""
    reset_launch_counts()
    recorder = StepRecorder()
    with torch.no_grad():
        output = model.generate(
            **{name: tensor.to(model.device) for name, tensor in inputs.items()},
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=model.config.pad_token_id or 0,
            output_logits=True,
            return_dict_in_generate=True,
            logits_processor=transformers.LogitsProcessorList([recorder]),
        )
    return Run(
        tokens=output.sequences[:, -new_tokens:].tolist(),
        logits=torch.stack([step.float().cpu() for step in output.logits]),
        seconds=recorder.seconds,
        launches=recorder.launches,
    )


def compare(ours: Run, theirs: Run) -> tuple[list[float], list[float], list[str]]:
    """The largest difference of logits in each step, up to the first whose tokens differ; the smallest gap
    between the reference's best two tokens in each step; and problems."""
    differs = (torch.tensor(ours.tokens) != torch.tensor(theirs.tokens)).any(0).tolist()
    # The logits of a step depend only on earlier tokens.
    steps = differs.index(True) + 1 if any(differs) else len(differs)
    best_two = theirs.logits.topk(2, dim=-1).values
    differences = (ours.logits - theirs.logits)[:steps].abs().amax((1, 2)).tolist()
    margins = (best_two[..., 0] - best_two[..., 1]).amin(1).tolist()
    problems = []
    if any(differs):
        problems.append(
            f"tokens differ, first at step {steps} of {len(differs)}, where the best two were "
            f"{margins[steps - 1]:.2e} apart and the logits {differences[-1]:.2e}"
        )
    if not ours.logits.isfinite().all():
        problems.append("logits are not all finite")
    return differences, margins, problems


def tokens_per_second(generate: Callable[[str], list[float]], batch: int) -> dict[str, float]:
    """Rates of all sequences, from the seconds of each step after the prompt. The implementations run in
    turns, so that both run at the same GPU temperature; the first round compiles and is not counted."""
    rounds: dict[str, list[float]] = {}
    for number in range(1 + ROUNDS if sys.platform == "darwin" else 0):
        for name in (NAME, "sdpa"):
            try:
                steps = generate(name)[1:]
            except ValueError:  # the model does not support sdpa
                continue
            if number and steps:
                rounds.setdefault(name, []).append(median(steps))
    return {name: batch / median(steps) for name, steps in rounds.items()}


def launch_problems(ours: Run) -> list[str]:
    """Checks that prefill (the prompt) and decode (later tokens) both ran."""
    expected = ["fattn_prefill"] + ["fattn_decode"] * (len(ours.launches) > 1)
    missing = [name for name in expected if not any(kernel.startswith(name) for kernel in ours.all_launches)]
    return [f"{name} did not run" for name in missing]


def print_tokens(report: dict[str, Any], tokenizer: Any) -> None:
    """Prints the verdict and the model's text."""

    def text(tokens: list[int]) -> str:
        return " ".join(map(str, tokens)) if tokenizer is None else repr(tokenizer.decode(tokens))

    ours, theirs = report["tokens"]["fattn"], report["tokens"]["eager"]
    print()
    for problem in report["problems"]:
        print(f"FAILED: {problem}")
    if not report["problems"]:
        print(f"OK: {sum(map(len, ours))} tokens agree exactly")
    for row, (mine, expected) in enumerate(zip(ours, theirs, strict=True)):
        print(f"\nsequence {row}   {len(set(mine))} different tokens among {len(mine)}")
        print(f"  fattn      {text(mine)}")
        print(f"  eager      {'the same' if mine == expected else text(expected)}")


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
