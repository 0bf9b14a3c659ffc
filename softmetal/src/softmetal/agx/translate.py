"""MSL to LLVM IR: softmetal.msl translates the program, clang compiles it against include/ and LLVM's passes
inline and unroll it.

clang compiles for NVPTX, which passes vectors as vectors and has bfloat. Arithmetic is as in the C++
standard, with a * b + c rounded once; agx_offline applies fast math.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..msl.lexer import TranslationError
from ..msl.preprocess import PreprocessorError, preprocess
from ..msl.translate import translate
from . import ir

INCLUDE = Path(__file__).parent / "include"
_HOST = Path(__file__).parents[1] / "msl" / "host"
_LLVM = "/usr/lib/llvm-19/bin"
_CLANG = [
    *("-x", "c++", "-std=c++17", "-fchar8_t", "--target=nvptx64-nvidia-cuda", "-nogpulib"),
    *("-Xclang", "-target-cpu", "-Xclang", "sm_90", "-nostdlibinc", "-nostdinc++", "-ffreestanding"),
    *("-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics", "-fno-strict-aliasing", "-fsigned-char"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=on", "-Wno-everything"),
    *("-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none"),
    "-fno-discard-value-names",  # Mesa reads the names of parameters
    *("-O2", "-Xclang", "-disable-llvm-passes", "-S", "-emit-llvm", "-o", "-", "-"),
]
_TIDY = "instcombine<no-verify-fixpoint>"
# Everything is inlined, loops are unrolled and arrays moved to registers first. The order of -O2 would hoist
# loads of arrays out of loops that are unrolled only later, and double every register that a loop carries.
_PASSES = (
    f"always-inline,globaldce,function(sroa,early-cse,simplifycfg,{_TIDY},loop-simplify,lcssa,"
    "loop(loop-rotate,indvars,loop-deletion,loop-unroll-full),"
    f"sroa,early-cse<memssa>,simplifycfg,{_TIDY},sroa,gvn,sccp,correlated-propagation,"
    f"{_TIDY},simplifycfg,dse,adce,{_TIDY},simplifycfg),globaldce"
)
_PASSES_AFTER_BFLOAT = f"early-cse,{_TIDY},simplifycfg,adce"
# Parts of the text that softmetal.msl returns.
_FUNCTION_CONSTANT = re.compile(
    r"(static const [^;=]*?(\w+) = )::softmetal::function_constant<([^;]*)>\([^;]*\)"
)
_IS_DEFINED = re.compile(r"::softmetal::function_constant_defined\s*\(\s*softmetal_info_(\w+)\.index\s*\)")
_THREADGROUP_VARIABLE = re.compile(
    r'(::softmetal::threadgroup_variable<[^;]*?), (\d+)>\((\d+), "[^"]*", __LINE__\)'
)
_ANNOTATION = re.compile(r'__attribute__\(\(annotate\("[^"]*"\)\)\)|\[\[clang::annotate\("[^"]*"\)\]\]')
_EXPORTS = '\n# 1 "softmetal exports"\n'
_BUFFERS = 32  # AGX_BUFFERS of include/agx_arguments.h


class AgxError(Exception):
    """The kernel cannot be compiled for Apple's GPUs; the text has the reason."""


@dataclass(frozen=True)
class Kernel:
    """A kernel of a program, specialised like a Metal pipeline, and the size of its threadgroups."""

    source: str
    kernel: str  # its host name
    threads: tuple[int, int, int]
    macros: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, bool | int | float] = field(default_factory=dict)  # function constants, by name
    threadgroup_memory: Mapping[int, int] = field(default_factory=dict)  # bytes of [[threadgroup(n)]]
    include: Sequence[str] = ()
    fast_math: bool = True  # Metal's default; False as with -fno-fast-math or MTLMathModeSafe
    name: str = "program_source"


def to_ir(kernel: Kernel) -> str:
    """LLVM IR that llvm-spirv and Mesa take. Raises AgxError."""
    text = _tool("clang++", *_CLANG, f"-I{INCLUDE}", f"-I{_HOST}", given=_to_cpp(kernel))
    text = ir.as_spirv_kernel(text, kernel.threads)
    text = _tool("opt", f"-passes={_PASSES}", "-S", "-o", "-", given=text)
    if "bfloat" in text:
        text = ir.without_bfloat(text)
        text = _tool("opt", f"-passes={_PASSES_AFTER_BFLOAT}", "-S", "-o", "-", given=text)
    if ir.has_odd_switches(text):
        text = _tool("opt", "-passes=lower-switch", "-S", "-o", "-", given=text)
    return ir.without_short_vectors(ir.without_attributes(ir.without_loop_hints(text)))


def to_bitcode(text: str, file: Path) -> None:
    _tool("llvm-as", "-o", str(file), given=text)


def _tool(name: str, *arguments: str, given: str) -> str:
    done = subprocess.run([f"{_LLVM}/{name}", *arguments], input=given, capture_output=True, text=True)
    if done.returncode:
        raise AgxError(f"{name} refuses the translation:\n{done.stderr[:2000]}")
    return done.stdout


def _to_cpp(kernel: Kernel) -> str:
    """C++ with the entry point agx_kernel, whose parameters are buffers of device and constant memory."""
    macros = [f"{name}={value}" for name, value in kernel.macros.items()]
    try:
        text = preprocess(kernel.source, kernel.name, macros, list(kernel.include))
        cpp = translate(text, checked=False, only=f"^{re.escape(kernel.kernel)}$").cpp
    except (TranslationError, PreprocessorError) as error:
        raise AgxError(str(error)) from error
    cpp = cpp.split(_EXPORTS)[0]
    if "softmetal_entry_0" not in cpp:
        raise AgxError(f"the program has no kernel '{kernel.kernel}'")
    cpp = _with_constants(cpp, kernel.constants)
    cpp = _ANNOTATION.sub("", _THREADGROUP_VARIABLE.sub(r"\1, \2, \3>()", cpp))
    numbers = range(_BUFFERS)
    parameters = ", ".join(
        f"SOFTMETAL_DEVICE void* d{i}, SOFTMETAL_CONSTANT_SPACE void* c{i}" for i in numbers
    )
    device, constant = (", ".join(f"{space}{i}" for i in numbers) for space in "dc")
    sizes = " ".join(f"{{{index}, {size}}}," for index, size in kernel.threadgroup_memory.items())
    x, y, z = kernel.threads
    return (
        f"#define AGX_THREADS uint3{{{x}, {y}, {z}}}\n"
        f"#define AGX_THREADGROUP_BYTES {sizes}\n"
        f'{cpp}\nextern "C" void agx_kernel({parameters}) {{ '
        f"const softmetal_arguments arguments = {{{{{device}}}, {{{constant}}}}}; "
        "softmetal_entry_0(&arguments); }\n"
    )


def _with_constants(cpp: str, values: Mapping[str, bool | int | float]) -> str:
    """Gives the function constants their values; the others are undefined, and 0."""
    declared = {name for _, name, _ in _FUNCTION_CONSTANT.findall(cpp)}
    if unknown := sorted(set(values) - declared):
        raise AgxError(f"the program has no function constant '{unknown[0]}'")
    cpp = _FUNCTION_CONSTANT.sub(lambda m: f"{m[1]}({m[3]}){float(values.get(m[2], 0))}", cpp)
    return _IS_DEFINED.sub(lambda m: str(m[1] in values).lower(), cpp)
