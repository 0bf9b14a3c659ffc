"""Rewrites the text of LLVM IR into what llvm-spirv and Mesa accept.

Mesa takes no bfloat, no vectors of one element, and switches only over integers of 8, 16, 32 or 64 bits.
SPIR-V takes one entry point without the attributes of NVPTX.
"""

from __future__ import annotations

import re
from itertools import count

_TRIPLE = "spir64-unknown-unknown"
_LAYOUT = "e-i64:64-v16:16-v24:32-v32:32-v48:64-v96:128-v192:256-v256:256-v512:512-v1024:1024-n8:16:32"
_TARGET_ATTRIBUTES = re.compile(
    r'"(target-cpu|target-features|tune-cpu|min-legal-vector-width|frame-pointer|'
    r'stack-protector-buffer-size|no-trapping-math)"="[^"]*"'
)
_THREADGROUP_VARIABLE = re.compile(
    r"^(@\S+ = )(?:linkonce_odr|internal)?(?: dso_local)?(?: local_unnamed_addr)?(?: unnamed_addr)? ?"
    r"(addrspace\(3\) global .*?) zeroinitializer(?:, comdat(?:\(\$\S+\))?)?(.*)$",
    re.M,
)
_FUNCTION = re.compile(
    r"^define (?:linkonce_odr |internal |weak_odr )?(?:dso_local )?(?!.*@agx_kernel\()(.*) (#\d+)(.*)\{$",
    re.M,
)
_COMDAT = re.compile(r" comdat(?:\(\S+\))?")
_ENTRY = re.compile(r"^define dso_local void @agx_kernel\((.*)\) (#\d+).*\{$", re.M)
_NOTE = "!90000"  # a number of metadata that the module does not use


def as_spirv_kernel(ir: str, threads: tuple[int, int, int]) -> str:
    """agx_kernel becomes a SPIR-V kernel, and every other function local and inlined."""
    ir = re.sub(r"^target triple = .*$", f'target triple = "{_TRIPLE}"', ir, flags=re.M)
    ir = re.sub(r"^target datalayout = .*$", f'target datalayout = "{_LAYOUT}"', ir, flags=re.M)
    ir = _TARGET_ATTRIBUTES.sub("", ir)
    ir = _THREADGROUP_VARIABLE.sub(r"\1internal \2 undef\3", ir)  # it starts undefined
    ir = ir.replace(" alwaysinline", "").replace(" noinline", "")
    ir = _FUNCTION.sub(
        lambda m: f"define internal {_COMDAT.sub('', m[1])} alwaysinline {m[2]}{_COMDAT.sub('', m[3])}{{", ir
    )
    ir = _ENTRY.sub(rf"define spir_kernel void @agx_kernel(\1) \2 !reqd_work_group_size {_NOTE} {{", ir)
    x, y, z = threads
    return f"{ir}\n{_NOTE} = !{{i32 {x}, i32 {y}, i32 {z}}}\n"


def without_attributes(ir: str) -> str:
    names = (
        "nocapture|noundef|readnone|readonly|writeonly|nonnull|dereferenceable\\(\\d+\\)|captures\\([^)]*\\)"
    )
    return re.sub(rf" (?:{names})(?=[ ,)])", "", ir)


def has_odd_switches(ir: str) -> bool:
    return re.search(r"^  switch i(?!8 |16 |32 |64 )", ir, re.M) is not None


def without_loop_hints(ir: str) -> str:
    """llvm-spirv turns a hint of how to unroll a loop into structured control flow, which Mesa refuses if the
    loop has an early exit. The loops have been unrolled."""
    return re.sub(r", !llvm\.loop !\d+$", "", ir, flags=re.M)


def without_short_vectors(ir: str) -> str:
    """InstCombine makes vectors of one element."""
    ir = re.sub(
        r"shufflevector (<\d+ x (\w+)> \S+), <\d+ x \w+> (?:poison|undef), <1 x i32> "
        r"(?:<i32 (\d+)>|zeroinitializer)",
        lambda m: f"extractelement {m[1]}, i64 {m[3] or 0}",
        ir,
    )
    return re.sub(r"bitcast <1 x (\w+)> ", r"bitcast \1 ", ir)


_FLAGS = r"(?:\w+ )*?"
# Instructions on bfloat, and the same on i16: {1} is the result, {2} the first operand or word, {n} a number.
_BFLOAT = (
    (
        rf"(fadd|fsub|fmul|fdiv) {_FLAGS}bfloat (\S+), (\S+)",
        "  %bf.x{n} = fpext bfloat {3} to float\n  %bf.y{n} = fpext bfloat {4} to float\n"
        "  %bf.r{n} = {2} float %bf.x{n}, %bf.y{n}\n  {1} = fptrunc float %bf.r{n} to bfloat",
    ),
    (
        rf"fcmp ({_FLAGS}\w+) bfloat (\S+), (\S+)",
        "  %bf.x{n} = fpext bfloat {3} to float\n  %bf.y{n} = fpext bfloat {4} to float\n"
        "  {1} = fcmp {2} float %bf.x{n}, %bf.y{n}",
    ),
    (rf"fneg {_FLAGS}bfloat (\S+)", "  {1} = xor i16 {2}, -32768"),
    (
        rf"fpext {_FLAGS}bfloat (\S+) to float",
        "  %bf.a{n} = zext i16 {2} to i32\n  %bf.b{n} = shl nuw i32 %bf.a{n}, 16\n"
        "  {1} = bitcast i32 %bf.b{n} to float",
    ),
    (
        rf"fptrunc {_FLAGS}float (\S+) to bfloat",
        "  %bf.a{n} = bitcast float {2} to i32\n  %bf.b{n} = lshr i32 %bf.a{n}, 16\n"
        "  %bf.c{n} = and i32 %bf.b{n}, 1\n  %bf.d{n} = add i32 %bf.c{n}, 32767\n"
        "  %bf.e{n} = add i32 %bf.a{n}, %bf.d{n}\n  %bf.f{n} = lshr i32 %bf.e{n}, 16\n"
        "  {1} = trunc i32 %bf.f{n} to i16",
    ),
)


def without_bfloat(ir: str) -> str:
    """bfloat becomes i16: a conversion to float is a shift, one from float rounds to the nearest even, and
    arithmetic is in float."""
    numbers = count()
    for instruction, same in _BFLOAT:

        def lowered(m: re.Match[str], same: str = same) -> str:
            return same.format(m[0], *m.groups(), n=next(numbers))

        ir = re.sub(rf"^  (%\S+) = {instruction}", lowered, ir, flags=re.M)
    ir = ir.replace("bfloat", "i16")
    return re.sub(r"\b0xR([0-9A-F]{4})\b", lambda m: str(int(m[1], 16)), ir)
