"""Fine-tunes a language model with LoRA adapters, through torch's attention and through torch_fattn's.

    python examples/lora.py [--device mps] [--model FOLDER] [--length 512] [--steps 10]

Without a model it makes a small one with seeded random weights. It prints the losses of both runs, and the
memory at the end of the forward passes, where a training step needs about the most.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from torch_fattn.integrations.transformers import register

SMALL = LlamaConfig(
    vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip


class Adapter(nn.Module):
    """A linear layer that stays as it is, plus a product of two thin matrices that learn."""

    def __init__(self, layer: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False, dtype=layer.weight.dtype)
        self.up = nn.Linear(rank, layer.out_features, bias=False, dtype=layer.weight.dtype)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))  # type: ignore[no-any-return]


def model_with_adapters(folder: str | None, attention: str) -> Any:
    torch.manual_seed(0)
    if folder is None:
        model = AutoModelForCausalLM.from_config(SMALL, attn_implementation=attention)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention)
    model.requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, Adapter(getattr(layer.self_attn, name)))
    return model


def train(model: Any, tokens: Tensor, steps: int) -> tuple[list[float], int]:
    """The losses, and the most memory at the end of a forward pass, in bytes above that of the weights."""
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses, most, before = [], 0, allocated(tokens.device)
    for _ in range(steps):
        loss = model.train()(tokens, labels=tokens, use_cache=False).loss
        most = max(most, allocated(tokens.device) - before)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    return losses, most


def allocated(device: torch.device) -> int:
    return torch.mps.current_allocated_memory() if device.type == "mps" else 0


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune adapters, and compare two kinds of attention.")
    parser.add_argument("--device", default="mps" if torch.backends.mps.is_available() else "cpu")
    parser.add_argument("--model", help="a folder with a model of Llama's architecture")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()

    register()
    for attention in ("sdpa", "fattn"):
        model = model_with_adapters(options.model, attention).to(options.device)
        most = model.config.vocab_size
        tokens = torch.randint(most, (1, options.length), generator=torch.Generator().manual_seed(1))
        losses, kept = train(model, tokens.to(options.device), options.steps)
        memory = f", {kept / 1e6:.1f} MB before the backward" if options.device == "mps" else ""
        print(f"{attention:6} loss {losses[0]:.4f} to {losses[-1]:.4f}{memory}")


if __name__ == "__main__":
    main()
