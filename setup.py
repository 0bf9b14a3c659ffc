"""Builds torch_fattn._C: the ops everywhere, and with them the Metal path where torch has its MPS backend.

A wheel belongs to the minor version of torch it is built with: it requires that one, and its file name says
so, by the build tag (torch_fattn-0.1.0-215-...), or with FATTN_LOCAL_VERSION=1 by the version, by which pip
can choose (torch_fattn-0.1.0+torch2.15-...). The source archive is for all of them and needs no torch.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

from setuptools import setup

if TYPE_CHECKING:
    from torch.utils.cpp_extension import CppExtension

ROOT = Path(__file__).resolve().parent
VERSIONS = runpy.run_path(str(ROOT / "torch_fattn" / "runtime" / "versions.py"))
SUPPORTED = VERSIONS["requirement"]("torch", VERSIONS["TORCH"])
BLOB = "https://github.com/torch-fattn/torch-fattn/blob/main/"
RAW = "https://raw.githubusercontent.com/torch-fattn/torch-fattn/main/"
FOR_EVERY_TORCH = {"sdist", "egg_info"}  # the archive, and the first queries of a build front end
BECAUSE = "torch_fattn is built against the torch that will run it, and"


def import_torch() -> Any:
    """The torch to build against; None where the result is for all of them."""
    if sys.argv[1:] and sys.argv[1] in FOR_EVERY_TORCH:
        return None
    try:
        import torch
        import torch.utils.cpp_extension
    except ImportError as error:
        if error.name == "torch" and (Path(sysconfig.get_path("platlib")) / "torch").is_dir():
            sys.exit(
                f"{BECAUSE} pip's build isolation hides the torch that is installed: "
                "run `pip install --no-build-isolation .`"
            )
        sys.exit(
            f"{BECAUSE} none can be imported ({error}): run `pip install '{SUPPORTED}' 'setuptools>=77'`, "
            "then `pip install --no-build-isolation .`"
        )
    if (fault := VERSIONS["fault"]("torch", torch.__version__, VERSIONS["TORCH"])) is not None:
        sys.exit(fault)
    return torch


def metadata(torch: Any) -> dict[str, Any]:
    """What depends on torch, and the README with links that lead somewhere from a package index."""
    version, requires = VERSIONS["VERSION"], SUPPORTED
    if torch is not None:
        minor = VERSIONS["minor"](torch.__version__)
        requires = VERSIONS["requirement"]("torch", (minor, minor))
        if os.environ.get("FATTN_LOCAL_VERSION"):
            version += f"+torch{VERSIONS['text'](minor)}"
    return {
        "version": version,
        "install_requires": [requires],
        "long_description": with_absolute_links((ROOT / "README.md").read_text(encoding="utf-8")),
        "long_description_content_type": "text/markdown",
    }


def with_absolute_links(markdown: str) -> str:
    def absolute(link: re.Match[str]) -> str:
        target = link["target"]
        if re.match(r"[a-z]+:|#", target):
            return link[0]
        return f"{link['before']}{RAW if link['image'] else BLOB}{target}{link['after']}"

    inline = r"(?P<before>(?P<image>!?)\[[^\]]*\]\()(?P<target>[^)\s]+)(?P<after>\))"
    html = r"(?P<before><(?P<image>img)\b[^>]*?\bsrc=\")(?P<target>[^\"]+)(?P<after>\")"
    return re.sub(html, absolute, re.sub(inline, absolute, markdown))


def compiler_finds_metal() -> bool:
    """Elsewhere than on a Mac, Metal's headers are where the compiler was told to look."""
    flags = shlex.split(os.environ.get("CPPFLAGS", ""))
    folders = [flag.removeprefix("-I") for flag in flags if flag.startswith("-I")]
    return sys.platform == "darwin" or any(
        (Path(folder) / "Metal" / "Metal.h").is_file() for folder in folders
    )


def configure_macos() -> None:
    os.environ.setdefault("MACOSX_DEPLOYMENT_TARGET", "14.0")  # the first with Metal 3.1
    # A universal2 Python would compile every file twice; torch has no x86_64 wheel for macOS.
    if os.environ.setdefault("ARCHFLAGS", "-arch arm64") == "-arch arm64":
        target = os.environ["MACOSX_DEPLOYMENT_TARGET"]
        os.environ.setdefault("_PYTHON_HOST_PLATFORM", f"macosx-{target}-arm64")  # the tag of the wheel


