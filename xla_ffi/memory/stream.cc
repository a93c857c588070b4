#include "memory/stream.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace jaxfabric {

#if defined(__x86_64__)
namespace {

__attribute__((target("avx512f"))) void StreamLinesAvx512(std::byte* to, const std::byte* from,
                                                          size_t lines) {
  for (; lines >= 4; lines -= 4, to += 256, from += 256) {
    const __m512i a = _mm512_loadu_si512(from);
    const __m512i b = _mm512_loadu_si512(from + 64);
    const __m512i c = _mm512_loadu_si512(from + 128);
    const __m512i d = _mm512_loadu_si512(from + 192);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), a);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + 64), b);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + 128), c);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + 192), d);
  }
  for (; lines > 0; --lines, to += 64, from += 64) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
  }
}

__attribute__((target("avx2"))) void StreamLinesAvx2(std::byte* to, const std::byte* from,
                                                     size_t lines) {
  for (; lines > 0; --lines, to += 64, from += 64) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), a);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 32), b);
  }
}

void StreamLinesSse2(std::byte* to, const std::byte* from, size_t lines) {
  for (; lines > 0; --lines, to += 64, from += 64) {
    for (size_t i = 0; i < 64; i += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
    }
  }
}

void StreamLines(std::byte* to, const std::byte* from, size_t lines) {
  if (__builtin_cpu_supports("avx512f")) return StreamLinesAvx512(to, from, lines);
  if (__builtin_cpu_supports("avx2")) return StreamLinesAvx2(to, from, lines);
  StreamLinesSse2(to, from, lines);
}

}  // namespace

void StreamCopy(void* destination, const void* source, size_t bytes) {
  if (bytes == 0) return;
  auto* to = static_cast<std::byte*>(destination);
  const auto* from = static_cast<const std::byte*>(source);
  const size_t misalignment = reinterpret_cast<uintptr_t>(to) % kStreamLine;
  if (misalignment != 0) {
    const size_t head = bytes < kStreamLine - misalignment ? bytes : kStreamLine - misalignment;
    std::memcpy(to, from, head);
    to += head;
    from += head;
    bytes -= head;
  }
  const size_t lines = bytes / kStreamLine;
  StreamLines(to, from, lines);
  std::memcpy(to + lines * kStreamLine, from + lines * kStreamLine, bytes % kStreamLine);
}

// Streaming stores are weakly ordered: without it a later flag could be seen before the data.
void StreamFence() { _mm_sfence(); }

#else

void StreamCopy(void* destination, const void* source, size_t bytes) {
  if (bytes != 0) std::memcpy(destination, source, bytes);
}
void StreamFence() {}

#endif

}  // namespace jaxfabric
