"""Random programs of the nodes in programs.py, determined by a seed."""

from __future__ import annotations

import random
from typing import Any

from programs import (
    BINARY,
    NEVER_UNDEFINED,
    OPERATIONS,
    Assign,
    Binary,
    Block,
    Call,
    Conditional,
    Element,
    Exchange,
    Function,
    If,
    Jump,
    Leaf,
    Loop,
    Operation,
    Program,
    ShortCircuit,
    Switch,
)


class Generate:
    def __init__(self, name: str, seed: int, threads: int) -> None:
        self.random = random.Random(seed)
        self.program = Program(name, threads)
        self.loops = 0
        for i in range(self.random.randrange(3)):
            kind = self.random.choice(["plain", "template", "method"])
            function = Function(f"f{i}_{name}", kind)
            function.body = self.block(2, loop="", returns=True)
            function.result = self.expression(2)
            self.program.functions.append(function)
        body: list[Any] = []
        for _ in range(self.random.randrange(3, 6)):
            if self.random.random() < 0.2:
                body.append(self.exchange())
            elif self.random.random() < 0.1:
                inner = Block([*self.block(2, loop="").statements, self.exchange()])
                body.append(Loop("for", self.counter(), Leaf("3u"), None, inner))
            else:
                body += self.block(2, loop="").statements
        body += self.block(2, loop="", returns=True).statements
        self.program.body = Block(body)

    def exchange(self) -> Exchange:
        return Exchange(self.expression(2), self.random.randrange(1, 31), self.program.threads)

    def counter(self) -> str:
        self.loops += 1
        return f"k{self.loops}"

    def expression(self, depth: int) -> Any:
        choose = self.random.random()
        if depth == 0 or choose < 0.15:
            return Leaf(self.random.choice(["t", "t", "a", "b", "c", "d", f"{self.random.randrange(40)}u"]))
        if choose < 0.45:
            operator = self.random.choice(list(BINARY))
            right = self.expression(depth - 1)
            if operator == "%":
                right = Leaf(f"{self.random.randrange(1, 9)}u")
            elif operator in ("<<", ">>"):
                right = Leaf(f"{self.random.randrange(1, 9)}u")
            return Binary(operator, self.expression(depth - 1), right)
        if choose < 0.55:
            return Conditional(*(self.expression(depth - 1) for _ in range(3)))
        if choose < 0.63:
            return ShortCircuit(
                self.random.choice(["&&", "||"]), self.expression(depth - 1), self.expression(depth - 1)
            )
        if choose < 0.68:
            return Element("e", self.expression(depth - 1))
        if choose < 0.76 and self.program.functions:
            return Call(
                self.random.choice(self.program.functions),
                self.random.randrange(1, 4),
                self.expression(depth - 1),
                self.random.choice("abcd"),
            )
        names = list(OPERATIONS) if self.random.random() < 0.3 else NEVER_UNDEFINED
        name = self.random.choice(names)
        operands = [self.expression(depth - 1)]
        if "_shuffle" in name:
            operands.append(Leaf(f"{self.random.randrange(1, 32)}u"))
        if name.endswith(("_active", "_is_first")):
            operands = []
        return Operation(name, operands, macro=self.random.random() < 0.3)

    def block(self, depth: int, loop: str, returns: bool = False) -> Block:
        count = self.random.randrange(1, 4)
        return Block([self.statement(depth, loop, returns) for _ in range(count)])

    def statement(self, depth: int, loop: str, returns: bool) -> Any:
        choose = self.random.random()
        if depth > 0 and choose < 0.2:
            otherwise = self.block(depth - 1, loop, returns) if self.random.random() < 0.6 else None
            return If(self.expression(2), self.block(depth - 1, loop, returns), otherwise)
        if depth > 0 and choose < 0.4:
            kind = self.random.choice(["for", "endless", "while", "do"])
            limit = self.random.choice([Leaf("4u"), Leaf("t"), self.expression(1), self.expression(2)])
            extra = self.expression(2) if self.random.random() < 0.3 else None
            pragma = self.random.choice(["", "", '_Pragma("clang loop unroll(full)")\n'])
            body = self.block(depth - 1, "loop", returns)
            return Loop(kind, self.counter(), limit, extra, body, pragma if kind == "for" else "")
        if depth > 0 and choose < 0.48:
            labels: list[int | None] = [0, 1, 2, 3, None]
            self.random.shuffle(labels)
            inside = "switch in loop" if "loop" in loop else "switch"
            cases = [
                (label, self.block(depth - 1, inside, returns), self.random.random() < 0.6)
                for label in labels[: self.random.randrange(2, 6)]
            ]
            return Switch(self.expression(2), cases)
        if loop and choose < 0.56:
            kinds = {"loop": ["break", "continue"], "switch": ["break"]}.get(loop, ["break", "continue"])
            return If(self.expression(2), Block([Jump(self.random.choice(kinds))]), None)
        if returns and choose < 0.6:
            return If(self.expression(2), Block([Jump("return", self.expression(1))]), None)
        target: Any = Leaf(self.random.choice("abcd"))
        if self.random.random() < 0.2:
            target = Element("e", Leaf(self.random.choice(["t", "a", "1u"])))
        return Assign(target, self.random.choice(["", "+", "^", "*", "+"]), self.expression(2))
