"""`threadgroup` variables of kernels: each becomes a reference to storage that the runtime keeps per
threadgroup.

Every array is placed separately, between guard zones, and the runtime can poison it. A constexpr function
computes how many bytes a kernel declares, for the pipeline's limit of 32 KiB. It has the kernel's template
parameters and repeats those declarations of the kernel's body that the variables' types need.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .lexer import TokenList, TranslationError
from .qualifiers import host_text
from .structure import Function, Outline

_ZERO = re.compile(r"0x0+|0*\.?0*[fFhHuUlL]*")
_STATEMENT_STARTS = {";", "{", "}", ":", ")"}
_CONSTANT_DECLARATIONS = {"constexpr", "const", "static", "constant", "using", "typedef", "enum", "struct"}
_ATTRIBUTES = {"alignas", "__attribute__"}
_CONTROL = {"if", "else", "for", "while", "do", "switch", "case", "return"}


@dataclass
class Declaration:
    """threadgroup T x[8], y;"""

    begin: int
    end: int
    type_name: str
    variables: list[tuple[str, str]]  # name, dimensions
    alignment: str  # of alignas() or __attribute__((aligned())), or "1"


@dataclass
class Block:
    """A braced block of a kernel's body: the declarations that the sizes of its threadgroup variables
    need.
    """

    constants: list[tuple[int, int, set[str]]] = field(
        default_factory=list
    )  # statements that declare constants or types
    items: list[Declaration | Block] = field(default_factory=list)

    def declarations(self) -> list[Declaration]:
        nested = [item.declarations() if isinstance(item, Block) else [item] for item in self.items]
        return [declaration for inner in nested for declaration in inner]


def bytes_function(function: Function) -> str:
    return f"softmetal_threadgroup_bytes_{function.name}"


def translate_threadgroup_variables(tokens: TokenList, outline: Outline) -> None:
    for function in outline.functions:
        if function.body is None:
            continue
        block = _read_block(tokens, *function.body)
        declarations = block.declarations()
        if function.is_kernel:
            _insert_bytes_function(tokens, function, block)
        elif declarations:
            raise TranslationError(
                tokens[declarations[0].begin].where,
                f"a threadgroup variable must be declared in a kernel function, not in '{function.name}'",
            )
        number = 0
        for declaration in declarations:
            _translate(tokens, declaration, number)
            number += len(declaration.variables)


# ---- reading -------------------------------------------------------------------------------------


def _read_block(tokens: TokenList, begin: int, end: int) -> Block:
    block, i = Block(), begin + 1
    while i < end:
        if tokens.text(i) == "{":
            block.items.append(_read_block(tokens, i, tokens.closing(i)))
            i = tokens.closing(i) + 1
        elif tokens.kind(i) == "name" and tokens.text(tokens.previous(i)) in _STATEMENT_STARTS:
            i = _read_statement(tokens, i, end, block)
        else:
            i += 1
    return block


def _read_statement(tokens: TokenList, begin: int, end: int, block: Block) -> int:
    """Records the statement at `begin` if it matters; returns where to continue."""
    words, after = _leading_words(tokens, begin)
    stop = after
    while stop < end and tokens.text(stop) not in (";", "{", "}", "="):
        stop = tokens.closing(stop) + 1 if tokens.text(stop) in ("(", "[") else stop + 1
    if "threadgroup" in words and _declares_variable(tokens, begin, stop):
        stop = _drop_zeros(tokens, begin)
        block.items.append(_read_declaration(tokens, begin, stop))
        return stop
    if words & _CONSTANT_DECLARATIONS and tokens.text(begin) not in _CONTROL:
        semicolon = begin
        while semicolon < end and tokens.text(semicolon) != ";":
            semicolon = (
                tokens.closing(semicolon) + 1 if tokens.text(semicolon) in ("(", "[", "{") else semicolon + 1
            )
        block.constants.append((begin, semicolon, _declared_names(tokens, begin, semicolon)))
        return semicolon
    return begin + 1


def _drop_zeros(tokens: TokenList, begin: int) -> int:
    """Blanks the zero initialisers of the declaration at `begin`, which Apple's compiler accepts and MLX
    writes; refuses others. The memory still starts out undefined. Returns the declaration's semicolon.
    """
    i = begin
    while tokens.text(i) not in (";", ""):
        if tokens.text(i) in ("=", "{"):
            end = i
            while tokens.text(end) not in (";", ",", ""):
                end = tokens.closing(end) + 1 if tokens.text(end) in ("(", "[", "{") else end + 1
            if not all(_is_zero(tokens, k) for k in range(i + 1, end)):
                raise TranslationError(
                    tokens[begin].where, "a threadgroup variable cannot have an initialiser other than zero"
                )
            tokens.blank(i, end)
            i = end
            continue
        i = tokens.closing(i) + 1 if tokens.text(i) in ("(", "[") else i + 1
    return i


def _is_zero(tokens: TokenList, i: int) -> bool:
    """Whether the token is 0, a brace or part of a value made of them: `float4(0)`."""
    if tokens.kind(i) == "name":
        return tokens.text(i) in ("false", "nullptr") or tokens.text(i + 1) in ("(", "{")
    return tokens.text(i) in ("(", ")", "{", "}", ",") or _ZERO.fullmatch(tokens.text(i)) is not None


def _leading_words(tokens: TokenList, begin: int) -> tuple[set[str], int]:
    words, i = set(), begin
    while tokens.kind(i) == "name":
        words.add(tokens.text(i))
        i = tokens.closing(i + 1) + 1 if tokens.text(i) in _ATTRIBUTES else i + 1
    return words, i


def _declares_variable(tokens: TokenList, begin: int, end: int) -> bool:
    """Whether the statement declares a variable, not a pointer or reference."""
    i = begin
    while i < end:
        text = tokens.text(i)
        if text in ("*", "&", "("):
            return False
        if text == "<":
            i = tokens.closing_angle(i)
        elif text == "[" or text in _ATTRIBUTES:
            i = tokens.closing(i if text == "[" else i + 1)
        i += 1
    return True


def _declared_names(tokens: TokenList, begin: int, end: int) -> set[str]:
    if tokens.text(begin) == "using":
        return {tokens.text(begin + 1)}
    if tokens.text(begin) in ("struct", "enum"):
        return {tokens.text(i) for i in range(begin + 1, end) if tokens.kind(i) == "name"}
    names = set()
    for first, last in tokens.split(begin, end):
        stop = next((i for i in range(first, last) if tokens.text(i) in ("=", "{", "[", "(")), last)
        names.add(tokens.text(stop - 1))
    return names


def _read_declaration(tokens: TokenList, begin: int, end: int) -> Declaration:
    alignment = _take_alignment(tokens, begin, end)
    i = begin
    while tokens.kind(i) == "gone" or tokens.text(i) in ("threadgroup", "static", "volatile"):
        i += 1
    declarators = tokens.split(i, end)
    first_name = _name_index(tokens, *declarators[0])
    words = [k for k in range(i, first_name) if tokens.text(k) not in ("threadgroup", "volatile")]
    variables = []
    for k, (first, last) in enumerate(declarators):
        name = first_name if k == 0 else first
        variables.append((tokens.text(name), tokens.join(name + 1, last)))
    return Declaration(begin, end, tokens.join(words[0], words[-1] + 1), variables, alignment)


def _take_alignment(tokens: TokenList, begin: int, end: int) -> str:
    """Blanks the attributes anywhere in a declaration; returns the alignment that they set."""
    alignment, i = "1", begin
    while i < end:
        if tokens.text(i) in _ATTRIBUTES:
            close = tokens.closing(i + 1)
            aligned = [k for k in range(i, close) if tokens.text(k) in ("alignas", "aligned", "__aligned__")]
            if aligned and tokens.text(aligned[0] + 1) == "(":
                alignment = tokens.join(aligned[0] + 2, tokens.closing(aligned[0] + 1))
            tokens.blank(i, close + 1)
            i = close
        i += 1
    return alignment


def _name_index(tokens: TokenList, begin: int, end: int) -> int:
    """The declared name in `T<...> name[8]`: the last name outside of brackets."""
    i, last = begin, begin
    while i < end and tokens.text(i) != "[":
        if tokens.text(i) == "<":
            i = tokens.closing_angle(i)
        elif tokens.kind(i) == "name":
            last = i
        i += 1
    return last


# ---- writing -------------------------------------------------------------------------------------


def _translate(tokens: TokenList, declaration: Declaration, number: int) -> None:
    pieces = []
    for k, (name, dimensions) in enumerate(declaration.variables):
        alias = f"softmetal_type_{name}"
        pieces.append(
            f"typedef {declaration.type_name} {alias}{dimensions}; SOFTMETAL_THREADGROUP {alias}& {name} = "
            f"::softmetal::threadgroup_variable<{alias}, {declaration.alignment}>"
            f'({number + k}, "{name}", __LINE__)'
        )
    tokens.blank(declaration.begin, declaration.end)
    tokens[declaration.begin].after += "; ".join(pieces)


def _insert_bytes_function(tokens: TokenList, function: Function, block: Block) -> None:
    header = host_text(tokens, function.template_begin, function.begin) if function.is_template else ""
    begin = function.template_begin if function.is_template else function.begin
    needed = _needed_names(tokens, block)
    body = _sizes(tokens, block, needed) if block.declarations() else ""
    tokens[begin].before += (
        f"{header} constexpr uint32_t {bytes_function(function)}() "
        f"{{ uint32_t bytes = 0; {body} return (bytes + 15) / 16 * 16; }} "
    )


def _needed_names(tokens: TokenList, block: Block) -> set[str]:
    """Names in the variables' types and dimensions, and the names in their definitions, recursively."""
    needed: set[str] = set()
    for declaration in block.declarations():
        needed |= {
            tokens.text(i) for i in range(declaration.begin, declaration.end) if tokens.kind(i) == "name"
        }
    statements = _statements(block)
    while True:
        mentioned = {
            tokens.text(i)
            for begin, end, names in statements
            if names & needed
            for i in range(begin, end)
            if tokens.kind(i) == "name"
        }
        if mentioned <= needed:
            return needed
        needed |= mentioned


def _statements(block: Block) -> list[tuple[int, int, set[str]]]:
    nested = [statement for item in block.items if isinstance(item, Block) for statement in _statements(item)]
    return block.constants + nested


def _sizes(tokens: TokenList, block: Block, needed: set[str]) -> str:
    text = ""
    for begin, end, names in block.constants:
        if names & needed:
            words = [
                tokens.join(i, i + 1)
                for i in range(begin, end)
                if tokens.text(i) not in ("static", "constant")
            ]
            text += " ".join(words) + "; "
    for item in block.items:
        if isinstance(item, Block):
            if not item.declarations():
                continue
            text += f"{{ {_sizes(tokens, item, needed)} }} "
            continue
        for name, dimensions in item.variables:
            text += (
                f"typedef {item.type_name} softmetal_type_{name}{dimensions}; "
                f"bytes = ::softmetal::threadgroup_end<softmetal_type_{name}, {item.alignment}>(bytes); "
            )
    return text
