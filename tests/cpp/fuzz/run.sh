#!/usr/bin/env bash
# Runs every fuzzer of a build for so many seconds, from an empty corpus.
#
#   cmake -S . -B build/fuzz -G Ninja -DCMAKE_CXX_COMPILER=clang++ -DJAXFABRIC_BUILD_EXTENSION=OFF \
#     -DJAXFABRIC_BUILD_FUZZERS=ON && ninja -C build/fuzz fuzzers
#   tests/cpp/fuzz/run.sh build/fuzz 10
set -euo pipefail
build=$(cd "$1" && pwd)
seconds=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for source in "$(dirname "$0")"/fuzz_*.cc; do
  name=$(basename "$source" .cc)
  mkdir "$work/$name"
  # A crash leaves its input in the build folder, and its log here.
  if ! "$build/$name" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=1024 -max_len=4096 \
    -artifact_prefix="$build/$name-" "$work/$name" >"$work/log" 2>&1; then
    cat "$work/log"
    exit 1
  fi
  printf '%s: %s\n' "$name" "$(tail -1 "$work/log")"
done
