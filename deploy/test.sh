#!/usr/bin/env bash
# test.sh: every test of Tandem, from nothing but this repository. Takes about 20 minutes on 2 cores.
#
#   test.sh               all stages
#   test.sh --long        with the full counts (hours): fuzzers ten minutes each, 200 kills, 10,000 simulations, an hour of load
#   test.sh --only NAME   one stage (see the list that --help ends with); may be given several times
#   test.sh --list        the stages
#
# Each stage's output is in build/test-logs/STAGE.log, a fuzzer's in fuzz-NAME.log there. The last line counts the stages; the exit code is 0 when all passed.
# Stages: packages build checks unit arm model sim fault e2e asan tsan fuzz gpu

set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=lib.sh
. "$here/lib.sh"
root=$(dirname "$here")
cd "$root"

stages=(packages build checks unit arm model sim fault e2e asan tsan fuzz gpu)
only=()
long=''
while [ $# -gt 0 ]; do
  case $1 in
    --long) long=1 ;;
    --only) [ $# -ge 2 ] || die "--only wants a stage: ${stages[*]}"; only+=("$2"); shift ;;
    --list) printf '%s\n' "${stages[@]}"; exit 0 ;;
    -h | --help) usage; exit 0 ;;
    *) die "unknown argument $1: see --help" ;;
  esac
  shift
done
for stage in "${only[@]}"; do
  [[ " ${stages[*]} " == *" $stage "* ]] || die "there is no stage $stage: ${stages[*]}"
