"""Chooses timed sizes that gain more than the noise and have one summation order for all lengths, and the
calls to route to torch's own attention. Pure functions from times to rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import geometric_mean

from .candidates import SHORT_PREFILL, Sizes, Subject, order_of
from .tuned_file import TunedRoute, TunedRow

LEAST_GAIN = 0.03
# The range that each timed length represents: rows of a prefill or of training, from a tile of torch's kernel
# up, and keys of a decode.
ROWS: tuple[tuple[int, int | None], ...] = ((64, SHORT_PREFILL), (SHORT_PREFILL + 1, None))
SCOPES = {"prefill": ROWS, "decode": ((1, 4096), (4097, None)), "training": ROWS}

Seconds = Mapping[int, float]  # seconds of a call by length index


@dataclass(frozen=True)
class Timed:
    """Times of one subject: the built-in sizes twice, and every candidate that ran at every length."""

    base: Seconds
    base_again: Seconds
    base_sizes: Sizes | None  # None if unknown (decode)
    candidates: Mapping[Sizes, Seconds]

    @property
    def noise(self) -> float:
        """The relative difference between two measurements of the same sizes."""
        return max(abs(self.base_again[i] / self.base[i] - 1) for i in self.base)


def choose(subject: Subject, timed: Timed) -> list[TunedRow]:
    """The rows of this subject; empty if no candidate beats the built-in sizes."""
    lengths = sorted(timed.base)
    least_gain = max(LEAST_GAIN, 2 * timed.noise)
    ratios = {
        sizes: [seconds[i] / timed.base[i] for i in lengths] for sizes, seconds in timed.candidates.items()
    }
    if timed.base_sizes is not None:
        ratios[timed.base_sizes] = [1.0 for _ in lengths]
    groups: dict[Sizes, list[Sizes]] = {}
    for sizes in ratios:
        groups.setdefault(order_of(subject.kernel, sizes), []).append(sizes)

    best: tuple[float, list[Sizes]] = (1.0, [])
    for members in groups.values():
        chosen = [_best_at(i, members, ratios, timed.base_sizes, least_gain) for i in range(len(lengths))]
        gains = [ratios[sizes][i] for i, sizes in enumerate(chosen)]
        slower = any(ratio > 1 + timed.noise for ratio in gains)
        cost = geometric_mean(gains)
        if not slower and cost < best[0]:
            best = (cost, chosen)
    cost, chosen = best
    gained = [ratios[sizes][i] for i, sizes in enumerate(chosen)]
    if not chosen or min(gained) > 1 - least_gain:
        return []
    if len(set(chosen)) == 1:
        return [subject.row(chosen[0], None, round(1 / cost, 3))]
    last = len(chosen) - 1
    return [
        subject.row(sizes, None if i == last else SHORT_PREFILL, round(1 / gained[i], 3))
        for i, sizes in enumerate(chosen)
    ]


def _best_at(
    i: int,
    members: list[Sizes],
    ratios: Mapping[Sizes, list[float]],
    base: Sizes | None,
    least_gain: float,
) -> Sizes:
    """The fastest sizes at a length with the given summation order; the built-in ones if none gains."""
    fastest = min(members, key=lambda sizes: ratios[sizes][i])
    return base if base in members and ratios[fastest][i] > 1 - least_gain else fastest


def confirmed(rows: list[TunedRow], base: Seconds, tuned: Seconds, noise: float) -> list[TunedRow]:
    """The rows with their gains in a second timing; empty if they do not gain again, since the fastest of
    many candidates may be a fluke."""
    lengths = sorted(base)
    gains = [base[i] / tuned[i] for i in lengths]
    if max(gains) < 1 / (1 - LEAST_GAIN) or min(gains) < 1 - noise:
        return []
    if len(rows) == 1:
        gains = [geometric_mean(gains)]
    return [replace(row, gain=round(gain, 3)) for row, gain in zip(rows, gains, strict=True)]


def faster_on_tensors(row: TunedRow, base: Seconds, tensors: Seconds, noise: float) -> list[TunedRow]:
    """The row that enables tensor operations; empty unless they gain at every length, since they have their
    own summation order and no length may become slower."""
    gains = [base[i] / tensors[i] for i in sorted(base)]
    if min(gains) < 1 / (1 - max(LEAST_GAIN, 2 * noise)):
        return []
    return [replace(row, gain=round(geometric_mean(gains), 3))]


def against_torch(
    subject: Subject,
    ours: Seconds,
    torchs: Seconds,
    built_in: Mapping[int, str],
    noise: float,
    versions: tuple[str, str],
) -> list[TunedRoute]:
    """Routes where the implementation that is faster, by more than the noise, differs from the built-in
    table's, if it has one. `versions` are those of macOS and torch."""
    least_gain = max(LEAST_GAIN, 2 * noise)
    routes = []
    for i, scope in zip(sorted(ours), SCOPES[subject.op], strict=True):
        fast, slow, to = min((ours[i], torchs[i], "fattn"), (torchs[i], ours[i], "torch"))
        if fast <= slow * (1 - least_gain) and to != built_in.get(i):
            gain = round(slow / fast, 3)
            what = (subject.routed, subject.dtype, subject.dim)
            routes.append(TunedRoute(*what, *scope, to, *versions, gain))
    return routes
