#!/usr/bin/env bash
# One job of the CI matrix, the same for a person and for CI: ci/run.sh [--require] JOB [JOB...]; ci/run.sh list names them.
#
# A job that a machine cannot run says `not run: REASON` and ends with status 0; one that fails ends with another status.
# With --require, as CI has it, where each job has the runner it needs, what was not run counts as failed. JOB:ARCH, such as
# cuda_device:sm_90, also requires a device of that architecture.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export CARGO_TERM_COLOR="${CARGO_TERM_COLOR:-never}"
ALL=cuda,rocm,cli,candle,capi,dlpack,tracing,profiler

say() { printf '\n== %s\n' "$*"; }

# Extracts the shell commands of README.md's fenced blocks that follow a line `<!-- ci: NAME -->`.
readme_commands() {
  awk -v name="<!-- ci: $1 -->" '$0 == name {armed = 1} /^```/ {if (inside) {inside = 0; armed = 0} else if (armed) {inside = 1; next}} inside' README.md
}

job_format() {
  say "format"
  cargo fmt --all --check
  cargo fmt --manifest-path fuzz/Cargo.toml --check
}

job_lint() {
  say "clippy, every feature set that a user builds"
  # One package at a time: in a workspace one member's features are every member's.
  for features in "" cli cuda rocm capi,dlpack; do
    cargo clippy --all-targets --features "$features" --quiet -- -D warnings
  done
  cargo clippy --workspace --all-targets --features "$ALL" --quiet -- -D warnings
}

job_docs() {
  say "documentation with every feature"
  RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --features "$ALL" --quiet
}

job_docsrs() {
  say "documentation as docs.rs builds it"
  has_nightly || return 0
  # Badges of features need a nightly compiler.
  RUSTDOCFLAGS="-D warnings --cfg docsrs" cargo +nightly doc --no-deps --features "$(docsrs_features)" --quiet
}

# The features that Cargo.toml tells docs.rs of: all that are public interface.
docsrs_features() {
  sed -n '/^\[package.metadata.docs.rs\]/,/^$/s/^features = \[\(.*\)\]/\1/p' Cargo.toml | tr -d '" '
}

job_api() {
  say "the public interface against ci/api"
  has_nightly || return 0
  cargo_tool cargo-public-api || return 0
  local changed=0 package features
  for package in latentwave latentwave-hip-sys; do
    features=""
    [ $package = latentwave ] && features=$(docsrs_features)
    mkdir -p target/api
    CARGO_TARGET_DIR=target/api cargo +nightly public-api -sss --package $package --features "$features" >target/api/$package.txt
    [ -z "${LATENTWAVE_WRITE:-}" ] || cp target/api/$package.txt ci/api/
    diff -u ci/api/$package.txt target/api/$package.txt || changed=1
  done
  [ $changed = 0 ] || echo "meant so? LATENTWAVE_WRITE=1 ci/run.sh api, and a line in CHANGELOG.md"
  return $changed
}

job_fuzz() {
  local seconds=${FUZZ_SECONDS:-60} target
  say "each fuzz target for $seconds seconds, from its corpus"
  has_nightly || return 0
  cargo_tool cargo-fuzz || return 0
  for target in $(cargo +nightly fuzz list); do
    # What is found new goes to the first folder.
    mkdir -p "target/fuzz/$target"
    cargo +nightly fuzz run "$target" "target/fuzz/$target" "fuzz/corpus/$target" -- \
      -max_total_time="$seconds" -timeout=20 -rss_limit_mb=4096 -print_final_stats=1
  done
}

