#!/usr/bin/env bash
# run.sh [BUILD]: everything that needs a GPU: the CUDA tests; the same by the kernels that older devices than Hopper get; compute-sanitizer over all of
# them with few and small cases; the real model; the real programs. BUILD (build/release) was made where nvcc is; without a GPU, or without the CUDA
# engine in it, it says so and exits with 77. How fast the engine is: bench.py.
#   TANDEM_GPU_STAGES="tests faults older sanitizer model programs": these alone
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
bin=${1:-$root/build/release}/bin
stages=${TANDEM_GPU_STAGES:-tests faults older sanitizer model programs}

why=$("$bin/kernels_test_cuda_kv" | sed -n 's/^skipped: //p')
if [ -n "$why" ]; then
  echo "$why"
  exit 77
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
has() { [[ " $stages " == *" $1 "* ]]; }

# step NAME SECONDS COMMAND…: begun beside the others; what it prints comes whole, at the end of `together`.
names=() pids=()
step() {
  local name=$1 limit=$2 begun=$SECONDS
  shift 2
  (
    code=0
    timeout -k 5 "$limit" "$@" || code=$?
    if [ $code -eq 0 ]; then echo "== $name passed in $((SECONDS - begun)) s"; else echo "== $name FAILED ($code) after $((SECONDS - begun)) s"; fi
    exit $code
  ) >"$work/${#pids[@]}" 2>&1 &
  names+=("$name") pids+=($!)
}
failed=()
together() {
  local i
  for i in "${!pids[@]}"; do
    if wait "${pids[$i]}"; then grep -v -E '^\[ *(RUN|OK)' "$work/$i" || true; else
      failed+=("${names[$i]}")
      cat "$work/$i"
    fi
  done
  names=() pids=()
}

# An empty library in the place of cuBLASLt: its stores are not seen by initcheck, and it has no code for a device that is to pass for an older one.
cc -shared -o "$work/libcublasLt.so.13" -Wl,-soname,libcublasLt.so.13 -x c /dev/null

tests=(kernels_test_cuda_kv kernels_test_cuda_sample kernels_test_cuda_det kernels_test_cuda_forward kernels_test_cuda_ops kernels_test_cuda_stream kernels_test_cuda_fresh kernels_test_cuda_8bit)
if has tests; then
  for test in "${tests[@]}" kernels_test_cuda_launches kernels_test_forward_double kernels_test_cuda_bench cloud_test_engine_gpu; do
    step "$test" 120 "$bin/$test"
  done
  step "kernels_test_cuda_forward without cuBLASLt" 120 env LD_PRELOAD="$work/libcublasLt.so.13" "$bin/kernels_test_cuda_forward"
  together
fi
if has faults; then # takes all the memory that there is
  step kernels_test_cuda_faults 120 "$bin/kernels_test_cuda_faults"
  together
fi
if has older; then # the driver compiles the PTX of sm_80, in which nothing of Hopper's is used
  for test in "${tests[@]}"; do
    step "$test by the code for sm_80" 300 env CUDA_FORCE_PTX_JIT=1 LD_PRELOAD="$work/libcublasLt.so.13" "$bin/$test"
  done
  together
fi
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null || true)
if has sanitizer && [ -n "$sanitizer" ]; then
  for tool in racecheck initcheck memcheck; do
    for test in "${tests[@]}"; do
      blas=()
      [ $tool = initcheck ] && blas=(env LD_PRELOAD="$work/libcublasLt.so.13")
      step "$tool of $test" 300 env TANDEM_TEST_SMALL=1 "${blas[@]}" "$sanitizer" --tool "$tool" --error-exitcode 9 "$bin/$test"
    done
  done
  together
elif has sanitizer; then
  echo "== no compute-sanitizer here: not run"
fi
if has model || has programs; then
  TANDEM_MODEL=${TANDEM_MODEL:-$("$root/deploy/fetch-model.sh")}
  export TANDEM_MODEL TANDEM_BIN=$bin TANDEM_TEST_MODEL=$TANDEM_MODEL
fi
if has model; then
  step "real model" 300 "$bin/kernels_test_cuda_real"
  together
fi
if has programs; then
  step "real programs" 600 python3 "$here/programs.py"
  together
fi
[ ${#failed[@]} -eq 0 ] || printf 'failed: %s\n' "${failed[@]}"
exit ${#failed[@]}
