"""Refusals of torch_fattn.patterns; see __init__.py."""

from __future__ import annotations

from tests.helpers.public_calls import heads
from tests.helpers.refusals import Refusal
from torch_fattn import patterns

SCORES, ROWS, ODD = heads(1, 2, 3, 4), heads(1, 4, 40, 16), heads(1, 3, 40, 16)

REFUSALS = [
    Refusal("pass a number above 0 and at most 1", lambda: patterns.top_blocks(SCORES, 30)),
    Refusal("pass a number above 0 and at most 1", lambda: patterns.mass_blocks(SCORES, 0.5, 0.0)),
    Refusal("pass two positive sizes", lambda: patterns.pooled_scores(ROWS, ROWS, (0, 128))),
    Refusal("use blocks of 64 or 128", lambda: patterns.Pattern(0.5, (128, 16))),
    Refusal("where Hq is a multiple of Hkv", lambda: patterns.pooled_scores(ROWS, ODD)),
    Refusal("pass positive sizes of at most", lambda: patterns.neighborhood((4, 0), (1, 1))),
    Refusal(
        "pass 2 sizes of 0 to",
        lambda: patterns.neighborhood((4, 6), (1,)),
        lambda: patterns.neighborhood((4, 6), (1, 0)),
    ),
    Refusal("pass 2 sizes of 1 to", lambda: patterns.tile_order((4, 6), (2, 0))),
    Refusal("pass 0 to 4194304", lambda: patterns.neighborhood((4, 6), (1, 1), first=-1)),
    Refusal(
        "pass tile_order of the same grid",
        lambda: patterns.neighborhood((4, 6), (1, 1), order=patterns.tile_order((4, 5), (2, 2))),
        lambda: patterns.neighborhood((4, 6), (1, 1), order=patterns.tile_order((4, 6), (2, 2))),
    ),
]
