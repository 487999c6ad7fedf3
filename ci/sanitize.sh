#!/usr/bin/env bash
# Every kernel of sm_90a under NVIDIA's compute-sanitizer: one tiny problem of each form by `latentwave soak --points`, by each tool.
#
#   ci/sanitize.sh [NAME...]      all forms, or those whose names begin like one of these; `ci/sanitize.sh list` names them
#   ci/sanitize.sh --dry [NAME...] runs the problems without a tool, and says which kernel served each: also under ci/cuda.sh
#
# A form is chosen by what is planned for (--captured-for), so short sequences reach the forms of long ones. Needs the program, on
# PATH or named by LATENTWAVE, and compute-sanitizer, on PATH, in a folder of CUDA's or named by SANITIZER. SANITIZE_TOOLS
# ("racecheck memcheck initcheck synccheck"), SANITIZE_SECONDS (60: a run that takes longer is cut off), SANITIZE_JOBS (8 runs at a
# time), SANITIZE_TOKENS (500: a sequence's, where a form has few of them), SANITIZE_TOTAL (none: seconds after which no run is begun)
# and SANITIZE_OUT (target/sanitize: logs). Ends with status 1 if a tool reported something, a result was wrong or another kernel
# served a problem; with 3 if no more than runs that were cut off or not begun are missing.
set -euo pipefail
[ -n "${LATENTWAVE:-}" ] || LATENTWAVE=$(command -v latentwave || echo "$(dirname "${BASH_SOURCE[0]}")/../target/release/latentwave")
TOOLS=${SANITIZE_TOOLS:-racecheck memcheck initcheck synccheck}
SECONDS_EACH=${SANITIZE_SECONDS:-60}
JOBS=${SANITIZE_JOBS:-8}
TOKENS=${SANITIZE_TOKENS:-500}
OUT=${SANITIZE_OUT:-target/sanitize}

