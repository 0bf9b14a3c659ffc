"""The supported versions of the language."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Language:
    name: str  # as in -std= of Apple's compiler
    version: int  # __METAL_VERSION__
    cpp: int  # the year of the C++ standard it is based on

    @property
    def spoken(self) -> str:
        return f"MSL {self.name.removeprefix('metal')}"

    @property
    def version_macro(self) -> str:
        return f"__METAL_VERSION__={self.version}"

    @property
    def has_lambdas(self) -> bool:
        return self.version >= 320

    @property
    def has_tensors(self) -> bool:
        return self.version >= 400

    @property
    def has_generic_pointers(self) -> bool:
        """Whether pointers and references without an address space point to any memory except constant."""
        return self.version >= 410


_ALL = (
    Language("metal3.1", 310, 14),
    Language("metal3.2", 320, 14),
    Language("metal4.0", 400, 17),
    Language("metal4.1", 410, 17),
)
LANGUAGES = {language.name: language for language in _ALL}
DEFAULT = "metal3.1"
