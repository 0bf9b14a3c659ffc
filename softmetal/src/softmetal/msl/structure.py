"""The outline of a program, found by a walk over the tokens: functions, program-scope variables, types
and function constants.

MSL is C++. This module reads declarations only as far as the passes need, to know where a function's
parameters and body are and which names are types; clang reads the rest.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from .lexer import TokenList, TranslationError

_ACCESS = {"public", "private", "protected"}
_CLASS_KEYS = {"struct", "class", "union"}
_NOT_VARIABLES = {"using", "typedef", "static_assert", "friend", "extern", "asm", "enum"}


@dataclass
class Function:
    name: str
    begin: int  # first token of the declaration, after template <...>
    parameters: tuple[int, int]  # its parentheses
    body: tuple[int, int] | None  # its braces
    is_template: bool
    scope: str  # "namespace" or "class"
    namespace: str  # "a::b::" or ""
    is_kernel: bool = False
    template_begin: int = -1
    host_name: str = ""  # of a renamed kernel


@dataclass
class Variable:
    name: str
    begin: int
    name_index: int
    end: int  # its semicolon
    scope: str
    namespace: str


@dataclass
class Instantiation:
    """template [[host_name("x")]] [[kernel]] void f<float>(...);"""

    begin: int
    end: int
    namespace: str


@dataclass
class Outline:
    functions: list[Function] = field(default_factory=list)
    variables: list[Variable] = field(default_factory=list)
    instantiations: list[Instantiation] = field(default_factory=list)
    class_names: set[str] = field(default_factory=set)
    # Template type parameters and aliases, which may denote a vector: the scopes of each name.
    type_names: dict[str, list[range]] = field(default_factory=lambda: defaultdict(list))
    methods: dict[str, list[range]] = field(default_factory=lambda: defaultdict(list))  # and their classes
    bodies: set[int] = field(default_factory=set)  # the opening braces of classes and functions
    derived: list[range] = field(default_factory=list)  # the bodies of classes with bases

    def note_alias(self, name: str, first_word: str, scope: range) -> None:
        if first_word in _CLASS_KEYS:  # typedef struct { ... } name;
            self.class_names.add(name)
        elif first_word not in self.class_names:
            self.type_names[name].append(scope)

    def names_type(self, name: str, i: int) -> bool:
        """Whether an alias or type parameter of that name is visible at `i`. A base may have any alias."""
        if name not in self.type_names or any(i in body for body in self.methods.get(name, ())):
            return False
        return any(i in scope for scope in [*self.type_names[name], *self.derived])


def outline(tokens: TokenList) -> Outline:
    result = Outline()
    _Walker(tokens, result).scope(0, len(tokens), "namespace")
    _collect_type_names(tokens, result)
    return result


def _collect_type_names(tokens: TokenList, result: Outline) -> None:
    methods = {function.begin: function.name for function in result.functions if function.scope == "class"}
    scopes = [range(len(tokens))]
    parameters = range(0)  # the scope of the latest template's parameters
    for i, token in enumerate(tokens.tokens):
        if i == scopes[-1].stop:
            scopes.pop()
        if i in result.bodies:
            scopes.append(range(i, tokens.closing(i)))
        if i in methods:
            result.methods[methods[i]].append(scopes[-1])
        if token.kind != "name":
            continue
        if token.text == "template" and tokens.text(i + 1) == "<":
            parameters = range(i, declaration_end(tokens, tokens.closing_angle(i + 1), len(tokens)))
        elif token.text in ("typename", "class") and tokens.kind(i + 1) == "name":
            if tokens.text(i + 2) in (",", ">", "="):
                result.type_names[tokens.text(i + 1)].append(parameters)
        elif token.text == "using" and tokens.text(i + 2) == "=":
            result.note_alias(tokens.text(i + 1), tokens.text(i + 3), scopes[-1])
        elif token.text == "typedef":
            end = i
            while tokens.text(end) != ";":
                end = tokens.closing(end) + 1 if tokens.text(end) in ("(", "{") else end + 1
            if tokens.kind(end - 1) == "name":
                result.note_alias(tokens.text(end - 1), tokens.text(i + 1), scopes[-1])


def declaration_end(tokens: TokenList, i: int, end: int) -> int:
    """Its semicolon, or the brace that closes a function's body."""
    is_function = False
    while i < end and tokens.text(i) != ";":
        if tokens.kind(i) == "op" and tokens.text(i) in ("(", "[", "{"):
            is_body = is_function and tokens.text(i) == "{"
            is_function = is_function or tokens.text(i) == "("
            i = tokens.closing(i)
            if is_body and tokens.text(i + 1) not in (";", ",", "{"):
                return i
        i += 1
    return i


