"""Comparisons and logical operators of vectors: Metal returns a vector of bool, clang a vector of integers 0
and -1.

`a < b` becomes `::softmetal::truth(a < b)`, the identity for everything but such vectors. The operands of
`!`, `&&` and `||` go through `::softmetal::condition`, because clang has no logical operators for vectors
of bool. Both are constexpr, so constant expressions stay constant, and a scalar `&&` still skips its second
operand.
"""

from __future__ import annotations

from .angles import template_brackets
from .lexer import TokenList
from .structure import Outline
from .types import ADDRESS_SPACES, BUILTIN_TYPES

# The precedence of the operators that can end an operand of a comparison; all others bind tighter.
_PRECEDENCE = {
    ",": 0, ";": 0, "?": 1, ":": 1, "=": 1, "+=": 1, "-=": 1, "*=": 1, "/=": 1, "%=": 1, "&=": 1, "|=": 1,
    "^=": 1, "<<=": 1, ">>=": 1, "||": 2, "&&": 3, "|": 4, "^": 5, "&": 6, "==": 7, "!=": 7,
    "<": 8, ">": 8, "<=": 8, ">=": 8,
}  # fmt: skip
_COMPARISONS = {"==", "!=", "<", ">", "<=", ">="}
_LOGICAL = {"&&", "||"}
_STATEMENT_WORDS = {"return", "case", "else", "do", "default"}
_CONTROL_WORDS = {"if", "for", "while", "switch", "constexpr"}
_ALTERNATIVES = {"and": "&&", "or": "||", "not": "!", "not_eq": "!=", "bitand": "&", "bitor": "|", "xor": "^"}
_UNARY = {"-", "+", "*", "&", "!", "~", "++", "--"}
_BRACKETS = {"(", "[", "{", ")", "]", "}"}


def translate_comparisons(tokens: TokenList, outline: Outline) -> None:
    _ComparisonPass(tokens, outline).run()


class Operands:
    """The ends of operands, and the casts before them."""

    def __init__(self, tokens: TokenList, outline: Outline) -> None:
        self.tokens = tokens
        self.outline = outline
        self.types = BUILTIN_TYPES | outline.class_names | {"auto"}
        self.pairs = template_brackets(tokens)
        self.pairs.update(
            {tokens.closing(i): i for i, t in enumerate(tokens.tokens) if t.kind == "op" and t.text in "([{"}
        )

    def names_type(self, i: int) -> bool:
        t = self.tokens
        is_member = t.text(i - 1) == "::" and t.text(i) in self.outline.type_names
        return t.text(i) in self.types or is_member or self.outline.names_type(t.text(i), i)

    def is_braced_value(self, opening: int) -> bool:
        """float4{...}, not the body of a statement."""
        t, before = self.tokens, self.tokens.previous(opening)
        return (t.kind(before) == "name" and t.text(before) not in _STATEMENT_WORDS) or (
            t.text(before) == ">" and before in self.pairs
        )

    def unary_end(self, i: int) -> int:
        """Last token of the operand at `i`: prefixes, casts, a primary expression, postfix operators."""
        t = self.tokens
        while t.kind(i) == "gone" or (t.kind(i) == "op" and t.text(i) in _UNARY):
            i = t.next(i)
        if t.kind(i) == "op" and t.text(i) in ("(", "[", "{"):
            i = t.closing(i)
            if self.is_cast(i) and t.starts_operand(t.next(i)):
                return self.unary_end(t.next(i))
        elif t.kind(i) == "name" and t.text(i) == "sizeof" and t.text(t.next(i)) != "(":
            return self.unary_end(t.next(i))
        while True:
            k = t.next(i)
            text = t.text(k)
            if t.text(i) == "::" or (t.kind(k) in ("name", "raw", "string") and t.kind(i) != "op"):
                i = k  # `unsigned int(x)`, neighbouring strings, what an earlier pass has rewritten
            elif t.kind(k) != "op":
                return i
            elif text in ("(", "[") or (text == "{" and self.is_braced_value(k)):
                i = t.closing(k)
            elif k in self.pairs and text == "<":
                i = self.pairs[k]
            elif text in (".", "->", "::"):
                i = t.next(k)
                if t.text(i) == "template":
                    i = t.next(i)
            elif text in ("++", "--"):
                i = k
            else:
                return i

    def is_cast(self, close: int) -> bool:
        """Whether the parentheses that end at `close` hold a type."""
        t = self.tokens
        last = t.previous(close)
        while t.text(last) in ("*", "&") and t.kind(last) == "op":
            last = t.previous(last)
        if last in self.pairs and t.text(last) == ">":
            last = t.previous(self.pairs[last])
            return self.names_type(last) or t.text(last) in ("vec", "array")
        first = t.next(self.pairs[close])
        words = {t.text(k) for k in range(first, close) if t.kind(k) == "name"}
        return self.names_type(last) or bool(words & {"const", *ADDRESS_SPACES})


