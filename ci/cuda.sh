#!/usr/bin/env bash
# Runs the CUDA side where there is no NVIDIA GPU: its tests as they are, its kernels by the emulator of ci/nvidia.
#
#   ci/cuda.sh BINARY [ARG...]    runs one program there, such as a test binary built with `--features cuda`
#   ci/cuda.sh --suite            builds and runs the whole CUDA side: backend, contract, golden data, sessions, regressions, a soak
#
# Needs a C++ compiler, and nothing of NVIDIA's. A program is stopped after CUDA_TIMEOUT seconds (600). NVIDIA_EMULATOR_* variables
# configure the device: ci/nvidia/README.md. SOAK_SECONDS (60) is how long random problems are run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

EMULATOR=target/cuda-emulator
RESULTS=$EMULATOR/results
CXX=${CXX:-c++}

# Whether it can run here; says why not otherwise.
possible() {
  [ "$(uname -m)" = x86_64 ] || { echo "not run: the emulator switches threads in x86-64's assembler"; return 1; }
  command -v "$CXX" >/dev/null || { echo "not run: needs a C++ compiler"; return 1; }
}

# Builds the driver and the compiler, for this processor, unless they are there already and nothing has changed.
prepare() {
  local flags=(-std=c++20 -O3 -march=native -fPIC -shared -Wall -Wextra -Wno-restrict) made
  made=$(
    { "$CXX" --version; grep -m 1 '^flags' /proc/cpuinfo; echo "$PWD ${flags[*]}"; } 2>&1 | cksum
    find ci/nvidia -type f ! -name '*.md' -exec cksum {} + | sort -k 3
  )
  [ "$(cat "$EMULATOR/made" 2>/dev/null)" != "$made" ] || return 0
  rm -rf "$EMULATOR"
  mkdir -p "$RESULTS"
  "$CXX" "${flags[@]}" -Wl,-soname,libcuda.so.1 ci/nvidia/machine/*.cc ci/nvidia/driver/*.cc -o "$EMULATOR/libcuda.so.1"
  "$CXX" "${flags[@]}" ci/nvidia/nvrtc/*.cc -o "$EMULATOR/libnvrtc.so.13"
  ln -s "$PWD/ci/nvidia/device" "$PWD/ci/nvidia/machine" "$EMULATOR"
  echo "$made" >"$EMULATOR/made"
}

# Runs a program with the emulated libraries. What is compiled is kept for the next one.
emulated() {
  LD_LIBRARY_PATH="$PWD/$EMULATOR" LATENTWAVE_NVRTC="$PWD/$EMULATOR" LATENTWAVE_CACHE_DIR="$PWD/$EMULATOR/cache" \
    LATENTWAVE_REQUIRE="${LATENTWAVE_REQUIRE:-cuda,nvrtc}" CXX=$CXX timeout "${CUDA_TIMEOUT:-600}" "$@"
}

# Runs a program, and says how it ended: row NAME COMMAND...
row() {
  local name=$1 started=$SECONDS result log
  log="$RESULTS/${name//[^a-zA-Z0-9_]/-}.log"
  shift
  if "$@" >"$log" 2>&1; then
    result=$(grep -E '^test result: ok|problems right' "$log" | sed 's/^test result: ok. //; s/;.*//' | tail -n 1)
  else
    result="FAILED ($log)"
  fi
  printf '%-44s %5ss  %s\n' "$name" $((SECONDS - started)) "$result"
  if [[ $result == FAILED* ]]; then
    grep -E -A 3 'emulated device:|panicked|^error' "$log" | head -n 40 | sed 's/^/    /'
    return 1
  fi
}

# Path of a test binary.
test_binary() {
  cargo test --no-run --message-format=json --quiet --features cuda,cli --test "$1" |
    sed -n "s|.*\"executable\":\"\([^\"]*/deps/$1-[^\"]*\)\".*|\1|p" | tail -n 1
}

# One test at a time, so that chance falls the same way whenever it is run.
tests() { emulated "$@" --test-threads=1; }

# Reads before a kernel's turn, one for each form that begins before it, as an edit of its source: of the step's own rows by a loader, and
# of queries.
EARLY_READS=(
  'stream.h:s/at\.end - p\.query_len/at.end/'
  'stream.h:s/if (due \&\& has_come) take_turn();//'
  'rows_block.h:s/if (due) take_turn();//'
  'wide_block.h:s/if (look && p\.settled) take_turn();//'
  'mla_decode_split_keys.cu:s/if (p\.settled) take_turn();//'
)

# The test of the layers' turns with each of these: it must fail, by numbers.
early_reads_are_found() {
  local sources=$EMULATOR/early-reads early of log
  for early in "${EARLY_READS[@]}"; do
    of=kernels/sm90/${early%%:*}
    rm -rf "$sources" && mkdir "$sources" && cp -r kernels hip "$sources"
    sed -i "${early#*:}" "$sources/$of"
    ! cmp -s "$of" "$sources/$of" || { echo "error: $of has no longer what is taken out here"; return 1; }
    log=$(LATENTWAVE_KERNEL_SOURCES=$sources tests "$1" cuda::rows_of_the_step 2>&1) && { echo "error: $early is not found"; return 1; }
    grep -q 'elements miss' <<<"$log" || { echo "$log"; return 1; }
  done
  echo "test result: ok. ${#EARLY_READS[@]} found"
}

run_suite() {
  local failed=0 name contract
  # Of the backend's own tests, one wants the carried machine code, and some a compiler that knows every architecture's limits.
  row cuda tests "$(test_binary cuda)" --skip compile:: --skip kernels_of_common_models_are_carried || failed=1
  for name in regression_47144 session golden user_reports; do
    row $name tests "$(test_binary $name)" cuda:: || failed=1
  done
  contract=$(test_binary contract)
  row contract tests "$contract" cuda:: &
  NVIDIA_EMULATOR_CAPABILITY=80 NVIDIA_EMULATOR_SMS=12 row "contract, compute capability 8.0" tests "$contract" cuda:: || failed=1
  wait $! || failed=1
  row "reads before a kernel's turn" early_reads_are_found "$contract" || failed=1
  for name in 86 89 100 120; do
    NVIDIA_EMULATOR_CAPABILITY=$name row "types and heads, compute capability $name" tests "$contract" cuda::every_cache cuda::head_counts || failed=1
  done
  cargo build --quiet --features cuda,cli --bin latentwave
  local soak=(emulated target/debug/latentwave soak --backend cuda --seconds "${SOAK_SECONDS:-60}")
  row "soak of small problems" "${soak[@]}" --small &
  row soak "${soak[@]}" || failed=1
  wait $! || failed=1
  return "$failed"
}

case "${1:-}" in
  "" | -h | --help)
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' ci/cuda.sh
    [ $# -gt 0 ] && exit 0 || exit 2
    ;;
esac
possible || exit 0
prepare
case "$1" in
  --suite) run_suite ;;
  *) emulated "$@" ;;
esac
