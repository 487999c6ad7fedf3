#!/bin/bash
# Compares hip_sys's constants, layouts and signatures with the published hip-sys and with AMD's headers of several releases.
#
# Needs cargo and a C compiler. What cannot be had here is told as `not run: REASON`; a difference fails.
set -euo pipefail
cd "$(dirname "$0")/.."
. ci/debian.sh

echo "== published hip-sys"
if [ "$(rustc -vV | sed -n 's/^host: //p')" != x86_64-unknown-linux-gnu ]; then
    echo "not run: the published crate's layouts are those of x86_64"
elif ! (cd ci/hip-abi && cargo fetch --locked --quiet); then
    echo "not run: cargo cannot fetch it"
else
    # From its own folder, whose cargo configuration replaces the build script that wants ROCm.
    (cd ci/hip-abi && CARGO_TARGET_DIR=../../target/hip-abi cargo test --locked)
fi

cargo build --quiet -p latentwave-hip-sys --example abi
compiler=$(command -v "${CC:-cc}" || true)
checked=0
absent=$(mktemp)
trap 'rm -f "$absent"' EXIT
for suite in $HIP_SUITES; do
    echo "== headers of $suite"
    tree=target/hip-runtimes/$suite
    if [ -z "$compiler" ]; then
        echo "not run: no C compiler"
    elif ! reason=$(hip_release "$suite" "$tree" 2>&1); then
        echo "not run: $reason"
    else
        target/debug/examples/abi "$tree/usr/include" >"target/hip-abi-$suite.c" 2>>"$absent"
        "$compiler" -fsyntax-only -I "$tree/usr/include" "target/hip-abi-$suite.c"
        echo "$(grep -c '^_Static_assert' "target/hip-abi-$suite.c") facts agree with HIP $(hip_version "$tree")"
        checked=$((checked + 1))
    fi
done

# A name that no release knows is a name that we invented.
if [ "$checked" -gt 0 ]; then
    invented=$(sort "$absent" | uniq -c | awk -v all="$checked" '$1 == all { print $3 }')
    if [ "$checked" -eq "$(wc -w <<<"$HIP_SUITES")" ] && [ -n "$invented" ]; then
        echo "no release has: $invented" >&2
        exit 1
    fi
fi
