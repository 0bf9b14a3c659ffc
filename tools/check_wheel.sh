#!/usr/bin/env bash
# Installs the wheel in dist into a bare environment, away from the sources, and tests it: its versions, `doctor`,
# 30 families of transformers against eager attention, and a user's script under mypy --strict. On Linux the softmetal
# of this checkout provides the mps device.
# Usage: tools/check_wheel.sh DIRECTORY VERSIONS (a file of requirements/; the directory is recreated)
set -euo pipefail
usage="usage: tools/check_wheel.sh DIRECTORY VERSIONS"
folder=${1:?$usage} versions=$(realpath "${2:?$usage}")
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
minor=$(sed -n 's/^torch==\([0-9]*\.[0-9]*\)\..*/\1/p' "$versions")

rm -rf "$folder"
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
wheels=("$root"/dist/torch_fattn-*+torch"$minor"-cp310-abi3-*.whl)
[ ${#wheels[@]} = 1 ] && [ -f "${wheels[0]}" ] || {
  echo "check_wheel: dist does not contain exactly one wheel for torch $minor: run make wheel" >&2
  exit 1
}
"$root/.venv/bin/python" -m venv "$folder/venv"
python=$folder/venv/bin/python
"$python" -m pip install --quiet "${wheels[0]}[transformers]" -r "$versions" numpy
if [ "$(uname -s)" = Linux ]; then
  "$python" -m pip install --quiet 'setuptools>=77'
  "$python" -m pip install --quiet --no-build-isolation -e "$root/softmetal"
fi
# Copy only the tests, and the table that they read.
cp -R "$root/tests" "$folder/tests"
mkdir "$folder/docs"
cp "$root/docs/models.md" "$folder/docs"
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
"$python" -m pip install --quiet pytest expecttest hypothesis mypy
"$python" -m pytest -q -p no:cacheprovider tests/transformers/test_families.py tests/pytorch/test_typing.py -m "not slow"
echo "check_wheel: $(basename "${wheels[0]}") passes"
