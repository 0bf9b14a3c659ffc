"""`python -m torch_fattn demo`: a transformers model generates text with and without the kernels.

The same greedy generation runs on device "mps" with `attn_implementation="fattn"` and with transformers'
eager attention. Every token must be the same. Eager attention on the CPU is only printed: there the other
layers of the model round differently. The two prompts have different lengths and are padded to one batch, so
that the run includes masks.

On a Mac the model then generates again, alternating between `fattn` and `sdpa`, to measure tokens per second.
"""

from __future__ import annotations

import copy
import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

try:
    import transformers
    from huggingface_hub import try_to_load_from_cache
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
from . import demo_speed
from .arguments import ArgumentError
from .demo_recording import PlanRecorder, Progress, StepRecorder
from .doctor import advice_about_device

DEVICE = "mps"

PROMPT_LENGTH = 100
PADDING = 24  # of the second sequence, on its left
SEED = 0
OUTPUT = Path("out")
POSITIONS = 4096  # of the random model
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
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


@dataclass
class Comparison:
    """Logits are compared as long as both runs have chosen the same tokens."""

    agree: bool
    first_difference: list[int | None]  # per sequence: the step of the first token that differs
    logit_difference: list[float]  # per step: maximum over sequences and vocabulary
    margin: list[float]  # per step: the reference's smallest gap between the best two tokens
    problems: list[str] = field(default_factory=list)


def main(model_path: str | None, dtype_name: str, new_tokens: int, verbose: bool = False) -> int:
    """Runs the demo, writes out/demo.json and out/demo.png and returns the exit status."""
    if model_path is not None:
        check_folder(model_path)
    make_output_folder()
    if obstacles := advice_about_device():
        print(f"torch_fattn demo needs a GPU: {obstacles[0]}", file=sys.stderr)
        return 1
    register()
    dtype = getattr(torch, dtype_name)
    cpu_model, description = load_model(model_path, dtype)
    check_length(cpu_model, new_tokens)
    tokenizer = load_tokenizer(model_path)
    inputs = make_prompt(cpu_model, tokenizer)
    model = copy.deepcopy(cpu_model)
    model.set_attn_implementation(NAME)
    model.to(DEVICE)
    print(f"model        {description}, {dtype_name}")
    print(
        f"task         {new_tokens} greedy tokens after a prompt of {PROMPT_LENGTH}, batch of 2, "
        f"{PADDING} tokens of padding in one sequence\n"
    )

    with PlanRecorder() as plans:
        progress = Progress("fattn on mps", new_tokens, "kernels are compiled on their first use")
        try:
            ours = generate(model, inputs, new_tokens, progress)
        except NotImplementedError as refusal:
            print(f"\nFAILED: this model does not run through fattn: {first_line(refusal)}")
            return 1
    compiled = compile_summary()  # before another implementation compiles more
    model.set_attn_implementation("eager")
    theirs = generate(model, inputs, new_tokens, Progress("eager on mps", new_tokens, ""))
    comparison = compare(ours, theirs)
    comparison.problems += launch_problems(ours, plans)
    on_cpu = compare(ours, generate(cpu_model, inputs, new_tokens, Progress("eager on CPU", new_tokens, "")))

    def seconds_of(implementation: str) -> list[float]:
        model.set_attn_implementation(implementation)
        return generate(model, inputs, new_tokens, None).seconds

    speed = demo_speed.compare(seconds_of, len(ours.tokens))
    print_verdict(ours, comparison)
    print_text(ours, theirs, tokenizer)
    print_facts(ours, comparison, on_cpu, plans)
    print_times(ours, speed, compiled)
    print_plans(plans, verbose)
    write_result(ours, theirs, comparison, on_cpu, plans, f"{description}, {dtype_name}", speed)
    return 1 if comparison.problems else 0


def check_folder(path: str) -> None:
    """Checks --model before anything is loaded."""
    if not path:
        raise ArgumentError("--model '' is empty; give the folder of a checkpoint or leave it out")
    folder = Path(path)
    if folder.is_file():
        raise ArgumentError(f"--model {path!r} is a file; give the folder that holds config.json and weights")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ArgumentError(f"--model {path!r} contains no config.json; give the folder of a checkpoint")
    if folder.exists() or is_cached(path):
        return
    if HUB_ID.fullmatch(path):
        raise ArgumentError(
            f"--model {path!r} is neither a folder nor in the local Hugging Face cache, and the demo loads "
            f"local files only; download it with `hf download {path}` and run this again"
        )
    raise ArgumentError(f"--model {path!r} does not exist; give the folder of a checkpoint")


