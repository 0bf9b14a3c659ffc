#!/usr/bin/env bash
# Makes a virtual environment with torch and transformers in it. On Debian and Ubuntu, first installs those of the
# compilers and libraries that softmetal needs and the machine lacks; on macOS the Xcode command-line tools are enough.
# Usage: tools/setup_env.sh DIRECTORY VERSIONS (a file of requirements/)
set -euo pipefail
venv=${1:?usage: tools/setup_env.sh DIRECTORY VERSIONS}
versions=${2:?usage: tools/setup_env.sh DIRECTORY VERSIONS}

find_python() {
  local name names=(python3.11 python3.12 python3.13 python3.14 python3.10 python3)
  [ -z "${PYTHON:-}" ] || names=("$PYTHON")  # another than the one that was asked for would be no help
  for name in "${names[@]}"; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      command -v "$name"
      return
    fi
  done
}

has_package() { [ "$(dpkg-query --show --showformat='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }
has_header() { "$1" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null; }

install_system_packages() {
  local wanted=(clang-19 libclang-19-dev libclang-rt-19-dev llvm-19 llvm-19-dev libobjc-12-dev
                libblocksruntime-dev libgnustep-base-dev cmake ninja-build) missing=() package python
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
    command -v sudo >/dev/null || { echo "setup_env: install these packages as root: ${missing[*]}" >&2; exit 1; }
    root=(sudo)
  fi
  echo "setup_env: installing ${missing[*]}"
  "${root[@]}" apt-get update -qq
  "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
}

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
    xcrun --find clang >/dev/null 2>&1 || {
      echo "setup_env: the compiler is missing: run xcode-select --install, then this again" >&2
      exit 1
    }
    ;;
esac

python=$(find_python)
[ -n "$python" ] || {
  echo "setup_env: ${PYTHON:-python3} is no Python from 3.10 on: install one, or set PYTHON=/path/to/python3" >&2
  exit 1
}
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
# torch first: everything else is built against it.
"$venv/bin/python" -m pip install --quiet "$(grep '^torch==' "$versions")"
"$venv/bin/python" -m pip install --quiet 'setuptools>=77' numpy -r "$versions"
