#include "memory/reduce.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "memory/float_environment.h"
#include "memory/reduce_kernels.h"
#include "memory/reduce_reference.h"

namespace jaxfabric {
namespace {

constexpr std::byte kGuard{0xa5};
constexpr size_t kGuardBytes = 64;
// Around vector lengths, the accumulator's block and the block of a streamed reduction.
constexpr size_t kCounts[] = {0, 1, 3, 15, 16, 17, 31, 33, 63, 64, 65, 1023, 1025, 4097, 20000};

template <class T>
void FillFloats(std::mt19937_64& random, std::byte* data, size_t count) {
  std::normal_distribution<double> normal(0, 100);
  using Limits = std::numeric_limits<T>;
  const T special[] = {T(0),          -T(0),         Limits::infinity(),   -Limits::infinity(),
                       Limits::max(), Limits::min(), Limits::denorm_min(), Limits::quiet_NaN()};
  for (size_t i = 0; i < count; ++i) {
    const T value = random() % 16 == 0 ? special[random() % std::size(special)]
                                       : static_cast<T>(normal(random));
    std::memcpy(data + i * sizeof(T), &value, sizeof(T));
  }
}

void Fill(std::mt19937_64& random, DType dtype, std::byte* data, size_t count) {
  switch (dtype) {
    case DType::kFloat32:
      return FillFloats<float>(random, data, count);
    case DType::kComplex64:
      return FillFloats<float>(random, data, 2 * count);
    case DType::kFloat64:
      return FillFloats<double>(random, data, count);
    case DType::kComplex128:
      return FillFloats<double>(random, data, 2 * count);
    default:
      // Small floats have few enough codes for random ones to meet every case.
      for (size_t i = 0; i < count * DTypeSize(dtype); ++i) {
        data[i] = static_cast<std::byte>(dtype == DType::kBool ? random() & 1 : random());
      }
  }
}

// A buffer of elements at a chosen misalignment, with guard bytes on both sides.
class Buffer {
 public:
  Buffer(DType dtype, size_t count, size_t misalignment)
      : bytes_(count * DTypeSize(dtype)),
        storage_(bytes_ + 2 * kGuardBytes + misalignment + 64, kGuard) {
    const auto address = reinterpret_cast<uintptr_t>(storage_.data());
    begin_ = (64 - address % 64) % 64 + kGuardBytes + misalignment;
  }
  std::byte* data() { return storage_.data() + begin_; }
  const std::byte* data() const { return storage_.data() + begin_; }
  size_t bytes() const { return bytes_; }
  bool GuardsIntact() const {
    for (size_t i = 0; i < storage_.size(); ++i) {
      const bool inside = i >= begin_ && i < begin_ + bytes_;
      if (!inside && storage_[i] != kGuard) return false;
    }
    return true;
  }

 private:
  size_t bytes_;
  std::vector<std::byte> storage_;
  size_t begin_;
};

class ReduceTest : public ::testing::TestWithParam<std::tuple<DType, ReduceOp>> {
 protected:
  DType dtype() const { return std::get<0>(GetParam()); }
  ReduceOp op() const { return std::get<1>(GetParam()); }
  size_t size() const { return DTypeSize(dtype()); }

  std::vector<Buffer> MakeSources(size_t source_count, size_t count, size_t misalignment) {
    std::vector<Buffer> sources;
    for (size_t k = 0; k < source_count; ++k) {
      sources.emplace_back(dtype(), count, misalignment * k);
      Fill(random_, dtype(), sources.back().data(), count);
    }
    return sources;
  }

  static std::vector<const void*> Pointers(const std::vector<Buffer>& sources) {
    std::vector<const void*> pointers;
    for (const Buffer& source : sources) pointers.push_back(source.data());
    return pointers;
  }

  // Equal bits, but for what is inside a NaN.
  void ExpectElements(const std::byte* actual, const std::vector<std::byte>& expected,
                      const std::string& what) {
    for (size_t at = 0; at < expected.size(); at += size()) {
      if (std::memcmp(actual + at, expected.data() + at, size()) == 0) continue;
      ASSERT_TRUE(HasNan(dtype(), expected.data() + at) && HasNan(dtype(), actual + at))
          << what << ": element " << at / size() << " differs";
    }
  }

