// The narrow floating-point types with x86's own conversions and AVX-512 arithmetic: two to four
// times what compilers make of the portable loops, in the same bits.
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

// Each format loads 16 elements as float32 and stores 16 rounded ones, as its codec does.

struct Float16Lanes {
  static constexpr size_t kBytes = 2;
  // The masked forms with every lane on: gcc 12 warns about its own header for the plain ones.
  JF_AVX512 static inline __m512 Load(const std::byte* from) {
    return _mm512_maskz_cvtph_ps(0xffff,
                                 _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  JF_AVX512 static inline void Store(std::byte* to, __m512 value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                        _mm512_maskz_cvtps_ph(0xffff, value, kRound));
  }
};

struct Bfloat16Lanes {
  static constexpr size_t kBytes = 2;
  JF_AVX512 static inline __m512 Load(const std::byte* from) {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(
        _mm512_maskz_slli_epi32(0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, codes), 16));
  }
  JF_AVX512 static inline void Store(std::byte* to, __m512 value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i high = _mm512_maskz_srli_epi32(0xffff, bits, 16);
    const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_maskz_srli_epi32(
        0xffff, _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    const __m512i codes = _mm512_mask_or_epi32(rounded, nan, high, _mm512_set1_epi32(0x40));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_maskz_cvtepi32_epi16(0xffff, codes));
  }
};

// What both float8 types have in common: the code of a magnitude given as float bits, with values
// beyond the largest code at `last`.
template <class Codec, int kShift>
JF_AVX512 inline __m512i RoundMagnitude(__m512i magnitude, int last) {
  const __m512i odd =
      _mm512_and_si512(_mm512_maskz_srli_epi32(0xffff, magnitude, kShift), _mm512_set1_epi32(1));
  const __m512i half = _mm512_set1_epi32((1 << (kShift - 1)) - 1);
  const __m512i shifted = _mm512_maskz_srli_epi32(
      0xffff, _mm512_add_epi32(_mm512_add_epi32(magnitude, half), odd), kShift);
  const __m512i rounded = _mm512_maskz_min_epu32(
      0xffff, _mm512_sub_epi32(shifted, _mm512_set1_epi32(Codec::kRebias >> kShift)),
      _mm512_set1_epi32(last));
  const __m512i magic = _mm512_set1_epi32(Codec::kMagicBits);
  const __m512i subnormal =
      _mm512_sub_epi32(_mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(magnitude),
                                                         _mm512_castsi512_ps(magic))),
                       magic);
  const __mmask16 small =
      _mm512_cmplt_epu32_mask(magnitude, _mm512_set1_epi32(Codec::kRebias + (1 << 23)));
  return _mm512_mask_mov_epi32(rounded, small, subnormal);
}

JF_AVX512 inline void StoreCodes(std::byte* to, __m512i bits, __m512i magnitude_codes) {
  const __m512i sign =
      _mm512_and_si512(_mm512_maskz_srli_epi32(0xffff, bits, 24), _mm512_set1_epi32(0x80));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm512_maskz_cvtepi32_epi8(0xffff, _mm512_or_si512(magnitude_codes, sign)));
}

JF_AVX512 inline __m256i LoadCodes(const std::byte* from) {
  return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

struct Float8E5M2Lanes {
  static constexpr size_t kBytes = 1;
  // The high byte of a float16.
  JF_AVX512 static inline __m512 Load(const std::byte* from) {
    return _mm512_maskz_cvtph_ps(0xffff, _mm256_slli_epi16(LoadCodes(from), 8));
  }
  JF_AVX512 static inline void Store(std::byte* to, __m512 value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    const __m512i codes = RoundMagnitude<Float8E5M2Codec, 21>(magnitude, 0x7c);
    const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    StoreCodes(to, bits, _mm512_mask_mov_epi32(codes, nan, _mm512_set1_epi32(0x7e)));
  }
};

struct Float8E4M3FNLanes {
  static constexpr size_t kBytes = 1;
  // As a float16 whose exponent is 8 too small, which the conversion reads exactly, subnormal or
  // not; and the one NaN apart.
  JF_AVX512 static inline __m512 Load(const std::byte* from) {
    const __m256i codes = LoadCodes(from);
    const __m256i shifted = _mm256_slli_epi16(codes, 7);
    // The sign is one bit short of its place: adding it to itself moves it there.
    const __m256i halves =
        _mm256_add_epi16(shifted, _mm256_and_si256(shifted, _mm256_set1_epi16(0x4000)));
    const __m512 value =
        _mm512_mul_ps(_mm512_maskz_cvtph_ps(0xffff, halves), _mm512_set1_ps(256.0f));
    const __m256i magnitude = _mm256_and_si256(codes, _mm256_set1_epi16(0x7f));
    const __mmask16 nan = _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(0x7f));
    const __m512i bits = _mm512_castps_si512(value);
    return _mm512_castsi512_ps(
        _mm512_mask_or_epi32(bits, nan, bits, _mm512_set1_epi32(0x7fc00000)));
  }
  JF_AVX512 static inline void Store(std::byte* to, __m512 value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    StoreCodes(to, bits, RoundMagnitude<Float8E4M3FNCodec, 20>(magnitude, 0x7f));
  }
};