class _ComparisonPass(Operands):
    def __init__(self, tokens: TokenList, outline: Outline) -> None:
        self.calls: list[tuple[int, bool, int, int]] = []  # length, is condition, first and last token
        for i, token in enumerate(tokens.tokens):
            if token.kind == "name" and token.text in _ALTERNATIVES:
                tokens.put(i, _ALTERNATIVES[token.text], "op")
        super().__init__(tokens, outline)

    def run(self) -> None:
        for i in range(len(self.tokens)):
            operator = self.operator(i)
            if "..." in (self.tokens.text(i - 1), self.tokens.text(i + 1)):
                continue  # a fold expression
            if operator == "!" and self.is_prefix(i):
                end = self.unary_end(i + 1)
                self.wrap("truth", i, end)
                self.wrap("condition", self.tokens.next(i), end)
            elif operator in _COMPARISONS:
                self.wrap("truth", self.left(i), self.right(i))
            elif operator in _LOGICAL and not self.is_declarator(i):
                begin, end = self.left(i), self.right(i)
                self.wrap("truth", begin, end)
                self.wrap("condition", begin, self.tokens.previous(i))
                self.wrap("condition", self.tokens.next(i), end)
        self.insert_calls()

    def wrap(self, function: str, begin: int, end: int) -> None:
        self.calls.append((end - begin, function == "condition", begin, end))

    def insert_calls(self) -> None:
        """The inner calls first; around one comparison, truth is inside of condition."""
        t = self.tokens
        for _, is_condition, begin, end in sorted(self.calls):
            t[begin].before = f"::softmetal::{'condition' if is_condition else 'truth'}({t[begin].before}"
            t[end].after += ")"

    # ---- kinds of tokens -------------------------------------------------------------------------

    def operator(self, i: int) -> str:
        """The binary operator or '!' at `i`; empty for brackets of templates, halves of a shift, and names of
        operator functions.
        """
        t = self.tokens
        text = t.text(i)
        if t.kind(i) != "op" or i in self.pairs or t.text(t.previous(i)) == "operator":
            return ""
        if text == ">" and (
            self.is_glued(i + 1, (">", ">=")) or (t.text(i - 1) == ">" and self.is_glued(i, (">",)))
        ):
            return ">>"
        if text == ">=" and t.text(i - 1) == ">" and i - 1 not in self.pairs and self.is_glued(i, (">=",)):
            return ">>="
        return text

    def is_glued(self, i: int, texts: tuple[str, ...]) -> bool:
        t = self.tokens
        return t.text(i) in texts and i not in self.pairs and i - 1 not in self.pairs and not t[i].prefix

    def is_prefix(self, i: int) -> bool:
        """Whether the operator at `i` is a prefix operator."""
        t, before = self.tokens, self.tokens.previous(i)
        if before < 0:
            return True
        if t.kind(before) in ("name", "number", "string", "raw"):
            return t.text(before) in _STATEMENT_WORDS
        if t.text(before) == ")" and self.is_cast(before):
            return True
        return t.text(before) not in (")", "]", "}") and self.pairs.get(before, before) >= before

    def is_declarator(self, i: int) -> bool:
        """Whether the && at `i` belongs to a type or function: T&& x, operator T() && {}."""
        t, before = self.tokens, self.tokens.previous(i)
        if t.text(t.next(i)) in ("{", ";", ")", ",", ">"):
            return True
        if before in self.pairs and t.text(before) == ">":
            before = t.previous(self.pairs[before])
            return not t.text(before).endswith("_v") and t.text(t.next(i)) != "("
        return t.kind(before) == "name" and self.names_type(before)

    # ---- operands --------------------------------------------------------------------------------

    def left(self, i: int) -> int:
        """First token of the left operand of the operator at `i`."""
        t, precedence = self.tokens, _PRECEDENCE[self.operator(i)]
        begin, k = i, t.previous(i)
        while k >= 0:
            if k in self.pairs:
                opening = self.pairs[k]
                if opening > k or (t.text(k) == "}" and not self.is_braced_value(opening)):
                    break
                if t.text(k) == ")" and t.text(t.previous(opening)) in _CONTROL_WORDS:
                    break
                k = opening
            elif t.kind(k) == "op" and (t.text(k) in _BRACKETS or self.bounds(k, precedence)):
                break
            elif t.kind(k) == "name" and t.text(k) in _STATEMENT_WORDS:
                break
            begin, k = k, t.previous(k)
        return begin

    def bounds(self, k: int, precedence: int) -> bool:
        """Whether the text right of the operator at `k` is the whole left operand of an operator of that
        precedence. Operators with the same precedence are left-associative.
        """
        operator = self.operator(k)
        return _PRECEDENCE.get(operator, precedence) < precedence and not (
            operator == "&" and self.is_prefix(k)
        )

    def right(self, i: int) -> int:
        """Last token of the right operand of the operator at `i`."""
        t, precedence = self.tokens, _PRECEDENCE[self.operator(i)]
        end = self.unary_end(t.next(i))
        k = t.next(end)
        while k < len(t):
            operator = self.operator(k)
            is_end = t.kind(k) != "op" or t.text(k) in _BRACKETS or k in self.pairs
            if is_end or _PRECEDENCE.get(operator, precedence + 1) <= precedence:
                break
            if operator in (">>", ">>="):
                if operator == ">>=" or t.text(t.next(k)) == ">=":
                    break
                k = t.next(k)  # the second half
            end = self.unary_end(t.next(k))
            k = t.next(end)
        return end
