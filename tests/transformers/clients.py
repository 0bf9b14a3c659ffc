"""What clients ask a server of the tiny checkpoint."""

from __future__ import annotations

import random

from tests.transformers.tiny_models import VOCAB

WORDS = [f"w{n}" for n in range(VOCAB - 3)]  # of the checkpoint's tokenizer
CLIENTS = 32
NEW_TOKENS = 8
PATIENCE = 60.0  # seconds, for any one answer
SYSTEM = [random.Random(0).sample(WORDS, 16), random.Random(1).sample(WORDS, 16)]  # two blocks each


def prompt(number: int) -> str:
    """One of two system prompts, and words of its own."""
    draw = random.Random(number)
    return " ".join(SYSTEM[number % 2] + draw.choices(WORDS, k=draw.randint(1, 9)))
