"""Names of MSL's types and address spaces that the passes need to recognise."""

from __future__ import annotations

ADDRESS_SPACES = {"device", "threadgroup", "constant", "thread"}

SCALARS = (
    "bool char uchar short ushort int uint long ulong half bfloat float "
    "int8_t uint8_t int16_t uint16_t int32_t uint32_t int64_t uint64_t size_t ptrdiff_t"
).split()
_VECTOR_ELEMENTS = "bool char uchar short ushort int uint long ulong half bfloat float".split()

VECTORS = {element + width for element in _VECTOR_ELEMENTS for width in "234"}
PACKED_VECTORS = {"packed_" + element + width for element in _VECTOR_ELEMENTS[1:] for width in "234"}
BUILTIN_TYPES = set(SCALARS) | VECTORS | PACKED_VECTORS | {"void", "unsigned", "signed"}
