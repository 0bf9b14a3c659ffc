"""The pictures in docs/: the keys that each query row sees under an option, and their weights.

A picture is a call whose values are the columns of the identity matrix, so its result is the matrix of
weights. The site draws the weights of `torch_fattn.reference`; tests/docs/test_pictures.py compares the
kernels' weights with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import torch
from torch import Tensor

from torch_fattn import reference

CELL, GAP, TOP, LEFT = 20, 6, 46, 78
INK, MUTED, HIDDEN, SEEN, LINE = "#1b1f24", "#67707b", "#eceff2", "#3949ab", "#c4cad1"
FONT = "font-family='system-ui, sans-serif'"
Groups = Sequence[tuple[str, int]]  # label of neighbouring columns or rows, and their number
Operator = Callable[..., Any]


@dataclass(frozen=True)
class Picture:
    """A call, and the labels of its rows and columns."""

    caption: str
    op: str
    operands: tuple[Tensor, ...]
    options: dict[str, Any]
    rows: list[str]
    columns: list[str]
    row_groups: Groups = field(default_factory=list)
    column_groups: Groups = field(default_factory=list)

    def weights(self, operator: Operator, device: str = "cpu") -> Tensor:
        """Returns `[rows, columns]` from the given operator of the reference or of the kernels."""
        moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in self.options.items()}
        out = operator(*(t.to(device) for t in self.operands), **moved)
        out = (out[0] if isinstance(out, tuple) else out).cpu().double()
        return out.reshape(len(self.rows), -1)[:, : len(self.columns)]

    def exact(self) -> Tensor:
        return self.weights(getattr(reference, self.op))

    def svg(self) -> str:
        weights = self.exact()
        rows, columns = list(self.rows), list(self.columns)
        column_groups = list(self.column_groups) or [("key", len(columns))]
        if "sinks" in self.options:  # the sink has the rest of the weight
            weights = torch.cat((weights, 1 - weights.sum(-1, keepdim=True)), dim=1)
            columns.append("")
            column_groups.append(("sink", 1))
        row_groups = self.row_groups or [("position", len(rows))]
        return draw(weights, rows, columns, row_groups, column_groups, self.caption)


def draw(
    weights: Tensor,
    rows: list[str],
    columns: list[str],
    row_groups: Groups,
    column_groups: Groups,
    title: str,
) -> str:
    """Draws a grid of cells: grey is hidden, and a darker blue is a larger weight."""
    across, down = _places(column_groups, LEFT), _places(row_groups, TOP)
    width, height = across[-1] + CELL + 8, down[-1] + CELL + 8
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' "
        f"viewBox='0 0 {width} {height}' {FONT} font-size='11'>",
        f"<title>{escape(title)}</title>",
        f"<rect width='{width}' height='{height}' rx='6' fill='#ffffff'/>",
    ]
    for name, x in zip(columns, across, strict=True):
        parts.append(_text(x + CELL / 2, TOP - 6, name, MUTED))
    for name, y in zip(rows, down, strict=True):
        parts.append(_text(LEFT - 6, y + CELL / 2 + 4, name, MUTED, "end"))
    first = 0
    for name, count in column_groups:
        parts.append(_text((across[first] + across[first + count - 1] + CELL) / 2, 16, name, INK))
        first += count
    first = 0
    for name, count in row_groups:
        middle = (down[first] + down[first + count - 1] + CELL) / 2
        parts.append(_text(8, middle + 4, name, INK, "start"))
        first += count
    largest = weights.max().item() or 1.0
    for row, y in zip(weights.tolist(), down, strict=True):
        for weight, x in zip(row, across, strict=True):
            cell = f"<rect x='{x}' y='{y}' width='{CELL - 2}' height='{CELL - 2}' rx='3' "
            if weight <= 1e-9:
                parts.append(f"{cell}fill='{HIDDEN}'/>")
            else:
                opacity = 0.12 + 0.88 * weight / largest
                parts.append(f"{cell}fill='{SEEN}' fill-opacity='{opacity:.2f}' stroke='{SEEN}'/>")
    return "\n".join((*parts, "</svg>")) + "\n"


def _places(groups: Groups, start: int) -> list[int]:
    places: list[int] = []
    for number, (_, count) in enumerate(groups):
        places += [start + GAP * number + CELL * (len(places) + i) for i in range(count)]
    return places


def _text(x: float, y: float, text: str, colour: str, anchor: str = "middle") -> str:
    return f"<text x='{x:g}' y='{y:g}' fill='{colour}' text-anchor='{anchor}'>{escape(text)}</text>"


# ---- operands: head dim 8, one head, a different value for each key


def _values(columns: int) -> Tensor:
    return torch.eye(columns, -(-columns // 8) * 8)


def _queries(*shape: int) -> Tensor:
    """Zero queries: all scores are 0, so visible keys have equal weights."""
    return torch.zeros(*shape, 8)


def _numbers(count: int, first: int = 0) -> list[str]:
    return [str(first + i) for i in range(count)]


def _prefill(caption: str, q_len: int = 6, kv_len: int = 10, **options: Any) -> Picture:
    operands = (_queries(1, 1, q_len), torch.zeros(1, 1, kv_len, 8), _values(kv_len)[None, None])
    first = options.get("q_offset", kv_len - q_len)
    rows = _numbers(q_len, first)
    return Picture(f"prefill({caption})", "prefill", operands, options, rows, _numbers(kv_len))


def _scored(caption: str, **options: Any) -> Picture:
    """Scores that grow from key to key, more steeply in later rows."""
    query, key = _queries(1, 1, 4), torch.zeros(1, 1, 10, 8)
    query[0, 0, :, 0], key[0, 0, :, 0] = torch.tensor([0.0, 1.0, 2.0, 4.0]), torch.linspace(-1, 1, 10)
    operands, options = (query, key, _values(10)[None, None]), options | {"scale": 1.0}
    names = ["x 0", "x 1", "x 2", "x 4"]
    groups = [("scores", 4)]
    return Picture(f"prefill({caption})", "prefill", operands, options, names, _numbers(10), groups)


def _decode(caption: str, seq_lens: list[int], rows: int, capacity: int, **options: Any) -> Picture:
    batch = len(seq_lens)
    key, value = torch.zeros(batch, 1, capacity, 8), _values(capacity).expand(batch, 1, -1, -1)
    operands = (_queries(batch, 1, rows), key, value, torch.tensor(seq_lens, dtype=torch.int32))
    names = [str(length - rows + i) for length in seq_lens for i in range(rows)]
    groups = [(f"seq {b}", rows) for b in range(batch)] if batch > 1 else []
    return Picture(f"decode({caption})", "decode", operands, options, names, _numbers(capacity), groups)


POOL, BLOCK = 5, 4
TABLES = torch.tensor([[3, 0, 4], [1, -1, -1]], dtype=torch.int32)
LENGTHS = torch.tensor([10, 3], dtype=torch.int32)


def _pool() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two sequences: blocks 3, 0 and 4 of the pool, and block 1; block 2 is free."""
    value = _values(POOL * BLOCK).reshape(POOL, BLOCK, 1, -1)
    return torch.zeros(POOL, BLOCK, 1, 8), value, TABLES, LENGTHS


