"""Translates MSL to CUDA C++, with the passes of softmetal.msl that read a program and CUDA's replacements
for the others.

CUDA has one address space for pointers, so `device`, `threadgroup`, `constant` and `thread` are dropped, and
declarations that differ only in them become one. Function constants are compile-time constants: each pipeline
is translated separately.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from softmetal.msl.expressions import translate_literals
from softmetal.msl.kernels import Kernel, KernelPass, Parameter
from softmetal.msl.lexer import TokenList, TranslationError
from softmetal.msl.members import translate_members
from softmetal.msl.qualifiers import drop_attributes
from softmetal.msl.structure import Function, Outline, Variable, outline
from softmetal.msl.types import ADDRESS_SPACES, VECTORS

from .runs import declare_runs

ConstantValues = Mapping[str, bool | int | float]

HEADER = '#include "softmetal_cuda.h"\n'
_NO_FUNCTIONS = {"static_assert", "using", "typedef", "friend", "extern", "asm"}
_CLASS_KEYS = {"struct", "class", "union", "enum"}
_PRAGMA = r"^[ \t]*#[ \t]*pragma[ \t]+"
_LOOP = _PRAGMA + r"clang[ \t]+loop[ \t]+"
_PRAGMAS = {
    rf"{_LOOP}unroll\((?:full|enable)\).*$": "#pragma unroll",
    r'_Pragma\("clang loop unroll\((?:full|enable)\)"\)': '_Pragma("unroll")',
    rf"{_LOOP}unroll_count\((\d+)\).*$": r"#pragma unroll \1",
    rf"{_LOOP}unroll\(disable\).*$": "#pragma unroll 1",
    rf"{_PRAGMA}(?:METAL|clang|GCC)\b.*$": "",
}
# `T x[N] = {[0 ... N - 1] = value};`, which nvcc refuses if N is a template parameter.
_FILLED_ARRAY = re.compile(
    r"\b(\w+)\s+(\w+)\[(\w+)\]\s*=\s*\{\s*\[\s*0\s*\.\.\.\s*\3\s*-\s*1\s*\]\s*=\s*([^,{}]+?)\s*\};"
)


def translate(
    preprocessed: str,
    kernel: str,
    constants: ConstantValues,
    max_threads: int,
    aligned_runs: bool = False,
    threadgroup_memory: Mapping[int, int] | None = None,
    min_groups: int = 0,
) -> str:
    """Returns CUDA C++ for one kernel of a preprocessed MSL program, with the entry point `softmetal_kernel`.

    `constants` sets function constants by name; the others are undefined. `aligned_runs` is the promise in
    runs.py. `threadgroup_memory` has the bytes of [[threadgroup(n)]] arguments by n. ptxas allocates
    registers for `min_groups` threadgroups per multiprocessor; 0 leaves the number to ptxas. Raises
    TranslationError.
    """
    tokens = TokenList(preprocessed)
    program = outline(tokens)
    entry = _EntryPass(
        tokens,
        program,
        f"^{re.escape(kernel)}$",
        bounds=f"{max_threads}, {min_groups}" if min_groups else f"{max_threads}",
        threadgroup_memory=threadgroup_memory or {},
    )
    entry.run()
    if len(entry.exported) != 1:
        raise TranslationError("program_source", f"the program has no kernel '{kernel}'")
    twins = _drop_twins(tokens, 0, len(tokens))
    if aligned_runs:
        declare_runs(tokens, program, twins)
    _place_variables(tokens, program, constants)
    _place_threadgroup_variables(tokens, program, aligned_runs)
    drop_attributes(tokens)
    translate_members(tokens, annotate=False)
    _qualify_functions(tokens, program)
    translate_literals(tokens)
    _qualify_vectors(tokens)
    _drop_address_spaces(tokens)
    text = tokens.render()
    for pragma, replacement in _PRAGMAS.items():
        text = re.sub(pragma, replacement, text, flags=re.M)
    return HEADER + _FILLED_ARRAY.sub(r"\1 \2[\3]; for (\1& each : \2) each = \4;", text)


@dataclass
class _EntryPass(KernelPass):
    """Writes the __global__ function instead of the tables of the CPU target."""

    bounds: str = "1024"
    threadgroup_memory: Mapping[int, int] = field(default_factory=dict)
    constant_parameters: set[int] = field(default_factory=set)  # id() of parameters that are passed as bytes

    def read_parameter(
        self, function: Function, position: int, span: tuple[int, int], attributes: dict[str, str]
    ) -> Parameter:
        parameter = super().read_parameter(function, position, span, attributes)
        if "constant" in self.declarator(span)[1]:
            self.constant_parameters.add(id(parameter))
        return parameter

    def export_plain(self, kernel: Kernel) -> None:
        function = kernel.function
        assert function.body is not None
        if not function.is_template and self.wanted(kernel.host_name):
            text = self.entry(kernel, kernel.host_name, function.name, function.namespace)
            self.tokens[function.body[1]].after += text

    def entry(self, kernel: Kernel, host_name: str, designator: str, namespace: str) -> str:
        bindings = "".join(f", {self.binding(parameter)}" for parameter in kernel.parameters)
        self.exported.append((host_name, designator, namespace))  # type: ignore[arg-type]
        return (
            f' extern "C" __global__ void __launch_bounds__({self.bounds}) '
            "softmetal_kernel(const __grid_constant__ ::softmetal::Arguments arguments) "
            f"{{ ::softmetal::Entry<&{_qualified(designator)}>::run(arguments{bindings}); }} "
        )

    def binding(self, parameter: Parameter) -> str:
        if parameter.binding == "ThreadgroupArgument":
            if not self.threadgroup_memory:
                raise TranslationError(
                    parameter.name,
                    f"the size of this [[threadgroup({parameter.slot})]] argument is unknown: give its bytes "
                    "in threadgroup_memory, as Metal's encoder is given them",
                )
            lengths = ", ".join(f"{{{index}, {size}}}" for index, size in self.threadgroup_memory.items())
            length = f"::softmetal::length_of({parameter.slot}, {{{lengths}}})"
            return f"::softmetal::ThreadgroupArgument<({parameter.slot}), {length}>{{}}"
        if parameter.binding != "Buffer":
            return f"::softmetal::{parameter.binding}{{}}"
        kind = "ConstantBytes" if id(parameter) in self.constant_parameters else "DeviceBuffer"
        return f"::softmetal::{kind}<({parameter.slot})>{{}}"


# ---- program-scope variables ------------------------------------------------------------------------------


def _place_variables(tokens: TokenList, program: Outline, constants: ConstantValues) -> None:
    unknown = set(constants) - {v.name for v in program.variables if _is_function_constant(tokens, v)}
    if unknown:
        raise TranslationError("program_source", f"the program has no function constant '{min(unknown)}'")
    for variable in program.variables:
        if variable.scope != "namespace":
            continue
        if _is_function_constant(tokens, variable):
            _define_function_constant(tokens, variable, constants)
        elif tokens.text(variable.name_index + 1) == "[":
            _qualify_variable(tokens, variable, "static __constant__ const")
        elif not _is_template_variable(tokens, variable):
            _qualify_variable(tokens, variable, "static constexpr")
    _translate_queries(tokens, constants)


def _is_function_constant(tokens: TokenList, variable: Variable) -> bool:
    return any(
        tokens.is_attribute(i) and tokens.text(i + 2) == "function_constant"
        for i in range(variable.name_index + 1, variable.end)
    )


def _is_template_variable(tokens: TokenList, variable: Variable) -> bool:
    return tokens.text(tokens.previous(variable.begin)) == ">"


def _define_function_constant(tokens: TokenList, variable: Variable, constants: ConstantValues) -> None:
    value = constants.get(variable.name, 0)
    words = [
        tokens.text(i)
        for i in range(variable.begin, variable.name_index)
        if tokens.text(i) not in ("constant", "static", "const", "constexpr")
    ]
    literal = str(value).lower() if isinstance(value, bool) else repr(value)
    tokens.blank(variable.begin, variable.end)
    tokens[variable.begin].after += f"static constexpr {' '.join(words)} {variable.name} = {literal}"


def _qualify_variable(tokens: TokenList, variable: Variable, qualifiers: str) -> None:
    for i in range(variable.begin, variable.name_index):
        if tokens.text(i) in ("constant", "static", "constexpr", "const", "inline"):
            tokens.blank(i, i + 1)
    tokens[variable.begin].before += f"{qualifiers} "


def _translate_queries(tokens: TokenList, constants: ConstantValues) -> None:
    for i, token in enumerate(tokens.tokens):
        if (
            token.kind == "name"
            and token.text == "is_function_constant_defined"
            and tokens.text(i + 1) == "("
        ):
            close = tokens.closing(i + 1)
            defined = tokens.text(close - 1) in constants
            tokens.blank(i + 1, close + 1)
            tokens.overwrite(i, "true" if defined else "false")


# ---- functions --------------------------------------------------------------------------------------------


def _place_threadgroup_variables(tokens: TokenList, program: Outline, aligned_runs: bool) -> None:
    """`threadgroup T x[8];` in a kernel's body, not a pointer: the word becomes __shared__. The promise of
    aligned runs holds for them, too."""
    word = "__shared__ __align__(16)" if aligned_runs else "__shared__"
    for function in program.functions:
        if not function.is_kernel or function.body is None:
            continue
        for i in range(*function.body):
            if tokens.kind(i) == "name" and tokens.text(i) == "threadgroup" and _declares_storage(tokens, i):
                tokens.overwrite(i, word)


def _declares_storage(tokens: TokenList, i: int) -> bool:
    if tokens.text(tokens.previous(i)) not in (";", "{", "}", ")", "alignas"):
        return False
    while tokens.text(i) not in (";", "=", "["):
        if tokens.text(i) in ("*", "&", "("):
            return False
        i = tokens.closing_angle(i) + 1 if tokens.text(i) == "<" else i + 1
    return True


def _qualify_functions(tokens: TokenList, program: Outline) -> None:
    for function in program.functions:
        if tokens.kind(function.begin) == "gone" and not function.is_kernel and _is_gone(tokens, function):
            continue
        if tokens.text(function.begin) in _NO_FUNCTIONS:
            continue
        is_inline = any(tokens.text(i) == "inline" for i in range(function.begin, function.parameters[0]))
        inline = "" if is_inline or function.scope == "class" else "inline "
        tokens[function.begin].before += f"__device__ __attribute__((always_inline)) {inline}"


def _is_gone(tokens: TokenList, function: Function) -> bool:
    return all(tokens.kind(i) == "gone" for i in range(function.begin, function.parameters[1] + 1))


_VECTOR_NAME = re.compile(rf"(?<![\w:.])(?:{'|'.join(sorted(VECTORS))})\b")


def _qualified(designator: str) -> str:
    """Qualifies vectors in the arguments of a template kernel's designator."""
    return _VECTOR_NAME.sub(r"::metal::\g<0>", designator)


