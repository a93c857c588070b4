// all_reduce_rms_norm for 1 to 8 ranks, against the three operations one by one.
#include <cmath>

#include "device/cluster.h"
#include "memory/codec.h"

namespace jaxfabric::device {
namespace {

template <class C>
struct NormType {
  using Codec = C;
  using Storage = typename C::Storage;
};

template <class Type>
class RmsNormKernels : public testing::Test {
 protected:
  using Codec = typename Type::Codec;
  using Storage = typename Type::Storage;

  static std::string TypeName() {
    if constexpr (std::is_same_v<Codec, PlainCodec<float>>) return "float32";
    return std::is_same_v<Codec, Float16Codec> ? "float16" : "bfloat16";
  }
  static float Element(Bytes& array, uint64_t i) {
    Storage value;
    std::memcpy(&value, array.data() + i * sizeof(Storage), sizeof(Storage));
    return Codec::Load(value);
  }
  static Bytes Random(std::mt19937_64& random, uint64_t count) {
    Bytes array(count * sizeof(Storage),
                static_cast<uint32_t>(random() % 16 / sizeof(Storage) * sizeof(Storage)));
    for (uint64_t i = 0; i < count; ++i) {
      const auto value = static_cast<float>(static_cast<int>(random() % 2001) - 1000) / 256;
      const Storage stored = Codec::Store(value);
      std::memcpy(array.data() + i * sizeof(Storage), &stored, sizeof(Storage));
    }
    return array;
  }
};

using NormTypes =
    testing::Types<NormType<PlainCodec<float>>, NormType<Float16Codec>, NormType<Bfloat16Codec>>;
TYPED_TEST_SUITE(RmsNormKernels, NormTypes);

TYPED_TEST(RmsNormKernels, AgreeWithTheOperationsOneByOne) {
  using Stored = typename TestFixture::Storage;
  using Coded = typename TestFixture::Codec;
  constexpr float kEpsilon = 1e-5f;
  std::mt19937_64 random(sizeof(Stored));
  for (int round = 0; round < 8 + Rounds(56); ++round) {
    const uint32_t ranks = 1 + static_cast<uint32_t>(round) / 2 % 8;
    const bool packets = round % 2 == 0;
    Cluster cluster({ranks, 3, 256, kLineBytes * 2 * ranks}, random());
    const auto blocks = static_cast<uint32_t>(1 + random() % 3);
    const auto threads = static_cast<uint32_t>(1 + random() % (kThreadSanitizer ? 6 : 40));
    // Rows of 16 to 128 bytes, or, where they may be longer than an area, to 640.
    const auto hidden = static_cast<uint32_t>(
        (1 + random() % (packets || random() % 2 == 0 ? 8 : 40)) * 16 / sizeof(Stored));
    const uint64_t rows = packets ? random() % (2 * blocks + 1) : random() % 20;
    const uint64_t count = rows * hidden;
    const bool in_place = random() % 2 == 0;
    const bool equal_residuals = random() % 2 == 0;
    Bytes weight = this->Random(random, hidden), residual = this->Random(random, count);
    for (int launch = 0; launch < 2; ++launch) {
      std::vector<Bytes> inputs, outputs, residuals, news;
      for (uint32_t r = 0; r < ranks; ++r) {
        inputs.push_back(this->Random(random, count));
        outputs.push_back(this->Random(random, count));
        news.push_back(this->Random(random, count));
        residuals.push_back(this->Random(random, count));
        if (!equal_residuals) continue;
        std::memcpy(residuals[r].data(), residual.data(), residual.size());
      }
      std::vector<std::vector<float>> given(ranks), added(ranks);
      for (uint32_t r = 0; r < ranks; ++r) {
        for (uint64_t i = 0; i < count; ++i) {
          given[r].push_back(this->Element(inputs[r], i));
          added[r].push_back(this->Element(residuals[r], i));
        }
      }
      for (uint32_t r = 0; r < ranks; ++r) {
        const RmsNormArguments a{cluster.View(r),
                                 11,
                                 hidden,
                                 inputs[r].data(),
                                 residuals[r].data(),
                                 weight.data(),
                                 (in_place ? inputs : outputs)[r].data(),
                                 (in_place ? residuals : news)[r].data(),
                                 rows,
                                 kEpsilon};
        cluster.Start(r,
                      StrCat("jaxfabric_all_reduce_rms_norm_", packets ? "packets_" : "two_shot_",
                             this->TypeName()),
                      blocks, threads, a);
      }
      cluster.RunAll();
      for (uint32_t r = 0; r < ranks; ++r) ASSERT_FALSE(cluster.trapped[r]);
      std::vector<Bytes>& y = in_place ? inputs : outputs;
      std::vector<Bytes>& made = in_place ? residuals : news;
      for (uint64_t row = 0; row < ranks * rows; ++row) {
        const auto r = static_cast<uint32_t>(row / rows);
        const uint64_t begin = row % rows * hidden;
        double squares = 0;
        for (uint64_t i = begin; i < begin + hidden; ++i) {
          float sum = given[0][i];
          for (uint32_t other = 1; other < ranks; ++other) sum += given[other][i];
          const float rounded = Coded::Load(Coded::Store(sum));
          const float stored = Coded::Load(Coded::Store(rounded + added[r][i]));
          ASSERT_EQ(this->Element(made[r], i), stored) << "row " << row << " of " << rows;
          squares += double{stored} * stored;
        }
        const double scale = 1 / std::sqrt(squares / hidden + double{kEpsilon});
        for (uint64_t i = begin; i < begin + hidden; ++i) {
          const double exact = this->Element(made[r], i) * scale * this->Element(weight, i - begin);
          const double tolerance = sizeof(Stored) == 4                   ? 1e-6
                                   : std::is_same_v<Coded, Float16Codec> ? 1e-3
                                                                         : 8e-3;
          ASSERT_NEAR(this->Element(y[r], i), exact, std::abs(exact) * tolerance + 1e-7)
              << "row " << row << ", threads " << threads;
        }
      }
      for (uint32_t r = 0; r < ranks; ++r) {
        if (equal_residuals) {
          EXPECT_EQ(y[r].Copy(), y[0].Copy());
          EXPECT_EQ(made[r].Copy(), made[0].Copy());
        }
        EXPECT_TRUE(y[r].GuardsIntact() && made[r].GuardsIntact());
      }
    }
  }
}

}  // namespace
}  // namespace jaxfabric::device
