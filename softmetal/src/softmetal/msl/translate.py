"""MSL to C++: the order of the passes. The file of each pass explains it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .attributes import annotate
from .braces import translate_braced_arguments, translate_string_literals
from .comparisons import translate_comparisons
from .conditionals import translate_conditionals
from .constants import FunctionConstants
from .expressions import ExpressionPass, translate_literals, translate_vectors_of_bool
from .kernels import KernelPass
from .language import DEFAULT, LANGUAGES, Language
from .lexer import TokenList
from .members import translate_members
from .overloads import separate_overloads
from .qualifiers import (
    drop_attributes,
    pointers_for_array_parameters,
    translate_address_spaces,
)
from .stages import declare_builtins, drop_stages
from .strict import check
from .structure import Outline, outline
from .threadgroup import translate_threadgroup_variables
from .usage import names_reached

HEADER = '#include "softmetal_msl.h"\n'
_UNROLL = re.compile(r"^([ \t]*#[ \t]*pragma[ \t]+clang[ \t]+loop[ \t]+unroll)[ \t]*\(\w+\)", re.MULTILINE)


@dataclass
class Translation:
    cpp: str
    tokens: TokenList
    outline: Outline


def translate(
    preprocessed: str, *, checked: bool, only: str | None = None, language: Language = LANGUAGES[DEFAULT]
) -> Translation:
    """C++ for a preprocessed MSL program. `only` is a regular expression of the host names to export.

    Raises TranslationError with the place in the .metal source.
    """
    tokens = TokenList(preprocessed)
    program = outline(tokens)
    drop_stages(tokens, program)
    declare_builtins(tokens, program)
    check(tokens, program, language)
    separate_overloads(tokens, program)
    annotate(tokens, program)
    reached = names_reached(tokens, program)
    kernels = KernelPass(tokens, program, only)
    constants = FunctionConstants(tokens, program)
    kernels.run()
    constants.run()
    kernels.check_gates(constants)
    translate_threadgroup_variables(tokens, program)
    pointers_for_array_parameters(tokens, program)
    drop_attributes(tokens)
    translate_members(tokens)
    translate_braced_arguments(tokens, program)
    translate_string_literals(tokens)
    translate_conditionals(tokens)
    translate_comparisons(tokens, program)
    translate_vectors_of_bool(tokens)
    ExpressionPass(tokens, program).run()
    translate_literals(tokens)
    translate_address_spaces(tokens, language)
    text = tokens.render()
    if checked:
        # Every array access is a callback, so arrays stay in memory, and unrolling would only add code to
        # compile. Without checks loops are unrolled, as on a GPU: more products then meet sums across
        # statements, and are rounded once.
        text = _UNROLL.sub(r"\1(disable)", text)
    table = _module_table(kernels, constants, reached, checked)
    return Translation(HEADER + text + table, tokens, program)


def _module_table(
    kernels: KernelPass, constants: FunctionConstants, reached: dict[str, set[str]], checked: bool
) -> str:
    return (
        '\n# 1 "softmetal exports"\n'
        + kernels.exports({name: constants.positions(names) for name, names in reached.items()})
        + constants.exports()
        + 'extern "C" __attribute__((visibility("default")))\n'
        "const softmetal_module_table softmetal_module = {\n"
        f"    SOFTMETAL_ABI_VERSION, {len(kernels.exported)}, softmetal_kernels, {int(checked)}, "
        f"{len(constants.descriptions)}, softmetal_function_constants}};\n"
    )
