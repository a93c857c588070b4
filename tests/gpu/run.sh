#!/usr/bin/env bash
# All that needs a GPU, on any machine with one: build, tests, timings, and a table of them at the end.
#
#   tests/gpu/run.sh
#
# Takes the Python of the PATH, or $PYTHON, with the packages that docs/cuda.md names, an nvcc, and
# what else is there: GoogleTest, compute-sanitizer. What lacks them is skipped, and the table says
# so. Reaches for nothing over the network, and installs nothing; the build stays in build/gpu, and
# the timings in build/gpu/gpu_timings.json. Leave the GPUs to it: a job of somebody else changes the
# times, and may keep a rank's kernels from running beside the others'.
# Exit code: 0 passed, 1 something failed, 77 no test could run, for the reasons that are printed.
set -uo pipefail
cd "$(dirname "$0")/../.."

python=${PYTHON:-python3}
build=build/gpu
site=$PWD/$build/site
log=$(mktemp)
trap 'rm -f "$log"' EXIT
rows=()
failed=0
tested=0

# part NAME COMMAND...: a command that returns 77 has printed "SKIPPED: why".
part() {
  local name=$1 start=$SECONDS status=0 result=passed
  printf '\n=== %s\n' "$name"
  "${@:2}" 2>&1 | tee "$log" || status=$?
  if ((status == 77)); then
    result=$(grep 'SKIPPED' "$log" | tail -n 1)
  elif ((status)); then
    result="FAILED, exit code $status"
    failed=1
  elif grep -q '^SUMMARY: ' "$log"; then
    result="passed: $(sed -n 's/^SUMMARY: //p' "$log" | tail -n 1)"
  fi
  rows+=("$(printf '%-32s %4d s  %s' "$name" $((SECONDS - start)) "$result")")
  return "$status"
}

finish() {
  printf '\n=== GPU checks\n'
  printf '%s\n' "${rows[@]}"
  printf '%-32s %4d s\n' all "$SECONDS"
  exit "$1"
}

skipped() {
  echo "SKIPPED: $1"
  return 77
}

built() {
  local gtest=OFF
  [[ -e /usr/include/gtest/gtest.h ]] && gtest=ON
  rm -rf "$site"
  "$python" -m pip install --quiet --no-build-isolation --no-deps --no-index --target "$site" . \
    --config-settings build-dir="$build" \
    --config-settings cmake.define.JAXFABRIC_BUILD_GPU_TESTS="$gtest"
}

cpp_tests() {
  [[ -x $build/jaxfabric_gpu_tests ]] || { skipped 'no GoogleTest'; return; }
  "$build/jaxfabric_gpu_tests"
}

# Small calls between processes: the sanitizer may run the kernels of one process one after another,
# so that ranks of the same would wait in vain.
sanitizer() {
  [[ -x $build/jaxfabric_gpu_tests ]] || { skipped 'needs the C++ tests'; return; }
  command -v compute-sanitizer >/dev/null || { skipped 'compute-sanitizer is not installed'; return; }
  local status=0
  timeout 100 compute-sanitizer --tool "$1" --target-processes all --error-exitcode 1 \
    "$build/jaxfabric_gpu_tests" --gtest_filter="$2" || status=$?
  ((status != 77)) || skipped 'the C++ tests were'
  return "$status"
}

has_plugin() {
  "$python" -m pip show --quiet jax-cuda13-plugin jax-cuda12-plugin 2>/dev/null
}

# -P: the package is the one that was built, not the sources here.
python_tests() {
  has_plugin || { skipped 'JAX has no CUDA plugin: pip install jax[cuda13]'; return; }
  # pytest's own JAX must leave memory to the processes that the tests start.
  JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONPATH="$site" \
    "$python" -P -m pytest -p no:cacheprovider --gpu tests/gpu
}

timings() {
  [[ -x $build/jaxfabric_gpu_timings ]] || { skipped 'no GoogleTest'; return; }
  # JAX's own NCCL comes with its CUDA plugin.
  local nccl
  nccl=$("$python" -c 'import glob, sys
print(*[lib for p in sys.path for lib in glob.glob(f"{p}/nvidia/nccl/lib/libnccl.so.2")][:1])')
  "$build/jaxfabric_gpu_timings" --json "$build/gpu_timings.json" --nccl "${nccl:-libnccl.so.2}"
}

part 'environment' "$python" tests/gpu/gpu_environment.py
status=$?
((status)) && finish "$status"
part 'build' built || finish 1
part 'kernels' "$python" tests/gpu/kernel_table.py "$build"
(($? == 77)) && finish 77
part 'C++ tests' cpp_tests
(($? == 77)) || tested=1
part 'compute-sanitizer memcheck' sanitizer memcheck '*GpuCalls*/2x1:*GpuReplay*/2x1'
part 'compute-sanitizer racecheck' sanitizer racecheck '*GpuCalls*/2x1'
part 'Python tests' python_tests
(($? == 77)) || tested=1
part 'timings' timings
((failed || tested)) || failed=77
finish "$failed"
