#!/usr/bin/env bash
# Checks that a tag can be released: ci/release.sh [--publish] vX.Y.Z
#
# The versions of all packages match the tag, CHANGELOG.md has a section for it, and each package is made and built from what it holds,
# in the order in which they depend on each other. With --publish they are then published in that order.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PACKAGES=(latentwave-hip-sys latentwave)

publish=
if [ "${1:-}" = --publish ]; then
  publish=1
  shift
fi
tag=${1:?usage: ci/release.sh [--publish] vX.Y.Z}
version=${tag#v}
fail() {
  echo "$tag cannot be released: $*" >&2
  exit 1
}

[ "$tag" = "v$version" ] || fail "a tag is written vX.Y.Z"
for package in "${PACKAGES[@]}"; do
  have=$(cargo metadata --no-deps --format-version 1 | python3 -c '
import json, sys
print(*(package["version"] for package in json.load(sys.stdin)["packages"] if package["name"] == sys.argv[1]))' "$package")
  [ "$have" = "$version" ] || fail "$package is at version ${have:-none}"
done
grep -q "package = \"latentwave-hip-sys\", path = \"hip\", version = \"$version\"" Cargo.toml ||
  fail "Cargo.toml asks for another version of latentwave-hip-sys"
awk -v head="## [$version]" 'index($0, head) == 1 {on = 1; next} /^## / {on = 0} on && /[^[:space:]]/ {found = 1} END {exit !found}' \
  CHANGELOG.md || fail "CHANGELOG.md has no section [$version], or an empty one"

# Built from their packages in one go, as a user gets them: the second finds the first there.
cargo package "${PACKAGES[@]/#/--package=}"
python3 ci/package.py
[ -z "$publish" ] || for package in "${PACKAGES[@]}"; do
  cargo publish --package "$package"
done
echo "$tag can be released"
