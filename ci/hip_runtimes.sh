#!/bin/bash
# Runs hip_sys's tests against AMD's own HIP runtimes, from Debian's packages, on a machine that needs no GPU and no ROCm.
#
# For each release: unpack its packages under target/, start the test through the release's own loader and libraries, and
# expect `NoDevice` and a working compiler. Prints `not run: REASON` for a release that cannot be had.
set -euo pipefail
cd "$(dirname "$0")/.."
. ci/debian.sh

# `cargo test --no-run` tells where it put the program.
program=$(cargo test -p latentwave-hip-sys --test no_gpu --no-run 2>&1 | sed -n 's/.*(\(.*no_gpu-[0-9a-f]*\))$/\1/p')
[ -x "$program" ] || { echo "the test did not build" >&2; exit 1; }

echo "== no HIP runtime"
if ldconfig -p | grep -q libamdhip64 || [ -e /opt/rocm/lib ]; then
    echo "not run: this machine has one"
else
    env -u HIP_PATH -u ROCM_PATH HIP_SYS_EXPECT=unavailable "$program" --nocapture --test-threads=1
fi

for suite in $HIP_SUITES; do
    echo "== HIP of $suite"
    tree=target/hip-runtimes/$suite
    if ! reason=$(hip_release "$suite" "$tree" 2>&1); then
        echo "not run: $reason"
        continue
    fi
    libraries=$tree/usr/lib/x86_64-linux-gnu:$tree/lib/x86_64-linux-gnu
    # Only the release's own libraries are seen: its C library too, so that one program serves all.
    loader=$(find "$tree" -path '*lib64/ld-linux-x86-64.so.2' -print -quit)
    env -u HIP_PATH -u ROCM_PATH HIP_SYS_EXPECT=no-device \
        "$loader" --library-path "$libraries" "$program" --nocapture --test-threads=1
done
