#!/usr/bin/env bash
# One job of the CI matrix, the same for a person and for CI: ci/run.sh JOB [JOB...]; ci/run.sh list names them.
#
# A job that a machine cannot run says `not run: REASON` and ends with status 0; one that fails ends with another status.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export CARGO_TERM_COLOR="${CARGO_TERM_COLOR:-never}"
ALL=cuda,rocm,cli,capi,dlpack,tracing

say() { printf '\n== %s\n' "$*"; }

# Extracts the shell commands of README.md's fenced blocks that follow a line `<!-- ci: NAME -->`.
readme_commands() {
  awk -v name="<!-- ci: $1 -->" '$0 == name {armed = 1} /^```/ {if (inside) {inside = 0; armed = 0} else if (armed) {inside = 1; next}} inside' README.md
}

job_format() {
  say "format"
  cargo fmt --all --check
}

job_lint() {
  say "clippy, every feature set that a user builds"
  # One package at a time: in a workspace one member's features are every member's.
  for features in "" cli cuda rocm; do
    cargo clippy --all-targets --features "$features" --quiet -- -D warnings
  done
  cargo clippy --workspace --all-targets --features "$ALL" --quiet -- -D warnings
}

job_docs() {
  say "documentation with every feature"
  RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --features "$ALL" --quiet
}

job_unit() {
  say "tests on the host backend with no feature"
  cargo test --quiet
  say "tests with every feature"
  cargo test --workspace --features "$ALL" --quiet
  say "examples"
  for example in examples/*.rs; do
    cargo run --quiet --example "$(basename "$example" .rs)"
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
  c++ -std=c++17 $warn examples/c/decode.cpp $shared -o "$prefix/decode_cpp" && "$prefix/decode_cpp"
  cc -std=c99 $warn examples/c/decode.c $shared -lm -o "$prefix/decode" && "$prefix/decode"
  cc -std=c99 $warn examples/c/decode.c target/release/liblatentwave.a ${libs:-$(sed -n 's/^Libs.private: //p' include/latentwave.pc)} -lm -o "$prefix/decode_static" && "$prefix/decode_static"
  say "nothing but the ABI is exported"
  if command -v nm >/dev/null; then
    nm -D --defined-only "$prefix/lib/liblatentwave.so" | awk '$3 !~ /^lw_/ {print; bad = 1} END {exit bad}'
  fi
  if command -v pkg-config >/dev/null; then
    say "pkg-config"
    install -Dt "$prefix/lib/pkgconfig" include/latentwave.pc
    PKG_CONFIG_PATH="$prefix/lib/pkgconfig" bash -euc 'cc examples/c/decode.c $(pkg-config --cflags --libs latentwave) -lm -o target/capi/decode_pc'
    LD_LIBRARY_PATH="$prefix/lib" target/capi/decode_pc
  fi
  say "torch or numpy through ctypes"
  if command -v python3 >/dev/null; then
    python3 examples/torch_decode.py
  fi
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

# Installs Debian packages where that can be done without asking; says why not otherwise.
debian_install() {
  if ! command -v apt-get >/dev/null || [ "$(id -u)" -ne 0 ]; then
    echo "packages $* are missing, and only root on Debian can install them here"
    return 1
  fi
  apt-get update -qq >/dev/null 2>&1
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@" >/dev/null 2>&1 || { echo "apt cannot install $*"; return 1; }
}

job_kernels() {
  say "every kernel variant for every architecture of both vendors, without a GPU"
  if ! command -v clang++-22 >/dev/null || ! command -v ld.lld-22 >/dev/null; then
    debian_install clang-22 lld-22 || true
  fi
  python3 ci/kernels.py --all
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

job_deny() {
  say "cargo-deny: bans, licences, sources"
  if ! command -v cargo-deny >/dev/null; then
    cargo install --locked --quiet cargo-deny || { echo "not run: cargo-deny cannot be installed here"; return 0; }
  fi
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
  rustup run "$version" cargo check --workspace --features "$ALL"
}

job_miri() {
  say "Miri on the pure parts"
  if ! cargo miri --version >/dev/null 2>&1; then
    echo "not run: Miri needs a nightly toolchain, which is not installed"
    return 0
  fi
  cargo miri test --lib -- graph:: plan:: batch::
}

if [ $# -eq 0 ] || [ "$1" = list ]; then
  declare -F | sed -n 's/^declare -f job_/  /p'
  exit 0
fi
for job in "$@"; do
  declare -F "job_$job" >/dev/null || { echo "no job '$job'; ci/run.sh list names them" >&2; exit 2; }
  "job_$job"
done