def is_cached(hub_id: str) -> bool:
    try:
        return isinstance(try_to_load_from_cache(hub_id, "config.json"), str)
    except ValueError:  # not a valid repository id
        return False


def make_output_folder() -> None:
    """Checks that the results can be written, before the run."""
    try:
        OUTPUT.mkdir(exist_ok=True)
        for name in ("demo.json", "demo.png"):
            (OUTPUT / name).open("a").close()
    except OSError as error:
        raise ArgumentError(
            f"results cannot be written to {OUTPUT.absolute()} ({error.strerror}); run the demo in a folder "
            "that you may write to"
        ) from error


def check_length(model: PreTrainedModel, new_tokens: int) -> None:
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and PROMPT_LENGTH + new_tokens > positions:
        most = positions - PROMPT_LENGTH
        raise ArgumentError(
            f"--new-tokens {new_tokens} after a prompt of {PROMPT_LENGTH} passes the {positions} positions "
            + (f"of this model; give at most {most}" if most > 0 else "of this model; give another --model")
        )


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def load_model(path: str | None, dtype: torch.dtype) -> tuple[Any, str]:
    """The checkpoint at `path`, or a small random Llama; with eager attention, on the CPU."""
    if path is not None:
        try:
            model = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
                attn_implementation="eager",
                local_files_only=True,
                trust_remote_code=False,
            ).eval()
        except Exception as error:  # each library raises its own errors for a damaged checkpoint
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
        max_position_embeddings=POSITIONS,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    randomise(model)
    heads = f"{config.num_attention_heads} query / {config.num_key_value_heads} key-value heads"
    layers = f"{config.num_hidden_layers} layers, {heads} of {config.head_dim}"
    return model.to(dtype), f"Llama architecture ({layers}, {millions(model)} M random weights)"


def randomise(model: PreTrainedModel) -> None:
    """Initialises weights so that attention matters: distinct scores, and logits with a clear maximum. Under
    the usual initialisation attention is nearly uniform and a wrong mask changes no token."""
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
    pad = model.config.pad_token_id or 0
    if tokenizer is not None:
        text = tokenizer(TEXT)["input_ids"]
        text = text * (2 * PROMPT_LENGTH // len(text) + 1)
        ids = torch.tensor([text[:PROMPT_LENGTH], text[PROMPT_LENGTH : 2 * PROMPT_LENGTH]])
    mask = torch.ones_like(ids)
    ids[1, :PADDING] = pad
    mask[1, :PADDING] = 0
    return {"input_ids": ids, "attention_mask": mask}


def load_tokenizer(path: str | None) -> Any:
    """None for a model without a tokenizer, whose prompts are random tokens."""
    if path is None:
        return None
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, ImportError, KeyError):
        return None


def generate(model: Any, inputs: dict[str, Tensor], new_tokens: int, progress: Progress | None) -> Run:
    """Generates exactly `new_tokens` greedy tokens and shows progress."""
    reset_launch_counts()
    recorder = StepRecorder(progress, launch_counts)
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


def compare(ours: Run, theirs: Run) -> Comparison:
    first: list[int | None] = []
    for mine, expected in zip(ours.tokens, theirs.tokens, strict=True):
        different = [step for step, pair in enumerate(zip(mine, expected, strict=True)) if pair[0] != pair[1]]
        first.append(different[0] if different else None)
    # The logits of a step depend only on earlier tokens.
    steps = min((step + 1 for step in first if step is not None), default=len(ours.logits))
    best_two = theirs.logits.topk(2, dim=-1).values
    comparison = Comparison(
        agree=ours.tokens == theirs.tokens,
        first_difference=first,
        logit_difference=(ours.logits - theirs.logits)[:steps].abs().amax((1, 2)).tolist(),
        margin=(best_two[..., 0] - best_two[..., 1]).amin(1).tolist(),
    )
    if not comparison.agree:
        comparison.problems.append(
            f"tokens differ, first at step {steps} of {len(ours.logits)}, where the best two were "
            f"{comparison.margin[steps - 1]:.2e} apart and the logits {comparison.logit_difference[-1]:.2e}"
        )
    if not ours.logits.isfinite().all():
        comparison.problems.append("logits are not all finite")
    return comparison


