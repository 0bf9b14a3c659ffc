"""The preprocessor: clang -E with replacements for Metal's headers that define only macros (msl/host has
the rest).
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .language import DEFAULT, LANGUAGES, Language
from .lexer import TranslationError

CLANG = "clang++-19"
STUB_HEADERS = Path(__file__).parent / "stub"
_PREDEFINED = (
    "__METAL__",
    "__METAL_MACOS__",
    "__HAVE_BFLOAT__",
)
# clang -E neither expands the macros in these nor keeps their definitions.
_UNROLL = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+unroll[ \t]*\(.*$", re.MULTILINE)
_CONTRACTION = re.compile(r"^(\s*)#\s*pragma\s+METAL\s+fp\s+contract\b", re.MULTILINE)
_MISSING = re.compile(r"^(.*?:\d+):\d+: fatal error: '([^']+)' file not found", re.MULTILINE)


def preprocess(
    source: str,
    name: str,
    macros: Sequence[str] = (),
    include: Sequence[str] = (),
    language: Language = LANGUAGES[DEFAULT],
) -> str:
    """The program's text after preprocessing, with line markers that call the source `name`."""
    command = [
        CLANG,
        "-E",
        "-x",
        "c++",
        f"-std=c++{language.cpp}",
        "-nostdinc",
        "-nostdinc++",
        "-w",
        "-I",
        str(STUB_HEADERS),
    ]
    predefined = (
        language.version_macro,
        *_PREDEFINED,
        *(["__HAVE_TENSOR__"] if language.has_tensors else []),
    )
    command += [f"-D{macro}" for macro in (*predefined, *macros)]
    for folder in include:
        command += ["-I", folder]
    done = subprocess.run(
        [*command, "-"], input=f'#line 1 "{name}"\n{source}', capture_output=True, text=True
    )
    if done.returncode:
        missing = _MISSING.search(done.stderr)
        if missing:
            where, header = missing.groups()
            raise TranslationError(
                where, f"'{header}' is not a header of Metal: a program can include only metal_* and simd/*"
            )
        raise PreprocessorError(done.stderr)
    return _CONTRACTION.sub(r"\1#pragma clang fp contract", _UNROLL.sub("", done.stdout))


class PreprocessorError(Exception):
    """clang -E failed; the text is clang's."""