def find_ninja() -> None:
    """torch compiles files side by side where it finds ninja: in this environment too, active or not."""
    os.environ["PATH"] = os.pathsep.join((os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")))


def mode_flags() -> tuple[list[str], list[str]]:
    """Flags of compiler and linker: optimised, or as `make build DEBUG=1 SANITIZE=address` requests."""
    sanitizers = os.environ.get("FATTN_SANITIZE", "")
    sanitize = [f"-fsanitize={sanitizers}"] if sanitizers else []
    if os.environ.get("FATTN_DEBUG", "0") not in ("", "0"):
        optimise = ["-O0", "-g", "-UNDEBUG", "-D_GLIBCXX_ASSERTIONS"]
    else:
        optimise = ["-O1", "-g"] if sanitizers else ["-O2", "-g0"]
    return [*optimise, *sanitize, *(["-fno-omit-frame-pointer"] if sanitizers else [])], sanitize


def extension(torch: Any) -> CppExtension:
    sources = sorted(ROOT.glob("csrc/*/*.cpp"))
    macros: list[tuple[str, str | None]] = []
    compile_args, link_args = mode_flags()
    if torch.backends.mps.is_built():
        if not compiler_finds_metal():
            sys.exit(
                "torch_fattn: this torch has an mps device from softmetal, and the compiler misses its "
                'headers: run `eval "$(python -m softmetal config --env)"` and this again, or set '
                "SOFTMETAL=0 for a build without Metal"
            )
        sources += sorted(ROOT.glob("csrc/metal/*.mm"))
        macros.append(("FATTN_WITH_METAL", None))
        embed = [sys.executable, str(ROOT / "tools" / "embed_kernels.py")]
        subprocess.run([*embed, "--output", str(ROOT / "csrc/generated/kernel_sources.inc")], check=True)
        if sys.platform == "darwin":
            configure_macos()
            link_args += ["-framework", "Metal", "-framework", "Foundation"]
    else:
        metal_only = [ROOT / "csrc" / room for room in ("launch", "selftest")]
        sources = [source for source in sources if source.parent not in metal_only]
    return torch.utils.cpp_extension.CppExtension(
        "torch_fattn._C",
        [str(source.relative_to(ROOT)) for source in sources],
        define_macros=macros,
        extra_compile_args={
            "cxx": ["-std=c++20", "-Wall", "-Werror=switch", "-fvisibility=hidden", *compile_args]
        },
        extra_link_args=link_args,
        depends=[str(header.relative_to(ROOT)) for header in ROOT.glob("csrc/**/*.h")]
        + ["csrc/generated/kernel_sources.inc"],
        py_limited_api=True,
    )


def precompile(command: list[str], folder: Path) -> None:
    """Compiles csrc/ops/precompiled.h for both languages of the sources, unless clang takes what the folder
    has with this command: it refuses headers of other options, and of files that have changed."""
    header = ROOT / "csrc" / "ops" / "precompiled.h"
    folder.mkdir(parents=True, exist_ok=True)
    use = [*command, "-fsyntax-only", "-include-pch", folder]
    languages = [
        language
        for language in ("c++", "objective-c++")
        if subprocess.run([*use, "-x", language, os.devnull], stderr=subprocess.DEVNULL).returncode != 0
    ]
    # Without the flag, every source instantiates the header's templates again.
    command = [*command, "-fpch-instantiate-templates"]
    processes = [
        subprocess.Popen([*command, "-x", f"{language}-header", header, "-o", folder / f"{language}.pch"])
        for language in languages
    ]
    if sum(process.wait() != 0 for process in processes):
        sys.exit("torch_fattn: csrc/ops/precompiled.h does not compile: set FATTN_PCH=0 to build without it")


def build_command(torch: Any) -> type:
    class BuildExtension(torch.utils.cpp_extension.BuildExtension):  # type: ignore[misc]
        def build_extension(self, extension: CppExtension) -> None:
            if os.environ.get("FATTN_PCH", "0") not in ("", "0"):
                # clang refuses a header that was compiled with other options; torch has added its own by now.
                command = [*shlex.split(os.environ.get("CXX", "c++")), *self.compiler.compiler_so[1:]]
                for name, value in extension.define_macros:
                    command.append(f"-D{name}" if value is None else f"-D{name}={value}")
                command += [f"-I{path}" for path in (*extension.include_dirs, *self.compiler.include_dirs)]
                flags = extension.extra_compile_args["cxx"]
                folder = Path(self.build_temp).resolve() / "precompiled"
                precompile([*command, *flags], folder)
                flags += ["-include-pch", str(folder)]  # clang takes the one of the source's language
            super().build_extension(extension)

    return BuildExtension


def build(torch: Any) -> dict[str, Any]:
    find_ninja()
    major, minor = VERSIONS["minor"](torch.__version__)
    tag = {} if os.environ.get("FATTN_LOCAL_VERSION") else {"build_number": f"{major}{minor}"}
    return {
        "ext_modules": [extension(torch)],
        "cmdclass": {"build_ext": build_command(torch)},
        "options": {"bdist_wheel": {"py_limited_api": "cp310", **tag}},
    }


TORCH = import_torch()
setup(**metadata(TORCH), **({} if TORCH is None else build(TORCH)))
