#!/bin/bash
# Runs the tests of hip_sys and of the ROCm backend against AMD's own HIP runtimes, from Debian's packages, on a machine that
# needs no GPU and no ROCm.
#
# For each release: unpack its packages under target/, start the tests through the release's own loader and libraries, and
# expect `NoDevice` and a working compiler. Prints `not run: REASON` for a release that cannot be had.
set -euo pipefail
cd "$(dirname "$0")/.."
. ci/debian.sh

# `cargo test --no-run` tells where it put a program.
built() {
    cargo test "$@" --no-run 2>&1 | sed -n 's/^ *Executable .*(\(.*\))$/\1/p' | grep . || {
        echo "the tests did not build: cargo test $*" >&2
        exit 1
    }
}
bindings=$(built -p latentwave-hip-sys --test no_gpu)
backend=$(built --features rocm --test rocm)

# run_tests EXPECTED COMMAND...: starts both programs by the command.
run_tests() {
    local expected=$1 program
    shift
    for program in "$bindings" "$backend"; do
        env -u HIP_PATH -u ROCM_PATH HIP_SYS_EXPECT="$expected" LATENTWAVE_ROCM_EXPECT="$expected" \
            "$@" "$program" --nocapture --test-threads=1
    done
}

echo "== no HIP runtime"
if ldconfig -p | grep -q libamdhip64 || [ -e /opt/rocm/lib ]; then
    echo "not run: this machine has one"
else
    run_tests unavailable
fi

for suite in $HIP_SUITES; do
    echo "== HIP of $suite"
    tree=target/hip-runtimes/$suite
    if ! reason=$(hip_release "$suite" "$tree" 2>&1); then
        echo "not run: $reason"
        continue
    fi
    # Only the release's own libraries are seen: its C library too, so that one program serves all.
    loader=$(find "$tree" -path '*lib64/ld-linux-x86-64.so.2' -print -quit)
    libraries=$tree/usr/lib/x86_64-linux-gnu:$tree/lib/x86_64-linux-gnu
    run_tests no-device "$loader" --library-path "$libraries"
done
