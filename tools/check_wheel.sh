#!/usr/bin/env bash
# Installs the wheel in dist into a bare environment, away from the sources, and tries it: the versions it names,
# `doctor`, and 30 families of transformers against eager attention. On Linux softmetal, as it is built here, is
# the mps device.
# Usage: tools/check_wheel.sh DIRECTORY TORCH TRANSFORMERS (their versions; the directory is made anew)
set -euo pipefail
usage="usage: tools/check_wheel.sh DIRECTORY TORCH TRANSFORMERS"
folder=${1:?$usage} torch=${2:?$usage} transformers=${3:?$usage}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
minor=$(cut -d. -f1,2 <<< "$torch")

rm -rf "$folder"
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
wheels=("$root"/dist/torch_fattn-*+torch"$minor"-cp310-abi3-*.whl)
[ ${#wheels[@]} = 1 ] && [ -f "${wheels[0]}" ] || {
  echo "check_wheel: dist has not one wheel for torch $minor: run make wheel" >&2
  exit 1
}
"$root/.venv/bin/python" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install --quiet "${wheels[0]}[transformers]" "torch==$torch" "transformers==$transformers" numpy
if [ "$(uname -s)" = Linux ]; then
  "$python" -m pip install --quiet 'setuptools>=77'
  "$python" -m pip install --quiet --no-build-isolation -e "$root/softmetal"
fi
# The tests as they are, and nothing else of the sources.
cp -R "$root/tests" "$folder/tests"
cd "$folder"
"$python" - "$minor" <<'END'
import importlib.metadata, pathlib, sys
import torch_fattn
minor, package = sys.argv[1], importlib.metadata.metadata("torch-fattn")
major, second = minor.split(".")
assert pathlib.Path(torch_fattn.__file__).is_relative_to(sys.prefix), torch_fattn.__file__
assert package["Version"] == f"{torch_fattn.__version__}+torch{minor}", package["Version"]
needed = package.get_all("Requires-Dist")
assert f"torch<{major}.{int(second) + 1},>={minor}" in needed, needed
END
"$python" -m torch_fattn --version
"$python" -m torch_fattn doctor
"$python" -m pytest --version >/dev/null 2>&1 || "$python" -m pip install --quiet pytest expecttest hypothesis
"$python" -m pytest -q -p no:cacheprovider tests/transformers/test_families.py -m "not slow"
echo "check_wheel: $(basename "${wheels[0]}") is well"
