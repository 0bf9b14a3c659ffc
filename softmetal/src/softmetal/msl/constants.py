"""Function constants: `constant T X [[function_constant(N)]];` and the program-scope constants computed
from them.

Each becomes a variable whose dynamic initialiser reads the pipeline's value from the runtime. A pipeline
loads a new copy of the module when its values are known.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .lexer import TokenList, TranslationError
from .structure import Outline, Variable

_QUALIFIERS = ("constant", "static", "const", "constexpr")


@dataclass
class FunctionConstants:
    tokens: TokenList
    outline: Outline
    names: list[str] = field(default_factory=list)
    dynamic: set[str] = field(default_factory=set)  # function constants and those computed from them
    descriptions: list[str] = field(default_factory=list)  # C++ names of the softmetal_function_constant_info

    def run(self) -> None:
        optional = self.translate_queries()
        for variable in self.outline.variables:
            parentheses = self.attribute(variable)
            if parentheses is not None:
                self.declare(variable, parentheses, variable.name not in optional)
                self.dynamic.add(variable.name)
            elif self.depends_on(variable):
                self.make_dynamic(variable)
                self.dynamic.add(variable.name)

    def attribute(self, variable: Variable) -> tuple[int, int] | None:
        """The parentheses of [[function_constant(N)]]."""
        t = self.tokens
        for i in range(variable.name_index + 1, variable.end):
            if t.is_attribute(i) and t.text(i + 2) == "function_constant":
                return i + 3, t.closing(i + 3)
        return None

    def declare(self, variable: Variable, parentheses: tuple[int, int], required: bool) -> None:
        t, name = self.tokens, variable.name
        after = variable.name_index + 1
        if t.text(after) == "[" and not t.is_attribute(after):
            raise TranslationError(
                t[variable.name_index].where,
                f"function constant '{name}' is an array: it must be a scalar or vector",
            )
        if any(t.kind(i) == "op" and t.text(i) in ("=", "{") for i in range(parentheses[1], variable.end)):
            raise TranslationError(
                t[variable.name_index].where,
                f"function constant '{name}' has an initialiser: its value is given to the pipeline",
            )
        words = [i for i in range(variable.begin, variable.name_index) if t.text(i) not in _QUALIFIERS]
        type_name = t.join(words[0], words[-1] + 1)
        index = t.join(parentheses[0] + 1, parentheses[1])
        t.blank(variable.begin, variable.end)
        t[variable.begin].after += (
            f"static constexpr softmetal_function_constant_info softmetal_info_{name} = "
            f'{{"{name}", ({index}), ::softmetal::data_type<{type_name}>, {int(required)}}}; '
            f"static const {type_name} {name} = ::softmetal::function_constant<{type_name}>({index})"
        )
        self.names.append(name)
        self.descriptions.append(f"::{variable.namespace}softmetal_info_{name}")

    def depends_on(self, variable: Variable) -> bool:
        t = self.tokens
        return any(
            (t.kind(i) == "name" and t.text(i) in self.dynamic)
            or t.text(i).startswith("::softmetal::function_constant_defined")
            for i in range(variable.name_index + 1, variable.end)
        )

    def make_dynamic(self, variable: Variable) -> None:
        for i in range(variable.begin, variable.name_index):
            if self.tokens.text(i) in _QUALIFIERS:
                self.tokens.blank(i, i + 1)
        self.tokens[variable.begin].before += "static const "

    def translate_queries(self) -> set[str]:
        """Translates is_function_constant_defined(X); returns the names X."""
        t, asked = self.tokens, set()
        for i, token in enumerate(t.tokens):
            if token.kind == "name" and token.text == "is_function_constant_defined" and t.text(i + 1) == "(":
                name = t.closing(i + 1) - 1
                asked.add(t.text(name))
                t.overwrite(i, "::softmetal::function_constant_defined")
                t.overwrite(name, f"softmetal_info_{t.text(name)}.index")
        return asked

    def check_gate(self, gate: str, where: str, subject: str) -> None:
        """Checks the X of [[function_constant(X)]] on a kernel's parameter."""
        if gate.split("::")[-1].strip() not in self.dynamic:
            raise TranslationError(
                where,
                f"{subject} depends on '{gate}', which is neither a function constant nor computed from one",
            )

    def positions(self, mentioned: set[str]) -> list[int]:
        """Returns the positions of the constants with these names in the exported table."""
        return [i for i, name in enumerate(self.names) if name in mentioned]

    def exports(self) -> str:
        rows = ", ".join(self.descriptions)
        declaration = "static const softmetal_function_constant_info softmetal_function_constants[]"
        return f"{declaration} = {{{rows or '{}'}}};\n"
