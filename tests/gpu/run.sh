#!/usr/bin/env bash
# run.sh [BUILD]: everything that needs a GPU: the CUDA tests, compute-sanitizer over those of single kernels, the real model, the real
# programs. BUILD (build/release) was made where nvcc is; without a GPU, or without the CUDA engine in it, it says so and exits with 77.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
bin=${1:-$root/build/release}/bin

why=$("$bin/kernels_test_cuda_kv" | sed -n 's/^skipped: //p')
if [ -n "$why" ]; then
  echo "$why"
  exit 77
fi
failed=()
step() { # NAME SECONDS COMMAND...
  local name=$1 limit=$2 begun=$SECONDS
  shift 2
  if timeout -k 5 "$limit" "$@"; then echo "== $name passed in $((SECONDS - begun)) s"; else
    echo "== $name FAILED ($?)"
    failed+=("$name")
  fi
}
for test in forward_double cuda_kv cuda_det cuda_forward cuda_ops cuda_stream cuda_fresh cuda_bench; do
  step "$test" 120 "$bin/kernels_test_$test"
done
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null || true)
if [ -n "$sanitizer" ]; then
  for test in cuda_det cuda_forward cuda_stream cuda_fresh; do
    step "memcheck of $test" 300 "$sanitizer" --tool memcheck --error-exitcode 9 "$bin/kernels_test_$test"
  done
  for tool in memcheck racecheck initcheck; do
    for test in cuda_kv cuda_ops; do
      step "$tool of $test" 300 "$sanitizer" --tool "$tool" --error-exitcode 9 "$bin/kernels_test_$test"
    done
  done
else
  echo "== no compute-sanitizer here: not run"
fi
TANDEM_MODEL=${TANDEM_MODEL:-$("$root/deploy/fetch-model.sh")}
export TANDEM_MODEL TANDEM_BIN=$bin TANDEM_TEST_MODEL=$TANDEM_MODEL
step "real model" 300 "$bin/kernels_test_cuda_real"
step "real programs" 600 python3 "$here/programs.py"
[ ${#failed[@]} -eq 0 ] || echo "failed: ${failed[*]}"
exit ${#failed[@]}
