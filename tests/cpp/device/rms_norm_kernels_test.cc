// all_reduce_rms_norm for 1 to 8 ranks, against the three operations one by one.
#include "device/rms_norm_case.h"

namespace jaxfabric::device {
namespace {

template <class C>
class RmsNormKernels : public testing::Test {};

using Codecs = testing::Types<PlainCodec<float>, Float16Codec, Bfloat16Codec>;
TYPED_TEST_SUITE(RmsNormKernels, Codecs);

TYPED_TEST(RmsNormKernels, AgreeWithTheOperationsOneByOne) {
  using Case = RmsNormCase<TypeParam>;
  std::mt19937_64 random(sizeof(typename TypeParam::Storage));
  for (int round = 0; round < 8 + Rounds(56); ++round) {
    const uint32_t ranks = 1 + static_cast<uint32_t>(round) / 2 % 8;
    const bool packets = round % 2 == 0;
    Cluster cluster({ranks, 3, 256, kLineBytes * 2 * ranks}, random());
    const auto blocks = static_cast<uint32_t>(1 + random() % 3);
    const auto threads = static_cast<uint32_t>(1 + random() % (kThreadSanitizer ? 6 : 40));
    // Rows of 16 to 128 bytes, or, where they may be longer than an area, to 640.
    const auto row_bytes =
        static_cast<uint32_t>(16 * (1 + random() % (packets || random() % 2 == 0 ? 8 : 40)));
    const uint64_t rows = packets ? random() % (2 * blocks + 1) : random() % 20;
    // Twice in one communicator: areas are used again, with the other parity.
    for (int launch = 0; launch < 2; ++launch) {
      Case c(random, ranks, rows, row_bytes);
      for (uint32_t r = 0; r < ranks; ++r) {
        cluster.Start(r,
                      StrCat("jaxfabric_all_reduce_rms_norm_", packets ? "packets_" : "two_shot_",
                             Case::TypeName()),
                      blocks, threads, c.Arguments(cluster, r, 11));
      }
      cluster.RunAll();
      for (uint32_t r = 0; r < ranks; ++r) {
        ASSERT_FALSE(cluster.trapped[r]);
        ASSERT_TRUE(c.Check(r)) << "threads " << threads;
        if (c.equal_residuals()) {
          EXPECT_EQ(c.Output(r).Copy(), c.Output(0).Copy());
          EXPECT_EQ(c.NewResidual(r).Copy(), c.NewResidual(0).Copy());
        }
      }
    }
  }
}

}  // namespace
}  // namespace jaxfabric::device
