"""The arithmetic of a program: the settings of MTLCompileOptions, and choices that Metal leaves to the
GPU."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from ..paths import BUILD

PASSES = BUILD / "libsoftmetal_arithmetic.so"
MATH_MODES = ("safe", "relaxed", "fast")
FUNCTIONS = ("fast", "precise")
_FLUSH = "-softmetal-flush-subnormals"
# The assumptions that each math mode permits. Two of them allow reordering; only `fast` excludes NaN and
# infinities.
_ASSUMPTIONS = {
    "safe": (),
    "relaxed": ("-fno-signed-zeros", "-fassociative-math", "-freciprocal-math"),
    "fast": (
        "-fno-signed-zeros", "-fassociative-math", "-freciprocal-math", "-fno-honor-nans",
        "-fno-honor-infinities",
    ),
}  # fmt: skip


def choice(variable: str, values: tuple[str, ...]) -> str:
    value = os.environ.get(variable) or values[0]
    if value not in values:
        raise ValueError(f"{variable} is '{value}'; use {' or '.join(values)}")
    return value


@dataclass(frozen=True)
class Arithmetic:
    mode: str = "fast"  # MTLMathMode
    # MTLMathFloatingPointFunctions: which log a call without fast:: and precise:: means
    functions: str = "fast"
    # a * b + c with one rounding, in float and half, as in every math mode of Apple's compiler.
    contract: bool = field(default_factory=lambda: choice("SOFTMETAL_CONTRACT", ("1", "0")) == "1")
    # The largest errors that the specification permits, flushed subnormal floats and the assumptions of the
    # math mode, instead of the host's most accurate results.
    worst: bool = field(default_factory=lambda: choice("SOFTMETAL_FAST_MATH", ("exact", "worst")) == "worst")

    def flags(self) -> tuple[str, ...]:
        """clang's options."""
        # clang marks products and sums, and the pass contracts them: the code generator would do so only if
        # the processor has the instruction.
        contraction = "fast-honor-pragmas" if self.contract else "off"
        flags = [
            f"-DSOFTMETAL_FAST_FUNCTIONS={int(self.functions == 'fast')}",
            f"-DSOFTMETAL_WORST_MATH={int(self.worst)}",
            f"-fpass-plugin={PASSES}",
        ]
        if self.worst:
            flags += [*_ASSUMPTIONS[self.mode], "-Xclang", "-load", "-Xclang", str(PASSES), "-mllvm", _FLUSH]
        return (*flags, f"-ffp-contract={contraction}")