  std::mt19937_64 random_{12345};
};

TEST_P(ReduceTest, MatchesTheReference) {
  for (size_t source_count : {1, 2, 3, 4, 5, 8, 13}) {
    for (size_t count : kCounts) {
      for (size_t misalignment : {size_t{0}, size(), size_t{1}}) {
        const std::vector<Buffer> sources = MakeSources(source_count, count, misalignment);
        const std::vector<const void*> pointers = Pointers(sources);
        const auto expected = ReferenceReduce(dtype(), op(), pointers, count);
        for (Store store : {Store::kCached, Store::kNonTemporal}) {
          Buffer destination(dtype(), count, 3 * misalignment);
          Reduce(dtype(), op(), destination.data(), pointers, count, store);
          const std::string what =
              StrCat(source_count, " sources, count ", count, ", misalignment ", misalignment,
                     ", non-temporal ", store == Store::kNonTemporal);
          ExpectElements(destination.data(), expected, what);
          ASSERT_TRUE(destination.GuardsIntact()) << what;
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_P(ReduceTest, DestinationMayBeAnySource) {
  for (size_t source_count : {1, 2, 3, 5, 9}) {
    for (size_t target = 0; target < source_count; ++target) {
      for (Store store : {Store::kCached, Store::kNonTemporal}) {
        constexpr size_t kCount = 3001;
        std::vector<Buffer> sources = MakeSources(source_count, kCount, 1);
        const std::vector<const void*> pointers = Pointers(sources);
        const auto expected = ReferenceReduce(dtype(), op(), pointers, kCount);
        Reduce(dtype(), op(), sources[target].data(), pointers, kCount, store);
        ExpectElements(sources[target].data(), expected,
                       StrCat("into source ", target, " of ", source_count));
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Three more sources that change nothing make the reduction take the blocked path.
TEST_P(ReduceTest, TwoSourcesGiveTheBitsOfManySources) {
  constexpr size_t kCount = 5003;
  const std::vector<Buffer> sources = MakeSources(2, kCount, 0);
  std::vector<const void*> pointers = Pointers(sources);
  Buffer two(dtype(), kCount, 0);
  Reduce(dtype(), op(), two.data(), pointers, kCount);
  Buffer neutral(dtype(), kCount, 0);  // -0 for floating point, 0 for integers
  std::memset(neutral.data(), 0, neutral.bytes());
  const bool complex = dtype() == DType::kComplex64 || dtype() == DType::kComplex128;
  const bool floating = complex || SlowCodecOf(dtype()) != nullptr || dtype() == DType::kFloat32 ||
                        dtype() == DType::kFloat64;
  const size_t part = complex ? size() / 2 : size();
  for (size_t at = part - 1; floating && at < neutral.bytes(); at += part) {
    neutral.data()[at] = std::byte{0x80};
  }
  const void* extra = op() == ReduceOp::kSum ? neutral.data() : pointers[1];
  pointers.insert(pointers.end(), 3, extra);
  Buffer many(dtype(), kCount, 0);
  Reduce(dtype(), op(), many.data(), pointers, kCount);
  ExpectElements(many.data(), {two.data(), two.data() + two.bytes()}, "two against five sources");
}

std::vector<std::tuple<DType, ReduceOp>> ReduciblePairs() {
  std::vector<std::tuple<DType, ReduceOp>> pairs;
  for (DType dtype : AllDTypes()) {
    for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin}) {
      if (CheckReducible(dtype, op).ok()) pairs.emplace_back(dtype, op);
    }
  }
  return pairs;
}

INSTANTIATE_TEST_SUITE_P(AllTypes, ReduceTest, ::testing::ValuesIn(ReduciblePairs()),
                         [](const auto& pair) {
                           return StrCat(DTypeName(std::get<0>(pair.param)), "_",
                                         ReduceOpName(std::get<1>(pair.param)));
                         });

template <class T>
std::vector<T> ReduceVectors(DType dtype, ReduceOp op, const std::vector<std::vector<T>>& sources) {
  std::vector<const void*> pointers;
  for (const auto& source : sources) pointers.push_back(source.data());
  std::vector<T> result(sources[0].size());
  Reduce(dtype, op, result.data(), pointers, result.size());
  return result;
}

TEST(Reduce, AddsInTheOrderOfTheSources) {
  const std::vector<std::vector<float>> sources = {{1e8f}, {1.0f}, {-1e8f}};
  EXPECT_EQ(ReduceVectors(DType::kFloat32, ReduceOp::kSum, sources)[0], 0.0f);
}

TEST(Reduce, NarrowTypesRoundOnce) {
  // 256 + 1 is not a bfloat16; two rounded additions would stay at 256.
  const std::vector<std::vector<uint16_t>> sources = {{0x4380}, {0x3f80}, {0x3f80}};
  EXPECT_EQ(ReduceVectors(DType::kBfloat16, ReduceOp::kSum, sources)[0], 0x4381);
}

TEST(Reduce, IntegersWrap) {
  const std::vector<std::vector<int32_t>> sources = {{std::numeric_limits<int32_t>::max()}, {1}};
  EXPECT_EQ(ReduceVectors(DType::kInt32, ReduceOp::kSum, sources)[0],
            std::numeric_limits<int32_t>::min());
}

TEST(Reduce, NanWinsWhereverItIs) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin}) {
    for (size_t where = 0; where < 6; ++where) {
      std::vector<std::vector<float>> sources(6, std::vector<float>(40, 1.0f));
      sources[where].assign(40, nan);
      for (float value : ReduceVectors(DType::kFloat32, op, sources)) {
        ASSERT_TRUE(std::isnan(value)) << ReduceOpName(op) << ", source " << where;
      }
    }
  }
}

#if defined(__SSE__)
// XLA's compute threads flush denormals; the result must not depend on the thread.
TEST(Reduce, DoesNotDependOnTheThreadsFloatMode) {
  const unsigned saved = _mm_getcsr();
  constexpr unsigned kFlushAndToZero = 0x8040 | 0x6000;  // and round towards zero
  _mm_setcsr(saved | kFlushAndToZero);
  const float tiny = std::numeric_limits<float>::denorm_min();
  const std::vector<std::vector<float>> sources = {std::vector<float>(20, tiny),
                                                   std::vector<float>(20, tiny)};
  std::vector<float> result(20);
  const void* pointers[] = {sources[0].data(), sources[1].data()};
  Reduce(DType::kFloat32, ReduceOp::kSum, result.data(), pointers, result.size());
  const unsigned after = _mm_getcsr();
  _mm_setcsr(saved);
  EXPECT_EQ(after & ~0x3fu, (saved | kFlushAndToZero) & ~0x3fu) << "the mode must be restored";
  for (float value : result) ASSERT_EQ(value, 2 * tiny);
}
#endif

// The instructions of this CPU against the loops that need none of them.
TEST(Reduce, NarrowTypesDoNotDependOnTheCpu) {
  constexpr size_t kCount = (1 << 16) + 77;
  std::mt19937_64 random(7);
  for (DType dtype :
       {DType::kFloat16, DType::kBfloat16, DType::kFloat8E5M2, DType::kFloat8E4M3FN}) {
    const size_t size = DTypeSize(dtype);
    std::vector<std::vector<std::byte>> sources(5, std::vector<std::byte>(kCount * size));
    for (auto& source : sources) Fill(random, dtype, source.data(), kCount);
    for (size_t i = 0; i < kCount; ++i) std::memcpy(sources[0].data() + i * size, &i, size);
    const void* pointers[] = {sources[0].data(), sources[1].data(), sources[2].data(),
                              sources[3].data(), sources[4].data()};
    for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin}) {
      for (size_t source_count : {2, 3, 5}) {
        std::vector<std::byte> fast(kCount * size);
        std::vector<std::byte> portable(kCount * size);
        NarrowReduction(dtype)(op, fast.data(), pointers, source_count, 0, kCount);
        PortableNarrowReduction(dtype)(op, portable.data(), pointers, source_count, 0, kCount);
        for (size_t at = 0; at < fast.size(); at += size) {
          const bool both_nan =
              HasNan(dtype, fast.data() + at) && HasNan(dtype, portable.data() + at);
          ASSERT_TRUE(both_nan || std::memcmp(fast.data() + at, portable.data() + at, size) == 0)
              << DTypeName(dtype) << " " << ReduceOpName(op) << " of " << source_count
              << ", element " << at / size;
        }
      }
    }
  }
}

TEST(CheckReducible, NamesWhatHasNoMeaning) {
  EXPECT_TRUE(CheckReducible(DType::kBool, ReduceOp::kMax).ok());
  EXPECT_TRUE(CheckReducible(DType::kComplex64, ReduceOp::kSum).ok());
  EXPECT_TRUE(CheckReducible(DType::kFloat8E5M2, ReduceOp::kMin).ok());
  EXPECT_EQ(CheckReducible(DType::kBool, ReduceOp::kSum).code(), Code::kInvalidArgument);
  const Status complex = CheckReducible(DType::kComplex128, ReduceOp::kMin);
  EXPECT_EQ(complex.code(), Code::kInvalidArgument);
  EXPECT_NE(complex.message().find("min is not defined for complex128"), std::string_view::npos);
  EXPECT_FALSE(CheckReducible(DType::kInvalid, ReduceOp::kSum).ok());
  EXPECT_FALSE(CheckReducible(static_cast<DType>(77), ReduceOp::kSum).ok());
  EXPECT_FALSE(CheckReducible(DType::kFloat32, static_cast<ReduceOp>(9)).ok());
}

TEST(DType, SizesAndNames) {
  EXPECT_EQ(DTypeSize(DType::kComplex128), 16u);
  EXPECT_EQ(DTypeSize(DType::kFloat8E4M3FN), 1u);
  EXPECT_EQ(DTypeSize(static_cast<DType>(77)), 0u);
  EXPECT_EQ(DTypeName(DType::kBfloat16), "bfloat16");
  EXPECT_EQ(DTypeName(DType::kInvalid), "invalid");
  for (DType dtype : AllDTypes()) EXPECT_GT(DTypeSize(dtype), 0u);
}

}  // namespace
}  // namespace jaxfabric
