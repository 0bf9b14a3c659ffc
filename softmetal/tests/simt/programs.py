"""Random structured SIMT programs, as MSL text and as an oracle that runs them lane by lane.

A node of a program writes its MSL (`text`) and executes itself for one lane: a generator that yields a
request (place, operation, operands) for each operation among lanes. The place is the lane's position: the
evaluation order of the enclosing nodes and the iterations of the loops, outermost first. A lane's places only
grow in lexicographic order, so no further lane can reach the smallest place: the lanes at this place take
part.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

Place = tuple[int, ...]
Run = Generator[tuple[Place, str, tuple[int, ...]], int, int]
MASK = 0xFFFFFFFF


class Break(Exception):  # noqa: N818
    pass


class Continue(Exception):  # noqa: N818
    pass


class Return(Exception):  # noqa: N818
    def __init__(self, value: int) -> None:
        self.value = value


@dataclass
class Frame:
    variables: dict[str, int]
    arrays: dict[str, list[int]]
    shared: list[int]  # the threadgroup array


# ---- expressions, all of type uint


@dataclass
class Leaf:
    text: str

    def run(self, frame: Frame, place: Place) -> Run:
        yield from ()
        return int(self.text[:-1]) if self.text.endswith("u") else frame.variables[self.text]


BINARY: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "^": lambda a, b: a ^ b,
    "&": lambda a, b: a & b, "|": lambda a, b: a | b, "<": lambda a, b: a < b, "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b, ">=": lambda a, b: a >= b,
    "%": lambda a, b: a % b, ">>": lambda a, b: a >> (b & 31), "<<": lambda a, b: a << (b & 31),
}  # fmt: skip


@dataclass
class Binary:
    operator: str
    left: Any
    right: Any

    @property
    def text(self) -> str:
        return f"uint({self.left.text} {self.operator} {self.right.text})"

    def run(self, frame: Frame, place: Place) -> Run:
        left = yield from self.left.run(frame, (*place, 0))
        right = yield from self.right.run(frame, (*place, 1))
        return BINARY[self.operator](left, right) & MASK


@dataclass
class Conditional:
    condition: Any
    first: Any
    second: Any

    @property
    def text(self) -> str:
        return f"({self.condition.text} ? {self.first.text} : {self.second.text})"

    def run(self, frame: Frame, place: Place) -> Run:
        if (yield from self.condition.run(frame, (*place, 0))):
            return (yield from self.first.run(frame, (*place, 1)))
        return (yield from self.second.run(frame, (*place, 2)))


@dataclass
class ShortCircuit:
    operator: str  # && or ||
    left: Any
    right: Any

    @property
    def text(self) -> str:
        return f"uint({self.left.text} {self.operator} {self.right.text})"

    def run(self, frame: Frame, place: Place) -> Run:
        left = yield from self.left.run(frame, (*place, 0))
        if bool(left) == (self.operator == "||"):
            return int(bool(left))
        return int(bool((yield from self.right.run(frame, (*place, 1)))))


@dataclass
class Element:
    array: str
    index: Any

    @property
    def text(self) -> str:
        return f"{self.array}[{self.index.text} & 3]"

    def run(self, frame: Frame, place: Place) -> Run:
        return frame.arrays[self.array][(yield from self.index.run(frame, place)) & 3]


# text with {0}, {1} for the operands
OPERATIONS = {
    **{f"simd_{n}": f"simd_{n}({{0}})" for n in ("sum", "max", "min", "and", "or", "xor", "product")},
    **{f"quad_{n}": f"quad_{n}({{0}})" for n in ("sum", "max", "min", "and", "or", "xor", "product")},
    **{
        f"{group}_{n}": f"{group}_{n}({{0}})"
        for group in ("simd", "quad")
        for n in ("prefix_inclusive_sum", "prefix_exclusive_sum", "broadcast_first")
    },
    "simd_ballot": "uint((ulong)simd_ballot({0} & 1))",
    "simd_any": "uint(simd_any({0} & 1))",
    "simd_all": "uint(simd_all({0} & 1))",
    "simd_active": "uint((ulong)simd_active_threads_mask())",
    "simd_is_first": "uint(simd_is_first())",
    "quad_ballot": "uint((ushort)quad_ballot({0} & 1))",
    "quad_any": "uint(quad_any({0} & 1))",
    "quad_all": "uint(quad_all({0} & 1))",
    "quad_is_first": "uint(quad_is_first())",
    **{
        f"{group}_{n}": f"{group}_{n}({{0}}, ushort({{1}} & {last}))"
        for group, last in (("simd", 31), ("quad", 3))
        for n in (
            "shuffle", "shuffle_xor", "shuffle_up", "shuffle_down", "shuffle_rotate_up",
            "shuffle_rotate_down",
        )
    },
}  # fmt: skip

# A shuffle may read an inactive lane.
NEVER_UNDEFINED = [name for name in OPERATIONS if "_shuffle" not in name]


@dataclass
class Operation:
    name: str
    operands: list[Any]
    macro: bool = False

    @property
    def text(self) -> str:
        plain = OPERATIONS[self.name].format(*(o.text for o in self.operands))
        return f"IDENTITY({plain})" if self.macro else plain

    def run(self, frame: Frame, place: Place) -> Run:
        values = []
        for i, operand in enumerate(self.operands):
            values.append((yield from operand.run(frame, (*place, i))))
        return (yield (*place, len(values)), self.name, tuple(values))


@dataclass
class Function:
    name: str
    kind: str  # plain, template or method
    body: Any = None
    result: Any = None

    @property
    def definition(self) -> str:
        head = {"plain": "", "template": "template <int N> ", "method": f"struct Of_{self.name} {{ uint s; "}
        number = "N" if self.kind == "template" else "s" if self.kind == "method" else "3"
        tail = "};\n" if self.kind == "method" else "\n"
        qualifier = " thread" if self.kind == "method" else ""
        return (
            f"{head[self.kind]}uint {self.name}(uint a, thread uint& b, uint t){qualifier} {{\n"
            f"uint c = {number}, d = 0; uint e[4] = {{a, b, 1, 2}};\n"
            f"{self.body.text}return {self.result.text};\n}}\n{tail}"
        )


@dataclass
class Call:
    function: Function
    number: int
    argument: Any
    reference: str

    @property
    def text(self) -> str:
        arguments = f"({self.argument.text}, {self.reference}, t)"
        if self.function.kind == "template":
            return f"{self.function.name}<{self.number}>{arguments}"
        if self.function.kind == "method":
            return f"make_{self.function.name}({self.number}u).{self.function.name}{arguments}"
        return self.function.name + arguments

    def run(self, frame: Frame, place: Place) -> Run:
        a = yield from self.argument.run(frame, (*place, 0))
        b = frame.variables[self.reference]
        number = 3 if self.function.kind == "plain" else self.number
        variables = {"a": a, "b": b, "c": number, "d": 0, "t": frame.variables["t"]}
        inner = Frame(variables, {"e": [a, b, 1, 2]}, frame.shared)
        try:
            yield from self.function.body.run(inner, (*place, 1, 0))
            value = yield from self.function.result.run(inner, (*place, 1, 1))
        except Return as returned:
            value = returned.value
        frame.variables[self.reference] = inner.variables["b"]
        return value


# ---- statements


@dataclass
class Assign:
    target: Any  # Leaf or Element
    operator: str  # "", "+", "^", ...
    value: Any

    @property
    def text(self) -> str:
        return f"{self.target.text} {self.operator}= {self.value.text};\n"

    def run(self, frame: Frame, place: Place) -> Run:
        value = yield from self.value.run(frame, (*place, 0))
        if isinstance(self.target, Element):
            index = (yield from self.target.index.run(frame, (*place, 1))) & 3
            store: Any = frame.arrays[self.target.array]
            key: Any = index
        else:
            store, key = frame.variables, self.target.text
        store[key] = (BINARY[self.operator](store[key], value) if self.operator else value) & MASK
        return 0


@dataclass
class Block:
    statements: list[Any]

    @property
    def text(self) -> str:
        return "".join(s.text for s in self.statements)

    def run(self, frame: Frame, place: Place) -> Run:
        for i, statement in enumerate(self.statements):
            yield from statement.run(frame, (*place, i))
        return 0


@dataclass
class If:
    condition: Any
    then: Block
    otherwise: Block | None

    @property
    def text(self) -> str:
        tail = f" else {{\n{self.otherwise.text}}}\n" if self.otherwise else "\n"
        return f"if ({self.condition.text}) {{\n{self.then.text}}}{tail}"

    def run(self, frame: Frame, place: Place) -> Run:
        if (yield from self.condition.run(frame, (*place, 0))):
            yield from self.then.run(frame, (*place, 1))
        elif self.otherwise:
            yield from self.otherwise.run(frame, (*place, 2))
        return 0


@dataclass
class Loop:
    kind: str  # for, endless, while, do
    counter: str
    limit: Any  # the text masks it to 0..7: every loop ends
    extra: Any  # a condition, or None
    body: Block
    pragma: str = ""

    @property
    def text(self) -> str:
        k = self.counter
        condition = f"({k} < ({self.limit.text} & 7u))" + (f" && {self.extra.text}" if self.extra else "")
        if self.kind == "for":
            return f"{self.pragma}for (uint {k} = 0; {condition}; ++{k}) {{\n{self.body.text}}}\n"
        if self.kind == "endless":
            return f"for (uint {k} = 0;; ++{k}) {{\nif (!({condition})) break;\n{self.body.text}}}\n"
        if self.kind == "while":
            head = f"{{ uint {k} = 0; while ({condition}) {{ ++{k};\n"
            return f"{head}{self.body.text}}} }}\n"
        return f"{{ uint {k} = 0; do {{ ++{k};\n{self.body.text}}} while ({condition}); }}\n"

    def run(self, frame: Frame, place: Place) -> Run:
        variables = frame.variables
        variables[self.counter] = 0
        iteration = 0
        while True:
            here = (*place, iteration)
            if self.kind != "do" and not (yield from self._goes_on(frame, (*here, 0))):
                return 0
            if self.kind in ("while", "do"):
                variables[self.counter] += 1
            try:
                yield from self.body.run(frame, (*here, 1))
            except Break:
                return 0
            except Continue:
                pass
            if self.kind in ("for", "endless"):
                variables[self.counter] += 1
            if self.kind == "do" and not (yield from self._goes_on(frame, (*here, 2))):
                return 0
            iteration += 1

    def _goes_on(self, frame: Frame, place: Place) -> Run:
        limit = (yield from self.limit.run(frame, (*place, 0))) & 7
        if frame.variables[self.counter] >= limit:
            return 0
        return 1 if not self.extra else (yield from self.extra.run(frame, (*place, 1)))


@dataclass
class Switch:
    value: Any
    cases: list[tuple[int | None, Block, bool]]  # label (None: default), statements, ends in a break

    @property
    def text(self) -> str:
        lines = [f"switch ({self.value.text} % 5u) {{\n"]
        for label, block, ends in self.cases:
            name = "default" if label is None else f"case {label}"
            lines.append(f"{name}: {{\n{block.text}{'break;' if ends else ''}}}\n")
        return "".join(lines) + "}\n"

    def run(self, frame: Frame, place: Place) -> Run:
        value = (yield from self.value.run(frame, (*place, 0))) % 5
        labels = [label for label, _, _ in self.cases]
        if value not in labels and None not in labels:
            return 0
        start = labels.index(value if value in labels else None)
        for i, (_, block, ends) in enumerate(self.cases[start:], start):
            try:
                yield from block.run(frame, (*place, 1 + i))
            except Break:
                return 0
            if ends:
                return 0
        return 0


@dataclass
class Jump:
    kind: str  # break, continue, return
    value: Any = None

    @property
    def text(self) -> str:
        return f"return {self.value.text};\n" if self.value else f"{self.kind};\n"

    def run(self, frame: Frame, place: Place) -> Run:
        if self.kind == "return":
            raise Return((yield from self.value.run(frame, (*place, 0))))
        raise Break() if self.kind == "break" else Continue()


@dataclass
class Exchange:
    """Threads exchange values through threadgroup memory."""

    value: Any
    step: int
    threads: int

    @property
    def text(self) -> str:
        return (
            f"shared_[t] = {self.value.text};\nthreadgroup_barrier(mem_flags::mem_threadgroup);\n"
            f"a ^= shared_[(t + {self.step}u) % {self.threads}u];\n"
            "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        )

    def run(self, frame: Frame, place: Place) -> Run:
        t = frame.variables["t"]
        frame.shared[t] = yield from self.value.run(frame, (*place, 0))
        yield (*place, 1), "barrier", ()
        frame.variables["a"] ^= frame.shared[(t + self.step) % self.threads]
        yield (*place, 2), "barrier", ()
        return 0


@dataclass
class Program:
    name: str
    threads: int
    functions: list[Function] = field(default_factory=list)
    body: Block = field(default_factory=lambda: Block([]))

    @property
    def text(self) -> str:
        n = self.name
        definitions = "".join(
            f.definition
            + (f"Of_{f.name} make_{f.name}(uint s) {{ return {{s}}; }}\n" if f.kind == "method" else "")
            for f in self.functions
        )
        return (
            f"{definitions}uint body_{n}(uint t, threadgroup uint* shared_) {{\n"
            f"uint a = t, b = 1, c = 2, d = t * 7 % 11; uint e[4] = {{t, 1, 2, 3}};\n"
            f"{self.body.text}"
            "return a ^ (b * 3) ^ (c * 5) ^ (d * 7) ^ e[0] ^ (e[1] * 9) ^ (e[2] * 11) ^ e[3];\n}\n"
            f"kernel void {n}(device uint* o [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {{\n"
            f"threadgroup uint shared_[{self.threads}];\no[t] = body_{n}(t, shared_);\n}}\n"
        )

    def lane(self, t: int, shared: list[int]) -> Run:
        frame = Frame({"t": t, "a": t, "b": 1, "c": 2, "d": t * 7 % 11}, {"e": [t, 1, 2, 3]}, shared)
        try:
            yield from self.body.run(frame, ())
        except Return as returned:
            return returned.value
        v, e = frame.variables, frame.arrays["e"]
        return (v["a"] ^ v["b"] * 3 ^ v["c"] * 5 ^ v["d"] * 7 ^ e[0] ^ e[1] * 9 ^ e[2] * 11 ^ e[3]) & MASK
