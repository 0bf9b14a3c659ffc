"""Builds the programs that softmetal.agx runs: Mesa's compiler for Apple's GPUs with our patches, and LLVM's
translator to SPIR-V. `python -m softmetal build --agx` calls it.

Nothing is installed on the machine. The programs are in the cache of compiled kernels, in a folder named by
their sources, so checkouts share them. The translator is not in Debian 12: it is a package of Debian 13,
unpacked and run with that Debian's C library.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

from ..msl.compile import cache_folder

_PATCHES = Path(__file__).parent / "mesa"
_DEBIAN = "http://deb.debian.org/debian"
_MESA = "25.0.7"
_MESA_SHA256 = "592272df3cf01e85e7db300c449df5061092574d099da275d19e97ef0510f8a6"
_MESA_ADDRESSES = (
    f"{_DEBIAN}/pool/main/m/mesa/mesa_{_MESA}.orig.tar.xz",
    f"https://archive.mesa3d.org/mesa-{_MESA}.tar.xz",
)
_MESON = ["meson", "ninja", "mako", "pyyaml", "packaging", "setuptools", "ply"]
_OFF = "glx egl gbm gles1 gles2 llvm xmlconfig zlib zstd shader-cache expat".split()
_OPTIONS = [
    *("-Dbuildtype=release", "-Db_ndebug=false", "-Dtools=nir", "-Dopengl=false"),
    *("-Dgallium-drivers=", "-Dvulkan-drivers=", "-Dplatforms=", "-Dvideo-codecs="),
    *(f"-D{option}=disabled" for option in _OFF),
]
_TRANSLATOR = (
    "llvm-spirv-19 libllvmspirvlib19.1 libllvm19 libc6 libstdc++6 libgcc-s1 zlib1g libzstd1 libxml2 "
    "libedit2 libffi8 libtinfo6 libicu76 libbsd0 libmd0 liblzma5"
).split()


@functools.cache
def digest() -> str:
    """A digest of everything that affects the compiler's output."""
    sources = hashlib.sha256(_MESA_SHA256.encode())
    for path in sorted(_PATCHES.iterdir()):
        sources.update(path.read_bytes())
    return sources.hexdigest()[:16]


def folder() -> Path:
    return cache_folder() / f"agx-{digest()}"


def is_built() -> bool:
    return folder().is_dir()


def compiler() -> Path:
    return folder() / "agx_offline"


def spirv_translator() -> list[str]:
    """The command of llvm-spirv, without arguments."""
    system = folder() / "debian-13" / "usr"
    libraries = system / "lib" / "x86_64-linux-gnu"
    loader = libraries / "ld-linux-x86-64.so.2"
    path = f"{libraries}:{system}/lib/llvm-19/lib"
    return [str(loader), "--library-path", path, str(system / "bin" / "llvm-spirv-19")]


def build(jobs: int | None = None) -> None:
    """Takes two minutes on two idle cores, and 700 MB while it runs."""
    if is_built():
        print(f"up to date: {folder()}")
        return
    absent = [tool for tool in ("clang-19", "patch", "apt-get", "dpkg") if shutil.which(tool) is None]
    if absent:
        sys.exit(f"softmetal: {', '.join(absent)} not found; install them, on Debian 12 or later.")
    folder().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="agx-", dir=folder().parent) as scratch:
        built = Path(scratch) / "built"
        built.mkdir()
        _build_compiler(Path(scratch), built, jobs)
        _unpack_translator(Path(scratch), built)
        built.rename(folder())
    print(f"built: {folder()}")


def _run(command: list[str], folder: Path, environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        sys.exit(f"{done.stdout[-4000:]}\nsoftmetal: {command[0]} failed; its message is above.")


def _build_compiler(scratch: Path, built: Path, jobs: int | None) -> None:
    source = scratch / f"mesa-{_MESA}"
    print(f"downloading Mesa {_MESA} (47 MB)", flush=True)
    archive = scratch / "mesa.tar.xz"
    archive.write_bytes(_download())
    with tarfile.open(archive) as packed:
        packed.extractall(scratch, filter="data")
    for patch in sorted(_PATCHES.glob("*.patch")):
        _run(["patch", "--strip=1", f"--input={patch}"], source)
    driver = source / "src" / "asahi" / "offline"
    driver.mkdir()
    for name in ("agx_offline.c", "meson.build"):
        shutil.copy(_PATCHES / name, driver)
    print("compiling its AGX compiler", flush=True)
    tools = scratch / "tools"
    _run([sys.executable, "-m", "venv", str(tools)], scratch)
    _run([str(tools / "bin/pip"), "install", "--quiet", *_MESON], scratch)
    environment = {"PATH": f"{tools}/bin:{os.environ['PATH']}", "CC": "clang-19", "CXX": "clang++-19"}
    _run(["meson", "setup", "build", *_OPTIONS], source, environment)
    target = "src/asahi/offline/agx_offline"
    _run(["ninja", "-C", "build", *([f"-j{jobs}"] if jobs else []), target], source, environment)
    shutil.copy(source / "build" / target, built)


def _download() -> bytes:
    for address in _MESA_ADDRESSES:
        try:
            with urllib.request.urlopen(address, timeout=120) as response:
                content: bytes = response.read()
        except (urllib.error.URLError, OSError) as error:
            print(f"{address}: {error}")
            continue
        if hashlib.sha256(content).hexdigest() == _MESA_SHA256:
            return content
        print(f"{address}: not the expected archive")
    sys.exit("softmetal: Mesa's sources could not be downloaded; the addresses tried are above.")


def _unpack_translator(scratch: Path, built: Path) -> None:
    """apt with a configuration of its own: it reads and writes nothing of the machine's package lists."""
    print("downloading llvm-spirv (50 MB)", flush=True)
    apt = scratch / "apt"
    for folder in ("lists/partial", "cache/archives/partial", "none", "debs"):
        (apt / folder).mkdir(parents=True)
    (apt / "sources.list").write_text(f"deb {_DEBIAN} trixie main\n")
    settings = {
        "Dir::Etc::sourcelist": apt / "sources.list",
        "Dir::Etc::sourceparts": apt / "none",
        "Dir::Etc::preferences": apt / "none" / "preferences",
        "Dir::Etc::preferencesparts": apt / "none",
        "Dir::State::lists": apt / "lists",
        "Dir::Cache": apt / "cache",
        "APT::Sandbox::User": "root",
    }
    (apt / "apt.conf").write_text("".join(f'{name} "{value}";\n' for name, value in settings.items()))
    environment = {"APT_CONFIG": str(apt / "apt.conf")}
    _run(["apt-get", "update", "-qq"], apt, environment)
    _run(["apt-get", "download", "-qq", *_TRANSLATOR], apt / "debs", environment)
    for package in sorted((apt / "debs").glob("*.deb")):
        _run(["dpkg", "-x", str(package), str(built / "debian-13")], apt)