class _Walker:
    def __init__(self, tokens: TokenList, result: Outline) -> None:
        self.tokens = tokens
        self.result = result
        self.namespace_path = ""

    def scope(self, begin: int, end: int, kind: str) -> None:
        i = begin
        while i < end:
            i = self.declaration(i, end, kind)

    def declaration(self, i: int, end: int, kind: str) -> int:
        """Reads the declaration at `i`; returns the index after it."""
        t = self.tokens
        text = t.text(i)
        if text == ";":
            return i + 1
        if text in _ACCESS and t.text(i + 1) == ":":
            return i + 2
        if text == "namespace" or (text == "inline" and t.text(i + 1) == "namespace"):
            return self.namespace(i, end)
        if text == "extern" and t.kind(i + 1) == "string" and t.text(i + 2) == "{":
            self.scope(i + 3, t.closing(i + 2), kind)
            return t.closing(i + 2) + 1
        if text == "template":
            if t.text(i + 1) != "<":
                return self.instantiation(i, end)
            return self.templated(i, end, kind)
        return self.plain(i, end, kind, is_template=False)

    def namespace(self, i: int, end: int) -> int:
        t, begin = self.tokens, i
        while i < end and t.text(i) not in ("{", ";"):
            i += 1
        if t.text(i) == "{":
            outer = self.namespace_path
            name = "".join(t.text(k) for k in range(begin, i) if t.text(k) not in ("inline", "namespace"))
            self.namespace_path += f"{name}::" if name else ""
            self.scope(i + 1, t.closing(i), "namespace")
            self.namespace_path = outer
            return t.closing(i) + 1
        return i + 1

    def instantiation(self, i: int, end: int) -> int:
        stop = self.semicolon(i, end)
        self.result.instantiations.append(Instantiation(i, stop, self.namespace_path))
        return stop + 1

    def templated(self, i: int, end: int, kind: str) -> int:
        begin = i
        while self.tokens.text(i) == "template":
            close = self.tokens.closing_angle(i + 1)
            if close < 0:
                raise TranslationError(
                    self.tokens[i].where, "cannot find the end of this template parameter list"
                )
            i = close + 1
        before = len(self.result.functions)
        after = self.plain(i, end, kind, is_template=True)
        for function in self.result.functions[before:]:
            if function.begin == i:
                function.template_begin = begin
        return after

    def semicolon(self, i: int, end: int) -> int:
        t = self.tokens
        while i < end and t.text(i) != ";":
            i = t.closing(i) + 1 if t.kind(i) == "op" and t.text(i) in "([{" else i + 1
        return i

    def plain(self, begin: int, end: int, kind: str, is_template: bool) -> int:
        """A class, function, variable, alias ... that starts at `begin`."""
        t = self.tokens
        i, parameters, class_key, assigned = begin, None, False, False
        name_index, declarators = -1, begin
        while i < end:
            text, token_kind = t.text(i), t.kind(i)
            if text == ";" and token_kind == "op":
                self.finish(begin, i, kind, is_template, parameters, name_index, declarators)
                return i + 1
            if token_kind == "name" and text in _CLASS_KEYS and parameters is None and not assigned:
                class_key = True
                self.note_class_name(i)
            elif token_kind == "name" and text == "enum":
                class_key = False
            elif token_kind == "name" and text == "operator" and parameters is None:
                name_index, i = self.operator_name(i)
                continue
            elif (
                token_kind == "name"
                and text in ("decltype", "alignas", "__attribute__")
                and t.text(i + 1) == "("
            ):
                i = t.closing(i + 1) + 1
                continue
            elif text == "<" and parameters is None and not assigned:
                close = t.closing_angle(i)
                i = close + 1 if close > 0 else i + 1
                continue
            elif text == "[" and token_kind == "op":
                i = t.closing(i) + 1
                continue
            elif text == "=" and token_kind == "op":
                assigned = True
            elif text == "(":
                if parameters is None and not assigned:
                    parameters = (i, t.closing(i))
                    if name_index < 0:
                        name_index = self.name_before(i)
                i = t.closing(i) + 1
                continue
            elif text == ":" and parameters is not None and not assigned:
                i = self.skip_member_initialisers(i)
                continue
            elif text == "{":
                close = t.closing(i)
                if class_key and parameters is None and not assigned:
                    self.result.bodies.add(i)
                    if ":" in (t.text(k) for k in range(begin, i)):
                        self.result.derived.append(range(i, close))
                    self.scope(i + 1, close, "class")
                    class_key = False
                    declarators = close + 1
                elif parameters is not None and not assigned:
                    self.function(begin, name_index, parameters, (i, close), is_template, kind)
                    return close + 1
                i = close + 1
                continue
            i += 1
        return end

    def note_class_name(self, i: int) -> None:
        t, j = self.tokens, i + 1
        while t.is_attribute(j):
            j = t.closing(j) + 1
        if t.kind(j) == "name" and t.text(j + 1) not in ("::",):
            self.result.class_names.add(t.text(j))

    def operator_name(self, i: int) -> tuple[int, int]:
        """`operator` up to the parenthesis that opens its parameters."""
        j = i + 1
        if self.tokens.text(j) == "(":
            j = self.tokens.closing(j) + 1
        while self.tokens.text(j) not in ("(", ";", "{", ""):
            j += 1
        return i, j

    def name_before(self, parenthesis: int) -> int:
        t, j = self.tokens, parenthesis - 1
        if t.text(j) == ">":  # f<int>(...): a specialisation
            depth = 0
            while j >= 0:
                depth += {">": 1, "<": -1}.get(t.text(j), 0)
                if depth == 0:
                    break
                j -= 1
            j -= 1
        return j

    def skip_member_initialisers(self, i: int) -> int:
        """From the ':' after a constructor's parameters to its body."""
        t, i = self.tokens, i + 1
        while i < len(t):
            while t.text(i) not in ("(", "{"):
                if t.text(i) == "<":
                    i = t.closing_angle(i)
                i += 1
            i = t.closing(i) + 1
            if t.text(i) != ",":
                return i
            i += 1
        return i

    def finish(
        self,
        begin: int,
        end: int,
        kind: str,
        is_template: bool,
        parameters: tuple[int, int] | None,
        name_index: int,
        declarators: int,
    ) -> None:
        """Ends a declaration at its semicolon. `declarators` is where they start: after the body of a
        class, else `begin`.
        """
        t = self.tokens
        words = {t.text(k) for k in range(declarators, end) if t.kind(k) == "name"}
        if parameters is not None:
            self.function(begin, name_index, parameters, None, is_template, kind)
        elif t.text(begin) not in _NOT_VARIABLES and not words & _CLASS_KEYS and declarators < end:
            index = self.variable_name(declarators, end)
            if index >= declarators and (kind == "namespace" or "static" in words):
                self.result.variables.append(
                    Variable(t.text(index), begin, index, end, kind, self.namespace_path)
                )

    def variable_name(self, begin: int, end: int) -> int:
        """The declared name: the last name before = { [ or the end."""
        t, i, last = self.tokens, begin, -1
        while i < end:
            text = t.text(i)
            if t.is_attribute(i):
                i = t.closing(i) + 1
                continue
            if t.kind(i) == "op" and text in ("=", "{", "[", ","):
                break
            if text == "<":
                close = t.closing_angle(i)
                i = close + 1 if close > 0 else i + 1
                continue
            if t.kind(i) == "name":
                last = i
            i += 1
        return last

    def function(
        self,
        begin: int,
        name_index: int,
        parameters: tuple[int, int],
        body: tuple[int, int] | None,
        is_template: bool,
        kind: str,
    ) -> None:
        name = self.tokens.text(name_index)
        function = Function(name, begin, parameters, body, is_template, kind, self.namespace_path)
        function.is_kernel = self.is_kernel(begin, parameters[0])
        if body:
            self.result.bodies.add(body[0])
        self.result.functions.append(function)

    def is_kernel(self, begin: int, end: int) -> bool:
        t = self.tokens
        return any(t.kind(i) == "name" and t.text(i) == "kernel" for i in range(begin, end))
