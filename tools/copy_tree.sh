#!/usr/bin/env bash
# Updates a copy of the sources for builds against another torch, which must not touch the build here. Copies files
# that git tracks or would track, with their times, and removes files that are gone here. Build outputs in the copy stay.
# Usage: tools/copy_tree.sh DIRECTORY
set -euo pipefail
target=${1:?usage: tools/copy_tree.sh DIRECTORY}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
git rev-parse --git-dir >/dev/null || { echo "copy_tree: this is not a git checkout: run it in a clone of the repository" >&2; exit 1; }

mkdir -p "$target"
list=$target/.sources
git ls-files --cached --others --exclude-standard | while IFS= read -r file; do
  [ ! -f "$file" ] || printf '%s\n' "$file"
done | LC_ALL=C sort -u > "$list.new"
[ ! -f "$list" ] || LC_ALL=C comm -23 "$list" "$list.new" | while IFS= read -r gone; do rm -f "$target/$gone"; done
tar -c -T "$list.new" -f - | tar -x -C "$target" -f -
mv "$list.new" "$list"
