#!/usr/bin/env bash
# Creates a virtual environment with torch and the build's requirements. On Debian and Ubuntu, first installs missing
# compilers and libraries for softmetal; on macOS the Xcode command-line tools are enough.
# Usage: tools/setup_env.sh DIRECTORY VERSIONS (a file of requirements/)
set -euo pipefail
venv=${1:?usage: tools/setup_env.sh DIRECTORY VERSIONS}
versions=${2:?usage: tools/setup_env.sh DIRECTORY VERSIONS}

refuse() { echo "setup_env: $*" >&2; exit 1; }

grep -q '^torch==' "$versions" 2>/dev/null ||
  refuse "$versions names no version of torch: pass a file of requirements/"

find_python() {  # prints the first Python 3.10 or newer, of the given architecture or any
  local name machine=${1:-} names=(python3.11 python3.12 python3.13 python3.14 python3.10 python3)
  [ -z "${PYTHON:-}" ] || names=("$PYTHON")  # do not replace the requested Python
  for name in "${names[@]}"; do
    if "$name" -c 'import platform, sys; sys.exit(sys.version_info < (3, 10) or
      platform.machine() != (sys.argv[1] or platform.machine()))' "$machine" 2>/dev/null; then
      command -v "$name"
      return
    fi
  done
}

has_package() { [ "$(dpkg-query --show --showformat='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }
has_header() { "$1" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null; }

install_system_packages() {
  local wanted missing=() package python
  mapfile -t wanted < "$(dirname "${BASH_SOURCE[0]}")/../softmetal/src/softmetal/debian-packages.txt"
  python=$(find_python)
  if [ -z "$python" ]; then
    wanted+=(python3 python3-venv python3-dev)
  else
    "$python" -c 'import ensurepip' 2>/dev/null || wanted+=(python3-venv)
    has_header "$python" || wanted+=(python3-dev)
  fi
  for package in "${wanted[@]}"; do
    has_package "$package" || missing+=("$package")
  done
  [ ${#missing[@]} -gt 0 ] || return 0

  local root=()
  if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || refuse "install these packages as root: ${missing[*]}"
    root=(sudo)
  fi
  echo "setup_env: installing ${missing[*]}"
  "${root[@]}" apt-get update -qq
  "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
}

check_mac() {
  local version machine
  machine=$(uname -m)
  if [ "$(sysctl -n sysctl.proc_translated 2>/dev/null)" = 1 ]; then
    refuse "this shell runs as x86_64 under Rosetta and torch has wheels for arm64 only: run arch -arm64 make build"
  elif [ "$machine" != arm64 ]; then
    refuse "this is a Mac with an Intel processor ($machine) and the kernels need an M1 or newer: use Linux, where" \
      "they run in software"
  fi
  version=$(sw_vers -productVersion)
  if [ "${version%%.*}" -lt 14 ]; then
    refuse "this is macOS $version and the kernels need Metal 3.1, which begins with macOS 14: update macOS"
  fi
  xcrun --find clang >/dev/null 2>&1 ||
    refuse "the compiler is missing: run xcode-select --install, then this again"
}

machine=
case $(uname -s) in
  Linux)
    if command -v apt-get >/dev/null; then
      install_system_packages
    else
      echo "setup_env: not Debian or Ubuntu: clang++-19, GNUstep base, libobjc, libBlocksRuntime, cmake and ninja" \
        "are taken from PATH as they are" >&2
    fi
    ;;
  Darwin)
    check_mac
    machine=arm64
    ;;
esac

python=$(find_python $machine)
if [ -z "$python" ]; then
  python=$(find_python)
  [ -z "$python" ] ||
    refuse "$python is a Python for Intel processors and torch has wheels for arm64 only: install Python from" \
      "python.org, or set PYTHON=/path/to/python3"
  refuse "${PYTHON:-python3} is not Python 3.10 or newer: install one, or set PYTHON=/path/to/python3"
fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
PYTHON=$venv/bin/python
[ -n "$(find_python $machine)" ] ||
  refuse "$venv was made with a Python for Intel processors: remove it, and run this again"
# Install torch first: everything else is built against it.
echo "setup_env: installing $(grep '^torch==' "$versions") and what a build needs into $venv"
"$PYTHON" -m pip install --disable-pip-version-check "$(grep '^torch==' "$versions")"
"$PYTHON" -m pip install --disable-pip-version-check --quiet 'setuptools>=77' ninja numpy
