"""Expresses a mask as the operators' options: causality, a window, and a prefix that every row sees."""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple

from .tracing import Expression, is_linear, parts_of

_MAX_BOXES, _MAX_NUMBER = 64, 2**30  # larger numbers may overflow in torch


class Box(NamedTuple):
    """The pairs with `least <= kv_idx - q_idx <= most` and `first <= kv_idx <= last`."""

    least: float = -inf
    most: float = inf
    first: float = -inf
    last: float = inf


def meet(some: list[Box], others: list[Box]) -> list[Box]:
    """The intersection of two unions of boxes."""
    both = [
        Box(max(a.least, b.least), min(a.most, b.most), max(a.first, b.first), min(a.last, b.last))
        for a in some
        for b in others
    ]
    return [box for box in both if box.least <= box.most and box.first <= box.last]


def boxes_of(value: Any, wanted: bool = True) -> list[Box] | None:
    """Boxes whose union is the set of pairs where a bool expression is `wanted`; None unless it consists of
    comparisons of `kv_idx - q_idx` or `kv_idx` with integers."""
    if not isinstance(value, Expression):
        return None
    name, arguments = value.name, value.arguments
    if name in ("new_ones", "new_zeros"):  # the initial value in and_masks and or_masks
        return [Box()] if (name == "new_ones") == wanted else []
    if value.keywords:
        return None
    if name in ("invert", "logical_not"):
        return boxes_of(arguments[0], not wanted)
    if len(arguments) != 2:
        return None
    if name in ("and", "or", "logical_and", "logical_or"):
        some, others = (boxes_of(each, wanted) for each in arguments)
        if some is None or others is None or len(some) * len(others) > _MAX_BOXES:
            return None
        return meet(some, others) if name.endswith("and") == wanted else some + others
    if name in ("ge", "gt", "le", "lt"):
        smaller, larger = arguments if name[0] == "l" else arguments[::-1]
        or_equal = name[1] == "e"
        return _ordered(smaller, larger, or_equal) if wanted else _ordered(larger, smaller, not or_equal)
    return None


def _ordered(smaller: Any, larger: Any, or_equal: bool) -> list[Box] | None:
    """The pairs with `smaller <= larger`, or `<`. `abs(x)` is max(x, -x)."""
    found = [Box()]
    for one in _sides(smaller):
        some: list[Box] = []
        for other in _sides(larger):
            q, k, number = (other.get(part, inf) - one.get(part, inf) for part in ("q_idx", "kv_idx", 1))
            if not all(isinstance(each, int) for each in (q, k, number)) or abs(number) > _MAX_NUMBER:
                return None
            least = (0 if or_equal else 1) - number  # of q * q_idx + k * kv_idx
            boxes = {
                (-1, 1): Box(least=least),
                (1, -1): Box(most=-least),
                (0, 1): Box(first=least),
                (0, -1): Box(last=-least),
            }
            if (q, k) not in boxes:
                return None
            some.append(boxes[q, k])
        found = meet(found, some)
    return found


def _sides(value: Any) -> list[dict[Any, Any]]:
    """The linear forms in the indices of a value; empty if it is not linear."""
    is_distance = isinstance(value, Expression) and value.name == "abs" and not value.keywords
    found = parts_of(value.arguments[0] if is_distance else value)
    zeros = {"q_idx": 0, "kv_idx": 0, 1: 0}
    parts = zeros | found[0] if is_linear(found) else {}
    return [parts, {part: -factor for part, factor in parts.items()}] if is_distance else [parts]


def options_of(boxes: list[Box] | None, rows: int, keys: int) -> dict[str, Any] | None:
    """The options that hide all pairs outside the union of these boxes; None if no options do."""
    everything = Box(1 - rows, keys - 1, 0, keys - 1)
    some = {
        Box(*(none if own == end else own for own, end, none in zip(box, everything, Box(), strict=True)))
        for box in meet(boxes or [], [everything])
    }
    some = {box for box in some if not any(box != other and meet([box], [other]) == [box] for other in some)}
    windows = [box for box in some if box.first == -inf and box.last == inf]
    prefixes = [box for box in some if box.first == box.least == -inf and box.last < inf]
    if len(windows) != 1 or len(prefixes) > 1 or len(some) != len(windows) + len(prefixes):
        return None
    left, right = -windows[0].least, windows[0].most
    is_causal = right == 0 and all(box.most == 0 for box in prefixes)
    if left < 0 or right < 0 or (not is_causal and any(box.most < inf for box in prefixes)):
        return None
    options: dict[str, Any] = {"is_causal": is_causal}
    if left < inf:
        options["window_left"] = left
    if right < inf and not is_causal:
        options["window_right"] = right
    if prefixes:
        options["sink_tokens"] = int(prefixes[0].last) + 1
    return options
