#!/usr/bin/env bash
# Runs tests of the ROCm side where there is no AMD GPU: AMD's own HIP runtime on the emulator of ci/amd.
#
#   ci/rocm.sh                    builds the emulator and runs its own tests under the HIP runtime
#   ci/rocm.sh BINARY [ARG...]    runs one program there, such as a test binary built with `--features rocm`
#   ci/rocm.sh --tests [--only TEXT] BINARY...
#                                 runs each test of these binaries (with TEXT in its name) in a process of its own, prints a table
#   ci/rocm.sh --suite            builds and runs the whole ROCm side: bindings, backend, contract, golden data, sessions, regressions
#   ci/rocm.sh --instructions     lists the instructions implemented, with those that the last table's tests executed marked
#
# The runtime is Debian 13's HIP 5.7.1, unpacked under target/; it finds the emulator by the ordinary library search.
# A program is stopped after ROCM_TIMEOUT seconds (900). AMD_EMULATOR_* variables configure the device: ci/amd/src/device/config.rs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=ci/debian.sh
source ci/debian.sh

SUITE=trixie
TREE=target/hip-runtimes/$SUITE
LIBRARIES=$TREE/usr/lib/x86_64-linux-gnu
EMULATOR=target/rocm-emulator
RESULTS=$EMULATOR/results

# Fetches the runtime and builds the emulator for this processor.
prepare() {
  hip_release "$SUITE" "$TREE" || return 1
  local flags=${RUSTFLAGS:-}
  if grep -qw avx2 /proc/cpuinfo && grep -qw fma /proc/cpuinfo; then
    flags="$flags -C target-cpu=x86-64-v3"
  fi
  RUSTFLAGS=$flags cargo build --quiet --release --package latentwave-amd-emulator --lib --target-dir "$EMULATOR"
  mkdir -p "$EMULATOR/lib" "$RESULTS"
  ln -sf ../release/libhsakmt.so "$EMULATOR/lib/libhsakmt.so.1"
}

# Runs a program with the runtime's libraries, and with its loader: they may be newer than the host's.
# What has no name in the library path, such as the compiler that a test starts, uses the host's own.
emulated() {
  local program=$1
  shift
  if [ "${AMD_EMULATOR_CHECK:-0}" != 0 ]; then
    # Each allocation stands alone then, so that bounds are found.
    export HSA_DISABLE_FRAGMENT_ALLOCATOR=1
  fi
  timeout "${ROCM_TIMEOUT:-900}" "$LIBRARIES/ld-linux-x86-64.so.2" --library-path "$PWD/$EMULATOR/lib:$PWD/$LIBRARIES" "$program" "$@"
}

# Runs every test of a binary in a process of its own; the table says what each executed. Fails when one failed.
run_tests() {
  local binary name failed=0 started seconds status log only=
  if [ "$1" = --only ]; then
    only=$2
    shift 2
  fi
  local format='%-72s %16s %9s  %s\n'
  # shellcheck disable=SC2059
  printf "$format" test wave-instructions seconds result
  for binary in "$@"; do
    while read -r name; do
      log="$RESULTS/$(basename "$binary")-${name//[^a-zA-Z0-9_]/-}.log"
      rm -f "$log" "$log.statistics"
      started=$(date +%s.%N)
      status=ok
      AMD_EMULATOR_STATISTICS="$PWD/$log.statistics" LATENTWAVE_REQUIRE=${LATENTWAVE_REQUIRE:-rocm} \
        emulated "$binary" --exact "$name" --nocapture >"$log" 2>&1 </dev/null || status="FAILED ($log)"
      seconds=$(awk -v a="$started" -v b="$(date +%s.%N)" 'BEGIN {printf "%.2f", b - a}')
      # shellcheck disable=SC2059
      printf "$format" "$name" "$(awk '$1 == "total" {n += $3} END {print n + 0}' "$log.statistics" 2>/dev/null || echo 0)" \
        "$seconds" "$status"
      if [ "$status" != ok ]; then
        failed=1
        tail -n 15 "$log" | sed 's/^/    /'
      fi
    done < <(emulated "$binary" --list --format terse | sed -n 's/: test$//p' | grep -F -- "$only")
  done
  return "$failed"
}

# Path of a test binary that cargo builds with these arguments.
test_binary() {
  cargo test --no-run --message-format=json --quiet "$@" |
    sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1
}

# Everything that runs on a device, with a device of two sizes: the number of compute units must come through.
run_suite() {
  local failed=0 name binaries=()
  AMD_EMULATOR_CUS=12 run_tests "$(test_binary --package latentwave-amd-emulator --test hip)" || failed=1
  run_tests "$(test_binary --package latentwave-hip-sys --test device)" || failed=1
  run_tests "$(test_binary --features rocm --test rocm)" || failed=1
  for name in regression_47144 session contract golden user_reports; do
    binaries+=("$(test_binary --features rocm --test "$name")")
  done
  run_tests --only rocm:: "${binaries[@]}" || failed=1
  return "$failed"
}

if ! prepare; then
  echo "not run: the HIP runtime cannot be fetched"
  exit 0
fi
case "${1:-}" in
  "")
    run_tests "$(test_binary --package latentwave-amd-emulator --test hip)"
    ;;
  --tests)
    shift
    run_tests "$@"
    ;;
  --suite)
    rm -f "$RESULTS"/*
    run_suite
    ;;
  --instructions)
    cat "$RESULTS"/*.statistics 2>/dev/null |
      cargo run --quiet --package latentwave-amd-emulator --example instructions
    ;;
  *)
    emulated "$@"
    ;;
esac