// Maximum and minimum as in Extreme(): a where a is greater or NaN, else b.
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

// Both loops return the number of elements done. Two vectors at a time: the chain of operations
// over the sources is otherwise what one waits for. Any number of sources in one pass.
template <class Lanes, ReduceOp kOp>
JF_AVX512 size_t LoopAvx512(std::byte* out, const void* const* sources, size_t source_count,
                            size_t begin, size_t count) {
  constexpr size_t kStep = 16 * Lanes::kBytes;
  const size_t offset = begin * Lanes::kBytes;
  const size_t end = count / 32 * 32 * Lanes::kBytes;
  for (size_t i = 0; i < end; i += 2 * kStep) {
    const auto* from = static_cast<const std::byte*>(sources[0]) + offset + i;
    __m512 a = Lanes::Load(from);
    __m512 b = Lanes::Load(from + kStep);
    for (size_t k = 1; k < source_count; ++k) {
      from = static_cast<const std::byte*>(sources[k]) + offset + i;
      a = Combine<kOp>(a, Lanes::Load(from));
      b = Combine<kOp>(b, Lanes::Load(from + kStep));
    }
    Lanes::Store(out + i, a);
    Lanes::Store(out + i + kStep, b);
  }
  return end / Lanes::kBytes;
}

JF_F16C inline __m256 LoadFloat16(const std::byte* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

template <ReduceOp kOp>
JF_F16C size_t LoopF16c(std::byte* out, const void* const* sources, size_t source_count,
                        size_t begin, size_t count) {
  const size_t offset = begin * 2;
  const size_t end = count / 16 * 32;
  for (size_t i = 0; i < end; i += 32) {
    const auto* from = static_cast<const std::byte*>(sources[0]) + offset + i;
    __m256 a = LoadFloat16(from);
    __m256 b = LoadFloat16(from + 16);
    for (size_t k = 1; k < source_count; ++k) {
      from = static_cast<const std::byte*>(sources[k]) + offset + i;
      a = Combine<kOp>(a, LoadFloat16(from));
      b = Combine<kOp>(b, LoadFloat16(from + 16));
    }
    auto* to = reinterpret_cast<__m128i*>(out + i);
    _mm_storeu_si128(to, _mm256_cvtps_ph(a, kRound));
    _mm_storeu_si128(to + 1, _mm256_cvtps_ph(b, kRound));
  }
  return end / 2;
}

using Loop = size_t (*)(std::byte*, const void* const*, size_t, size_t, size_t);

// A loop for whole vectors, and the portable reduction for what is left.
template <DType kDType, Loop kSum, Loop kMax, Loop kMin>
void ReduceNarrow(ReduceOp op, void* destination, const void* const* sources, size_t source_count,
                  size_t begin, size_t count) {
  auto* const out = static_cast<std::byte*>(destination);
  const Loop loop = op == ReduceOp::kSum ? kSum : op == ReduceOp::kMax ? kMax : kMin;
  const size_t done = loop(out, sources, source_count, begin, count);
  if (done == count) return;
  PortableNarrowReduction(kDType)(op, out + done * DTypeSize(kDType), sources, source_count,
                                  begin + done, count - done);
}

using enum ReduceOp;

template <DType kDType, class Lanes>
constexpr ReduceFunction kAvx512 =
    ReduceNarrow<kDType, LoopAvx512<Lanes, kSum>, LoopAvx512<Lanes, kMax>, LoopAvx512<Lanes, kMin>>;

bool HasAvx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

}  // namespace

ReduceFunction NarrowReduction(DType dtype) {
  if (HasAvx512()) {
    switch (dtype) {
      case DType::kFloat16:
        return kAvx512<DType::kFloat16, Float16Lanes>;
      case DType::kBfloat16:
        return kAvx512<DType::kBfloat16, Bfloat16Lanes>;
      case DType::kFloat8E5M2:
        return kAvx512<DType::kFloat8E5M2, Float8E5M2Lanes>;
      case DType::kFloat8E4M3FN:
        return kAvx512<DType::kFloat8E4M3FN, Float8E4M3FNLanes>;
      default:
        break;
    }
  }
  if (dtype == DType::kFloat16 && __builtin_cpu_supports("avx2") &&
      __builtin_cpu_supports("f16c")) {
    return ReduceNarrow<DType::kFloat16, LoopF16c<kSum>, LoopF16c<kMax>, LoopF16c<kMin>>;
  }
  return PortableNarrowReduction(dtype);
}

#else

ReduceFunction NarrowReduction(DType dtype) { return PortableNarrowReduction(dtype); }

#endif

}  // namespace jaxfabric
