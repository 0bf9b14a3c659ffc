"""Compiles MSL source to a shared object: preprocess, translate, compile with clang. Results are cached by
content.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

from ..paths import BUILD
from .arithmetic import PASSES, Arithmetic, choice
from .diagnostics import FLAGS, readable
from .language import DEFAULT, LANGUAGES, Language
from .lexer import TranslationError, source_line
from .preprocess import CLANG, PreprocessorError, preprocess
from .translate import HEADER, translate

_PACKAGE = Path(__file__).parent
RULES = BUILD / "libsoftmetal_rules.so"
SIMT_PASSES = BUILD / "libsoftmetal_passes.so"
_LANGUAGE_FLAGS = [
    # SYCL's device mode, for its address spaces only (host/types.h). It mangles bfloat as the auxiliary
    # target does.
    "-x", "c++", "-Xclang", "-fsycl-is-device", "-Xclang", "-aux-triple",
    "-Xclang", f"{platform.machine()}-pc-linux-gnu", "-nostdinc++", "-nostdlibinc",
    f"-I{_PACKAGE / 'host'}",
]  # fmt: skip
_COMMON_FLAGS = [
    "-fPIC", "-fvisibility=hidden", "-Xclang", "-fno-pch-timestamp",
    # Findings name the line in the kernel that called the runtime, so that call must leave a frame.
    "-fno-optimize-sibling-calls",
    "-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics", "-fno-strict-aliasing", "-fsigned-char",
    # The element type of vectors of bool (host/types.h).
    "-fchar8_t",
    # Vectors of different types do not mix: clang would take the bits of one for the other.
    "-flax-vector-conversions=none",
    # half and bfloat are rounded after every operation; floats out of an integer's range saturate.
    "-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none",
    "-fno-strict-float-cast-overflow",
    # Keeps endless loops, for the watchdog; keeps large frames from skipping the guard page.
    "-fno-finite-loops", "-fstack-clash-protection",
    *FLAGS,
    # The runtime's passes (simt/passes) read the names of basic blocks.
    f"-fpass-plugin={SIMT_PASSES}", "-fno-discard-value-names",
]  # fmt: skip
_LINK_FLAGS = ["-nostdlib++", "--rtlib=compiler-rt"]
# Compiling a kernel takes longer than running it: optimisations that cost more than they save are off.
_MODE_FLAGS = {
    "fast": [
        "-O1", "-gline-tables-only", "-fno-vectorize", "-fno-slp-vectorize", "-mllvm", "-inline-threshold=20",
    ],
    # Every access of the kernel as one callback (simt/passes/checks.cpp): accesses are not merged, and not
    # turned into library calls.
    "checked": [
        "-O1", "-gline-tables-only", "-fno-omit-frame-pointer", "-fno-vectorize",
        "-fno-slp-vectorize", "-fno-builtin",
        # Forbids speculative loads. All other parts of AddressSanitizer are off.
        "-fsanitize=kernel-address", "-mllvm=-asan-instrument-reads=0", "-mllvm=-asan-instrument-writes=0",
        "-mllvm=-asan-instrument-atomics=0", "-mllvm=-asan-instrument-byval=0", "-mllvm=-asan-stack=0",
        "-mllvm=-asan-globals=0",
    ],
}  # fmt: skip
MODES = tuple(_MODE_FLAGS)
# likely: refuses programs that Apple's compiler refuses, certainly or probably. unsure: also ones that it may
# refuse.
REFUSALS = ("likely", "unsure")
_X86_64_V3 = {"avx2", "bmi2", "f16c", "fma"}


class CompileError(Exception):
    """The program is refused. The text is for its author and names lines of the .metal source."""


@dataclass(frozen=True)
class Program:
    source: str
    name: str = "program_source"  # the source's name in errors and findings
    macros: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    std: str = DEFAULT
    only: str | None = None  # regular expression of the host names to export; None for all
    arithmetic: Arithmetic = field(default_factory=Arithmetic)
    # Also refuse constructs that no public Metal source has: Apple's compiler may accept or refuse them.
    refuse_unsure: bool = field(default_factory=lambda: choice("SOFTMETAL_REFUSE", REFUSALS) == "unsure")


def cache_folder() -> Path:
    return Path(os.environ.get("SOFTMETAL_CACHE") or Path.home() / ".cache" / "softmetal")


def compile_program(program: Program, mode: str, folder: Path | None = None) -> Path:
    """Returns the program's shared object, from the cache if possible. Raises CompileError."""
    language = LANGUAGES[program.std]
    try:
        preprocessed = preprocess(program.source, program.name, program.macros, program.include, language)
        target = (folder or cache_folder()) / f"{_key(preprocessed, mode, program)}.so"
        if not _is_whole(target):
            translation = translate(
                preprocessed, checked=mode == "checked", only=program.only, language=language
            )
            compiler = Compiler(
                translation.cpp, preprocessed, language, program.arithmetic, program.refuse_unsure
            )
            compiler.build(mode, target)
    except (TranslationError, PreprocessorError) as error:
        raise CompileError(str(error)) from error
    if requests := os.environ.get("SOFTMETAL_REQUESTS"):
        with open(requests, "a") as log:
            log.write(f"{target.name}\n")
    return target