job_unit() {
  say "tests on the host backend with no feature"
  cargo test --quiet
  say "tests with every feature"
  cargo test --workspace --features "$ALL" --quiet
  say "examples"
  for example in examples/*.rs; do
    cargo run --quiet --features "$ALL" --example "$(basename "$example" .rs)"
  done
}

job_readme() {
  say "README's main command"
  local commands
  commands=$(readme_commands main)
  [ -n "$commands" ] || { echo "README.md names no command for 'main'"; return 1; }
  bash -euxc "$commands"
}

job_capi() {
  if ! command -v cc >/dev/null || ! command -v c++ >/dev/null; then
    echo "not run: the examples in C and C++ need cc and c++"
    return 0
  fi
  say "README's commands for C: the shared library and the example in C"
  local commands libs prefix=target/capi
  commands=$(readme_commands c)
  [ -n "$commands" ] || { echo "README.md names no command for 'c'"; return 1; }
  bash -euxc "$commands"
  say "the example in C++, in C with all warnings, and in C against the static library"
  libs=$(cargo rustc --release --lib --crate-type staticlib --features capi -- --print native-static-libs 2>&1 | sed -n 's/.*native-static-libs: //p' | tail -n 1)
  mkdir -p "$prefix/lib" "$prefix/include"
  cp target/release/liblatentwave.so "$prefix/lib/"
  cp include/latentwave.h "$prefix/include/"
  local warn="-Wall -Wextra -Wpedantic -Werror -I$prefix/include" shared="-L$prefix/lib -Wl,-rpath,$PWD/$prefix/lib -llatentwave"
  c++ -std=c++17 $warn examples/c/decode.cpp $shared -o "$prefix/decode_cpp"
  "$prefix/decode_cpp"
  cc -std=c99 $warn examples/c/decode.c $shared -lm -o "$prefix/decode"
  "$prefix/decode"
  cc -std=c99 $warn examples/c/decode.c target/release/liblatentwave.a ${libs:-$(sed -n 's/^Libs.private: //p' include/latentwave.pc)} -lm -o "$prefix/decode_static"
  "$prefix/decode_static"
  say "nothing but the ABI is exported"
  if command -v nm >/dev/null; then
    nm -D --defined-only "$prefix/lib/liblatentwave.so" | awk '$3 !~ /^lw_/ {print; bad = 1} END {exit bad}'
  fi
  if command -v pkg-config >/dev/null; then
    say "pkg-config"
    install -Dt "$prefix/lib/pkgconfig" include/latentwave.pc
    libs=$(PKG_CONFIG_PATH="$prefix/lib/pkgconfig" pkg-config --cflags --libs latentwave)
    cc examples/c/decode.c $libs -lm -o "$prefix/decode_pc"
    LD_LIBRARY_PATH="$prefix/lib" "$prefix/decode_pc"
  fi
  say "torch or numpy through ctypes"
  local python=python3
  if ! python3 -c 'import torch' 2>/dev/null && ! python3 -c 'import numpy' 2>/dev/null; then
    python3 -m venv "$prefix/venv" && "$prefix/venv/bin/pip" install --quiet numpy || { echo "not run: python3 has no numpy"; return 0; }
    python="$prefix/venv/bin/python3"
  fi
  "$python" examples/torch_decode.py
}

job_package() {
  say "package dry run"
  cargo package --workspace --allow-dirty --quiet
  python3 ci/package.py
}

job_test() {
  job_format
  job_lint
  job_docs
  job_unit
  job_readme
  job_package
}

# Whether there is a nightly toolchain, with these components; says why not otherwise.
has_nightly() {
  local component
  for component in rustc "$@"; do
    rustup component list --toolchain nightly --installed 2>/dev/null | grep -q "^$component" && continue
    echo "not run: needs a nightly toolchain with ${*:-nothing more} (rustup toolchain install nightly --component ...)"
    return 1
  done
}

# Installs a tool of cargo's where it is missing; says why not otherwise.
cargo_tool() {
  command -v "$1" >/dev/null || cargo install --locked --quiet "$1" || { echo "not run: $1 cannot be installed here"; return 1; }
}

# Installs Debian packages where that can be done without asking; says why not otherwise.
debian_install() {
  if ! command -v apt-get >/dev/null || [ "$(id -u)" -ne 0 ]; then
    echo "packages $* are missing, and only root on Debian can install them here"
    return 1
  fi
  apt-get update -qq >/dev/null 2>&1
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@" >/dev/null 2>&1 || { echo "apt cannot install $*"; return 1; }
}

# AMD's compiler and disassembler; what is missing is reported as not run by those who need it.
amd_compiler() {
  if ! command -v clang++-22 >/dev/null || ! command -v ld.lld-22 >/dev/null || ! command -v llvm-objdump-22 >/dev/null; then
    debian_install clang-22 lld-22 llvm-22 || true
  fi
}

job_kernels() {
  say "every kernel variant for every architecture of both vendors, without a GPU"
  amd_compiler
  python3 ci/kernels.py --all
}

job_isa() {
  say "what the main loops of both vendors execute, against ci/isa/budgets.toml"
  amd_compiler
  python3 ci/isa/tests.py
  python3 ci/isa --all=gfx942,gfx950
}

job_hip() {
  say "hip_sys against AMD's headers, and against AMD's runtimes without a GPU"
  ci/hip_abi.sh
  ci/hip_runtimes.sh
}

job_rocm() {
  say "the ROCm side on an emulated gfx942, under AMD's own HIP runtime"
  ci/rocm.sh --suite
}

job_cuda() {
  say "the CUDA side on an emulated sm_90a and sm_80"
  ci/cuda.sh --suite
}

job_deny() {
  say "cargo-deny: bans, licences, sources"
  cargo_tool cargo-deny || return 0
  # Advisories need a database that is fetched from elsewhere; they are a matter for a machine with open network.
  cargo deny check bans licenses sources
}

job_msrv() {
  say "minimum supported Rust version"
  local version
  version=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
  if ! rustup run "$version" cargo --version >/dev/null 2>&1; then
    echo "not run: toolchain $version is not installed (clippy's incompatible_msrv checked the standard library's part)"
    return 0
  fi
  # candle's own minimum is higher: 1.89.
  CARGO_TARGET_DIR=target/msrv rustup run "$version" cargo check --workspace --features "${ALL/candle,/}"
}

job_miri() {
  say "Miri on the pure parts"
  has_nightly miri rust-src || return 0
  # A device that cannot ask the machine for its facts takes its defaults.
  MIRIFLAGS="${MIRIFLAGS:-} -Zmiri-isolation-error=hide" cargo +nightly miri test --quiet --lib -- graph:: plan:: batch::
}

# Every suite, and a replay checked against float64, with a vendor's device that must be there.
# device_suites BACKEND FILE ARCH: FILE exists where that vendor's driver is loaded.
device_suites() {
  local backend=$1 file=$2 arch=$3
  say "every suite on a $backend device ${arch:+of $arch}"
  [ -e "$file" ] || { echo "not run: no $file, so no $backend device is here"; return 0; }
  local found
  found=$(cargo run --release --quiet --features "$backend,cli" -- info | grep -A 1 "^$backend [0-9]" || true)
  echo "$found"
  if ! grep -q "^   ${arch:-}" <<<"$found"; then
    echo "not run: no $backend device ${arch:+of $arch}"
    return 0
  fi
  LATENTWAVE_REQUIRE=$backend cargo test --features "$backend,cli" --quiet
  cargo run --release --quiet --features "$backend,cli" -- replay data/azure_conv_excerpt.csv --backend "$backend" --verify 2
}

job_cuda_device() {
  device_suites cuda /dev/nvidiactl "${1:-}"
}

job_rocm_device() {
  device_suites rocm /dev/kfd "${1:-}"
}

required=
if [ "${1:-}" = --require ]; then
  required=1
  shift
fi
if [ $# -eq 0 ] || [ "$1" = list ]; then
  declare -F | sed -n 's/^declare -f job_/  /p'
  exit 0
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for job in "$@"; do
  IFS=: read -r name arch <<<"$job"
  declare -F "job_$name" >/dev/null || { echo "no job '$name'; ci/run.sh list names them" >&2; exit 2; }
  if [ -z "$required" ]; then
    "job_$name" $arch
    continue
  fi
  "job_$name" $arch 2>&1 | tee "$log"
  if grep -q '^not run:' "$log"; then
    echo "$job is required here, but parts of it were not run" >&2
    exit 1
  fi
done