# Name | kernel of stage 1 that has to serve it, a pattern | kernel that is looked at (-: all) | options of soak.
# Two splits of a few tiles each (fixed:2) let rings go round and leave something to merge; `auto` adds the plan.
forms() {
  local two="--split-policy fixed:2 --captured-for 16384" T=$TOKENS
  cat <<TABLE
rows bf16 | bf16_bf16_.*_r64_.*_f1 | - | $two --points "B2 S$T H32 q2"
wide fp8 | bf16_fp8_e4m3_.*_r64_.*_f10 | - | $two --kv-dtype fp8 --points "B2 S$T H32 q2"
rows gathered | bf16_bf16_.*_r64_.*_f1g | - | $two --page-size 4 --points "B2 S$T H32 q2"
rows small pages | bf16_bf16_.*_r64_.*_f1s | - | $two --page-size 8 --points "B2 S$T H32 q2"
rows auto | bf16_bf16_.*_r64_.*_f1 | - | --captured-for 8192 --points "B2 S150 H32 q2"
keys 16 bf16 | bf16_bf16_.*_r16_.*_f2 | - | $two --points "B4 S$T H16"
keys 16 fp8 | bf16_fp8_e4m3_.*_r16_.*_f2 | - | $two --kv-dtype fp8 --points "B2 S$T H16"
keys 16 gathered | bf16_bf16_.*_r16_.*_f2g | - | $two --page-size 4 --points "B4 S$T H16"
keys 16 small pages | bf16_bf16_.*_r16_.*_f2s | - | $two --page-size 8 --points "B4 S$T H16"
keys 16 fp8 gathered | bf16_fp8_e4m3_.*_r16_.*_f2g | - | $two --kv-dtype fp8 --page-size 8 --points "B2 S$T H16"
keys 16 auto, merging | bf16_bf16_.*_r16_.*_f2 | - | --captured-for 16384 --points "B5 S150 H16"
keys 32 bf16 | bf16_bf16_.*_r32_.*_f2 | - | $two --points "B4 S$T H16 q2"
keys 32 fp8 | bf16_fp8_e4m3_.*_r32_.*_f2 | - | $two --kv-dtype fp8 --points "B2 S$T H16 q2"
keys 32 gathered | bf16_bf16_.*_r32_.*_f2g | - | $two --page-size 4 --points "B4 S$T H16 q2"
keys 32 small pages | bf16_bf16_.*_r32_.*_f2s | - | $two --page-size 8 --points "B4 S$T H16 q2"
keys 32 fp8 gathered | bf16_fp8_e4m3_.*_r32_.*_f2g | - | $two --kv-dtype fp8 --page-size 8 --points "B2 S$T H16 q2"
few boxes 16 | bf16_bf16_.*_r16_t64_.*_f7 | - | --captured-for 16384 --points "B1 S150 H16"
few boxes 32 | bf16_bf16_.*_r32_t64_.*_f7 | - | --captured-for 16384 --points "B1 S150 H16 q2"
few boxes 32, tiles in turn | bf16_bf16_.*_r32_t64_.*_f7 | - | --captured-for 8192 --points "B1 S6000 H128"
few tokens 16 | bf16_bf16_.*_r16_t16_.*_f3 | - | --captured-for 16384 --page-size 4 --points "B1 S150 H16"
few tokens 32 | bf16_bf16_.*_r32_t16_.*_f3 | - | --captured-for 16384 --page-size 4 --points "B1 S150 H16 q2"
few or rows, few | bf16_bf16_.*_r64_.*_f9 | - | --captured-for 131072 --points "B1 S150 H32 q2"
few or rows, rows | bf16_bf16_.*_r64_.*_f9 | - | --captured-for 131072 --points "B1 S16500 H32 q2"
few or rows, small pages | bf16_bf16_.*_r64_.*_f9s | - | --captured-for 131072 --page-size 16 --points "B1 S16500 H32 q2"
portable 16 bf16 | bf16_bf16_.*_r16_.*_f0 | - | $two --portable --points "B2 S$T H16"
portable 32 bf16 | bf16_bf16_.*_r32_.*_f0 | - | $two --portable --points "B2 S$T H16 q2"
portable turns bf16 | bf16_bf16_.*_r64_.*_f4 | - | $two --portable --points "B2 S$T H32 q2"
portable 16 fp8 | bf16_fp8_e4m3_.*_r16_.*_f0 | - | $two --portable --kv-dtype fp8 --points "B2 S$T H16"
portable 32 fp8 | bf16_fp8_e4m3_.*_r32_.*_f0 | - | $two --portable --kv-dtype fp8 --points "B2 S$T H16 q2"
portable 64 fp8 | bf16_fp8_e4m3_.*_r64_.*_f0 | - | $two --portable --kv-dtype fp8 --points "B2 S$T H32 q2"
plan | bf16_bf16_.* | mla_plan | --captured-for 16384 --points "var B24 ~300 H16"
reduce | bf16_bf16_.* | mla_decode_reduce | --split-policy fixed:5 --captured-for 16384 --points "B3 S$T H32 q2"
cache write | bf16_bf16_.* | mla_cache_write | --ops --points "B1 S9 H1"
cache gather | bf16_bf16_.* | mla_cache_gather | --ops --points "B1 S9 H1"
merge | bf16_bf16_.* | merge_states | --ops --points "B1 S9 H1"
combine | bf16_bf16_.* | dcp_combine | --ops --points "B1 S9 H1"
TABLE
}