def compile_errors(
    source: str, macros: Sequence[str] = (), std: str = DEFAULT, name: str = "program_source"
) -> str:
    """Returns the errors of a program (macros: NAME=VALUE), or "" if it compiles. No code is generated."""
    language = LANGUAGES[std]
    try:
        preprocessed = preprocess(source, name, macros, (), language)
        translation = translate(preprocessed, checked=False, language=language)
    except (TranslationError, PreprocessorError) as error:
        return str(error)
    messages = Compiler(translation.cpp, preprocessed, language).messages()
    return readable(messages, partial(source_line, preprocessed), language)


def _keep(file: Path, target: Path) -> None:
    """Moves the file into the cache with its digest at the end. The dynamic linker ignores the digest, and
    clang stops reading a precompiled header at the zeros before it.
    """
    file.write_bytes(_sealed(file.read_bytes()))
    os.replace(file, target)


def _is_whole(kept: Path) -> bool:
    try:
        content = kept.read_bytes()
    except FileNotFoundError:
        return False
    return _sealed(content[: -len(_sealed(b""))]) == content


def _sealed(content: bytes) -> bytes:
    return content + bytes(4) + hashlib.sha256(content).digest()


def _key(preprocessed: str, mode: str, program: Program) -> str:
    machine = (platform.machine(), *_machine_flags())
    options = (mode, program.std, repr(program.arithmetic), program.only or "", str(program.refuse_unsure))
    return _digest(toolchain_version(), *machine, *options, preprocessed)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]


@cache
def _machine_flags() -> tuple[str, ...]:
    """x86-64 before v3 has no instructions for half, so conversions would be calls. A level instead of
    `native` gives the same results on every machine.
    """
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return ()
    return ("-march=x86-64-v3",) if words >= _X86_64_V3 else ()


@cache
def toolchain_version() -> str:
    """A digest of the translator, the rules, the host headers, the ABI and clang."""
    time = os.stat(shutil.which(CLANG) or CLANG).st_mtime_ns  # another after an upgrade
    digest = hashlib.sha256(f"{CLANG} {time}".encode())
    inputs = ("*.py", "common/*.h", "host/*.h", "stub/**/*")
    for path in sorted(path for pattern in inputs for path in _PACKAGE.glob(pattern)):
        if path.is_file():
            digest.update(path.read_bytes())
    for path in (_PACKAGE.parent / "simt" / "abi.h", RULES, PASSES, SIMT_PASSES):
        if not path.exists():
            raise CompileError(f"{path.name} is not built: run `python -m softmetal build`")
        digest.update(path.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Compiler:
    """clang on a translated program."""

    cpp: str
    preprocessed: str  # the source's lines, for messages
    language: Language = LANGUAGES[DEFAULT]
    arithmetic: Arithmetic = field(default_factory=Arithmetic)
    refuse_unsure: bool = False

    def build(self, mode: str, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Renamed into place when complete, which makes concurrent compiles of one program safe.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".compile-") as scratch:
            code, output = Path(scratch) / "module.o", Path(scratch) / "module.so"
            done = self._read_program(mode, ["-c", "-o", str(code)])
            errors = readable(done.stderr, partial(source_line, self.preprocessed), self.language)
            if errors or done.returncode:
                raise CompileError(errors or done.stderr)
            # A separate step: a driver that compiles and links would start clang once more.
            link = [CLANG, "-shared", *_LINK_FLAGS, "-o", str(output), str(code)]
            done = subprocess.run(link, capture_output=True, text=True)
            if done.returncode:
                raise CompileError(done.stderr)
            _keep(output, target)

    def _precompiled_headers(self, mode: str) -> Path:
        """Returns the headers of every program, from the cache if possible."""
        options = (*_MODE_FLAGS[mode], *self.arithmetic.flags(), *_machine_flags(), str(self.language.cpp))
        parts = (toolchain_version(), str(_PACKAGE), self.language.version_macro, *options)
        target = cache_folder() / f"{_digest(*parts)}.pch"
        if not _is_whole(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".compile-") as scratch:
                output = Path(scratch) / "headers.pch"
                flags = [*_MODE_FLAGS[mode], "-x", "c++-header", "-o", str(output)]
                done = replace(self, cpp=HEADER)._read(flags)
                if done.returncode:
                    raise CompileError(done.stderr)
                _keep(output, target)
        return target

    def messages(self) -> str:
        """All of clang's messages about the program, without generating code."""
        return self._read_program("fast", ["-fsyntax-only", "-ferror-limit=0"]).stderr

    def _read_program(self, mode: str, flags: list[str]) -> subprocess.CompletedProcess[str]:
        rules = [f"-fplugin={RULES}", f"-fplugin-arg-softmetal-{self.language.version}"]
        if self.refuse_unsure:
            rules.append("-fplugin-arg-softmetal-unsure")
        headers = ["-include-pch", str(self._precompiled_headers(mode))]
        return self._read([*rules, *_MODE_FLAGS[mode], *headers, *flags])

    def _read(self, flags: list[str]) -> subprocess.CompletedProcess[str]:
        language = [f"-std=c++{self.language.cpp}", f"-D{self.language.version_macro}"]
        return self._clang([*_LANGUAGE_FLAGS, *language, *flags], self.cpp)

    def _clang(self, flags: list[str], text: str) -> subprocess.CompletedProcess[str]:
        fixed = [*_COMMON_FLAGS, *_machine_flags(), *self.arithmetic.flags()]
        return subprocess.run([CLANG, *fixed, *flags, "-"], input=text, capture_output=True, text=True)