def _slots() -> tuple[list[str], Groups]:
    """Returns the position in each slot of the pool, and the blocks."""
    names = [""] * (POOL * BLOCK)
    for table, length in zip(TABLES.tolist(), LENGTHS.tolist(), strict=True):
        for position in range(length):
            names[BLOCK * table[position // BLOCK] + position % BLOCK] = str(position)
    return names, [(f"block {block}", BLOCK) for block in range(POOL)]


def _paged_decode() -> Picture:
    names, blocks = _slots()
    caption = "paged_decode(query, key_cache, value_cache, block_tables, seq_lens)"
    operands = (_queries(2, 1, 1), *_pool())
    rows = [str(length - 1) for length in LENGTHS.tolist()]
    groups = [("seq 0", 1), ("seq 1", 1)]
    return Picture(caption, "paged_decode", operands, {}, rows, names, groups, blocks)


def _paged_prefill() -> Picture:
    names, blocks = _slots()
    caption = "paged_prefill(query, ..., cu_seqlens_q, max_seqlen_q=4, is_causal=True)"
    starts = torch.tensor([0, 4, 5], dtype=torch.int32)
    operands = (_queries(5, 1), *_pool(), starts)
    groups = [("seq 0", 4), ("seq 1", 1)]
    rows = ["6", "7", "8", "9", "2"]
    options = {"max_seqlen_q": 4, "is_causal": True}
    return Picture(caption, "paged_prefill", operands, options, rows, names, groups, blocks)


def _varlen() -> Picture:
    caption = "varlen_prefill(..., cu_seqlens_q, cu_seqlens_k, is_causal=True)"
    starts = torch.tensor([0, 5, 7, 11], dtype=torch.int32)
    operands = (_queries(11, 1), torch.zeros(11, 1, 8), _values(11)[:, None], starts, starts)
    options = {"max_seqlen_q": 5, "max_seqlen_k": 5, "is_causal": True}
    groups = [("seq 0", 5), ("seq 1", 2), ("seq 2", 4)]
    names = [str(i) for _, count in groups for i in range(count)]
    return Picture(caption, "varlen_prefill", operands, options, names, names, groups, groups)


def _shared_prefix() -> Picture:
    """One decode of three sequences that share their first 8 keys."""
    prefix, suffixes = 8, [3, 1, 2]
    starts = [prefix, prefix + 3, prefix + 4]
    value = torch.zeros(3, 1, prefix + 3, 16)
    for b, (start, count) in enumerate(zip(starts, suffixes, strict=True)):
        places = [*range(prefix), *range(start, start + count)]
        value[b, 0, range(len(places)), places] = 1.0
    operands = (_queries(3, 1, 1), torch.zeros(3, 1, prefix + 3, 8), value)
    lengths = torch.tensor([prefix + count for count in suffixes], dtype=torch.int32)
    columns = [*_numbers(prefix), *(str(prefix + i) for count in suffixes for i in range(count))]
    groups = [("prefix, read once", prefix), *((f"seq {b}", count) for b, count in enumerate(suffixes))]
    caption = "shared_prefix_decode(query, prefix_key, prefix_value, key, value, seq_lens)"
    rows = [str(length - 1) for length in lengths.tolist()]
    row_groups = [(f"seq {b}", 1) for b in range(3)]
    return Picture(caption, "decode", (*operands, lengths), {}, rows, columns, row_groups, groups)


def prefix_mask(q_len: int = 8, prefix: int = 4) -> Tensor:
    """Every row sees the first keys; the others are causal."""
    i, j = torch.arange(q_len)[:, None], torch.arange(q_len)
    return (j < prefix) | (j <= i)


def position_bias(q_len: int = 8) -> Tensor:
    """Nearer keys have larger weights, keys on the left larger ones than on the right; the last key is
    hidden."""
    i, j = torch.arange(q_len)[:, None], torch.arange(q_len)
    bias = -torch.where(j <= i, 0.35 * (i - j), 0.9 * (j - i)).float()
    bias[:, -1] = -torch.inf
    return bias


def draft_tree() -> Tensor:
    """Five drafts: 0 is the root, 1 and 2 follow it, 3 follows 1, 4 follows 2."""
    return torch.tensor([0b00001, 0b00011, 0b00101, 0b01011, 0b10101])


MAP_COLOURS = {"left out": HIDDEN, "no mask read": "#3949ab", "read": "#9fa8da"}


DOCUMENTS = (40, 24, 32)


def documents_mask() -> Tensor:
    """Packed documents; a token sees its own document."""
    document = torch.arange(len(DOCUMENTS)).repeat_interleave(torch.tensor(DOCUMENTS))
    return document[:, None] == document


def map_svg() -> str:
    """Draws the cells of 16 rows and 32 keys that `mask_map` returns for packed documents."""
    cells = reference.mask_map(documents_mask())[0, 0]
    scale, top, left = 3, 28, 56
    size = scale * sum(DOCUMENTS)
    width, height = left + size + 150, top + size + 8
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' "
        f"viewBox='0 0 {width} {height}' {FONT} font-size='11'>",
        "<title>mask_map(attn_mask) of three packed documents</title>",
        f"<rect width='{width}' height='{height}' rx='6' fill='#ffffff'/>",
        _text(left + size / 2, 16, "keys, 32 to a cell", INK),
        _text(8, top + size / 2 - 8, "rows,", INK, "start"),
        _text(8, top + size / 2 + 6, "16 to", INK, "start"),
        _text(8, top + size / 2 + 20, "a cell", INK, "start"),
    ]
    for i, row in enumerate(cells.tolist()):
        for j, cell in enumerate(row):
            colour = list(MAP_COLOURS.values())[{0.0: 0, 2.0: 1}.get(cell, 2)]
            x, y = left + scale * 32 * j, top + scale * 16 * i
            parts.append(f"<rect x='{x}' y='{y}' width='{scale * 32}' height='{scale * 16}' ")
            parts.append(f"fill='{colour}' stroke='#ffffff'/>")
    edge = left
    for document in DOCUMENTS:
        side, y = scale * document, top + edge - left
        parts.append(f"<rect x='{edge}' y='{y}' width='{side}' height='{side}' fill='none' stroke='{INK}'/>")
        edge += side
    for number, (name, colour) in enumerate(MAP_COLOURS.items()):
        x, y = left + size + 14, top + 22 * number
        parts.append(f"<rect x='{x}' y='{y}' width='14' height='14' rx='3' fill='{colour}'/>")
        parts.append(_text(x + 20, y + 11, name, INK, "start"))
    parts.append(_text(left + size + 14, top + 80, "outlined: a document", MUTED, "start"))
    return "\n".join((*parts, "</svg>")) + "\n"


PICTURES: dict[str, Picture] = {
    "full": _prefill("query, key, value"),
    "causal": _prefill("query, key, value, is_causal=True", is_causal=True),
    "top-left": _prefill("..., is_causal=True, q_offset=0", is_causal=True, q_offset=0),
    "chunk": _prefill("..., is_causal=True, q_offset=2", is_causal=True, q_offset=2),
    "window": _prefill("..., is_causal=True, window_left=2", is_causal=True, window_left=2),
    "two-sided": _prefill("..., window_left=2, window_right=1", window_left=2, window_right=1),
    "sink-tokens": _prefill(
        "..., is_causal=True, window_left=2, sink_tokens=2", is_causal=True, window_left=2, sink_tokens=2
    ),
    "sinks": _prefill("..., is_causal=True, sinks=sinks", is_causal=True, sinks=torch.tensor([1.0])),
    "no-softcap": _scored("query, key, value"),
    "softcap": _scored("..., softcap=1.0", softcap=1.0),
    "alibi": _prefill(
        "..., is_causal=True, alibi_slopes=slopes", is_causal=True, alibi_slopes=torch.tensor([0.5])
    ),
    "bool-mask": _prefill("text, text, text, mask", 8, 8, attn_mask=prefix_mask()),
    "additive-mask": _prefill("text, text, text, bias", 8, 8, attn_mask=position_bias()),
    "varlen": _varlen(),
    "decode": _decode("query, key, value, seq_lens", [10, 4, 7], 1, 12),
    "decode-rows": _decode("query, key, value, seq_lens", [10, 4], 3, 12),
    "tree": _decode("..., tree_mask=tree", [10], 5, 10, tree_mask=draft_tree()),
    "paged-decode": _paged_decode(),
    "paged-prefill": _paged_prefill(),
    "shared-prefix": _shared_prefix(),
}


def files() -> dict[str, str]:
    """The path of each picture in docs/, and its content."""
    pictures = {f"pictures/{name}.svg": picture.svg() for name, picture in PICTURES.items()}
    return pictures | {"pictures/mask-map.svg": map_svg()}