def _qualify_vectors(tokens: TokenList) -> None:
    """Qualifies float4 and the like as Metal's, because CUDA has global types with these names."""
    for i, token in enumerate(tokens.tokens):
        if (
            token.kind == "name"
            and token.text in VECTORS
            and tokens.text(tokens.previous(i)) not in ("::", ".", "->")
        ):
            tokens.put(i, f"::metal::{token.text}")


# ---- address spaces ---------------------------------------------------------------------------------------


def _drop_address_spaces(tokens: TokenList) -> None:
    """Drops address spaces; the target of a `constant` pointer stays const."""
    for i, token in enumerate(tokens.tokens):
        if token.kind == "name" and token.text in ADDRESS_SPACES:
            word = _word(tokens, i)
            if word:
                tokens.put(i, word)
            else:
                tokens.blank(i, i + 1)


def _stands_with_const(tokens: TokenList, i: int) -> bool:
    for step in (tokens.previous, tokens.next):
        k = step(i)
        while tokens.kind(k) == "name":
            if tokens.text(k) == "const":
                return True
            k = step(k)
    return False


def _drop_twins(tokens: TokenList, begin: int, end: int) -> list[tuple[int, int]]:
    """Removes definitions that differ from an earlier one only in address spaces. Returns the earlier ones'
    ranges."""
    seen: dict[str, tuple[int, int]] = {}
    kept: list[tuple[int, int]] = []
    for first, last in _declarations(tokens, begin, end):
        words = [_word(tokens, i) for i in range(first, last) if tokens.kind(i) != "gone"]
        if "namespace" in words[:2]:
            brace = next(i for i in range(first, last) if tokens.text(i) in ("{", ";"))
            if tokens.text(brace) == "{":
                kept += _drop_twins(tokens, brace + 1, tokens.closing(brace))
            continue
        text = " ".join(word for word in words if word)
        if text in seen and "{" in words:
            kept.append(seen[text])
            for i in range(first, last):
                tokens[i].before = tokens[i].after = ""
            tokens.blank(first, last)
        seen.setdefault(text, (first, last))
    return kept


def _word(tokens: TokenList, i: int) -> str:
    """The token in CUDA C++."""
    if tokens.kind(i) != "name" or tokens.text(i) not in ADDRESS_SPACES:
        return tokens.text(i)
    return "const" if tokens.text(i) == "constant" and not _stands_with_const(tokens, i) else ""


def _declarations(tokens: TokenList, begin: int, end: int) -> list[tuple[int, int]]:
    """Ranges of the declarations of a namespace scope."""
    ranges: list[tuple[int, int]] = []
    first, i, assigned, is_class = begin, begin, False, False
    while i < end:
        text = tokens.text(i)
        if tokens.kind(i) == "op" and text in ("(", "["):
            i = tokens.closing(i)
        elif tokens.kind(i) == "op" and text == "<" and tokens.closing_angle(i) > 0 and not assigned:
            i = tokens.closing_angle(i)
        elif text in _CLASS_KEYS:
            is_class = True
        elif text == "=":
            assigned = True
        ends = text == ";"
        if text == "{" and tokens.kind(i) == "op":
            i = tokens.closing(i)
            ends = not assigned and not is_class
        i += 1
        if ends:
            ranges.append((first, i))
            first, assigned, is_class = i, False, False
    return ranges
