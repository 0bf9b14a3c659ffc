"""Sizes and alignments of all types, compared with the specification's tables."""

from __future__ import annotations

import numpy as np
from elementwise import evaluate

SCALARS = {
    "bool": 1, "char": 1, "uchar": 1, "int8_t": 1, "uint8_t": 1, "short": 2, "ushort": 2, "int16_t": 2,
    "uint16_t": 2, "half": 2, "bfloat": 2, "int": 4, "uint": 4, "int32_t": 4, "uint32_t": 4, "float": 4,
    "long": 8, "ulong": 8, "int64_t": 8, "uint64_t": 8, "size_t": 8, "ptrdiff_t": 8,
}  # fmt: skip
ELEMENTS = "bool char uchar short ushort int uint long ulong half bfloat float".split()


def layouts() -> dict[str, tuple[int, int]]:
    """{type: its size, its alignment}."""
    table = {name: (size, size) for name, size in SCALARS.items()}
    for element in ELEMENTS:
        for width in (2, 3, 4):
            size = SCALARS[element] * (4 if width == 3 else width)
            table[f"{element}{width}"] = (size, size)
            if element != "bool":
                table[f"packed_{element}{width}"] = (SCALARS[element] * width, SCALARS[element])
    return table


def test_sizes_and_alignments() -> None:
    table = layouts()
    texts = [f"sizeof({name}) * 100 + alignof({name})" for name in table]
    got = evaluate(dict.fromkeys(texts, "int"), x=np.zeros(1, np.int32))
    wrong = {
        name: int(got[text][0])
        for text, (name, (size, alignment)) in zip(texts, table.items(), strict=True)
        if got[text][0] != size * 100 + alignment
    }
    assert not wrong


def test_members_are_laid_out_by_their_alignment() -> None:
    body = """
    struct Mixed { char a; float3 b; packed_float3 c; half d; long e; };
    struct Packed { packed_half3 a; packed_char3 b; uchar c; };
    """
    texts = {
        "sizeof(Mixed)": 64,
        "sizeof(Packed)": 10,
        "alignof(Mixed)": 16,
        "alignof(Packed)": 2,
        "offset_of_d()": 44,
    }
    body += "int offset_of_d() { Mixed m; return int((thread char*)&m.d - (thread char*)&m); }"
    got = evaluate(dict.fromkeys(texts, "int"), body=body, x=np.zeros(1, np.int32))
    assert {text: int(values[0]) for text, values in got.items()} == texts