# Forms whose names begin like one of the arguments; all without any.
chosen() {
  local line name
  while IFS= read -r line; do
    [ $# -gt 0 ] || { echo "$line"; continue; }
    for name in "$@"; do
      [[ $line != "$name"* ]] || { echo "$line"; break; }
    done
  done < <(forms)
}

trimmed() { sed 's/^ *//; s/ *$//' <<<"$1"; }

# The log of a form's run under a tool, without ending: FORM TOOL.
log_of() { echo "$OUT/${1//[^a-z0-9]/-}.$2"; }

# Runs a form under a tool ("none": by itself), and leaves its verdict beside its log: LINE TOOL NUMBER.
one() {
  local line=$1 tool=$2 name pattern kernel options log status=0 said served reports
  IFS='|' read -r name pattern kernel options <<<"$line"
  name=$(trimmed "$name") pattern=$(trimmed "$pattern") kernel=$(trimmed "$kernel")
  log=$(log_of "$name" "$tool")
  if [ -n "${SANITIZE_TOTAL:-}" ] && [ $(($(date +%s) - BEGUN)) -ge "$SANITIZE_TOTAL" ]; then
    echo "not begun" >"$log.verdict"
    return
  fi
  local -a command="($options)"
  command=("$LATENTWAVE" soak --backend cuda --seed 1 --problems 1 "${command[@]}")
  if [ "$tool" != none ]; then
    local filter=()
    [ "$kernel" = - ] || filter=(--kernel-name "kns=$kernel")
    # Tools that run side by side need ports of their own.
    [ -z "$PORTS" ] || filter+=(--base-port $((49200 + 16 * $3)))
    # Where each lane arrives for itself there is more to follow than tools expect.
    [ "$tool" != synccheck ] || [ -z "$BARRIERS" ] || filter+=(--num-cuda-barriers 65536)
    command=("$SANITIZER" --tool "$tool" "${filter[@]}" --print-limit 20 --launch-timeout 60 "${command[@]}")
  fi
  RAYON_NUM_THREADS=1 timeout -k 2 "$SECONDS_EACH" "${command[@]}" >"$log.log" 2>&1 || status=$?
  said=$(grep 'SUMMARY:' "$log.log" | tail -n 1 | sed 's/.*SUMMARY: //; s/ displayed.*//') || true
  served=$(sed -n 's/^.* q[0-9]*: mla_decode_split_//p' "$log.log")
  if [ $status = 124 ] || [ $status = 137 ]; then
    reports=$(grep -Ec '^=+ (Error|Warning|Invalid|Uninitialized|Barrier|Program hit)' "$log.log") || true
    said="cut off at $SECONDS_EACH s"
    [ "$reports" = 0 ] || said+=", reports: $reports"
  elif ! grep -q '1 problem right' "$log.log"; then
    said="FAILED with status $status${said:+, $said}"
  elif ! grep -Eqx "$pattern" <<<"$served"; then
    said="OTHER KERNEL: $served"
  elif [ "$tool" = none ]; then
    said=$served
  fi
  echo "${said:-FAILED: no summary}" >"$log.verdict"
}

# What became of it: FORM TOOL.
verdict() { cat "$(log_of "$1" "$2").verdict" 2>/dev/null || echo "FAILED: no verdict"; }

case "${1:-}" in
  -h | --help)
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    exit
    ;;
  list)
    forms | sed 's/ *|.*//'
    exit
    ;;
  --dry)
    shift
    TOOLS=none
    ;;
  *)
    for candidate in "${SANITIZER:-}" "$(command -v compute-sanitizer || true)" /usr/local/cuda{,-*}/bin/compute-sanitizer \
      /usr/local/cuda{,-*}/compute-sanitizer/compute-sanitizer /opt/nvidia/*/compute-sanitizer; do
      [ ! -x "$candidate" ] || { SANITIZER=$candidate; break; }
    done
    [ -x "${SANITIZER:-}" ] || { echo "not run: no compute-sanitizer"; exit 0; }
    ;;
esac
[ -x "$LATENTWAVE" ] || { echo "not run: no program latentwave"; exit 0; }
mapfile -t LINES_CHOSEN < <(chosen "$@")
[ ${#LINES_CHOSEN[@]} -gt 0 ] || { echo "no such form; ci/sanitize.sh list names them" >&2; exit 2; }
mkdir -p "$OUT"
rm -f "$OUT"/*.verdict
BEGUN=$(date +%s) PORTS='' BARRIERS='' number=0
[ "$TOOLS" = none ] || PORTS=$("$SANITIZER" --help 2>&1 | grep -c -- --base-port | sed 's/^0$//') || true
[ "$TOOLS" = none ] || BARRIERS=$("$SANITIZER" --help 2>&1 | grep -c -- --num-cuda-barriers | sed 's/^0$//') || true
for tool in $TOOLS; do
  for line in "${LINES_CHOSEN[@]}"; do
    while [ "$(jobs -rp | wc -l)" -ge "$JOBS" ]; do wait -n || true; done
    one "$line" "$tool" $((number++)) &
  done
done
wait

missing=0 bad=0
heading=$(printf '| %s ' form $TOOLS)
printf '%s|\n%s|\n' "$heading" "$(printf '| --- %.0s' form $TOOLS)"
for line in "${LINES_CHOSEN[@]}"; do
  name=${line%% |*}
  printf '| %s ' "$name"
  for tool in $TOOLS; do
    said=$(verdict "$name" "$tool")
    printf '| %s ' "$said"
    case "$said" in
      FAILED* | OTHER*) bad=1 ;;
      "0 errors" | "0 hazards" | *_f[0-9] | *_f[0-9][gs] | *_f10) ;;
      "cut off"*" s" | "not begun") missing=1 ;;
      *) bad=1 ;;
    esac
  done
  echo '|'
done
echo "$(($(date +%s) - BEGUN)) s; logs in $OUT"
[ $bad = 0 ] || exit 1
[ $missing = 0 ] || exit 3