done
[ ${#only[@]} -gt 0 ] && stages=("${only[@]}")

logs=build/test-logs
mkdir -p "$logs"
jobs=$(nproc)
if [ -n "$long" ]; then
  export TANDEM_LONG=1 TANDEM_SIM_RUNS=10000 TANDEM_FAULT_RUNS=2000 TANDEM_KILLS=200 TANDEM_LEAK_SECONDS=3600
  fuzz_seconds=600
else
  export TANDEM_SIM_RUNS=${TANDEM_SIM_RUNS:-500} TANDEM_KILLS=${TANDEM_KILLS:-20}
  fuzz_seconds=''
fi
export ASAN_OPTIONS=detect_leaks=1:abort_on_error=0 UBSAN_OPTIONS=print_stacktrace=1
export TSAN_OPTIONS="suppressions=$root/tests/tsan.supp halt_on_error=1 second_deadlock_stack=1"

configure_and_build() { # PRESET TARGET…
  cmake --preset "$1" >/dev/null && cmake --build "build/$1" -j "$jobs" "${@:2}"
}
labelled() { # BUILD LABELS [JOBS]
  ctest --test-dir "build/$1" -L "$2" --output-on-failure --no-tests=error -j "${3:-$jobs}"
}

skip() { echo "$*"; exit 77; } # of a whole stage, for want of something that it needs
stage_packages() { ./deploy/deps.sh --test && ./deploy/fetch-model.sh; }
stage_build() { configure_and_build release; }
stage_checks() { ./tests/checks.sh; }
stage_unit() { labelled release unit $((3 * jobs)); } # most of what they take is waiting: for a link to break, a patience to end
# The CPU engine for 64-bit Arm, cross-compiled and emulated: its unit tests, on a processor with everything and on one with the least;
# and its logits of the golden models, which must be those of this machine.
stage_arm() {
  local tool
  for tool in aarch64-linux-gnu-gcc qemu-aarch64; do
    have "$tool" || skip "$tool is missing; ./deploy/deps.sh --test installs it on Debian for x86-64"
  done
  configure_and_build release --target logits
  build/release/bin/logits >"$logs/logits.txt"
  cmake -S tests/arm -B build/arm -G Ninja -DCMAKE_TOOLCHAIN_FILE="$root/deploy/aarch64.cmake" -DTANDEM_LOGITS="$root/$logs/logits.txt"
  cmake --build build/arm -j "$jobs"
  ctest --test-dir build/arm --output-on-failure --no-tests=error -j "$jobs"
}
stage_model() { TANDEM_MODEL=$(./deploy/fetch-model.sh) labelled release model; }
stage_sim() { labelled release sim; }
stage_fault() { labelled release fault; }
build_asan() { configure_and_build asan; }
build_tsan() { configure_and_build tsan --target threaded; }
build_fuzz() { configure_and_build fuzz --target fuzzers; }
# These tests wait for the most part: what the stages behind them run is built in the time that they leave. Each builds what it does not find.
stage_e2e() {
  local code=0
  build_ahead >"$logs/ahead.log" 2>&1 &
  ./tests/e2e/run.sh || code=$?
  wait
  return $code
}
build_ahead() {
  renice -n 19 "$BASHPID" >/dev/null
  local stage
  for stage in asan tsan fuzz; do
    [[ " ${stages[*]} " != *" $stage "* ]] || "build_$stage" || return
  done
}
stage_asan() {
  build_asan && TANDEM_SIM_RUNS=$((TANDEM_SIM_RUNS / 10)) TANDEM_KILLS=2 labelled asan 'unit|sim|fault' $((2 * jobs))
}
stage_tsan() { build_tsan && labelled tsan threads $((2 * jobs)); }
fuzz_one() { # TARGET SECONDS
  local name=${1##*/fuzz_} corpus code=0
  corpus=$(mktemp -d)
  mkdir -p "tests/fuzz/corpus/$name"
  "$1" -max_total_time="$2" -timeout=60 -rss_limit_mb=2048 -print_final_stats=1 -verbosity=0 \
    -artifact_prefix="$logs/" "$corpus" "tests/fuzz/corpus/$name" >"$logs/fuzz-$name.log" 2>&1 || code=$?
  rm -rf "$corpus"
  [ $code -eq 0 ] || grep -A 25 ERROR "$logs/fuzz-$name.log" || tail -n 25 "$logs/fuzz-$name.log"
  grep '^stat::number_of' "$logs/fuzz-$name.log" || true
  echo "fuzz $name for $2 s: exit code $code"
  return $code
}
stage_fuzz() { # as many targets at a time as there are cores: a minute together, or ten minutes each
  build_fuzz || return 1
  local targets seconds
  mapfile -t targets < <(find build/fuzz/bin -name 'fuzz_*' -type f | sort)
  [ ${#targets[@]} -gt 0 ] || { echo "no fuzz target was built"; return 1; }
  seconds=${fuzz_seconds:-$((60 * jobs / ${#targets[@]} + 1))}
  export -f fuzz_one
  export logs
  printf '%s\0' "${targets[@]}" | xargs -0 -P "$jobs" -I {} bash -c 'fuzz_one {} '"$seconds"
}
stage_gpu() { configure_and_build release && ./tests/gpu/run.sh; }

passed=0 skipped=0 failed=()
started=$SECONDS
for stage in "${stages[@]}"; do
  begun=$SECONDS
  say "$stage …  ($logs/$stage.log)"
  # A subshell with its own -e: a stage stops at its first failure, the run goes on to the next stage.
  set +e
  (set -e; "stage_$stage") >"$logs/$stage.log" 2>&1 </dev/null
  code=$?
  set -e
  if [ $code -eq 0 ]; then
    passed=$((passed + 1))
    done_ "$stage passed in $((SECONDS - begun)) s"
  elif [ $code -eq 77 ]; then
    skipped=$((skipped + 1))
    warn "$stage skipped: $(tail -n 1 "$logs/$stage.log")"
  else
    failed+=("$stage")
    tail -n 60 "$logs/$stage.log" >&2
    warn "$stage failed; its whole output is in $logs/$stage.log"
    case $stage in packages | build) break ;; esac
  fi
done
echo "took $((SECONDS - started)) s"
[ ${#failed[@]} -eq 0 ] || warn "failed: ${failed[*]}"
[ $skipped -eq 0 ] || echo "$skipped skipped"
echo "$passed passed, ${#failed[@]} failed"
[ ${#failed[@]} -eq 0 ]
