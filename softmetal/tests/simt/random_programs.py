"""Random structured programs, determined by a seed.

Each simdgroup operation of a program records its place: a hash of its position in the text, and of the calls
and iterations that led there. The lanes that record a place are those that reach it, so they must have taken
part together: OPERATIONS says what each of them gets.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

HEAD = """#include <metal_stdlib>
using namespace metal;
#define IDENTITY(...) (__VA_ARGS__)
struct Log {
  device uint4* entries;
  uint count, lane;
  uint add(uint place, uint operation, uint value) thread {
    if (count < ENTRIES) entries[count] = uint4(place, operation, value, 0);
    ++count;
    return value;
  }
};
uint mix(uint a, uint b) {
  const uint hash = (a ^ (b + 1) * 0x9E3779B1u) * 0x85EBCA6Bu;
  return hash ^ hash >> 15;
}
"""
KERNEL = """
kernel void {name}(device uint4* entries [[buffer(0)]], device uint* counts [[buffer(1)]],
                   uint t [[thread_index_in_threadgroup]]) {{
  Log log = {{entries + t * ENTRIES, 0, t % 32}};
  uint a = t, b = t * 7 % 11, h = t / 32;
{body}  counts[t] = log.count;
}}
"""
ENTRIES = 4096  # of each thread
MASK = 0xFFFFFFFF


def _mask(lanes: list[int]) -> int:
    return sum(1 << lane for lane in lanes)


# The value for a lane, from the lanes that take part: those of the simdgroup, or of the quad.
_OF_A_GROUP: dict[str, Callable[[int, list[int]], int]] = {
    "{group}_sum(1u << log.lane)": lambda lane, lanes: _mask(lanes),
    "{group}_or(3u << log.lane)": lambda lane, lanes: _mask(lanes) | _mask(lanes) << 1 & MASK,
    "{group}_xor(3u << log.lane)": lambda lane, lanes: _mask(lanes) ^ _mask(lanes) << 1 & MASK,
    "{group}_and(~(1u << log.lane))": lambda lane, lanes: MASK - _mask(lanes),
    "{group}_product(log.lane + 1)": lambda lane, lanes: math.prod(one + 1 for one in lanes) & MASK,
    "{group}_max(log.lane)": lambda lane, lanes: max(lanes),
    "{group}_min(log.lane)": lambda lane, lanes: min(lanes),
    "{group}_prefix_inclusive_sum(1u << log.lane)": lambda lane, lanes: _mask(
        [one for one in lanes if one <= lane]
    ),
    "{group}_prefix_exclusive_sum(1u << log.lane)": lambda lane, lanes: _mask(
        [one for one in lanes if one < lane]
    ),
    "{group}_broadcast_first(log.lane)": lambda lane, lanes: min(lanes),
    "uint({group}_is_first())": lambda lane, lanes: int(lane == min(lanes)),
    "uint({group}_any(log.lane % 3 == 0))": lambda lane, lanes: int(any(one % 3 == 0 for one in lanes)),
    "uint({group}_all(log.lane % 3 == 0))": lambda lane, lanes: int(all(one % 3 == 0 for one in lanes)),
}
OPERATIONS = {
    text.format(group=group): value for group in ("simd", "quad") for text, value in _OF_A_GROUP.items()
} | {
    "uint((ulong)simd_active_threads_mask())": lambda lane, lanes: _mask(lanes),
    "uint((ulong)simd_ballot(log.lane % 3 == 0))": lambda lane, lanes: _mask(
        [one for one in lanes if one % 3 == 0]
    ),
    "uint((ushort)quad_ballot(log.lane % 3 == 0))": lambda lane, lanes: _mask(
        [one % 4 for one in lanes if one % 3 == 0]
    ),
}
_NAMES = list(OPERATIONS)


def value_of(operation: int, lane: int, lanes: list[int]) -> int:
    name = _NAMES[operation]
    if "quad_" in name:
        lanes = [one for one in lanes if one // 4 == lane // 4]
    return OPERATIONS[name](lane, lanes)


class Program:
    """Writes a program's functions and its kernel. `h` is the hash of the place of the current block."""

    def __init__(self, seed: int, iterations: bool = True) -> None:
        self.name = f"p{seed}"
        self.random = random.Random(seed)
        self.iterations = iterations  # whether they are part of a place
        self.numbers = itertools.count()
        self.functions: list[str] = []
        definitions = [self._function(kind) for kind in ("plain", "template", "member")]
        parts = [self._block(2) for _ in range(4)]
        body = "threadgroup_barrier(mem_flags::mem_none);\n".join(parts)
        self.text = "".join(definitions) + KERNEL.format(name=self.name, body=body)

    def _function(self, kind: str) -> str:
        name = f"f{next(self.numbers)}_{self.name}"
        body = f"{self._block(1, returns=True)}return a ^ b;\n"
        definition = f"uint {name}(thread Log& log, uint h, uint a)"
        if kind == "plain":
            self.functions.append(name)
            return f"{definition} {{\nuint b = 2;\n{body}}}\n"
        if kind == "template":
            self.functions.append(f"{name}<3>")
            return f"template <int N> {definition} {{\nuint b = N;\n{body}}}\n"
        self.functions.append(f"Of_{name}{{4}}.{name}")
        return f"struct Of_{name} {{\nuint b;\n{definition} {{\n{body}}}\n}};\n"

    def _value(self, depth: int, place: str = "h") -> str:
        """An expression; `place` is the hash that its operations start from."""
        kind = self.random.random()
        if depth == 0 or kind < 0.15:
            return self.random.choice(["a", "b", "log.lane", f"{self.random.randrange(40)}u"])
        if kind < 0.5:
            operation = self.random.randrange(len(_NAMES))
            text = _NAMES[operation]
            text = f"IDENTITY({text})" if self.random.random() < 0.3 else text
            return f"log.add(mix({place}, {next(self.numbers)}), {operation}, {text})"
        left, right = self._value(depth - 1, place), self._value(depth - 1, place)
        if kind < 0.7:
            operator = self.random.choice("+ - * ^ & | < == >=".split())
            return f"uint({left} {operator} {right})"
        if kind < 0.8:
            return f"(({self._value(depth - 1, place)}) & 1 ? {left} : {right})"
        if kind < 0.9 or not self.functions:
            return f"uint(({left}) % 3 {self.random.choice(['&&', '||'])} ({right}) % 5)"
        return f"{self.random.choice(self.functions)}(log, mix({place}, {next(self.numbers)}), {left})"

    def _condition(self, place: str = "h") -> str:
        return f"({self._value(2, place)}) % 3 != 0"

    def _block(self, depth: int, inside: str = "", returns: bool = False) -> str:
        count = self.random.randrange(1, 4)
        return "".join(self._statement(depth, inside, returns) for _ in range(count))

    def _statement(self, depth: int, inside: str, returns: bool) -> str:
        kind = self.random.random()
        if depth > 0 and kind < 0.2:
            otherwise = f" else {{\n{self._block(depth - 1, inside, returns)}}}"
            text = f"if ({self._condition()}) {{\n{self._block(depth - 1, inside, returns)}}}"
            return f"{text}{otherwise if self.random.random() < 0.6 else ''}\n"
        if depth > 0 and kind < 0.5:
            return self._loop(depth, returns)
        if depth > 0 and kind < 0.6:
            return self._switch(depth, inside, returns)
        jumps = {"": [], "switch": ["break"]}.get(inside, ["break", "continue"])
        if jumps and kind < 0.75:
            return f"if ({self._condition()}) {self.random.choice(jumps)};\n"
        if returns and kind < 0.8:
            return f"if ({self._condition()}) return {self._value(1)};\n"
        operator = self.random.choice(["", "+", "^", "*"])
        return f"{self.random.choice('ab')} {operator}= {self._value(2)};\n"

    def _loop(self, depth: int, returns: bool) -> str:
        k = f"k{next(self.numbers)}"
        place = f"mix(outer, {k})" if self.iterations else "outer"
        limit = self.random.choice(["4u", "log.lane & 7", f"({self._value(1, place)} & 7)"])
        condition = f"{k} < {limit} && {self._condition(place)}"
        body = f"const uint h = {place};\n{self._block(depth - 1, 'loop', returns)}"
        kind = self.random.choice(["for", "endless", "while", "do"])
        if kind == "for":
            pragma = self.random.choice(["", '_Pragma("clang loop unroll(full)") '])
            text = f"{pragma}for (uint {k} = 0; {condition}; ++{k}) {{\n{body}}}\n"
        elif kind == "endless":
            text = f"for (uint {k} = 0;; ++{k}) {{\nif (!({condition})) break;\n{body}}}\n"
        elif kind == "while":
            text = f"uint {k} = 0;\nwhile ({condition}) {{\n++{k};\n{body}}}\n"
        else:
            text = f"uint {k} = 0;\ndo {{\n++{k};\n{body}}} while ({condition});\n"
        return f"{{\nconst uint outer = h;\n{text}}}\n"

    def _switch(self, depth: int, inside: str, returns: bool) -> str:
        labels = ["case 0", "case 1", "case 2", "case 3", "default"]
        self.random.shuffle(labels)
        inside = "switch in loop" if "loop" in inside else "switch"
        cases = [
            f"{label}: {{\n{self._block(depth - 1, inside, returns)}{self.random.choice(['break;', ''])}}}\n"
            for label in labels[: self.random.randrange(2, 6)]
        ]
        return f"switch (({self._value(2)}) % 5) {{\n{''.join(cases)}}}\n"
