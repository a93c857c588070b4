// float16 with the CPU's own conversions: compilers do not vectorise _Float16 <-> float, and the
// portable loop spends most of its time on the bit arithmetic these instructions replace.
#include "memory/reduce_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace jaxfabric {

#if defined(__x86_64__)
namespace {

constexpr int kRound = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

#define JF_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,f16c,fma")))
#define JF_F16C __attribute__((target("avx2,f16c")))

// Maximum and minimum as in MaxOp and MinOp: a where a is greater or NaN, else b.
template <ReduceOp kOp>
JF_AVX512 inline __m512 Combine(__m512 a, __m512 b) {
  if constexpr (kOp == ReduceOp::kSum) return _mm512_add_ps(a, b);
  constexpr int kCompare = kOp == ReduceOp::kMax ? _CMP_GT_OQ : _CMP_LT_OQ;
  const __mmask16 take_a =
      _mm512_cmp_ps_mask(a, b, kCompare) | _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
  return _mm512_mask_blend_ps(take_a, b, a);
}

template <ReduceOp kOp>
JF_F16C inline __m256 Combine(__m256 a, __m256 b) {
  if constexpr (kOp == ReduceOp::kSum) return _mm256_add_ps(a, b);
  constexpr int kCompare = kOp == ReduceOp::kMax ? _CMP_GT_OQ : _CMP_LT_OQ;
  const __m256 take_a =
      _mm256_or_ps(_mm256_cmp_ps(a, b, kCompare), _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  return _mm256_blendv_ps(b, a, take_a);
}

// The masked forms with every lane on: gcc 12 warns about its own header for the plain ones.
JF_AVX512 inline __m512 Load16(const void* source, size_t index) {
  return _mm512_maskz_cvtph_ps(
      0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(
                  static_cast<const std::byte*>(source) + index * sizeof(uint16_t))));
}

JF_F16C inline __m256 Load8(const void* source, size_t index) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(
      static_cast<const std::byte*>(source) + index * sizeof(uint16_t))));
}

// Both return the number of elements done, a multiple of the vector length. Two vectors at a time:
// the chain of additions over the sources is otherwise what one waits for.
template <ReduceOp kOp>
JF_AVX512 size_t LoopAvx512(void* destination, const void* const* sources, size_t source_count,
                            size_t begin, size_t count) {
  auto* out = static_cast<std::byte*>(destination);
  size_t i = 0;
  for (; i + 32 <= count; i += 32) {
    __m512 a = Load16(sources[0], begin + i);
    __m512 b = Load16(sources[0], begin + i + 16);
    for (size_t k = 1; k < source_count; ++k) {
      a = Combine<kOp>(a, Load16(sources[k], begin + i));
      b = Combine<kOp>(b, Load16(sources[k], begin + i + 16));
    }
    auto* to = reinterpret_cast<__m256i*>(out + i * sizeof(uint16_t));
    _mm256_storeu_si256(to, _mm512_maskz_cvtps_ph(0xffff, a, kRound));
    _mm256_storeu_si256(to + 1, _mm512_maskz_cvtps_ph(0xffff, b, kRound));
  }
  return i;
}

template <ReduceOp kOp>
JF_F16C size_t LoopF16c(void* destination, const void* const* sources, size_t source_count,
                        size_t begin, size_t count) {
  auto* out = static_cast<std::byte*>(destination);
  size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    __m256 a = Load8(sources[0], begin + i);
    __m256 b = Load8(sources[0], begin + i + 8);
    for (size_t k = 1; k < source_count; ++k) {
      a = Combine<kOp>(a, Load8(sources[k], begin + i));
      b = Combine<kOp>(b, Load8(sources[k], begin + i + 8));
    }
    auto* to = reinterpret_cast<__m128i*>(out + i * sizeof(uint16_t));
    _mm_storeu_si128(to, _mm256_cvtps_ph(a, kRound));
    _mm_storeu_si128(to + 1, _mm256_cvtps_ph(b, kRound));
  }
  return i;
}

using Loop = size_t (*)(void*, const void* const*, size_t, size_t, size_t);

template <Loop kSum, Loop kMax, Loop kMin>
void ReduceFloat16(ReduceOp op, void* destination, const void* const* sources, size_t source_count,
                   size_t begin, size_t count) {
  const Loop loop = op == ReduceOp::kSum ? kSum : op == ReduceOp::kMax ? kMax : kMin;
  const size_t done = loop(destination, sources, source_count, begin, count);
  if (done == count) return;
  ReduceFloat16Portable(op, static_cast<std::byte*>(destination) + done * sizeof(uint16_t), sources,
                        source_count, begin + done, count - done);
}

}  // namespace

ReduceFunction Float16Reduction() {
  using enum ReduceOp;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    return ReduceFloat16<LoopAvx512<kSum>, LoopAvx512<kMax>, LoopAvx512<kMin>>;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
    return ReduceFloat16<LoopF16c<kSum>, LoopF16c<kMax>, LoopF16c<kMin>>;
  }
  return ReduceFloat16Portable;
}

#else

ReduceFunction Float16Reduction() { return ReduceFloat16Portable; }

#endif

}  // namespace jaxfabric
