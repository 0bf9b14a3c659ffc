"""Reads what Mesa's compiler prints: blocks of instructions, loops, registers, offsets in the program."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

# Kinds of instructions, by what they cost (issue_cycles) and wait for (scheduler.py).
KINDS = {
    "product": "simd_matrix_fmadd",
    "local_load": "local_load",
    "local_store": "local_store",
    "device_load": "device_load",
    "device_store": "device_store",
    "spill": "stack_store",
    "fill": "stack_load",
    "shuffle": "shuffle_xor shuffle quad_shuffle_xor icmp_ballot fcmp_ballot "
    "simd_reduce simd_prefix quad_reduce",
    "transcendental": "exp2 log2 rcp rsqrt srsqrt",
    "float": "ffma fadd fmul hfma hadd hmul fcmpsel",
    "move": "mov mov_imm",
    "int": "iadd and or xor not bitop icmpsel icmp fcmp",
    "slow_int": "imad bfi bfeil extr asr intl bitrev popcount ffs convert floor",
    "wait": "wait",
    "barrier": "threadgroup_barrier memory_barrier",
    "uniform": "uniform_store get_sr",
}
_KIND_OF = {opcode: kind for kind, opcodes in KINDS.items() for opcode in opcodes.split()}
# Cycles of one scheduler that an instruction of a simdgroup occupies (philipturner/metal-benchmarks, M1).
# Instructions of the complex pipe take four cycles there, beside the others.
_PRODUCT_CYCLES, _SHUFFLE_CYCLES, _COMPLEX_CYCLES = 18, 2, 4
_COMPLEX = ("slow_int", "transcendental")


@dataclass
class Instruction:
    text: str

    @property
    def opcode(self) -> str:
        return self.text.split(" = ", 1)[-1].split()[0].rstrip(",")

    @property
    def kind(self) -> str:
        """Copies and swaps of registers are moves, whatever instruction makes them."""
        if re.search(r"bitop \S+, #0, #a$", self.text):
            return "move"
        if self.opcode == "xor" or (self.opcode == "bitop" and self.text.endswith("#6")):
            operands = re.match(r"(\S+) = \S+ (\S+), (\S+)", self.text)
            if operands and operands[1] in (operands[2], operands[3].rstrip(",")):
                return "move"
        return _KIND_OF.get(self.opcode, "control")

    @property
    def accessed_bytes(self) -> int:
        """Bytes that a lane loads or stores."""
        if self.kind not in ("local_load", "local_store", "device_load", "device_store", "spill", "fill"):
            return 0
        components = max((len(mask) for mask in re.findall(r", ([xyzw]+)", self.text)), default=1)
        data = self.text.split(" = ")[0] if " = " in self.text else self.text.split()[1]
        return components * (2 if re.search(r"r\d+[lh]", data) else 4)


@dataclass
class Block:
    index: int
    instructions: list[Instruction] = field(default_factory=list)
    successors: list[int] = field(default_factory=list)
    needed: int = 0  # half registers, before spilling
    code_bytes: int = 0

    @property
    def kinds(self) -> Counter[str]:
        return Counter(one.kind for one in self.instructions)


@dataclass(frozen=True)
class Loop:
    """The blocks from the target of a backward branch to the branch."""

    blocks: tuple[Block, ...]
    depth: int  # 1: outermost

    @property
    def kinds(self) -> Counter[str]:
        return sum((block.kinds for block in self.blocks), Counter())

    @property
    def instructions(self) -> list[Instruction]:
        return [one for block in self.blocks for one in block.instructions]

    @property
    def needed(self) -> int:
        return max(block.needed for block in self.blocks)

    @property
    def code_bytes(self) -> int:
        return sum(block.code_bytes for block in self.blocks)


def read(text: str, code_bytes: int) -> list[Block]:
    """The blocks of the main program after register allocation.

    Mesa prints the program before scheduling, after it and at the end, and then the preamble likewise, which
    runs once for a threadgroup and is not counted.
    """
    programs: list[dict[int, Block]] = []
    current: Block | None = None
    for line in text.splitlines():
        if match := re.fullmatch(r"block(\d+) \{", line):
            if match[1] == "0":
                programs.append({})
            current = programs[-1].setdefault(int(match[1]), Block(int(match[1])))
        elif current is not None and line.startswith("}"):
            current.successors = [int(n) for n in re.findall(r"block(\d+)", line.split("from")[0])]
            current = None
        elif current is not None and line.startswith("   "):
            current.instructions.append(Instruction(line.strip()))
    blocks = programs[2]
    for index, needed in re.findall(r"^DEMAND: block(\d+) (\d+) at", text, re.M):
        if (block := blocks.get(int(index))) and not block.needed:  # later numbers are those after spilling
            block.needed = int(needed)
    _set_sizes(blocks, text, code_bytes)
    return list(blocks.values())


def _set_sizes(blocks: dict[int, Block], text: str, code_bytes: int) -> None:
    tables: list[dict[int, int]] = []
    for index, offset in re.findall(r"^BLOCK-OFFSET: (\d+) (\d+)$", text, re.M):
        if index == "0":
            tables.append({})
        tables[-1][int(index)] = int(offset)
    offsets = next(table for table in tables if table.keys() == blocks.keys())
    order = sorted(offsets, key=lambda index: offsets[index])
    ends = [*(offsets[index] for index in order[1:]), max(code_bytes, offsets[order[-1]])]
    for index, end in zip(order, ends, strict=True):
        blocks[index].code_bytes = end - offsets[index]


def loops(blocks: list[Block]) -> list[Loop]:
    """In the order of the program, outer loops before those within."""
    last: dict[int, int] = {}
    for block in blocks:
        for target in block.successors:
            if target <= block.index:
                last[target] = max(last.get(target, 0), block.index)
    ranges = sorted(last.items(), key=lambda one: (one[0], -one[1]))
    return [
        Loop(
            tuple(block for block in blocks if first <= block.index <= end),
            sum(outer <= first and end <= outer_end for outer, outer_end in ranges),
        )
        for first, end in ranges
    ]


def hottest(found: list[Loop]) -> Loop | None:
    """The smallest loop around the block with most products; without products, around the largest block that
    computes an exponential or reads memory."""
    blocks = {block.index: block for loop in found for block in loop.blocks}
    if not blocks:
        return None

    def weight(block: Block) -> tuple[int, ...]:
        kinds = block.kinds
        return (
            kinds["product"],
            kinds["transcendental"] > 0,
            kinds["device_load"] > 0,
            len(block.instructions),
        )

    hot = max(blocks.values(), key=weight)
    around = [loop for loop in found if hot in loop.blocks]
    return min(around, key=lambda loop: len(loop.blocks))


@dataclass(frozen=True, order=True)
class _Path:
    cycles: tuple[int, int] = (0, 0)  # of products, and others
    blocks: tuple[Block, ...] = field(default=(), compare=False)

    def __add__(self, other: _Path) -> _Path:
        (products, rest), (more_products, more_rest) = self.cycles, other.cycles
        return _Path((products + more_products, rest + more_rest), self.blocks + other.blocks)


def steps(loop: Loop, within: set[int]) -> list[list[Block]]:
    """The longest paths of one iteration: the one with most products, and the best that goes through products
    which the first leaves out, if there are any. `within`: blocks of inner loops, which a path avoids if it
    can. Both sides of a condition run if lanes differ: elsewhere the longer one counts."""

    def alone(block: Block) -> _Path:
        products, rest = issue_cycles(block.kinds)
        return _Path((products, -rest if block.index in within else rest), (block,))

    head = loop.blocks[0].index
    before = {head: _Path()}  # the best path up to a block, and from it on
    after: dict[int, _Path] = {}
    for block in loop.blocks:
        if block.index in before:
            path = before[block.index] + alone(block)
            for target in block.successors:
                if target > block.index:
                    before[target] = max(before.get(target, path), path)
    for block in reversed(loop.blocks):
        ways = [_Path() if target == head else after.get(target) for target in block.successors]
        if known := [way for way in ways if way is not None]:
            after[block.index] = alone(block) + max(known)
    if head not in after:
        return []
    first = after[head]
    others = [
        before[block.index] + after[block.index]
        for block in loop.blocks
        if block.kinds["product"]
        and all(block is not one for one in first.blocks)
        and {block.index} <= before.keys() & after.keys()
    ]
    return [list(path.blocks) for path in (first, *([max(others)] if others else []))]


def issue_cycles(kinds: Counter[str]) -> tuple[int, int]:
    """Cycles in which a scheduler issues the products, and everything else."""
    products, shuffles = kinds["product"], kinds["shuffle"]
    rest = sum(kinds.values()) - products - shuffles + _SHUFFLE_CYCLES * shuffles
    complex_pipe = _COMPLEX_CYCLES * sum(kinds[kind] for kind in _COMPLEX)
    return _PRODUCT_CYCLES * products, max(rest, complex_pipe)
