"""`python -m softmetal corpus DIR`: how many kernel functions in a folder of Metal sources compile.

It counts the definitions of kernel functions in each .metal file and the headers that it includes; a template
counts once, with all its instantiations. A kernel compiles if its program, without the kernels that fail,
translates to C++ that clang accepts with every explicit instantiation. The program is tried as MSL 3.1 and
3.2; the version that compiles more kernels is used. A source that includes Metal 4's tensor headers is tried
as MSL 4.0. No code is generated. A source that needs macros or a prelude from its host counts as a failure
with that cause.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType

from .compile import Compiler
from .diagnostics import Message, errors
from .language import DEFAULT, LANGUAGES, Language
from .lexer import TokenList, TranslationError
from .preprocess import MissingHeaderError, PreprocessorError, preprocess
from .structure import Function, Outline, outline
from .translate import translate
from .usage import names_reached

_TENSOR_HEADER = re.compile(
    r'^# \d+ "[^"\n]*/(?:MetalPerformancePrimitives/|metal_(?:cooperative_)?tensor\b)', re.MULTILINE
)
_KERNEL = re.compile(r"^[^/\n]*?(?:\bkernel\s+void\b|\[\[\s*kernel\s*\]\]\s*void\b)", re.MULTILINE)
_ERROR = re.compile(r"(?P<file>[^\n:]+):(?P<line>\d+): error: (?P<text>[^\n]*)")
_UNDECLARED = re.compile(
    r"(?:use of undeclared identifier|unknown type name|no template named) '(?P<name>\w+)'"
    r"(?P<other>.*metal::)?"
)
_NEWER = "metal3.2"
_WITH_TENSORS = "metal4.0"
_MOST_ROUNDS = 40

Place = tuple[str, int]


@dataclass
class Failure:
    kernels: list[str]  # functions that fail for this reason
    where: str
    cause: str


@dataclass
class Result:
    path: str
    kernels: int
    failures: list[Failure] = field(default_factory=list)

    @property
    def compiled(self) -> int:
        return self.kernels - sum(len(failure.kernels) for failure in self.failures)


class _OutOfTimeError(Exception):
    pass


# ---- one source ----------------------------------------------------------------------------------


def try_source(path: Path, root: Path, seconds: int) -> Result:
    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise _OutOfTimeError

    source = _text(path)
    result = Result(path.relative_to(root).as_posix(), len(_KERNEL.findall(source)))
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        text = _read(source, path, root, LANGUAGES[_WITH_TENSORS])
        language = LANGUAGES[_WITH_TENSORS if _TENSOR_HEADER.search(text) else DEFAULT]
        if language.name == DEFAULT:
            text = _read(source, path, root, language)
        trial = _Trial(text, language)
        result.kernels = len(trial.kernels)
        trial.run(result.failures)
        if result.failures and language.name == DEFAULT:
            newer = _Trial(_read(source, path, root, LANGUAGES[_NEWER]), LANGUAGES[_NEWER])
            tried = Result(result.path, len(newer.kernels))
            if len(newer.compile()) < trial.errors:
                newer.run(tried.failures)
                result = max(result, tried, key=lambda one: one.compiled)
    except _OutOfTimeError:
        _fail_all(result, path.name, f"not done within {seconds} s")
    except MissingHeaderError as error:
        _fail_all(result, path.name, f"the header '{error.header}' is not there")
    except TranslationError as error:
        match = _ERROR.match(str(error))
        _fail_all(result, path.name, match["text"] if match else str(error))
    except PreprocessorError as error:
        match = _ERROR.search(re.sub(r":(\d+):\d+: (?:fatal )?error", r":\1: error", str(error)))
        _fail_all(result, path.name, f"preprocessor: {match['text'] if match else error}")
    except (LookupError, ValueError, RecursionError, StopIteration) as error:
        # The translator may get text that is not MSL.
        _fail_all(result, path.name, f"softmetal cannot read it ({type(error).__name__})")
    finally:
        signal.alarm(0)
    return result


def _fail_all(result: Result, where: str, cause: str) -> None:
    result.failures = [Failure(["?"] * result.kernels, where, cause)]


def _text(path: Path) -> str:
    data = path.read_bytes()
    is_utf16 = data[:2] in (b"\xff\xfe", b"\xfe\xff")
    return data.decode("utf-16" if is_utf16 else "utf-8-sig", errors="replace").replace("\0", "")


def _read(source: str, path: Path, root: Path, language: Language) -> str:
    """Returns the preprocessed program. Headers are searched beside the file, in `root`, and in any folder
    below `root` that contains the named path, nearest first.
    """
    folders = [str(path.parent), str(root)]
    while True:
        try:
            return preprocess(source, path.name, include=folders, language=language)
        except MissingHeaderError as error:
            folder = _folder_with(error.header, path, root)
            if folder is None or folder in folders:
                raise
            folders.append(folder)


def _folder_with(header: str, path: Path, root: Path) -> str | None:
    """Returns the folder to search for `header`: the one with the longest common path with the source."""
    name = header.split("/")[-1]
    found = [file for file in root.rglob(name) if str(file).endswith(f"/{header}")]
    if not found:
        return None
    nearest = max(found, key=lambda file: (len(os.path.commonpath([file, path])), -len(str(file))))
    return str(nearest)[: -len(header) - 1]


class _Trial:
    """Compiles a program repeatedly, each time without the kernels that failed."""

    def __init__(self, preprocessed: str, language: Language) -> None:
        self.preprocessed, self.language = preprocessed, language
        self.errors = 0  # of the whole program
        tokens = TokenList(preprocessed)
        self.kernels = [f.name for f in _kernels(outline(tokens))]

    def run(self, failures: list[Failure]) -> None:
        for _ in range(_MOST_ROUNDS):
            found = self.compile()
            self.errors = self.errors or len(found)
            if not found:
                return
            tokens = TokenList(self.preprocessed)
            program = outline(tokens)
            left = len(_kernels(program))
            removed = [_blame(tokens, program, places) for places, _ in found]
            if not any(removed):
                break
            gone: set[int] = set()
            for (places, cause), items in zip(found, removed, strict=True):
                kernels = [f for f in items if f.is_kernel and f.body and id(f) not in gone]
                gone |= {id(f) for f in items}
                if kernels:
                    failures.append(
                        Failure([f.name for f in kernels], f"{places[0][0]}:{places[0][1]}", cause)
                    )
            _blank(tokens, program, gone)
            self.preprocessed = tokens.render()
            if left == 0:
                return
        rest = [f.name for f in _kernels(outline(TokenList(self.preprocessed)))]
        if found and rest:
            place, cause = found[0][0][0], found[0][1]
            failures.append(Failure(rest, f"{place[0]}:{place[1]}", cause))

    def compile(self) -> list[tuple[list[Place], str]]:
        """Returns every error: its location, the locations that instantiated it, and its text."""
        try:
            translation = translate(self.preprocessed, checked=False, language=self.language)
        except TranslationError as error:
            match = _ERROR.match(str(error))
            if match is None:
                raise
            return [([(match["file"], int(match["line"]))], match["text"])]
        stderr = Compiler(translation.cpp, self.preprocessed, self.language).messages()
        return [(_places(block), _cause(block[0]["text"])) for block in errors(stderr)]


def _cause(text: str) -> str:
    undeclared = _UNDECLARED.match(text)
    if undeclared is None:
        return text
    if undeclared["other"]:
        return f"'{undeclared['name']}' is not in scope: its host writes `using namespace metal` before it"
    return (
        f"'{undeclared['name']}' is declared nowhere: a macro or prelude of its host, or a name of Metal's "
        "library that softmetal lacks"
    )


def _places(block: list[Message]) -> list[Place]:
    used = [
        m for m in block if m["severity"] != "note" or "instantiation" in m["text"] or "in call" in m["text"]
    ]
    return [(m["file"], int(m["line"])) for m in used]


def _kernels(program: Outline) -> list[Function]:
    return [f for f in program.functions if f.is_kernel and f.body is not None]


def _blame(tokens: TokenList, program: Outline, places: list[Place]) -> list[Function]:
    """Returns the kernels to blame for an error: the ones that contain or instantiate it, else the function
    that contains it and every kernel that may reach that function.
    """
    covered = set(places)
    kernels = [f for f in _kernels(program) if covered & _lines(tokens, *_span(f))]
    instantiated = {
        tokens.text(i)
        for one in program.instantiations
        if covered & _lines(tokens, one.begin, one.end)
        for i in range(one.begin, one.end)
    }
    kernels += [f for f in _kernels(program) if f.name in instantiated and f not in kernels]
    if kernels:
        return kernels
    helpers = [f for f in program.functions if covered & _lines(tokens, *_span(f))]
    if not helpers:
        return []
    names = {f.name for f in helpers}
    reached = names_reached(tokens, program)
    return [f for f in _kernels(program) if reached[f.name] & names] + helpers


def _span(function: Function) -> tuple[int, int]:
    begin = function.template_begin if function.template_begin >= 0 else function.begin
    return begin, (function.body or function.parameters)[1]


def _lines(tokens: TokenList, begin: int, end: int) -> set[Place]:
    return {(token.file, token.line) for token in tokens.tokens[begin : end + 1]}


def _blank(tokens: TokenList, program: Outline, gone: set[int]) -> None:
    for function in program.functions:
        if id(function) in gone:
            begin, end = _span(function)
            tokens.blank(begin, end + 1)
    removed = {f.name for f in program.functions if id(f) in gone and f.is_kernel}
    for one in program.instantiations:
        if any(tokens.text(i) in removed for i in range(one.begin, one.end)):
            tokens.blank(one.begin, one.end + 1)


# ---- all sources ---------------------------------------------------------------------------------


def try_folder(root: Path, jobs: int, seconds: int) -> Iterator[Result]:
    """Tries the largest sources first, because they take longest."""
    paths = sorted((p for p in root.rglob("*.metal") if p.is_file()), key=lambda p: (-p.stat().st_size, p))
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(partial(try_source, root=root, seconds=seconds), paths)


def summary(results: Iterable[Result]) -> str:
    results = list(results)
    kernels, compiled = sum(r.kernels for r in results), sum(r.compiled for r in results)
    lines = [
        f"{compiled} of {kernels} kernel functions compile ({100 * compiled / max(kernels, 1):.1f} %), "
        f"in {len(results)} sources; {sum(r.compiled == r.kernels for r in results)} of them whole"
    ]
    by_cause: dict[str, list[tuple[Result, Failure]]] = defaultdict(list)
    for result in results:
        for failure in result.failures:
            by_cause[_pattern(failure.cause)].append((result, failure))
    ranked = sorted(by_cause.values(), key=lambda found: -sum(len(f.kernels) for _, f in found))
    lines += ["kernels  files  cause"] if ranked else []
    for found in ranked:
        result, failure = found[0]
        number, files = sum(len(f.kernels) for _, f in found), len({r.path for r, _ in found})
        lines.append(f"{number:7d}  {files:5d}  {failure.cause} (in {result.path}, {failure.where})")
    return "\n".join(lines)


def _pattern(cause: str) -> str:
    """Returns an error's text without its names, to group errors of one kind."""
    return re.sub(r"'[^']*'", "'...'", cause)


def details(result: Result) -> str:
    lines = [f"{result.path}: {result.compiled} of {result.kernels}"]
    for failure in result.failures:
        lines.append(f"    {failure.where}: {failure.cause} [{', '.join(failure.kernels[:4])}]")
    return "\n".join(lines)


def as_json(results: Iterable[Result]) -> str:
    return json.dumps([asdict(result) | {"compiled": result.compiled} for result in results], indent=1)