def launch_problems(ours: Run, plans: PlanRecorder) -> list[str]:
    """Checks that every planned pass was launched, and that both prefill (the prompt) and decode (every
    further token) ran."""
    launched = total_launches(ours)
    expected = ["fattn_prefill"] + ["fattn_decode"] * (len(ours.launches) > 1)
    ran = {kernel for kernel, count in launched.items() if count}
    problems = [
        f"{kernel} was planned {count} times and launched {launched.get(kernel, 0)} times"
        for kernel, count in plans.kernels.items()
        if launched.get(kernel, 0) != count
    ]
    missing = [name for name in expected if not any(kernel.startswith(name) for kernel in ran)]
    return problems + [f"{name} did not run" for name in missing]


def total_launches(run: Run) -> dict[str, int]:
    kernels = dict.fromkeys(kernel for step in run.launches for kernel in step)
    return {kernel: sum(step.get(kernel, 0) for step in run.launches) for kernel in kernels}


def print_verdict(ours: Run, comparison: Comparison) -> None:
    print()
    for problem in comparison.problems:
        print(f"FAILED: {problem}")
    if not comparison.problems:
        print(f"OK: {sum(map(len, ours.tokens))} tokens agree exactly")


def print_text(ours: Run, theirs: Run, tokenizer: Any) -> None:
    for row, (mine, expected) in enumerate(zip(ours.tokens, theirs.tokens, strict=True)):
        print(f"\nsequence {row}   {len(set(mine))} different tokens among {len(mine)}")
        print(f"  fattn      {_text(mine, tokenizer)}")
        print(f"  eager      {'the same' if mine == expected else _text(expected, tokenizer)}")


def _text(tokens: list[int], tokenizer: Any) -> str:
    return " ".join(map(str, tokens)) if tokenizer is None else repr(tokenizer.decode(tokens))


def print_facts(ours: Run, comparison: Comparison, on_cpu: Comparison, plans: PlanRecorder) -> None:
    print(f"\ndevice       {plans.device_name}")
    worst, closest = max(comparison.logit_difference), min(comparison.margin)
    print(f"logits       differ by at most {worst:.2e}; the best two tokens are at least {closest:.2e} apart")
    tokens = "chooses the same tokens" if on_cpu.agree else "chooses other tokens"
    print(f"eager on CPU {tokens}; logits differ by at most {max(on_cpu.logit_difference):.2e} (not judged)")
    launches = (f"{count} x {kernel}" for kernel, count in total_launches(ours).items())
    print(f"launches     {', '.join(launches)}")


def print_times(ours: Run, speed: demo_speed.Comparison, compiled: str) -> None:
    print(f"first run    {sum(ours.seconds):.1f} s; its first step took {ours.seconds[0]:.1f} s")
    print(f"compiled     {compiled}; only the first run waits for this")
    print("\n".join(speed.lines))


def print_plans(plans: PlanRecorder, verbose: bool) -> None:
    for number, plan in enumerate(plans.distinct):
        label = "" if number else "plans"
        print(f"{label:<13}{plan.calls:3} x fattn.{plan.first.op}: {plan.summary}")
    if verbose:
        for plan in plans.distinct:
            print(f"\n{plan.first.details}\n  calls        {plan.calls}")
        print()
    elif plans.distinct:
        print(f"{'':<13}--verbose prints them whole")


def write_result(
    ours: Run,
    theirs: Run,
    comparison: Comparison,
    on_cpu: Comparison,
    plans: PlanRecorder,
    description: str,
    speed: demo_speed.Comparison,
) -> None:
    report = {
        "device": plans.distinct[0].first.data["device"] if plans.distinct else None,
        "model": description,
        "versions": {
            "torch_fattn": VERSION,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "prompt_length": PROMPT_LENGTH,
        "agree": comparison.agree,
        "problems": comparison.problems,
        "tokens": {"fattn": ours.tokens, "eager": theirs.tokens},
        "largest_logit_difference": max(comparison.logit_difference),
        "logit_difference_per_step": comparison.logit_difference,
        "margin_per_step": comparison.margin,
        "eager_on_cpu": {"agree": on_cpu.agree, "logit_difference": max(on_cpu.logit_difference)},
        "launches": total_launches(ours),
        "launches_per_step": ours.launches,
        "seconds_per_step": {"fattn": ours.seconds, "eager": theirs.seconds},
        "speed": speed.data,
        "plans": [{"calls": plan.calls, "first": plan.first.data} for plan in plans.distinct],
    }
    (OUTPUT / "demo.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    draw(report, OUTPUT / "demo.png")
    print(f"written      {OUTPUT / 'demo.json'}, {OUTPUT / 'demo.png'}")
